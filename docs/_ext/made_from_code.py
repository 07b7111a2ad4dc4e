"""Tables, command help and figures that are made from the code, so that they cannot be stale.

``{made-from-code} NAME`` puts what the function of that name in :data:`MAKERS` returns on the page.
"""

# ruff: noqa: RUF001  (Greek letters are the formulas' own names)

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from click.testing import CliRunner
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flashrl.cli import COMMANDS, main
from flashrl.core import registry
from flashrl.core.config import Entry
from flashrl.core.correction import PRESETS as CORRECTIONS
from flashrl.core.correction import CorrectionConfig
from flashrl.core.correction.rejection import Filter
from flashrl.core.interfaces import Capabilities
from flashrl.core.predict.gpus import GPUS
from flashrl.core.schemes import ALIASES, PRESETS, QuantScheme

COLUMNS = 88  # what a code block shows without a scroll bar
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Code(str):
    """A cell or phrase that is set as code."""

    __slots__ = ()


Rows = Iterable[Sequence[str]]


def table(headings: Sequence[str], rows: Rows) -> nodes.table:
    """A table; text in `backticks` and instances of :class:`Code` are set as code."""
    group = nodes.tgroup(cols=len(headings))
    group += [nodes.colspec(colwidth=1) for _ in headings]
    head, body = nodes.thead(), nodes.tbody()
    head += _row(headings)
    body += [_row(row) for row in rows]
    group += [head, body]
    return nodes.table("", group, classes=["colwidths-auto"])


