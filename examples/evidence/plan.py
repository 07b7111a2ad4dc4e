"""What a run is: an arm under a condition with a seed.  An arm and a condition are a file each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import yaml
from task import TASKS

from flashrl.core.config import Config, Entry
from flashrl.errors import ConfigError
from flashrl.report.records import read_run
from flashrl.trainers import corrections

__all__ = ["Arm", "Condition", "Plan", "is_done", "names", "read_arm", "read_condition"]

HERE = Path(__file__).parent
_Kind = TypeVar("_Kind")


@attrs.frozen(kw_only=True)
class Arm:
    """How rollouts are generated and what corrects for it: what the comparison is about.

    Args:
        name: Of its file.
        title: For people.
        rollout: An entry of ``FLASHRL_CONFIG``; it also says the scheme.
        correction: A name that :func:`flashrl.trainers.corrections.find` knows.
        smoothing: SmoothQuant's α, for a profile made from the model before training.
        trainer: Further arguments of TRL's ``GRPOConfig``.
        baselines: Arms that its final accuracy is tested against.
    """

    name: str
    title: str
    rollout: Mapping[str, Any]
    correction: str = "off"
    smoothing: float | None = None
    trainer: Mapping[str, Any] = attrs.field(factory=dict)
    baselines: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    def __attrs_post_init__(self) -> None:
        _ = self.scheme, corrections.find(self.correction)  # both say what they do not know
        if self.smoothing is not None and not 0 <= self.smoothing <= 1:
            raise ConfigError(f"arm {self.name!r}: smoothing is from 0 to 1, got {self.smoothing}")

    @property
    def scheme(self) -> str:
        """The scheme's own name."""
        return self.flashrl_config().for_rank(0).quant_scheme.name

    def flashrl_config(self, profile: Path | None = None) -> Config:
        """The configuration that FLASHRL_CONFIG names in this arm's runs."""
        given = {} if profile is None else {"profile": str(profile)}
        source = f"arm {self.name!r}, rollout"
        return Config.from_mapping({"configs": [{**self.rollout, **given}]}, source=source)


@attrs.frozen(kw_only=True)
class Condition:
    """What all arms of a comparison share.

    Args:
        name: Of its file.
        title: For people.
        order: Where it stands among the conditions of a report.
        task: A key of :data:`task.TASKS`.
        num_steps: Optimizer steps.
        num_prompts: Prompts a rollout.
        num_generations: Completions of each prompt, GRPO's group.
        mini_batches: Optimizer steps that one rollout is cut into.
        micro_batches: Forward passes that one optimizer step is cut into, for memory.
        lag: Optimizer steps by which the weights that sample are older than those that train.
        max_tokens: Longest completion.
        learning_rate: Of AdamW, constant.
        eval_every: Optimizer steps from one greedy evaluation to the next.
        num_held_out: Problems of an evaluation, the same in every run.
    """

    name: str
    title: str
    order: int = 0
    task: str = "short"
    num_steps: int = 300
    num_prompts: int = 16
    num_generations: int = 8
    mini_batches: int = 1
    micro_batches: int = 1
    lag: int = 0
    max_tokens: int = 24
    learning_rate: float = 2e-5
    eval_every: int = 20
    num_held_out: int = 256

    def __attrs_post_init__(self) -> None:
        faults = [
            f"{name} is {value!r}; it is a whole number of at least {least}"
            for name, least in (
                *(("num_steps", 1), ("num_prompts", 1), ("num_generations", 2)),
                *(("mini_batches", 1), ("micro_batches", 1), ("lag", 0), ("max_tokens", 1)),
                *(("eval_every", 1), ("num_held_out", 1)),
            )
            if not isinstance(value := getattr(self, name), int) or value < least
        ]
        if self.task not in TASKS:
            faults.append(f"task is {self.task!r}; known: {', '.join(TASKS)}")
        if not isinstance(self.learning_rate, float) or self.learning_rate <= 0:
            faults.append(f"learning_rate is {self.learning_rate!r}; write it as 1.0e-5")
        if not faults and self.completions % (self.mini_batches * self.micro_batches):
            faults.append(
                f"{self.completions} completions cannot be cut into {self.mini_batches} "
                f"mini-batches of {self.micro_batches} micro-batches each"
            )
        if not faults and self.lag and self.mini_batches > 1:
            faults.append("lag counts rollouts of one optimizer step each; mini_batches must be 1")
        if faults:
            raise ConfigError(f"condition {self.name!r}: " + "; ".join(faults))

    @property
    def completions(self) -> int:
        """Completions of a rollout."""
        return self.num_prompts * self.num_generations

    @property
    def histogram_steps(self) -> tuple[int, int, int]:
        """The first, the middle and the last step that a new rollout belongs to."""
        rollouts = range(1, self.num_steps + 1, self.mini_batches)
        return rollouts[0], rollouts[len(rollouts) // 2], rollouts[-1]


@attrs.frozen(kw_only=True)
class Plan:
    """One run.

    Args:
        arm: How rollouts are generated.
        condition: What it shares with the other arms.
        seed: Of prompts, sampling and everything else.
    """

    arm: Arm
    condition: Condition
    seed: int

    @property
    def name(self) -> str:
        """Unique in a sweep; its records go to ``run-<name>.jsonl``."""
        return f"{self.condition.name}.{self.arm.name}.seed{self.seed}"


def names(kind: str) -> list[str]:
    """The files of a kind that lie here: ``"arms"`` or ``"conditions"``."""
    return sorted(path.stem for path in (HERE / kind).glob("*.yaml"))


def read_arm(name: str) -> Arm:
    """An arm by its name here, or by its file's path.

    Raises:
        ConfigError: There is no such file, or something in it is wrong.
    """
    return _read(name, "arms", Arm)


def read_condition(name: str) -> Condition:
    """A condition by its name here, or by its file's path.

    Raises:
        ConfigError: There is no such file, or something in it is wrong.
    """
    return _read(name, "conditions", Condition)


def is_done(plan: Plan, output: Path) -> bool:
    """Whether the records in a folder say that a run came to its end."""
    path = output / f"run-{plan.name}.jsonl"
    compressed = path.with_name(f"{path.name}.gz")
    return any(each.is_file() and read_run(each).complete for each in (path, compressed))


def _read(name: str, kind: str, cls: type[_Kind]) -> _Kind:
    path = Path(name) if name.endswith(".yaml") else HERE / kind / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"no file {path}; give one, or a name: {', '.join(names(kind))}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    known = {field.name for field in attrs.fields(cls)} - {"name"}
    if not isinstance(values, dict) or not values.keys() <= known or "title" not in values:
        raise ConfigError(f"{path}: expected a title and any of {', '.join(sorted(known))}")
    if cls is Arm and "rollout" not in values:
        raise ConfigError(f"{path}: rollout is missing: an entry of FLASHRL_CONFIG ({_keys()})")
    return cls(name=path.stem, **values)


def _keys() -> str:
    return ", ".join(field.name for field in attrs.fields(Entry))
