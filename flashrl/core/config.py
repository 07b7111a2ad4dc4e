"""``FLASHRL_CONFIG``: a scheme's name, a YAML file, or a file on the hub.

A file lists one entry for each kind of data-parallel rank; rank r uses entry r mod n::

    configs:
      - fn: int8
        profile: profile.7b.safetensors
        ignore: [lm_head, "re:.*down_proj"]
      - fn: bf16

``fn`` may be written ``scheme``.  Files that flash-llm-rl wrote are read as they are, and what
:meth:`Config.to_yaml` writes for a scheme that it knows, flash-llm-rl reads.  Nothing but the YAML
is opened here, and for a scheme's name not even that: a profile is a path, for whoever needs it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import attrs

from flashrl.core._yaml import Document, dump_yaml, parse_overrides, parse_yaml
from flashrl.core.environment import EnvironmentOptions
from flashrl.core.hub import download_file
from flashrl.core.schemes import QuantScheme, get_scheme, scheme_names
from flashrl.errors import ConfigError

__all__ = ["Config", "Entry", "EnvironmentOptions", "load_config", "parse_overrides"]

_HUB_PATH = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.ya?ml)")


def _names(value: Iterable[str] | None) -> tuple[str, ...] | None:
    return (value,) if isinstance(value, str) else None if value is None else tuple(value)


def _text(default: str | None = None) -> Any:
    return attrs.field(default=default, metadata={"kind": "a string"})


def _flag(default: bool) -> Any:
    return attrs.field(default=default, metadata={"kind": "true or false"})


def _list() -> Any:
    return attrs.field(default=None, converter=_names, metadata={"kind": "a list of strings"})


@attrs.frozen(kw_only=True)
class Entry:
    """How the ranks that use this entry generate.

    Args:
        scheme: A scheme's name, as it was written; ``fn`` in a file.
        model: The model to start instead of the one that the script names.
        profile: Path of a profile with smoothing factors or static scales.
        dynamic: Recompute scales at every update; False keeps the profile's.
        kv_cache: ``"fp8"``, or None for the engine's own.
        lm_head_fp32: Compute logits in FP32.
        correction: Name of a correction preset, for the trainer.
        targets: Replaces the scheme's own targets.
        ignore: Replaces the scheme's own ignore list.
        distributed_executor_backend: Passed to the engine.
        load_format: Passed to the engine.
        quantization: flash-llm-rl's; kept, not needed.
        module_attribute_to_preserve: flash-llm-rl's; kept, not needed: nothing is moved.
        params_to_ignore: flash-llm-rl's; kept, not needed.

    Raises:
        ConfigError: Values are unknown or contradict each other; all of them are named.
    """

    scheme: str = _text("int8")
    model: str | None = _text()
    profile: str | None = _text()
    dynamic: bool = _flag(True)
    kv_cache: str | None = _text()
    lm_head_fp32: bool = _flag(False)
    correction: str | None = _text()
    targets: tuple[str, ...] | None = _list()
    ignore: tuple[str, ...] | None = _list()
    distributed_executor_backend: str | None = _text()
    load_format: str | None = _text()
    quantization: str | None = _text()
    module_attribute_to_preserve: tuple[str, ...] | None = _list()
    params_to_ignore: tuple[str, ...] | None = _list()

    def __attrs_post_init__(self) -> None:
        faults = [f"{key}: {fault}" for key, fault in _find_faults(attrs.asdict(self))]
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def quant_scheme(self) -> QuantScheme:
        """The scheme, with what this entry changes about it.

        Example:
            >>> Entry(scheme="fp8", kv_cache="fp8").quant_scheme.kv_cache
            'fp8'
        """
        changes = {"kv_cache": self.kv_cache, "targets": self.targets, "ignore": self.ignore}
        given = {field: value for field, value in changes.items() if value is not None}
        return get_scheme(self.scheme).evolve(dynamic=self.dynamic, **given)

    def to_mapping(self) -> dict[str, Any]:
        """What a file holds: everything that is not the default."""
        found: dict[str, Any] = {"fn": self.scheme}
        for field in attrs.fields(Entry):
            value = getattr(self, field.name)
            if field.name != "scheme" and value != field.default:
                found[field.name] = list(value) if isinstance(value, tuple) else value
        return found


_KINDS: Mapping[str, str] = {field.name: field.metadata["kind"] for field in attrs.fields(Entry)}


def _find_faults(values: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with an entry's values, as key and reason."""
    for key, value in values.items():
        kind = _KINDS.get("scheme" if key == "fn" else key)
        if kind is None:
            yield str(key), f"unknown{_suggest(str(key), ['fn', *_KINDS])}"
        elif value is not None and not _is_a(kind, value):
            yield str(key), f"must be {kind}, got {value!r:.60}"
    if None not in (values.get("fn"), values.get("scheme")) and values["fn"] != values["scheme"]:
        yield "fn", f"is {values['fn']!r}, but scheme is {values['scheme']!r}; give one of them"
    key = "scheme" if values.get("fn") is None else "fn"
    scheme = values.get(key)
    scheme = "int8" if scheme is None else scheme
    if isinstance(scheme, str) and scheme not in scheme_names():
        yield key, f"unknown scheme {scheme!r}{_suggest(scheme, scheme_names())}"
    if isinstance(values.get("kv_cache"), str) and values["kv_cache"] != "fp8":
        yield "kv_cache", f"is {values['kv_cache']!r}; allowed: 'fp8', or nothing for the engine's"
    if values.get("dynamic") is False and values.get("profile") is None:
        yield "dynamic", "is false, but static scales come from a profile and there is none"
    if scheme == "bf16" and values.get("profile") is not None:
        yield "profile", "has no use with bf16, which quantizes nothing; remove one of them"


