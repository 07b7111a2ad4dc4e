"""The demo's training: TRL's GRPO on the policy, rollouts from an 8-bit copy of it."""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

import flashrl
from flashrl.core.correction import get_config
from flashrl.demo.plan import RUNS, DemoPlan, DemoRun
from flashrl.demo.task import REWARDS, make_prompts
from flashrl.report.records import RunWriter
from flashrl.trainers.trl.trainer import SessionGRPOTrainer

__all__ = ["train"]

StepCallback = Callable[[DemoRun, Mapping[str, Any]], None]


def train(plan: DemoPlan, *, on_step: StepCallback) -> None:
    """Train once for each arm, one after another, recording every step as it is done.

    Args:
        plan: What the arms are and what they share.
        on_step: Told what was recorded of each step.
    """
    transformers.utils.logging.disable_progress_bar()
    # TRL 1.16 uses names that newer transformers deprecate; nobody who runs this can change that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    for run in (*RUNS, *plan.runs):  # an earlier demo's records must not stand beside this one's
        (plan.output / f"run-{run.name}.jsonl").unlink(missing_ok=True)
    for order, run in enumerate(plan.runs):
        with RunWriter(plan.output, run.name, order=order, **_facts(plan, run)) as writer:
            _train_run(plan, run, writer, on_step)
        gc.collect()  # a trainer is full of cycles, and the next one needs the memory


def _train_run(plan: DemoPlan, run: DemoRun, writer: RunWriter, on_step: StepCallback) -> None:
    started, cpu_started = time.perf_counter(), time.process_time()
    tokenizer = transformers.AutoTokenizer.from_pretrained(plan.model)
    # Never detached: that would make 16-bit weights once more, of an engine that is thrown away.
    session = flashrl.attach(_load(plan), scheme=run.scheme)
    trainer = SessionGRPOTrainer(
        session=session,
        correction=run.correction,
        stop_token_ids=_stop_tokens(tokenizer),
        model=_load(plan),
        processing_class=tokenizer,
        reward_funcs=list(REWARDS),
        args=_arguments(plan),
        train_dataset=Dataset.from_list(
            make_prompts(plan.num_steps * plan.num_prompts, seed=plan.seed)
        ),
    )
    trainer.remove_callback(PrinterCallback)  # stdout is for data
    trainer.add_callback(_Recorder(trainer, writer, lambda record: on_step(run, record)))
    try:
        trainer.train()
        session.update_weights(trainer.model.named_parameters())
        report = session.verify(trainer.model.named_parameters())
        writer.end["verified_tensors"] = len(report.comparisons)
    finally:
        writer.end |= {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
            "peak_rss_bytes": _peak_rss_bytes(),
            "engine": session.describe(),
        }


class _Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes down each step's log, its duration and its tokens."""

    def __init__(
        self,
        trainer: SessionGRPOTrainer,
        writer: RunWriter,
        on_record: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._trainer = trainer
        self._writer = writer
        self._on_record = on_record
        self._started = 0.0
        self._seconds = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter() - self._started

    def on_log(self, _: Any, state: Any, __: Any, *, logs: Mapping[str, Any], **___: Any) -> None:
        if "reward" not in logs:  # the summary at the end of training
            return
        record = {
            "step": state.global_step,
            "seconds": self._seconds,
            **{
                name: value
                for name, value in logs.items()
                if isinstance(value, int | float) and math.isfinite(value)
            },
        }
        self._writer.step(record)
        if self._trainer.token_log_probs is not None:
            log_probs, rollout_log_probs = self._trainer.token_log_probs
            self._writer.tokens(log_probs.tolist(), rollout_log_probs.tolist())
        self._on_record(record)


def _load(plan: DemoPlan) -> Any:
    """The policy in float32: its trainer wants that, and a CPU multiplies it fastest."""
    return transformers.AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)


def _arguments(plan: DemoPlan) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(plan.output),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=plan.num_prompts * plan.num_generations,
        num_generations=plan.num_generations,
        max_completion_length=plan.max_tokens,
        max_steps=plan.num_steps,
        learning_rate=plan.learning_rate,
        lr_scheduler_type="constant",
        reward_weights=list(REWARDS.values()),
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=plan.seed,
    )


def _stop_tokens(tokenizer: Any) -> list[int]:
    """End of sequence, and the line's end where that is one token."""
    stops = [tokenizer.eos_token_id]
    line_end = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if line_end and tokenizer.decode(line_end[-1:]) == "\n":
        stops.append(line_end[-1])
    return [token for token in stops if token is not None]


def _facts(plan: DemoPlan, run: DemoRun) -> dict[str, Any]:
    correction = get_config(run.correction)
    return {
        "heading": f"{plan.model.name} learns to add, with 8-bit rollouts",
        "lead": "The same model, trained three times with TRL's GRPO on sums of one-digit numbers: "
        "its rollouts generated by an unquantized copy, by an INT8 copy with truncated importance "
        "sampling, and by an INT8 copy without. After every step the copy gets the new weights.",
        "title": run.title,
        "scheme": run.scheme,
        "correction": run.correction,
        "truncation": correction.high if correction.level != "none" else None,
        "num_steps": plan.num_steps,
        "seed": plan.seed,
        "model": plan.model.name,
        "completions_per_step": plan.num_prompts * plan.num_generations,
        "learning_rate": plan.learning_rate,
        "best_reward": sum(REWARDS.values()),
        "num_threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "trl")},
    }


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
