"""FLASHRL_CONFIG: names, files, the hub; every fault at once; files of the original project."""

from __future__ import annotations

import builtins
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core._yaml import dump_yaml
from flashrl.core.config import Config, Entry, load_config, parse_overrides
from flashrl.core.schemes import PRESETS, get_scheme, scheme_names
from flashrl.errors import ConfigError, MissingDependencyError

# As `flashrl setup` of flash-llm-rl 1.0.3 writes it: int8 with a profile, then `-a --fn bf16`.
ORIGINAL = """\
configs:
- distributed_executor_backend: external_launcher
  fn: int8
  load_format: auto
  model: LiyuanLucasLiu/Qwen2.5-32B-quantized.w8a8
  profile: /data/profile.32b.pt
- distributed_executor_backend: external_launcher
  fn: bf16
  load_format: dummy
"""
ORIGINAL_FP8 = """\
configs:
- distributed_executor_backend: external_launcher
  fn: fp8
  load_format: auto
  module_attribute_to_preserve: [workspace]
  params_to_ignore: [q_scale]
  quantization: fp8
"""


def faults_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(text, source="rollout.yaml")
    return str(caught.value)


@pytest.mark.parametrize("name", scheme_names())
def test_every_scheme_name_is_a_configuration(name: str) -> None:
    config = load_config(name, environ={})
    assert [entry.scheme for entry in config.entries] == [name]
    assert config.for_rank(0).quant_scheme == get_scheme(name)


@pytest.mark.parametrize("name", ["fp8", "int8", "bf16"])
def test_a_scheme_without_a_profile_opens_no_file(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flash-RL#7, #21: fp8 without a profile still opened profile.pt."""
    (tmp_path / name).write_text("not: a configuration")
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"opened {arguments}")

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    assert load_config(name, environ={}).for_rank(3).profile is None


def test_the_variable_is_read_and_its_absence_is_none() -> None:
    config = load_config(environ={"FLASHRL_CONFIG": " int8 "})
    assert config is not None
    assert config.for_rank(0).scheme == "int8"
    assert load_config(environ={}) is None
    assert load_config(environ={"FLASHRL_CONFIG": ""}) is None


def test_files_of_the_original_are_read(tmp_path: Path) -> None:
    path = tmp_path / ".flashrl_config.32b.yaml"
    path.write_text(ORIGINAL)
    config = load_config(str(path), environ={})
    int8, bf16 = config.entries
    assert int8.scheme == "int8"
    assert int8.model == "LiyuanLucasLiu/Qwen2.5-32B-quantized.w8a8"
    assert int8.profile == "/data/profile.32b.pt"
    assert int8.distributed_executor_backend == "external_launcher"
    assert bf16.quant_scheme == PRESETS["bf16"]
    assert bf16.load_format == "dummy"
    fp8 = Config.from_yaml(ORIGINAL_FP8).for_rank(0)
    assert fp8.quant_scheme == PRESETS["fp8_channel"]
    assert fp8.module_attribute_to_preserve == ("workspace",)


def test_an_entry_without_a_scheme_is_int8_as_in_the_original() -> None:
    assert Config.from_yaml("configs: [{model: org/model}]").for_rank(0).scheme == "int8"


def test_what_is_written_is_a_file_of_the_original() -> None:
    """It looks for `fn` in each of `configs`, and takes a missing one for int8."""
    written = Config(entries=[Entry(scheme="bf16"), Entry(scheme="fp8", model="org/m")]).to_yaml()
    assert yaml.safe_load(written) == {"configs": [{"fn": "bf16"}, {"fn": "fp8", "model": "org/m"}]}


@pytest.mark.parametrize("text", [ORIGINAL, ORIGINAL_FP8])
def test_files_of_the_original_lose_nothing(text: str) -> None:
    assert yaml.safe_load(Config.from_yaml(text).to_yaml()) == yaml.safe_load(text)


_texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1).filter(
    str.strip
)
_entries = st.builds(
    Entry,
    scheme=st.sampled_from([name for name in scheme_names() if name != "bf16"]),
    model=st.none() | _texts,
    profile=_texts,
    dynamic=st.booleans(),
    kv_cache=st.sampled_from([None, "fp8"]),
    lm_head_fp32=st.booleans(),
    correction=st.none() | _texts,
    targets=st.none() | st.lists(_texts),
    ignore=st.none() | st.lists(_texts),
    load_format=st.none() | _texts,
)


@given(entries=st.lists(_entries, min_size=1, max_size=4))
def test_round_trip_reads_back_equal(entries: list[Entry]) -> None:
    config = Config(entries=entries)
    assert Config.from_yaml(config.to_yaml()) == config