def _is_a(kind: str, value: Any) -> bool:
    if kind == "a string":
        return isinstance(value, str) and bool(value.strip())
    if kind == "true or false":
        return isinstance(value, bool)
    return isinstance(value, str) or (
        isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    )


def _suggest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known)}"


def _as_entries(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(entries)


@attrs.frozen(kw_only=True)
class Config:
    """A configuration: one entry, or one for each kind of data-parallel rank.

    Args:
        entries: At least one.
        source: Where it came from.

    Raises:
        ConfigError: There is no entry.

    Example:
        >>> config = Config.from_yaml("configs: [{fn: int8}, {fn: bf16}]")
        >>> [config.for_rank(rank).scheme for rank in range(3)]
        ['int8', 'bf16', 'int8']
    """

    entries: tuple[Entry, ...] = attrs.field(converter=_as_entries)
    source: str = attrs.field(default="configuration", eq=False)

    def __attrs_post_init__(self) -> None:
        if not self.entries:
            raise ConfigError(f"{self.source}: configs is empty; give at least one entry")

    @classmethod
    def from_yaml(cls, text: str, *, source: str = "configuration") -> Config:
        """Read a file's content.

        Raises:
            ConfigError: It is no plain YAML, or keys or values are wrong; each is named with its
                path and line.
        """
        return cls._build(parse_yaml(text, source=source), source)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, source: str = "configuration") -> Config:
        """Read plain data.

        Raises:
            ConfigError: Keys or values are wrong; each is named with its path.
        """
        return cls._build(Document(value=data, lines={}), source)

    @classmethod
    def _build(cls, document: Document, source: str) -> Config:
        faults = [
            f"{path}: {fault}" + (f" (line {line})" if (line := document.lines.get(path)) else "")
            for path, fault in _find_document_faults(document.value)
        ]
        if faults:
            raise ConfigError("\n  ".join([f"{source}:", *faults]))
        entries = []
        for values in document.value["configs"]:
            given = {key: value for key, value in values.items() if value is not None}
            if "fn" in given:
                given["scheme"] = given.pop("fn")
            entries.append(Entry(**given))
        return cls(entries=entries, source=source)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Config:
        """Read a file, whatever the environment says.

        Raises:
            ConfigError: It cannot be read, or its content is wrong.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from error
        return cls.from_yaml(text, source=str(path))

    def for_rank(self, rank: int) -> Entry:
        """The entry of a data-parallel rank, counted from 0.

        Raises:
            ConfigError: The rank is negative or no integer.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ConfigError(f"a data-parallel rank is an integer from 0 on, got {rank!r}")
        return self.entries[rank % len(self.entries)]

    def to_yaml(self) -> str:
        """The content of a file that reads back equal."""
        return dump_yaml({"configs": [entry.to_mapping() for entry in self.entries]})


def _find_document_faults(data: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with a whole file, as path and reason."""
    if not isinstance(data, Mapping) or "configs" not in data:
        yield "configs", "is missing; a configuration is a table with a list 'configs' of entries"
        data = data if isinstance(data, Mapping) else {}
    for key in data:
        if key != "configs":
            yield str(key), f"unknown{_suggest(str(key), ['configs'])}"
    entries = data.get("configs", ())
    if not isinstance(entries, (list, tuple)) or (not entries and "configs" in data):
        yield "configs", f"must be a list of at least one entry, got {entries!r:.60}"
        return
    for index, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            for key, fault in _find_faults(entry):
                yield f"configs[{index}].{key}", fault
        else:
            yield f"configs[{index}]", f"must be a table, such as 'fn: int8', got {entry!r:.60}"


@overload
def load_config(value: str | os.PathLike[str], *, environ: Mapping[str, str] = ...) -> Config: ...
@overload
def load_config(value: None = None, *, environ: Mapping[str, str] = ...) -> Config | None: ...
def load_config(
    value: str | os.PathLike[str] | None = None, *, environ: Mapping[str, str] = os.environ
) -> Config | None:
    """Load what ``FLASHRL_CONFIG`` names.

    Args:
        value: A scheme's name, a YAML file, or ``org/repo/file.yaml`` on the Hugging Face hub; by
            default the variable's value.  A scheme's name opens no file.
        environ: The environment; ``FLASHRL_LMHEAD_FP32`` there wins over every entry.

    Returns:
        The configuration, or None if there is no value and the variable is not set.

    Raises:
        ConfigError: The value is none of these, the file cannot be had, or its content is wrong.
        MissingDependencyError: It is on the hub and huggingface_hub is not installed.

    Example:
        >>> load_config("fp8", environ={}).for_rank(0).quant_scheme.name
        'fp8_channel'
    """
    name = os.fspath(environ.get("FLASHRL_CONFIG", "") if value is None else value).strip()
    if value is None and not name:
        return None
    config = _find(name)
    lm_head_fp32 = EnvironmentOptions.from_environ(environ).lm_head_fp32
    if lm_head_fp32 is not None:
        entries = [attrs.evolve(entry, lm_head_fp32=lm_head_fp32) for entry in config.entries]
        config = attrs.evolve(config, entries=entries)
    return config


def _find(name: str) -> Config:
    if name in scheme_names():
        return Config(entries=[Entry(scheme=name)], source=name)
    path = Path(name).expanduser()
    if name and path.exists():
        return Config.read(path)
    hub = _HUB_PATH.fullmatch(name)
    if hub:
        return Config.read(download_file(hub["repo"], hub["file"]))
    close = difflib.get_close_matches(name, scheme_names(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError(
        f"FLASHRL_CONFIG={name!r} is no scheme{hint} and no such file exists; give a scheme "
        f"({', '.join(scheme_names())}), a YAML file, or org/repo/file.yaml on the hub"
    )
