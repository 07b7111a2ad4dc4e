"""Options: what OpenRLHF says by itself, and what needs a name of ours."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from flashrl.core.correction import CorrectionConfig
from flashrl.core.schemes import get_scheme
from flashrl.errors import ConfigError, UnknownNameError, UnsupportedError
from flashrl.trainers import corrections
from flashrl.trainers.openrlhf import OpenRLHFAdapter
from flashrl.trainers.openrlhf.__main__ import carrying, take_correction
from flashrl.trainers.openrlhf.options import OWN_KEY, OWN_VARIABLE, read_options

NATIVE = {
    # level, mode, threshold
    "tis": ("token", "clip", [0.0, 2.0]),
    "flashrl_c8": ("token", "clip", [0.0, 8.0]),
    "icepop": ("token", "mask", [0.5, 5.0]),
    "openrlhf": ("token", "mask", [0.5, 5.0]),
    "seq_mask_tis": ("seq", "mask", [0.999, 1.002]),
}


def overrides(correction: str) -> Any:
    return OpenRLHFAdapter().overrides(get_scheme("int8"), correction=correction)


def parsed(options: dict[str, Any], loss: str = "ppo") -> SimpleNamespace:
    """OpenRLHF's arguments, nested as it nests them."""
    section = {name.split(".")[-1]: v for name, v in options.items() if name != OWN_KEY}
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(**section)),
        actor=SimpleNamespace(policy_loss_type=loss),
    )


@pytest.mark.parametrize("name", NATIVE)
def test_what_openrlhf_has_is_said_in_its_own_options(name: str) -> None:
    level, mode, threshold = NATIVE[name]
    prefix = "algo.advantage.is_correction"
    assert overrides(name) == {
        f"{prefix}_level": level,
        f"{prefix}_mode": mode,
        f"{prefix}_gating": "ratio",
        f"{prefix}_threshold": threshold,
    }


def test_off_is_off() -> None:
    assert overrides("off") == {"algo.advantage.is_correction_level": "off"}


@pytest.mark.parametrize("name", ["bypass", "trl", "skyrl_geometric", "dppo_tv"])
def test_what_it_lacks_is_named_and_log_probs_are_asked_for(name: str) -> None:
    options = overrides(name)
    assert options[OWN_KEY] == corrections.find(name).name
    # OpenRLHF asks the engine for log-probabilities if and only if this is not off.
    assert options["algo.advantage.is_correction_level"] == "token"


def test_what_needs_a_whole_batch_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'ais' weighs a token by its whole batch"):
        overrides("ais")
    with pytest.raises(UnknownNameError, match="unknown correction 'tsi'"):
        overrides("tsi")


@pytest.mark.parametrize("name", [n for n in corrections.names() if n != "ais"])
def test_options_read_back_as_the_correction(name: str) -> None:
    options = overrides(name)
    read = read_options(parsed(options), environ={OWN_VARIABLE: options.get(OWN_KEY, "")})
    wanted = corrections.find(name)
    assert read.name == (wanted.name if OWN_KEY in options else "openrlhf")
    fields = {field: getattr(wanted, field) for field in wanted.__slots__ if field[0] != "_"}
    if read.level == "none" and not read.filters:
        fields |= {"low": read.low, "high": read.high}
    assert read == CorrectionConfig(**fields | {"name": read.name})


def test_gspo_weighs_nothing_for_its_ratio_is_against_the_rollout() -> None:
    read = read_options(parsed(overrides("tis"), loss="gspo"), environ={})
    assert read.level == "none"


def test_a_divergence_that_gates_is_not_mistaken_for_bounds_of_a_ratio() -> None:
    options = overrides("icepop") | {"algo.advantage.is_correction_gating": "tv"}
    assert read_options(parsed(options), environ={}).bound == "none"


def test_arguments_read_as_openrlhf_reads_them() -> None:
    launcher = OpenRLHFAdapter().launcher
    arguments = launcher.complete(["--vllm.enforce_eager"], overrides("seq_mask_tis"))
    assert arguments[1:] == [
        *("--algo.advantage.is_correction_level", "seq"),
        *("--algo.advantage.is_correction_mode", "mask"),
        *("--algo.advantage.is_correction_gating", "ratio"),
        *("--algo.advantage.is_correction_threshold", "0.999", "1.002"),
    ]
    with pytest.raises(ConfigError, match="is_correction_level is token, and off is needed"):
        launcher.complete(["--algo.advantage.is_correction_level", "token"], overrides("off"))


@pytest.mark.parametrize(
    "given", [["--flashrl.correction", "dppo_tv"], ["--flashrl.correction=dppo_tv"]]
)
def test_our_option_is_taken_out_of_the_arguments(given: list[str]) -> None:
    name, rest = take_correction(["--a", "1", *given, "--b"])
    assert (name, rest) == ("prime_rl_dppo_tv", ["--a", "1", "--b"])
    assert take_correction(["--a"]) == (None, ["--a"])


@pytest.mark.parametrize("given", [["--flashrl.correction"], ["--flashrl.correction", "--b"]])
def test_our_option_without_a_name_is_an_error(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="needs the name of a correction: tis"):
        take_correction(given)


def test_the_job_carries_our_variables_and_our_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FLASHRL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLASHRL_CONFIG", "fp8_channel")
    given = {"env_vars": {"NCCL_DEBUG": "WARN"}, "working_dir": "here"}
    runtime_env = carrying(lambda **kwargs: kwargs)(runtime_env=given)["runtime_env"]
    assert runtime_env["env_vars"] == {"NCCL_DEBUG": "WARN", "FLASHRL_CONFIG": "fp8_channel"}
    assert runtime_env["working_dir"] == "here"
    assert runtime_env["worker_process_setup_hook"].endswith("openrlhf.plugin.install")
    assert given["env_vars"] == {"NCCL_DEBUG": "WARN"}