@given(num_entries=st.integers(1, 5), rank=st.integers(0, 10_000), turns=st.integers(0, 100))
def test_ranks_take_turns(num_entries: int, rank: int, turns: int) -> None:
    config = Config(entries=[Entry(model=f"model-{i}") for i in range(num_entries)])
    assert config.for_rank(rank + turns * num_entries) == config.for_rank(rank)
    assert [config.for_rank(i).model for i in range(num_entries)] == [
        f"model-{i}" for i in range(num_entries)
    ]


@pytest.mark.parametrize("rank", [-1, 1.0, "0", True, None])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(ConfigError, match="data-parallel rank"):
        Config(entries=[Entry()]).for_rank(rank)


def test_an_entry_changes_its_scheme() -> None:
    entry = Entry(
        scheme="fp8_block", kv_cache="fp8", ignore=["lm_head", "re:.*gate"], targets="Linear"
    )
    scheme = entry.quant_scheme
    assert (scheme.strategy, scheme.block_structure) == ("block", (128, 128))
    assert (scheme.kv_cache, scheme.ignore) == ("fp8", ("lm_head", "re:.*gate"))
    assert scheme.targets == ("Linear",)
    assert not Entry(profile="p", dynamic=False).quant_scheme.dynamic


def test_every_fault_is_named_at_once_with_path_and_line() -> None:
    message = faults_of(
        "configs:\n"
        "  - fn: int8\n"
        "    profil: a.safetensors\n"
        "    lm_head_fp32: 1\n"
        "  - fn: int9\n"
        "    ignore: [lm_head, 3]\n"
        "  - kv_cache: int4\n"
        "    dynamic: false\n"
        "  - 7\n"
        "version: 2\n"
    )
    lines = message.splitlines()
    assert lines[0] == "rollout.yaml:"
    expected = [
        ("version: unknown; known: configs", "(line 10)"),
        ("configs[0].profil: unknown; did you mean 'profile'?", "(line 3)"),
        ("configs[0].lm_head_fp32: must be true or false, got 1", "(line 4)"),
        ("configs[1].ignore: must be a list of strings, got ['lm_head', 3]", "(line 6)"),
        ("configs[1].fn: unknown scheme 'int9'; did you mean 'int8'? known: bf16", "(line 5)"),
        ("configs[2].kv_cache: is 'int4'; allowed: 'fp8'", "(line 7)"),
        ("configs[2].dynamic: is false, but static scales come from a profile", "(line 8)"),
        ("configs[3]: must be a table", "(line 9)"),
    ]
    assert len(lines) == 1 + len(expected)
    for line, (start, end) in zip(lines[1:], expected, strict=True):
        assert line.strip().startswith(start)
        assert line.endswith(end)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "configs: is missing"),
        ("int8", "configs: is missing"),
        ("[1]", "configs: is missing"),
        ("configs: []", "configs: must be a list of at least one entry"),
        ("configs: {fn: int8}", "configs: must be a list"),
        ("configs:", "configs: must be a list"),
        ("config: [{fn: int8}]", "did you mean 'configs'?"),
        ("configs: [{fn: int8, scheme: fp8}]", "fn: is 'int8', but scheme is 'fp8'"),
        ("configs: [{fn: [int8]}]", "configs[0].fn: must be a string"),
        ("configs: [{fn: bf16, profile: p.pt}]", "configs[0].profile: has no use with bf16"),
        ("configs: [{model: ''}]", "configs[0].model: must be a string"),
        ("configs: [{model: 2025-01-01}]", "configs[0].model: must be a string"),
        ("configs: [{fn: int8, fn: bf16}]", "the key 'fn' stands there twice"),
        ("configs: [{fn: int8}", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("configs: &a [*a]", "configs[0]: must be a table"),
        ("? [a, b]\n: 1", "not valid YAML"),
        ("[" * 500, "not valid YAML"),
        ("configs: [{? {a: 1} : 2}]", "not valid YAML"),
        ("when: 2025-99-99", "not valid YAML"),
    ],
)
def test_faulty_files_say_what_is_wrong(text: str, fault: str) -> None:
    message = faults_of(text)
    assert fault in message
    assert "rollout.yaml" in message


@pytest.mark.parametrize(
    "text",
    [
        "configs: [!!python/object/apply:os.system ['touch marker']]",
        "configs: [{fn: !!python/name:os.system }]",
        "configs: [{!!python/name:os.system : int8}]",
        "configs: [{fn: !custom int8}]",
    ],
)
def test_tags_that_stand_for_code_are_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "line 1: the tag !" in faults_of(text)
    assert list(tmp_path.iterdir()) == []


def test_aliases_and_merge_keys_are_plain_data() -> None:
    config = Config.from_yaml(
        "configs:\n  - &base {fn: int8, model: org/m}\n  - {<<: *base, fn: bf16}\n  - *base\n"
    )
    assert [(entry.scheme, entry.model) for entry in config.entries] == [
        ("int8", "org/m"),
        ("bf16", "org/m"),
        ("int8", "org/m"),
    ]


