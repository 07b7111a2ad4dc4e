"""YAML that holds plain data and nothing else, with the line on which every value stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import yaml

from flashrl.errors import ConfigError

__all__ = ["Document", "dump_yaml", "parse_overrides", "parse_yaml"]

_PREFIX = "tag:yaml.org,2002:"
_PLAIN = frozenset({"str", "int", "float", "bool", "null", "seq", "map", "merge", "timestamp"})


class _Loader(yaml.SafeLoader):
    """The safe loader, which also reads ``1e-6`` as a number, as YAML 1.2 does."""


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which quotes a string that :class:`_Loader` would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        _PREFIX + "float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
        list("-+.0123456789"),
    )


@attrs.frozen(kw_only=True)
class Document:
    """A parsed document.

    Args:
        value: What it holds.
        lines: Line, from 1, of each value, by its path, such as ``configs[1].fn``.
    """

    value: Any
    lines: Mapping[str, int]


def parse_yaml(text: str, *, source: str) -> Document:
    """Parse one document of plain data.

    Args:
        text: The YAML.
        source: What to call it in an error.

    Returns:
        Its value, None if it is empty, with lines.

    Raises:
        ConfigError: It is no YAML, holds a tag that stands for code, or repeats a key; every such
            tag and key is named.

    Example:
        >>> parse_yaml("a: {b: 1e-6}", source="example").lines
        {'': 1, 'a': 1, 'a.b': 1}
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(value=None, lines={})
        lines: dict[str, int] = {}
        faults = list(_walk(node, "", lines, set()))
        if faults:
            raise ConfigError(f"{source}: " + "; ".join(faults))
        return Document(value=loader.construct_document(node), lines=lines)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{source} is not valid YAML: {reason}") from error
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: str, lines: dict[str, int], seen: set[int]) -> Iterator[str]:
    """Record the line of every value, and yield what is wrong; an alias is visited once."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if id(node) in seen:
        return
    seen.add(id(node))
    if node.tag == _PREFIX + "value":  # a lone "=", for which the safe loader has no constructor
        node.tag = _PREFIX + "str"
    if node.tag.removeprefix(_PREFIX) not in _PLAIN:
        tag = node.tag.replace(_PREFIX, "!!")
        yield f"line {line}: the tag {tag} is refused; a configuration holds plain data only"
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, f"{path}[{index}]", lines, seen)
    elif isinstance(node, yaml.MappingNode):
        known: set[str] = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if name in known:
                yield f"line {key.start_mark.line + 1}: the key {name!r} stands there twice"
            known.add(name)
            inside = f"{path}.{name}".lstrip(".")
            yield from _walk(key, inside, lines, seen)
            yield from _walk(value, inside, lines, seen)


def dump_yaml(value: Any) -> str:
    """Write plain data so that :func:`parse_yaml` reads it back equal, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Read ``key=value`` arguments; values are plain YAML and never evaluated.

    Args:
        overrides: Each split at its first ``=``; a dot in the key nests.

    Returns:
        The values, nested; of two for the same key the later one.

    Raises:
        ConfigError: Arguments without ``=``, without a key, with a value that is no plain YAML, or
            that make one key both a value and a table; all of them are named.

    Example:
        >>> parse_overrides(["x=a=b", "engine.max_num_seqs=64", "ignore=[lm_head]"])
        {'x': 'a=b', 'engine': {'max_num_seqs': 64}, 'ignore': ['lm_head']}
    """
    found: dict[str, Any] = {}
    faults = []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            faults.append(f"{override!r} is not of the form key=value")
            continue
        try:
            _insert(found, path, parse_yaml(text, source=repr(override)).value)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("; ".join(faults))
    return found


def _insert(table: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{'.'.join(path)!r}: {parent!r} already has a value of its own")
    if isinstance(table.get(last), dict) and not isinstance(value, dict):
        raise ConfigError(f"{'.'.join(path)!r} already holds values of its own")
    table[last] = value
