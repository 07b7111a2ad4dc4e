"""What a launcher's arguments come to."""

from __future__ import annotations

import argparse

import pytest

from flashrl.core.launchers import DashSyntax, HydraSyntax, Launcher
from flashrl.errors import ConfigError


def test_what_the_user_did_not_give_is_appended_in_order() -> None:
    launcher = Launcher(command=("-m", "trainer"))
    overrides = {"a.b": 2.0, "+c": "x", "d": None}
    assert launcher.complete(["e=1", "c=x"], overrides) == ["e=1", "c=x", "a.b=2.0", "d=null"]


@pytest.mark.parametrize(
    ("argument", "value"),
    [("k=2", 2.0), ("k=null", None), ("k=None", None), ("k=True", True), ("k='x_y'", "x_y")],
)
def test_an_argument_that_says_the_same_is_no_conflict(argument: str, value: object) -> None:
    assert Launcher().complete([argument], {"k": value}) == [argument]


def test_every_argument_that_says_otherwise_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a is 3, and 2\.0 is needed; b is true, and false is"):
        Launcher().complete(["a=3", "++b=true"], {"a": 2.0, "+b": False})


def test_bounds_that_read_as_one_number_are_told_apart() -> None:
    """``0.5_5`` is the number 0.55 to Python, and two bounds to verl."""
    with pytest.raises(ConfigError, match=r"k is 0\.55, and 0\.5_5 is needed"):
        Launcher().complete(["k=0.55"], {"k": "0.5_5"})


def test_hydra_reads_the_last_of_a_key_and_no_other_arguments() -> None:
    arguments = ["--config-name", "ppo", "k=1", "+k=2", "~gone=1", "plain"]
    assert HydraSyntax().read(arguments) == {"k": "2", "gone": "1"}


def test_dashes_are_written_as_argparse_reads_them() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    parser.add_argument("--bounds", nargs=2, type=float)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--slow", action="store_true")
    values = {"mode": "clip", "bounds": [0.0, 2.0], "fast": True, "slow": False}
    written = DashSyntax(flags=True).write(values)
    assert vars(parser.parse_args(written)) == values


def test_dashes_are_read_back() -> None:
    syntax = DashSyntax()
    values = {"mode": "clip", "bounds": [0.0, 2.0], "fast": True}
    assert syntax.read(["train.py", *syntax.write(values)]) == {
        "mode": "clip",
        "bounds": "0.0 2.0",
        "fast": "True",
    }
    launcher = Launcher(syntax=syntax)
    assert launcher.complete(["--bounds", "0", "2"], {"bounds": [0, 2], "fast": True}) == [
        *("--bounds", "0", "2"),
        *("--fast", "True"),
    ]


def test_several_values_are_compared_one_by_one() -> None:
    launcher = Launcher(syntax=DashSyntax())
    given = ["--threshold", "0", "2"]
    assert launcher.complete(given, {"threshold": [0.0, 2.0]}) == given
    with pytest.raises(ConfigError, match=r"threshold is 0 2, and 0\.5 5\.0 is needed"):
        launcher.complete(given, {"threshold": [0.5, 5.0]})
