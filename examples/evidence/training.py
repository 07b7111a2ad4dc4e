"""One run: TRL's GRPO with its own colocated vLLM, everything written down, and resumable."""

from __future__ import annotations

import fcntl
import math
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from plan import Plan
from task import TASKS, Problem, draw_problems
from trl import GRPOConfig

from flashrl.report.records import Histogram, RunWriter
from flashrl.trainers import corrections
from flashrl.trainers.trl.batches import log_value
from flashrl.trainers.trl.corrected import CorrectedGRPOTrainer

__all__ = ["EvidenceTrainer", "train"]

FORM_WEIGHT = 0.2
EDGES = torch.linspace(-2.0, 2.0, 81)
"""Bins of the importance ratio's histograms, in nats."""


def train(plan: Plan, *, model: Path, output: Path, gpu_memory: float, save_every: int) -> None:
    """Do a run, or what an earlier process left of it.

    Args:
        plan: What it is.
        model: The checkpoint to begin with.
        output: Where ``run-<name>.jsonl`` goes; checkpoints go to ``work/<name>`` in it.
        gpu_memory: Share of the GPU's memory for vLLM.
        save_every: Optimizer steps from one checkpoint to the next.

    Raises:
        KeyboardInterrupt: It was asked to stop by SIGTERM or SIGINT, and saved a checkpoint.
    """
    condition = plan.condition
    work = output / "work" / plan.name
    done = _last_checkpoint(work)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    transformers.utils.logging.disable_progress_bar()
    task = TASKS[condition.task]
    held_out = draw_problems(task, condition.num_held_out, seed="held out")
    problems = draw_problems(
        task,
        math.ceil(condition.num_steps / condition.mini_batches) * condition.num_prompts,
        seed=plan.seed,
        without=held_out,
    )
    with RunWriter(
        output, plan.name, order=condition.order, resume_after=done, **_facts(plan, model)
    ) as writer:
        with _alone(output / "work" / "start.lock"):  # vLLM measures free memory as it starts
            trainer = EvidenceTrainer(
                lag=condition.lag,
                correction=plan.arm.correction,
                model=str(model),
                processing_class=tokenizer,
                reward_funcs=[_scorer(plan), _former(plan)],
                args=_arguments(
                    plan, work, gpu_memory, save_every, _context(tokenizer, problems, plan)
                ),
                train_dataset=Dataset.from_list([problem.row() for problem in problems]),
            )
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.add_callback(Recorder(trainer, writer, plan, held_out))
        trainer.add_callback(Stopper(condition.mini_batches))
        transformers.set_seed(plan.seed)  # vLLM has set its own, the same for every run
        checkpoint = None if done is None else str(work / f"checkpoint-{done}")
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.state.global_step < condition.num_steps:
            raise KeyboardInterrupt(f"stopped after step {trainer.state.global_step}")
    for path in work.glob("checkpoint-*"):
        shutil.rmtree(path)


