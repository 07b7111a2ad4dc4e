"""``flashrl verify``: push weights back and forth, and prove that each reload is right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import attrs
import click
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from flashrl.cli._output import json_option, print_data, stderr_console
from flashrl.errors import VerificationError

if TYPE_CHECKING:
    import torch

    from flashrl.core.interfaces import NamedTensors
    from flashrl.session import Session

__all__ = ["command"]

_PROMPTS = [[1, 5, 9, 17], [1, 30, 31, 32, 33, 34]]


@attrs.frozen(kw_only=True)
class _Check:
    """One line of the table."""

    what: str
    passed: bool
    detail: str


@click.command("verify")
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkpoint folder; a second one is what is pushed.  Default: two tiny random ones.",
)
@click.option("--engine", default="huggingface", show_default=True, help="Engine to check.")
@click.option("--scheme", default="int8", show_default=True, help="How it stores its linears.")
@json_option
def command(models: tuple[Path, ...], engine: str, scheme: str, as_json: bool) -> None:
    """Push A, B, A into an engine and compare every tensor with the reference.

    Greedy answers are compared with those of fresh engines.  Last, a tensor of the reference is
    perturbed on purpose: verification must fail and name it, or it proves nothing.

    With one model, B is A with noise; with none, both are tiny and random.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # there is one already
    if len(models) > 2:
        raise click.UsageError("at most two models: the engine's own, and the one to push")
    with ExitStack() as stack:
        if not models:
            models = _make_tiny_models(stack.enter_context(TemporaryDirectory()))
        console = stderr_console()
        show = console.is_terminal and not as_json
        progress = stack.enter_context(Progress(console=console)) if show else None
        checks = []
        task = progress.add_task("verifying", total=9) if progress else None
        for check in _run_checks(models, engine, scheme):
            checks.append(check)
            if progress and task is not None:
                progress.update(task, advance=1, description=check.what)
    data = {
        "engine": engine,
        "scheme": scheme,
        "ok": all(check.passed for check in checks),
        "checks": [attrs.asdict(check) for check in checks],
    }
    print_data(data, _as_table(checks, engine, scheme), as_json=as_json)
    failed = [check.what for check in checks if not check.passed]
    if failed:
        raise VerificationError(
            f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}"
        )


def _make_tiny_models(folder: str) -> tuple[Path, ...]:
    from flashrl.testing.checkpoints import make_checkpoint

    return tuple(
        make_checkpoint(
            Path(folder) / name,
            seed=seed,
            hidden_size=256,  # heads of 64, for engines whose attention knows none smaller
            intermediate_size=512,
            initializer_range=0.1,
        ).path
        for seed, name in enumerate("ab")
    )


def _run_checks(models: tuple[Path, ...], engine: str, scheme: str) -> Iterator[_Check]:
    import flashrl
    from flashrl.core.profiles.checkpoints import Checkpoint

    pushed: dict[str, NamedTensors] = {"A": Checkpoint.open(models[0])}
    pushed["B"] = Checkpoint.open(models[1]) if len(models) == 2 else _WithNoise(pushed["A"])
    fresh: dict[str, list[list[int]] | None] = {}
    for which, folder in zip("AB", models, strict=False):
        with flashrl.launch(engine, folder, scheme) as session:
            fresh[which] = _answer(session)
            yield _verify(session, pushed[which], f"fresh engine on {which}")
    with flashrl.launch(engine, models[0], scheme) as session:
        for which in ("A", "B", "A"):
            session.update_weights(pushed[which])
            yield _verify(session, pushed[which], f"push {which}")
            if fresh.get(which) is not None:
                same = _answer(session) == fresh[which]
                yield _Check(
                    what=f"greedy answers after {which}",
                    passed=same,
                    detail="equal to a fresh engine's" if same else "not a fresh engine's",
                )
        yield _control(session, pushed["A"])


class _WithNoise:
    """The same tensors with 1 % noise, the same at every reading."""

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        generator = torch.Generator().manual_seed(0)
        for name, tensor in self._tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            yield name, (tensor + 0.01 * tensor.float().std() * noise).to(tensor.dtype)


def _answer(session: Session) -> list[list[int]] | None:
    """Greedy responses, or None where the engine generates through its own calls only."""
    from flashrl.core.rollouts import SamplingParams

    if not session.capabilities.generates:
        return None
    rollout = session.generate(_PROMPTS, SamplingParams(temperature=0.0, max_tokens=16))
    ids: list[list[int]] = rollout.response_ids.tolist()
    return ids


def _verify(session: Session, tensors: NamedTensors, what: str) -> _Check:
    try:
        report = session.verify(tensors)
    except VerificationError as error:
        return _Check(what=what, passed=False, detail=str(error))
    quantized = sum(info.scheme is not None for info in session.engine.weights().values())
    detail = f"{len(report.comparisons)} tensors equal bit for bit, {quantized} of them in 8 bit"
    return _Check(what=what, passed=True, detail=detail)


def _control(session: Session, tensors: NamedTensors) -> _Check:
    """Perturb one tensor of the reference: the check must fail, and name that tensor alone."""
    infos = session.engine.weights()
    culprit = next((n for n, info in infos.items() if info.scheme is not None), next(iter(infos)))
    what = f"control: {culprit} perturbed"
    try:
        session.verify((n, t + t.abs().max() if n == culprit else t) for n, t in tensors)
    except VerificationError as error:
        named = [c.name for c in error.report.mismatches] if error.report else []
        return _Check(
            what=what,
            passed=named == [culprit],
            detail="found and named" if named == [culprit] else f"named instead: {named}",
        )
    return _Check(what=what, passed=False, detail="not noticed")


def _as_table(checks: list[_Check], engine: str, scheme: str) -> Table:
    table = Table(title=f"{engine}, {scheme}", title_justify="left")
    for column in ("check", "result", "detail"):
        table.add_column(column)
    for check in checks:
        result = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(check.what, result, escape(check.detail))
    return table
