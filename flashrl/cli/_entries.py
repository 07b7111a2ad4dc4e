"""A configuration as the command line shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from flashrl.core.config import Config, Entry

__all__ = ["as_data", "tabulate"]


def as_data(config: Config | None) -> dict[str, Any]:
    """Entries as plain values: what the file says, and what that comes to."""
    entries = config.entries if config else ()
    return {"entries": [{**entry.to_mapping(), "scheme": _scheme(entry)} for entry in entries]}


def tabulate(config: Config) -> Table:
    """A row for each entry."""
    table = Table("ranks", "fn", "8 bit", "scales", "profile", "more", box=None)
    table.header_style = "bold"
    number = len(config.entries)
    for index, entry in enumerate(config.entries):
        ranks = "all" if number == 1 else ", ".join(str(index + number * n) for n in range(3))
        shown = entry.to_mapping()
        more = {k: v for k, v in shown.items() if k not in ("fn", "profile", "dynamic")}
        table.add_row(
            ranks if number == 1 else f"{ranks}, …",
            entry.scheme,
            _describe(entry),
            ("dynamic" if entry.dynamic else "static") if entry.quant_scheme.quantized else "",
            Text(entry.profile or ""),
            Text(", ".join(f"{key}: {value}" for key, value in more.items())),
        )
    return table


def _scheme(entry: Entry) -> Mapping[str, Any]:
    scheme = entry.quant_scheme
    return {
        "name": scheme.name,
        "quantized": scheme.quantized,
        "type": scheme.type,
        "strategy": scheme.strategy,
        "dynamic": scheme.dynamic,
        "prune_dead_neurons": scheme.prune_dead_neurons,
        "kv_cache": scheme.kv_cache,
        "targets": list(scheme.targets),
        "ignore": list(scheme.ignore),
    }


def _describe(entry: Entry) -> str:
    scheme = entry.quant_scheme
    if not scheme.quantized:
        return "no, exact log-probabilities only"
    pruned = ", dead channels pruned" if scheme.prune_dead_neurons else ""
    return f"{'int8' if scheme.type == 'int' else 'fp8'} by {scheme.strategy}{pruned}"
