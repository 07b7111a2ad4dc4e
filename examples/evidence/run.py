#!/usr/bin/env python3
"""Do one run: an arm under a condition with a seed; again, to go on where it was stopped.

    python examples/evidence/run.py int8_tis on_policy --seed 0 --out evidence

ARM and CONDITION are files of ``arms/`` and ``conditions/`` without ``.yaml``, or paths of others.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path
from typing import IO

from plan import Arm, Plan, is_done, names, read_arm, read_condition
from task import TASKS, draw_problems

from flashrl.core.profiles import Profile
from flashrl.demo.model import prepare_model
from flashrl.errors import ConfigError, FlashRLError

INTERRUPTED = 130
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # TRL reaches for the model in its own process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # one sampler everywhere, whatever is installed
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", metavar="ARM", help=", ".join(names("arms")))
    parser.add_argument("condition", metavar="CONDITION", help=", ".join(names("conditions")))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--model", type=Path, help="a checkpoint; SmolLM2-135M without it")
    parser.add_argument(
        "--gpu-memory", type=float, default=0.1, help="share of it for vLLM [default: 0.1]"
    )
    parser.add_argument(
        "--save-every", type=int, default=100, help="steps between checkpoints [default: 100]"
    )
    arguments = parser.parse_args()
    try:
        plan = Plan(
            arm=read_arm(arguments.arm),
            condition=read_condition(arguments.condition),
            seed=arguments.seed,
        )
        if is_done(plan, arguments.out):
            print(f"{plan.name} is done")
            return 0
        model = prepare_model(arguments.model, on_message=print)
        work = arguments.out / "work" / plan.name
        work.mkdir(parents=True, exist_ok=True)
        lock = _claim(work)  # held as long as it is referred to
        os.environ.update({k: os.environ.get(k, v) for k, v in _ENVIRONMENT.items()})
        os.environ["FLASHRL_CONFIG"] = str(_write_config(plan, model, work))
        from training import train  # vLLM and FlashRL in it read the environment as they start

        train(
            plan,
            model=model,
            output=arguments.out,
            gpu_memory=arguments.gpu_memory,
            save_every=arguments.save_every,
        )
        lock.close()
    except FlashRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(stopped, file=sys.stderr)
        return INTERRUPTED
    return 0


def _claim(work: Path) -> IO[str]:
    """Make sure that no other process does the same run."""
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is at this run: it holds {lock.name}") from None
    return lock


def _write_config(plan: Plan, model: Path, work: Path) -> Path:
    """What FLASHRL_CONFIG names, with a profile if the arm smooths."""
    profile = None
    if plan.arm.smoothing is not None:
        profile = work / "profile.safetensors"
        _make_profile(plan, plan.arm, model).save(profile)
    path = work / "flashrl.yaml"
    path.write_text(plan.arm.flashrl_config(profile).to_yaml(), encoding="utf-8")
    return path


def _make_profile(plan: Plan, arm: Arm, model: Path) -> Profile:
    """SmoothQuant's factors from a few problems of the condition's task, the same in every run."""
    from flashrl.core.profiles.calibration import profile_from_activations
    from flashrl.engines.huggingface.calibration import collect_from_prompts

    problems = draw_problems(TASKS[plan.condition.task], 64, seed="calibration")
    amax = collect_from_prompts(model, [problem.row()["prompt"] for problem in problems])
    return profile_from_activations(model, amax, scheme=arm.scheme, alpha=arm.smoothing)


if __name__ == "__main__":
    sys.exit(main())