class EvidenceTrainer(CorrectedGRPOTrainer):
    """Ours for TRL, which can also sample with the weights of some optimizer steps ago.

    Args:
        lag: How many steps ago; the first few rollouts after a start are as old as they can be.
        **kwargs: What :class:`CorrectedGRPOTrainer` takes.
    """

    def __init__(self, *, lag: int, **kwargs: Any) -> None:
        self._lag = lag
        self._versions: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)
        super().__init__(**kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, which syncs and generates; also notes how long the latter took."""
        started = time.perf_counter()
        with self._older_weights():
            result = super()._generate_single_turn(*args, **kwargs)
        milliseconds = 1000 * (time.perf_counter() - started)
        sync = vars(self.vllm_generation).get("flashrl_update_ms", 0.0)
        log_value(self, "generate_ms", milliseconds - sync)
        return result

    @contextmanager
    def _older_weights(self) -> Iterator[None]:
        """Let TRL sync the weights of ``lag`` steps ago in place of the newest."""
        if not self._lag:
            yield
            return
        parameters = dict(self.model.named_parameters())
        newest = {name: parameter.data for name, parameter in parameters.items()}
        copy = {name: tensor.clone() for name, tensor in newest.items()}
        self._versions.append((self.state.global_step, copy))
        step, older = self._versions[0]
        try:
            for name, parameter in parameters.items():
                parameter.data = older[name]
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = newest[name]
        self._last_loaded_step = step

    def answer(self, questions: Sequence[Any]) -> list[str]:
        """Greedy answers of the policy itself, unquantized and by transformers, in every arm alike.

        Args:
            questions: Messages, as the data set has them.
        """
        tokenizer = self.processing_class
        inputs = tokenizer.apply_chat_template(
            list(questions),
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_dict=True,
            return_tensors="pt",
        ).to(self.accelerator.device)
        config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=self.args.max_completion_length,
            eos_token_id=list(self.eos_token_ids),
            pad_token_id=tokenizer.pad_token_id,
        )
        self.model.eval()
        with torch.no_grad():
            ids = self.model.generate(**inputs, generation_config=config, use_cache=True)
        self.model.train()
        completions = ids[:, inputs["input_ids"].shape[1] :]
        answers: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=True)
        return answers


class Recorder(transformers.TrainerCallback):
    """Writes down each step's log, its duration, its evaluation and its histogram."""

    def __init__(
        self,
        trainer: EvidenceTrainer,
        writer: RunWriter,
        plan: Plan,
        held_out: Sequence[Problem],
    ) -> None:
        self._trainer = trainer
        self._writer = writer
        self._plan = plan
        self._held_out = held_out
        self._started = self._seconds = 0.0
        self._evaluation: dict[str, float] = {}

    def on_train_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 0:
            self._writer.step({"step": 0, **self._evaluate()})

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self._seconds = time.perf_counter() - self._started
        condition = self._plan.condition
        if state.global_step % condition.eval_every == 0 or state.global_step == state.max_steps:
            self._evaluation = self._evaluate()

    def on_log(self, _: Any, state: Any, __: Any, *, logs: Mapping[str, Any], **___: Any) -> None:
        if "train_runtime" in logs:  # the summary at the end of training
            return
        numbers = {k: v for k, v in logs.items() if isinstance(v, int | float) and math.isfinite(v)}
        milliseconds = numbers.get("flashrl/generate_ms")
        if milliseconds:
            tokens = numbers["completions/mean_length"] * self._plan.condition.completions
            numbers["tokens_per_second"] = 1000 * tokens / milliseconds
        record = numbers | {"seconds": self._seconds} | self._evaluation
        rounded = {name: float(f"{value:.6g}") for name, value in record.items()}
        self._writer.step({**rounded, "step": state.global_step})
        self._evaluation = {}
        if state.global_step in self._plan.condition.histogram_steps:
            self._writer.histogram(self._histogram(state.global_step))

    def _histogram(self, step: int) -> Histogram:
        assert self._trainer.token_log_probs is not None  # this step's rollout left them
        log_probs, rollout_log_probs = self._trainer.token_log_probs
        ratios = (log_probs.double() - rollout_log_probs.double()).clamp(EDGES[0], EDGES[-1])
        counts, _ = torch.histogram(ratios, EDGES.double())
        edges = [round(edge, 3) + 0.0 for edge in EDGES.tolist()]  # no -0.0
        return Histogram(step=step, edges=edges, counts=[int(count) for count in counts])

    def _evaluate(self) -> dict[str, float]:
        """Accuracy on the held-out problems, of all and of each level."""
        started = time.perf_counter()
        answers = self._trainer.answer([problem.row()["prompt"] for problem in self._held_out])
        task = TASKS[self._plan.condition.task]
        scores: dict[str, list[float]] = {}
        for problem, answer in zip(self._held_out, answers, strict=True):
            scores.setdefault(problem.level, []).append(task.score(answer, problem.answer))
        means = {f"accuracy/{level}": sum(each) / len(each) for level, each in scores.items()}
        total = sum(map(sum, scores.values())) / len(self._held_out)
        return {"accuracy": total, **means, "eval_seconds": time.perf_counter() - started}


class Stopper(transformers.TrainerCallback):
    """Ends the run at SIGTERM or SIGINT, after the step that it is in, with a checkpoint.

    Args:
        mini_batches: A rollout is used up first, for a checkpoint does not hold one.
    """

    def __init__(self, mini_batches: int) -> None:
        self._mini_batches = mini_batches
        self._asked = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: Any) -> None:
        self._asked = True
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        if self._asked and state.global_step % self._mini_batches == 0:
            control.should_save = control.should_training_stop = True


