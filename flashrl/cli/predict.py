"""``flashrl predict``: a row for each scheme."""

from __future__ import annotations

from typing import Any

import attrs
import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashrl.cli._output import json_option, print_data
from flashrl.cli._system import find_gpus
from flashrl.core.predict import ModelShape, Prediction, Workload, predict
from flashrl.core.predict.gpus import GPU, GPUS, get_gpu
from flashrl.core.schemes import PRESETS, get_scheme
from flashrl.errors import ConfigError, UnsupportedError

__all__ = ["command"]

_COUNT = click.IntRange(min=1)
_FRACTION = click.FloatRange(min=0, max=1, min_open=True)


@click.command("predict")
@click.option(
    "--model",
    required=True,
    metavar="PATH|NAME",
    help="A config.json, its folder, or a Qwen2.5 size such as qwen2.5-7b.",
)
@click.option("--gpu", help=f"One of {', '.join(GPUS)}.  [default: this machine's]")
@click.option("--scheme", "schemes", multiple=True, help="May be repeated.  [default: all presets]")
@click.option("--kv-cache", type=click.Choice(["fp8"]), help="Store the KV cache in FP8.")
@click.option("--batch", type=_COUNT, default=256, show_default=True, help="Sequences a step.")
@click.option("--prompt-length", type=_COUNT, default=512, show_default=True, help="Mean tokens.")
@click.option(
    "--response-length", type=_COUNT, default=2048, show_default=True, help="Mean tokens."
)
@click.option(
    "--tp",
    "tensor_parallel_size",
    type=_COUNT,
    default=1,
    show_default=True,
    help="GPUs that share one engine.",
)
@click.option(
    "--generation-share",
    type=_FRACTION,
    default=0.7,
    show_default=True,
    help="Fraction of a 16-bit training step that generation takes.",
)
@click.option(
    "--memory-utilization",
    type=_FRACTION,
    default=0.9,
    show_default=True,
    help="Fraction of the GPU's memory that the engine may use.",
)
@json_option
def command(
    model: str,
    gpu: str | None,
    schemes: tuple[str, ...],
    kv_cache: str | None,
    as_json: bool,
    **workload: Any,
) -> None:
    """Predict the speed-up and the memory of each scheme for a model on a GPU.

    A roofline from the GPU's data sheet and the model's configuration, met within 15 % on one
    H200; a step of training gains by Amdahl's law.
    """
    shape = ModelShape.from_config(model)
    sheet = get_gpu(gpu) if gpu else _this_machines_gpu()
    load = Workload(**workload)
    rows: list[Prediction] = []
    refused: dict[str, str] = {}
    for name in schemes or PRESETS:
        scheme = get_scheme(name)
        if kv_cache and scheme.kv_cache is None:
            scheme = scheme.evolve(kv_cache=kv_cache)
        try:
            rows.append(predict(shape, gpu=sheet, scheme=scheme, workload=load))
        except UnsupportedError as error:
            refused[scheme.name] = str(error)
    if not rows:
        raise UnsupportedError("\n".join(dict.fromkeys(refused.values())))
    data = {
        "model": {"name": shape.name, "num_parameters": shape.num_parameters},
        "gpu": sheet.board,
        "workload": attrs.asdict(load),
        "predictions": [_as_data(row) for row in rows],
        "unsupported": [{"scheme": name, "reason": why} for name, why in refused.items()],
    }
    title = f"{shape.name} ({shape.num_parameters / 1e9:.2f}B) on {sheet.board}"
    print_data(data, _render(title, load, rows, refused), as_json=as_json)


def _this_machines_gpu() -> GPU:
    gpus, reason = find_gpus()
    if not gpus:
        raise ConfigError(f"no GPU here ({reason}); name one with --gpu: {', '.join(GPUS)}")
    return attrs.evolve(get_gpu(gpus[0].name), memory_gb=gpus[0].memory_gb)


def _as_data(row: Prediction) -> dict[str, Any]:
    return {
        **attrs.asdict(row),
        "bound_by": row.bound_by,
        "time": {**attrs.asdict(row.time), "total": row.time.total},
        "decode_step": {**attrs.asdict(row.decode_step), "total": row.decode_step.total},
        "cautions": list(row.cautions),
    }


def _render(title: str, load: Workload, rows: list[Prediction], refused: dict[str, str]) -> Group:
    table = Table()
    table.add_column("scheme")
    for heading in ("tok/s", "rollout", "step", "weights GB", "saved GB", "at a time", "sync ms"):
        table.add_column(heading, justify="right")
    table.add_column("bound by")
    notes: dict[str, list[str]] = {}
    for name, reason in refused.items():
        notes.setdefault(reason, []).append(name)
    for row in rows:
        table.add_row(
            row.scheme + (" + fp8 KV" if row.kv_cache else ""),
            f"{row.tokens_per_second:,.0f}",
            _times(row.rollout_speedup),
            _times(row.step_speedup),
            f"{row.weight_bytes / 1e9:.1f}",
            f"{row.memory_saved_bytes / 1e9:.1f}",
            f"{row.num_running:,}",
            f"{row.update_seconds * 1e3:.0f}",
            row.bound_by.replace("_", " "),
        )
        for caution in row.cautions:
            notes.setdefault(caution, []).append(row.scheme)
    assumptions = (
        f"{load.batch:,} sequences of {load.prompt_length:,} + {load.response_length:,} tokens, "
        f"all equally long; generation takes {load.generation_share:.0%} of a 16-bit step."
    )
    return Group(
        Text(title, style="bold"),
        table,
        *(Text(f"{', '.join(names)}: {note}", style="yellow") for note, names in notes.items()),
        Text(assumptions, style="dim"),
    )


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"
