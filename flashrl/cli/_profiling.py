"""What ``flashrl profile`` was asked for, and the making of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from flashrl.cli._files import check_folder
from flashrl.cli._progress import progress_bar
from flashrl.core.schemes import PRESETS
from flashrl.errors import ProfileError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile
    from flashrl.core.profiles.checkpoints import Checkpoint

__all__ = ["FUNCTIONS", "ProfileRequest"]

_ANY_FP8 = "fp8"
FUNCTIONS = ("int8", _ANY_FP8, *(name for name in PRESETS if name.startswith("fp8_")))
"""What ``--fn`` takes: ``fp8`` for an FP8 copy of any strategy, every other name for one scheme."""


@attrs.frozen(kw_only=True)
class ProfileRequest:
    """The options of the command.

    Args:
        model: The 16-bit checkpoint.
        quantized: Its 8-bit copy; this or ``calibrate``.
        output: Where to save the profile.
        fn: One of :data:`FUNCTIONS`.
        calibrate: Prompts to run the model on.
        alpha: How much moves into the weights, default 0.5; with ``calibrate`` only.
        max_length: Tokens of a prompt to run, default 2048; with ``calibrate`` only.
        static_scales: Keep the scales too.

    Raises:
        UsageError: Options are missing or do not go together.
        ProfileError: ``output`` has no suffix that is known.
        ConfigError: ``output`` cannot be written.
    """

    model: str | None
    quantized: str | None
    output: Path | None
    fn: str
    calibrate: Path | None
    alpha: float | None
    max_length: int | None
    static_scales: bool

    def __attrs_post_init__(self) -> None:
        from flashrl.core.profiles.files import check_suffix

        if (self.quantized is None) == (self.calibrate is None):
            raise click.UsageError("give a quantized copy with -qm, or prompts with --calibrate")
        if self.calibrate is None and (self.alpha, self.max_length) != (None, None):
            raise click.UsageError("--alpha and --max-length go with --calibrate")
        if self.model is None and (self.calibrate is not None or self.fn == "int8"):
            raise click.UsageError("-m is needed: the 16-bit checkpoint")
        if self.output is None:
            raise click.UsageError("-o is needed: where to save the profile")
        check_suffix(self.output)
        check_folder(self.output)

    def make(self) -> Profile:
        """Make the profile; a bar shows how far it is.

        Raises:
            FlashRLError: Something about the checkpoints or prompts is wrong.
        """
        profile = self._from_prompts() if self.quantized is None else self._from_copy()
        return attrs.evolve(
            profile, base_model=self.model or "", quantized_model=self.quantized or ""
        )

    def save(self, profile: Profile) -> None:
        """Save it; what the format cannot hold is kept beside it in one that can.

        Raises:
            ProfileError: The format cannot hold it; the message says where it is.
        """
        from flashrl.core.profiles.files import save_profile

        assert self.output is not None  # checked above
        try:
            save_profile(profile, self.output)
        except ProfileError as error:
            kept = self.output.with_suffix(".safetensors")
            if kept.exists():
                raise
            profile.save(kept)
            raise ProfileError(f"{error}. It was kept as {kept}") from error

    def _from_copy(self) -> Profile:
        from flashrl.core.profiles import Profile
        from flashrl.core.profiles.calibration import profile_from_checkpoints

        copy = _open(self.quantized)
        scheme = copy.weight_scheme()
        if self.fn not in (scheme.name, *([_ANY_FP8] if scheme.type == "float" else [])):
            raise ProfileError(
                f"{self.quantized} holds {scheme.name} weights, and --fn is {self.fn}; pass "
                f"--fn {scheme.name}, or another copy"
            )
        if self.model is None:
            return Profile(scheme=scheme.name, weights=copy.quantized_weights())
        with progress_bar("profile") as progress:
            return profile_from_checkpoints(
                _open(self.model), copy, static_scales=self.static_scales, progress=progress
            )

    def _from_prompts(self) -> Profile:
        from flashrl.core.profiles.calibration import profile_from_activations
        from flashrl.engines.huggingface.calibration import collect_from_prompts, read_prompts

        assert self.calibrate is not None  # checked above
        prompts, checkpoint = read_prompts(self.calibrate), _open(self.model)
        if checkpoint.quantized_weights():
            raise ProfileError(
                f"{self.model} is quantized already; calibrate the 16-bit checkpoint, or give "
                "this one with -qm"
            )
        with progress_bar("activations") as progress:
            amax = collect_from_prompts(
                checkpoint.path, prompts, max_length=self.max_length or 2048, progress=progress
            )
        with progress_bar("profile") as progress:
            return profile_from_activations(
                checkpoint,
                amax,
                scheme="fp8_channel" if self.fn == _ANY_FP8 else self.fn,
                alpha=0.5 if self.alpha is None else self.alpha,
                static_scales=self.static_scales,
                progress=progress,
            )


def _open(name: str | None) -> Checkpoint:
    from flashrl.core.hub import find_checkpoint
    from flashrl.core.profiles.checkpoints import Checkpoint

    return Checkpoint.open(find_checkpoint(name or ""))