def _last_checkpoint(work: Path) -> int | None:
    """The step of the newest checkpoint that is whole: its state is written last."""
    found = [int(path.parent.name.rpartition("-")[2]) for path in work.glob("*/trainer_state.json")]
    return max(found, default=None)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process is between these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _scorer(plan: Plan) -> Any:
    score = TASKS[plan.condition.task].score

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [score(text, wanted) for text, wanted in zip(texts, answer, strict=True)]

    return right


def _former(plan: Plan) -> Any:
    score = TASKS[plan.condition.task].form

    def form(completions: list[Any], **_: Any) -> list[float]:
        return [score(completion[0]["content"]) for completion in completions]

    return form


def _context(tokenizer: Any, problems: Sequence[Problem], plan: Plan) -> int:
    """Tokens of the longest prompt and the longest completion, in whole blocks of the KV cache."""
    chats = [problem.row()["prompt"] for problem in problems]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    return 16 * math.ceil((max(map(len, prompts)) + plan.condition.max_tokens) / 16)


def _arguments(
    plan: Plan, work: Path, gpu_memory: float, save_every: int, context: int
) -> GRPOConfig:
    condition = plan.condition
    on_gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(work),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        per_device_train_batch_size=condition.completions
        // (condition.mini_batches * condition.micro_batches),
        gradient_accumulation_steps=condition.micro_batches,
        steps_per_generation=condition.mini_batches * condition.micro_batches,
        num_generations=condition.num_generations,
        max_completion_length=condition.max_tokens,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_importance_sampling_correction=False,  # the arm's correction is the trainer's own
        vllm_gpu_memory_utilization=gpu_memory,
        vllm_max_model_length=context,
        max_steps=condition.num_steps,
        learning_rate=condition.learning_rate,
        lr_scheduler_type="constant",
        reward_weights=[1.0, FORM_WEIGHT],
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=math.ceil(save_every / condition.mini_batches) * condition.mini_batches,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        seed=plan.seed,
        **plan.arm.trainer,
    )


def _facts(plan: Plan, model: Path) -> dict[str, Any]:
    arm, condition = plan.arm, plan.condition
    correction = corrections.find(arm.correction)
    return {
        "heading": "Does training with 8-bit rollouts reach what BF16 reaches?",
        "lead": "GRPO with TRL and vLLM on arithmetic that rules check. Arms differ in how they "
        "generate rollouts and in what corrects for it; conditions in how hard that makes it.",
        "title": f"{arm.title}; {condition.title.lower()}; seed {plan.seed}",
        "arm": arm.name,
        "arm_title": arm.title,
        "baselines": list(arm.baselines),
        "condition": condition.name,
        "condition_title": condition.title,
        "seed": plan.seed,
        "scheme": arm.scheme,
        "correction": arm.correction,
        "smoothing": arm.smoothing,
        "truncation": correction.high if correction.level != "none" else None,
        "num_steps": condition.num_steps,
        "task": condition.task,
        "held_out": condition.num_held_out,
        "completions_per_step": condition.completions // condition.mini_batches,
        "mini_batches": condition.mini_batches,
        "lag": condition.lag,
        "max_tokens": condition.max_tokens,
        "learning_rate": condition.learning_rate,
        "best_reward": 1.0 + FORM_WEIGHT,
        "model": model.name,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "num_threads": torch.get_num_threads(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    named = {}
    for name in ("torch", "transformers", "trl", "vllm", "flashrl"):
        try:
            named[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # copied onto the path instead of installed
            continue
    return named
