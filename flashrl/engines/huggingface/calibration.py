"""Activation statistics of a checkpoint: run it on prompts, and watch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from torch import Tensor

    from flashrl.core.profiles.calibration import Progress

__all__ = ["collect_from_prompts", "read_prompts"]

_KEYS = ("prompt", "text", "messages", "input_ids")

Prompt = str | list[Any]
"""Text, messages for the chat template, or token ids."""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts to calibrate with, one JSON value a line.

    Args:
        path: Each line is a string, or an object with ``prompt``, ``text``, ``messages`` or
            ``input_ids``; other keys are ignored, and so are empty lines.

    Returns:
        Text, lists of messages, or lists of token ids.

    Raises:
        ConfigError: The file cannot be read, holds no prompt, or some lines are none; the first few
            are named.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts {str(path)!r}: {error}") from error
    prompts: list[Prompt] = []
    faults = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_parse(line))
            except ValueError as error:
                faults.append(f"line {number}: {error}")
    if faults or not prompts:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"{path}: " + ("; ".join(faults[:3]) + more if faults else "there is no prompt") + ". "
            'A line is a JSON string, or an object such as {"prompt": "2 + 2 ="}, with one of '
            + ", ".join(_KEYS)
        )
    return prompts


def collect_from_prompts(
    folder: str | Path,
    prompts: Sequence[Prompt],
    *,
    max_length: int = 2048,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Run a checkpoint on prompts, one at a time and so without padding.

    The whole model is held in memory, in the dtype of the checkpoint, on the CPU.

    Args:
        folder: A 16-bit checkpoint with its tokenizer.
        prompts: As :func:`read_prompts` returns.
        max_length: Tokens of a prompt beyond which it is cut off.
        progress: Called after each prompt.

    Returns:
        Largest magnitude of each channel, as
        :func:`~flashrl.core.profiles.smoothing.collect_activation_amax` yields.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: The checkpoint does not load, or a prompt has no tokens.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "running a model on prompts needs transformers; pip install 'flashrl[huggingface]'"
        ) from error
    import torch

    from flashrl.core.profiles.smoothing import collect_activation_amax

    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{folder} does not load as a causal language model: {reason}") from error
    with torch.inference_mode(), collect_activation_amax(model) as amax:
        for index, prompt in enumerate(prompts):
            ids = _tokenize(tokenizer, prompt, index)[:max_length]
            _check_ids(ids, model.get_input_embeddings().num_embeddings, index)
            # The backbone alone: logits over the vocabulary are not needed.
            model.base_model(torch.tensor([ids]), use_cache=False)
            if progress is not None:
                progress(index + 1, len(prompts), f"prompt {index + 1}, {len(ids)} tokens")
    return dict(amax)


def _parse(line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if isinstance(value, dict):
        value = next((value[key] for key in _KEYS if key in value), None)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds == {int} or (kinds == {dict} and all("role" in item for item in value)):
            return value
    raise ValueError(f"holds no prompt: {line.strip():.60}")


def _tokenize(tokenizer: Any, prompt: Prompt, index: int) -> list[int]:
    ids: Any = prompt
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt[0], dict):
        if not tokenizer.chat_template:
            raise ConfigError(
                f"prompt {index + 1} is a list of messages, and the checkpoint's tokenizer has no "
                "chat template; give text"
            )
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(map(int, ids))


def _check_ids(ids: Sequence[int], vocab_size: int, index: int) -> None:
    if not ids:
        raise ConfigError(f"prompt {index + 1} has no tokens")
    strangers = [token for token in ids if not 0 <= token < vocab_size]
    if strangers:
        raise ConfigError(
            f"prompt {index + 1} holds the token {strangers[0]}; the model knows 0 to "
            f"{vocab_size - 1}"
        )