def _row(cells: Sequence[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", paragraph(cell)) for cell in cells))


def paragraph(text: str) -> nodes.paragraph:
    """A paragraph; text in `backticks` is code."""
    if isinstance(text, Code):
        return nodes.paragraph("", "", nodes.literal(text, text)) if text else nodes.paragraph()
    parts = re.split(r"`+([^`]+)`+", text)
    return nodes.paragraph(
        "",
        "",
        *(
            nodes.literal(part, part) if index % 2 else nodes.Text(part)
            for index, part in enumerate(parts)
            if part
        ),
    )


def describe_args(kind: type) -> Mapping[str, str]:
    """What the ``Args`` of a class's docstring say of each field."""
    section = re.split(r"\n\w+:\n", (inspect.getdoc(kind) or "").partition("Args:\n")[2])[0]
    section = re.sub(r":\w+:(?=`)", "", section)  # a role is nothing without its target
    entries = re.findall(r"^    (\w+): (.+(?:\n {8,}.+)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def schemes() -> Iterator[nodes.Node]:
    """Every preset scheme."""
    headings = ("name", "8-bit type", "one weight scale for each", "one activation scale for each")
    yield table(
        headings, ([Code(scheme.name), *_scheme_cells(scheme)] for scheme in PRESETS.values())
    )


def _scheme_cells(scheme: QuantScheme) -> list[str]:
    if not scheme.quantized:
        return ["none: weights stay as they are", "", ""]
    kind = "int8, -127 to 127" if scheme.type == "int" else "fp8 e4m3fn, ±448"
    block = scheme.block_structure or (0, 0)
    weights = {
        "channel": "output row",
        "tensor": "shard",
        "block": f"block of {block[0]} × {block[1]}",
    }
    inputs = {
        "token": "token",
        "tensor": "batch of tokens",
        "group": f"token's run of {block[1]} channels",
    }
    return [kind, weights[scheme.strategy], inputs[scheme.input_strategy]]


def aliases() -> Iterator[nodes.Node]:
    """Names that flash-llm-rl used."""
    rows = (
        [
            Code(alias),
            Code(scheme.name if scheme.name in PRESETS else "int8"),
            "with dead channels pruned" if scheme.prune_dead_neurons else "",
        ]
        for alias, scheme in ALIASES.items()
    )
    yield table(("flash-llm-rl's name", "here", "and"), rows)


def corrections() -> Iterator[nodes.Node]:
    """Every correction preset, by what it changes."""
    headings = ("preset", "objective", "weight", "kept", "also")
    yield table(headings, ([Code(c.name), *_correction_cells(c)] for c in CORRECTIONS.values()))


def _correction_cells(config: CorrectionConfig) -> list[str]:
    weight = {
        "token": "ρ of the token",
        "sequence": "ρ of the sequence (product)",
        "geometric": "geometric mean of ρ",
        "none": "1",
    }[config.level]
    weighs = config.level != "none"
    if weighs and config.bound == "truncate":
        weight += f", at most {config.high:g}"
        weight += f" and at least {config.low:g}" if config.low else ""
    kept = [
        _between(config.low, "ρ", config.high) if weighs and config.bound == "mask" else "",
        *(_between(f.low, _statistic(f), f.high) for f in config.filters),
        f"π - μ up to {config.tv_delta:g} the way the advantage pushes" if config.tv_delta else "",
    ]
    mixing = config.adaptive_kl_scale
    return [
        config.objective.replace("_", " "),
        weight,
        "; ".join(filter(None, kept)) or "everything",
        f"mixed by reliability, κ = {mixing:g}" if mixing else "",
    ]


def _between(low: float, what: str, high: float) -> str:
    return f"{low:g} ≤ {what} ≤ {high:g}" if low > 0 else f"{what} ≤ {high:g}"


def _statistic(criterion: Filter) -> str:
    if criterion.statistic == "ratio":
        return {"sum": "product of ρ", "mean": "geometric mean of ρ"}.get(criterion.over, "ρ")
    return f"{criterion.statistic} over {criterion.over}"


def correction_fields() -> Iterator[nodes.Node]:
    """The fields of a correction."""
    yield _fields(CorrectionConfig)


def config_keys() -> Iterator[nodes.Node]:
    """The keys of an entry in a configuration file."""
    texts = describe_args(Entry)
    yield table(
        ("key", "holds", "default", "meaning"),
        (
            [
                Code("fn" if field.name == "scheme" else field.name),
                field.metadata["kind"],
                Code("" if field.default is None else str(field.default).lower()),
                texts[field.name],
            ]
            for field in attrs.fields(Entry)
        ),
    )


def _fields(kind: type) -> nodes.table:
    texts = describe_args(kind)
    return table(
        ("field", "default", "meaning"),
        (
            [Code(f.name), Code(_default(f.default)), texts[f.name]]
            for f in attrs.fields(kind)
            if f.name in texts
        ),
    )


def _default(value: Any) -> str:
    return "" if value is attrs.NOTHING or isinstance(value, attrs.Factory) else repr(value)


def gpus() -> Iterator[nodes.Node]:
    """The GPUs whose data sheets are known."""
    headings = ("name", "board", "memory GB", "GB/s", "BF16 TFLOP/s", "INT8", "FP8", "link GB/s")
    yield table(
        headings,
        (
            [
                Code(gpu.name),
                gpu.board,
                f"{gpu.memory_gb:g}",
                f"{gpu.bandwidth_gb_s:,g}",
                *(
                    "none" if rate is None else f"{rate:,g}"
                    for rate in (gpu.bf16_tflops, gpu.int8_tflops, gpu.fp8_tflops)
                ),
                f"{gpu.link_gb_s:g}",
            ]
            for gpu in GPUS.values()
        ),
    )


def capabilities() -> Iterator[nodes.Node]:
    """What each registered engine declares, as far as that can be read without the engine."""
    engines = registry.list_adapters(registry.ENGINES)
    declared = {entry.name: _declared(entry.adapter) for entry in engines if entry.adapter}
    known = [(name, found) for name, found in declared.items() if found is not None]
    fields = [field.name for field in attrs.fields(Capabilities)]
    texts = describe_args(Capabilities)
    rows = [
        [texts[field].rstrip("."), *(_ability(getattr(found, field)) for _, found in known)]
        for field in fields
    ]
    yield table(["", *(Code(name) for name, _ in known)], rows)
    unknown = [name for name, found in declared.items() if found is None]
    if unknown:
        yield paragraph(
            f"{', '.join(f'`{name}`' for name in unknown)}: what it can do depends on the version "
            "that is installed, and is not known without it; see its how-to."
        )


def _declared(adapter: Any) -> Capabilities | None:
    """The ``CAPABILITIES`` beside an adapter; None where they need the engine itself."""
    package = type(adapter).__module__.rpartition(".")[0]
    try:
        module = importlib.import_module(f"{package}.attached")
    except ImportError:
        return None
    found = getattr(module, "CAPABILITIES", None)
    return found if isinstance(found, Capabilities) else None


def _ability(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(f"`{name}`" for name in (value if isinstance(value, tuple) else sorted(value)))


def commands() -> Iterator[nodes.Node]:
    """What ``--help`` of every command prints, its subcommands' after it."""
    for name in COMMANDS:
        section = nodes.section(ids=[f"flashrl-{name}"])
        section += nodes.title("", "", nodes.literal("", f"flashrl {name}"))
        section += _help(name)
        command = main.get_command(click.Context(main), name)
        if isinstance(command, click.Group):
            section += [_help(name, subcommand) for subcommand in command.commands]
        yield section


def _help(*words: str) -> nodes.literal_block:
    result = CliRunner().invoke(
        main, [*words, "--help"], prog_name="flashrl", terminal_width=COLUMNS
    )
    if result.exit_code:
        raise RuntimeError(f"flashrl {' '.join(words)} --help failed: {result.exception!r}")
    return nodes.literal_block(result.output, result.output, language="text")


def benchmarks() -> Iterator[nodes.Node]:
    """Every figure in ``benchmarks/results``, with the command that made it."""
    files = sorted(RESULTS.glob("*.json"))
    if not files:
        yield paragraph("No figures have been recorded yet.")
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        section = nodes.section(ids=[f"benchmark-{file.stem}"])
        name = str(result.pop("benchmark", file.stem)).replace("_", " ")
        section += nodes.title("", name.capitalize())
        command = str(result.pop("command", ""))
        if command:
            command = f"$ {command}"
            section += nodes.literal_block(command, command, language="console")
        section += _figures(result)
        yield section


def _figures(result: Mapping[str, Any], path: str = "") -> Iterator[nodes.Node]:
    """Plain figures as one table, groups of alike figures and lists of records as one each."""
    records = {key: value for key, value in result.items() if _is_records(value)}
    result = {key: value for key, value in result.items() if key not in records}
    groups = {key: value for key, value in result.items() if isinstance(value, Mapping) and value}
    plain = {key: _figure(value) for key, value in result.items() if key not in groups}
    alike = {key: group for key, group in groups.items() if not _is_nested(group)}
    if path and (plain or alike):
        yield nodes.rubric("", path)
    if plain:
        yield table(("", "value"), ([Code(key), value] for key, value in plain.items()))
    if alike:
        columns = list(dict.fromkeys(column for group in alike.values() for column in group))
        yield table(
            ("", *columns),
            (
                [key, *(_figure(group[c]) if c in group else "" for c in columns)]
                for key, group in alike.items()
            ),
        )
    for key, rows in records.items():
        flat = [_flatten(row) for row in rows]
        columns = list(dict.fromkeys(column for row in flat for column in row))
        yield nodes.rubric("", f"{path}: {key}".lstrip(": "))
        yield table(columns, ([_figure(row.get(c)) for c in columns] for row in flat))
    for key in (key for key in groups if key not in alike):
        yield from _figures(groups[key], f"{path}: {key}".lstrip(": "))


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A record without its nested records, and without the samples behind a median."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key} ")
        elif not key.startswith("all_"):
            flat[f"{prefix}{key}".replace("_", " ")] = value
    return flat


def _is_nested(group: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in group.values())


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value in ({}, [], None) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


MAKERS: Mapping[str, Callable[[], Iterator[nodes.Node]]] = {
    maker.__name__.replace("_", "-"): maker
    for maker in (
        schemes,
        aliases,
        corrections,
        correction_fields,
        config_keys,
        gpus,
        capabilities,
        commands,
        benchmarks,
    )
}
"""What ``{made-from-code}`` can make, by name."""


class MadeFromCode(SphinxDirective):
    """``{made-from-code} NAME``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make it, or say what can be made."""
        name = self.arguments[0]
        if name not in MAKERS:
            raise self.error(f"nothing is made under {name!r}; known: {', '.join(MAKERS)}")
        self.env.note_reread()  # the code may have changed where the page has not
        return list(MAKERS[name]())


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("made-from-code", MadeFromCode)
    return {"version": "1", "parallel_read_safe": True}
