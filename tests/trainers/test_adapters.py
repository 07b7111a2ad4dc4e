"""What every trainer adapter that is registered must do."""

from __future__ import annotations

from typing import Any

import pytest

from flashrl.core.interfaces import TrainerAdapter
from flashrl.core.registry import TRAINERS, list_adapters
from flashrl.core.schemes import get_scheme
from flashrl.errors import UnknownNameError, UnsupportedError
from flashrl.trainers import corrections

ADAPTERS = {r.name: r.adapter for r in list_adapters(TRAINERS) if r.adapter is not None}


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return ADAPTERS[request.param]


def test_verl_is_among_them() -> None:
    assert "verl" in ADAPTERS


def test_it_is_what_the_protocol_says_under_its_own_name(adapter: Any) -> None:
    assert isinstance(adapter, TrainerAdapter)
    assert ADAPTERS[adapter.name] is adapter


def test_it_says_what_is_installed_or_what_to_install(adapter: Any) -> None:
    viability = adapter.check()
    assert viability.ok or "pip install" in viability.reason


@pytest.mark.parametrize("correction", corrections.names())
@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_every_correction_is_written_or_refused_by_name(
    adapter: Any, scheme: str, correction: str
) -> None:
    refusal, written, again = "", [], []
    try:
        overrides = adapter.overrides(get_scheme(scheme), correction=correction)
    except UnsupportedError as error:
        refusal = str(error)
    else:
        written = adapter.launcher.complete([], overrides)
        again = adapter.launcher.complete(written, overrides)
    assert written == again
    names = (correction, corrections.find(correction).name)
    assert not refusal or any(name in refusal for name in names)


def test_an_unknown_correction_is_an_error(adapter: Any) -> None:
    with pytest.raises(UnknownNameError, match="unknown correction 'tsi'; known: tis"):
        adapter.overrides(get_scheme("int8"), correction="tsi")