def test_an_expanding_file_costs_nothing() -> None:
    """Ten levels of nine aliases each: 3.5 billion values, were they walked one by one."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    assert "a9: unknown" in faults_of("\n".join(levels))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int9", "did you mean 'int8'"),
        ("nowhere.yaml", "no such file exists"),
        ("/nowhere/a/b.yaml", "no such file exists"),
        (" ", "no such file exists"),
    ],
)
def test_a_value_that_is_nothing_lists_what_there_is(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(value, environ={})
    assert "fp8_channel" in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, binary):
        with pytest.raises(ConfigError, match="cannot read"):
            load_config(path, environ={})


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(ORIGINAL)
    assert len(load_config("~/mine.yaml", environ={}).entries) == 2


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a hub cache, and a hub that cannot be reached."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("offline_hub")
def test_hub_path_offline_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"org/repo/flashrl_config\.yaml .* hub.*Offline"):
        load_config("org/repo/flashrl_config.yaml", environ={})


def test_hub_path_is_read_from_the_hubs_own_cache(offline_hub: Path) -> None:
    repo, commit = offline_hub / "models--org--repo", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    file = repo / "snapshots" / commit / "sub" / "c.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(ORIGINAL)
    config = load_config("org/repo/sub/c.yaml", environ={})
    assert [entry.scheme for entry in config.entries] == ["int8", "bf16"]


def test_hub_path_without_the_hub_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"flashrl\[huggingface\]"):
        load_config("org/repo/flashrl_config.yaml", environ={})


@pytest.mark.parametrize(("flag", "expected"), [("1", [True, True]), ("0", [False, False])])
def test_the_environments_lm_head_wins(flag: str, expected: list[bool], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("configs: [{fn: int8, lm_head_fp32: true}, {fn: bf16}]")
    config = load_config(path, environ={"FLASHRL_LMHEAD_FP32": flag})
    assert [entry.lm_head_fp32 for entry in config.entries] == expected
    assert [entry.lm_head_fp32 for entry in Config.read(path).entries] == [True, False]


def test_entries_made_in_code_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme 'int9'.*; dynamic: is false"):
        Entry(scheme="int9", dynamic=False)
    with pytest.raises(ConfigError, match="at least one entry"):
        Config(entries=[])
    with pytest.raises(ConfigError, match=r"configs\[0\]\.fn: unknown scheme"):
        Config.from_mapping({"configs": [{"fn": "int9"}]})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("x=a=b", {"x": "a=b"}),
        ("x==", {"x": "="}),
        ("x=", {"x": None}),
        ("x=1", {"x": 1}),
        ("lr=1e-6", {"lr": 1e-6}),
        ("lr=.5", {"lr": 0.5}),
        ("version=1.2.3", {"version": "1.2.3"}),
        ("x=true", {"x": True}),
        ("x='1'", {"x": "1"}),
        ('backend="external_launcher"', {"backend": "external_launcher"}),
        ('keep=["workspace"]', {"keep": ["workspace"]}),
        ("x={a: 1}", {"x": {"a": 1}}),
        ("a.b.c=2", {"a": {"b": {"c": 2}}}),
        (" spaced = out ", {"spaced": "out"}),
        ("x=__import__('os').getcwd()", {"x": "__import__('os').getcwd()"}),
    ],
)
def test_override_values_are_plain_yaml(override: str, expected: dict[str, Any]) -> None:
    """Flash-RL calls eval on command-line values, and splits at every equals sign."""
    assert parse_overrides([override]) == expected


def test_overrides_nest_and_the_later_wins() -> None:
    assert parse_overrides(["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


def test_every_faulty_override_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(
            ["novalue", "=1", "a..b=1", "a=[1", "b=!!python/name:os.system", "c=1", "c.d=2"]
        )
    message = str(caught.value)
    for fault in (
        "'novalue' is not",
        "'=1' is not",
        "'a..b=1' is not",
        "'a=[1'",
        "the tag",
        "'c.d'",
    ):
        assert fault in message
    with pytest.raises(ConfigError, match=r"'c' already holds"):
        parse_overrides(["c.d=2", "c=1"])


@given(value=st.integers() | st.booleans() | st.floats(allow_nan=False) | _texts)
def test_a_value_that_is_written_is_read_back(value: Any) -> None:
    assert parse_overrides([f"key={dump_yaml(value)}"]) == {"key": value}


def test_reading_a_configuration_loads_no_torch() -> None:
    code = (
        "import sys; from flashrl.core.config import load_config; load_config('fp8', environ={});"
        "print(sorted({'torch', 'huggingface_hub', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
