"""A user's script that nobody edited: a trainer's loop around vLLM, nothing of FlashRL in it.

    python unedited.py MODEL REQUEST

REQUEST is a JSON file: ``prompts`` of token ids to generate from, ``scored`` sequences of token
ids, and, if weights are to be pushed, their ``pushed`` file and a ``folder`` for what the engine
holds before and after.  Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams


def models(llm: LLM) -> list[Any]:
    found: list[Any] = []
    llm.collective_rpc(lambda worker: found.append(worker.get_model()))
    return found


def dump(model: Any, path: Path) -> None:
    """Parameters, and the scales beside them."""
    held = dict(model.named_parameters())
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            held[f"{name}.weight_scale"] = module.weight_scale
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in held.items()}, path)


def generate(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy answers, each token with its log-probability."""
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]
    return [
        {
            "tokens": list(answer.token_ids),
            "log_probs": [
                step[token].logprob
                for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
        }
        for answer in found
    ]


def score(llm: LLM, sequences: list[list[int]]) -> list[list[float]]:
    """The log-probability of every token but the first."""
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    inputs = [{"prompt_token_ids": sequence} for sequence in sequences]
    return [
        [
            step[token].logprob
            for token, step in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            )
        ]
        for output in llm.generate(inputs, params, use_tqdm=False)
    ]


def main(model: str, request: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=16,
        num_gpu_blocks_override=64,
        gpu_memory_utilization=0.1,
    )
    config = llm.llm_engine.vllm_config.model_config
    answer: dict[str, Any] = {"model": config.model}
    answer["engine_processes"] = [process.pid for process in multiprocessing.active_children()]
    answer["scores"] = score(llm, request["scored"])
    answer["started"] = generate(llm, request["prompts"])
    if "pushed" in request:
        folder = Path(request["folder"])
        dump(models(llm)[0], folder / "started.safetensors")
        for pair in load_file(request["pushed"]).items():
            models(llm)[0].load_weights(iter([pair]))
        llm.reset_prefix_cache()
        dump(models(llm)[0], folder / "pushed.safetensors")
        answer["pushed"] = generate(llm, request["prompts"])
    return answer


if __name__ == "__main__":
    model, request = sys.argv[1:]
    answer = main(model, json.loads(Path(request).read_text()))
    sys.stdout.write(f"ANSWER {json.dumps(answer)}\n")
