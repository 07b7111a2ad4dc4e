"""What a run did, written down beside it: weights of the engine, inputs of the loss.

RECORDS names a folder.  DROP_LOG_PROB=n takes one log-probability out of the engine's n-th answer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

FOLDER = os.environ.get("RECORDS", "")
DROPPED = int(os.environ.get("DROP_LOG_PROB", "0"))


def save_numbered(kind: str, tensors: dict[str, Any]) -> None:
    """Write tensors to ``<kind>-<number>.safetensors``; one process writes of each kind."""
    number = len(list(Path(FOLDER).glob(f"{kind}-*.safetensors")))
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, Path(FOLDER) / f"{kind}-{number:02}.safetensors")


def save_engine(model: Any) -> None:
    """Every weight of an engine as it holds it, and the scales of those that have one."""
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        scale = getattr(module, "weight_scale", None)
        if scale is not None:
            tensors[f"{name}.weight_scale"] = scale.data
    save_numbered("engine", tensors)


def recording_loss(forward: Any) -> Any:
    """OpenRLHF's ``PolicyLoss.forward`` that writes down what it got, and gave."""

    def with_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        named = dict(zip(("log_probs", "old_log_probs", "advantages"), args, strict=False))
        names = (*named, "action_mask", "rollout_log_probs")
        tensors = {name: (named | kwargs)[name].float() for name in names}
        save_numbered("loss", tensors | {"loss": result[0].reshape(1)})
        return result

    return with_record


def recording_trl_loss(compute_loss: Any) -> Any:
    """TRL's ``GRPOTrainer._compute_loss`` that writes down what it got, and gave."""

    def with_record(self: Any, model: Any, inputs: Any) -> Any:
        loss = compute_loss(self, model, inputs)
        names = (
            *("completion_ids", "completion_mask", "tool_mask", "advantages"),
            *("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"),
        )
        found = {name: inputs[name] for name in names if name in inputs}
        save_numbered("loss", found | {"loss": loss.reshape(1)})
        return loss

    return with_record


def recording_trl_sync(sync_weights: Any) -> Any:
    """TRL's ``VLLMGeneration.sync_weights`` that writes down what vLLM then holds."""

    def with_record(self: Any) -> None:
        sync_weights(self)
        save_engine(self.llm.llm_engine.model_executor.driver_worker.model_runner.model)

    return with_record


def dropping_one(generate: Any) -> Any:
    """``AsyncLLM.generate`` whose n-th answer lacks the log-probability of its third token."""
    answers: list[str] = []

    async def with_gap(self: Any, *args: Any, **kwargs: Any) -> Any:
        final = None
        async for output in generate(self, *args, **kwargs):
            final = output
        answers.append(final.request_id)
        if len(answers) == DROPPED:
            completion = final.outputs[0]
            del completion.logprobs[2][completion.token_ids[2]]
        yield final

    return with_gap


def spoiling_one(generate: Any) -> Any:
    """``LLM.generate`` whose n-th answer has NaN for the log-probability of its third token."""
    answers: list[Any] = []

    def with_nan(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(self, *args, **kwargs)
        answers.extend(outputs)
        if len(answers) - len(outputs) < DROPPED <= len(answers):
            completion = answers[DROPPED - 1].outputs[0]
            completion.logprobs[2][completion.token_ids[2]].logprob = float("nan")
        return outputs

    return with_nan
