"""A bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io
import sys

import pytest

from flashrl.cli._progress import progress_bar


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_is_drawn_on_a_terminal_alone(
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stderr = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colours, not for a bar in a log file
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar("profile") as progress:
        for done in (1, 2):
            progress(done, 2, f"model.layers.{done}")
    drawn = stderr.getvalue()
    assert ("model.layers.2" in drawn) == ("2/2" in drawn) == ("profile" in drawn) == is_terminal
    assert is_terminal or not drawn
    assert capsys.readouterr().out == ""
