"""What an old install left is taken out, and nothing else is touched."""

from __future__ import annotations

import site
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest

# Written as flash-llm-rl 1.0.3 writes it.
OLD_LINES = "try: import flash_rl\nexcept ImportError: pass\n"
SPREAD = "try:\n    import flash_rl\nexcept ImportError:\n    pass\n"


@pytest.fixture
def customize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This Python's usercustomize.py, were it written."""
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "user"))
    for variable in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "usercustomize.py"


def backups(file: Path) -> list[str]:
    return sorted(other.name for other in file.parent.glob("*.bak*"))


def test_without_apply_the_lines_are_shown_and_stay(
    flashrl: Callable[..., Any], customize: Path
) -> None:
    customize.write_text("import os\n" + OLD_LINES + "os.environ['A'] = '1'\n")
    before = customize.read_bytes()
    result = flashrl("cleanup")
    assert result.exit_code == 0
    assert "-try: import flash_rl" in result.stdout
    assert "-except ImportError: pass" in result.stdout
    assert "-import os" not in result.stdout
    assert "--apply" in result.stdout
    assert customize.read_bytes() == before
    assert backups(customize) == []


@pytest.mark.parametrize("lines", [OLD_LINES, "import flash_rl\n", SPREAD, OLD_LINES * 2])
def test_apply_takes_out_these_lines_and_keeps_a_backup(
    lines: str, flashrl: Callable[..., Any], customize: Path
) -> None:
    content = "import os\r\n# flash_rl was here\n" + lines + "os.environ['A'] = '\x0c'\n"
    customize.write_bytes(content.encode())
    customize.chmod(0o640)
    found = flashrl("cleanup", "--apply", "--json").data
    [file] = found["files"]
    assert found["applied"]
    assert customize.read_bytes() == content.replace(lines, "").encode()
    assert customize.stat().st_mode & 0o777 == 0o640
    assert Path(file["backup"]).read_bytes() == content.encode()
    again = flashrl("cleanup", "--apply", "--json").data
    assert (again["applied"], again["files"]) == (False, [])
    assert backups(customize) == ["usercustomize.py.bak"]


def test_a_file_of_nothing_else_is_removed(flashrl: Callable[..., Any], customize: Path) -> None:
    customize.write_text(OLD_LINES)
    (customize.parent / "usercustomize.py.bak").write_text("someone's own")
    assert flashrl("cleanup", "--apply").exit_code == 0
    assert not customize.exists()
    assert (customize.parent / "usercustomize.py.bak").read_text() == "someone's own"
    assert (customize.parent / "usercustomize.py.bak1").read_text() == OLD_LINES


@pytest.mark.parametrize(
    "line",
    [
        "import os, flash_rl",
        "import os; import flash_rl",
        "from flash_rl import patch",
        "if True: import flash_rl",
        "try: import flash_rl\nexcept ImportError: print('none')",
        "import os; import flash_rl\nno Python at all",
    ],
)
def test_what_its_setup_never_wrote_is_left_and_named(
    line: str, flashrl: Callable[..., Any], customize: Path
) -> None:
    customize.write_text("import os\n" + line + "\n")
    before = customize.read_bytes()
    found = flashrl("cleanup", "--apply", "--json").data
    assert [(file["diff"], file["doubtful_lines"]) for file in found["files"]] == [("", [2])]
    assert customize.read_bytes() == before
    assert f"{customize}:2 mentions flash_rl" in flashrl("cleanup").stdout


def test_lines_that_are_commented_out_are_nothing(
    flashrl: Callable[..., Any], customize: Path
) -> None:
    """As the original's own cleanup leaves them."""
    customize.write_text("# try: import flash_rl\n# except ImportError: pass\n")
    assert flashrl("cleanup", "--json").data["files"] == []


def test_another_file_is_named_by_its_path_or_folder(
    flashrl: Callable[..., Any], customize: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "usercustomize.py").write_text(OLD_LINES)
    for path in (other, other / "usercustomize.py"):
        [file] = flashrl("cleanup", "-p", str(path), "--json").data["files"]
        assert file["path"] == str(other / "usercustomize.py")
    missing = flashrl("cleanup", "-p", str(tmp_path / "nowhere.py"))
    assert missing.exit_code == 2
    assert "nowhere.py" in missing.stderr


def test_it_says_how_to_turn_ours_off(
    flashrl: Callable[..., Any], customize: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHRL_CONFIG", "int8")
    monkeypatch.setenv("VLLM_PLUGINS", "flashrl,lora_resolver")
    found = flashrl("cleanup", "--json").data
    assert found["variables"]["FLASHRL_CONFIG"] == "int8"
    steps = [step["do"] for step in found["turn_off"]]
    assert steps[:2] == ["unset FLASHRL_CONFIG", "export VLLM_PLUGINS=lora_resolver"]
    # Nothing, to SGLang, would be everything.
    assert steps[2].startswith("export SGLANG_PLUGINS=")
    assert steps[2] != "export SGLANG_PLUGINS="
    assert "flashrl" not in steps[2]
    assert "unset FLASHRL_CONFIG" in flashrl("cleanup").stdout


@pytest.mark.skipif(util.find_spec("flash_rl") is None, reason="needs flash-llm-rl 1.0.3")
def test_what_the_original_itself_writes_is_taken_out(
    flashrl: Callable[..., Any], customize: Path
) -> None:
    code = (
        "import site, sys; site.getsitepackages = lambda: [sys.argv[1]]\n"
        "from flash_rl.commands import setup_flashrl_env; setup_flashrl_env()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(customize.parent)], check=True)
    assert "flash_rl" in customize.read_text()
    assert flashrl("cleanup", "--apply").exit_code == 0
    assert not customize.exists()
