"""SGLang's engine on a CPU: import stubs, and engines that tests share.

An engine needs half a minute to start, so tests take idle ones from a pool.  SGLang ends the whole
process when a scheduler fails: a test that kills an engine kills the test run, and is seen.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import flashrl
from flashrl.engines.sglang import compat
from flashrl.session import Session
from flashrl.testing import Checkpoint, make_checkpoint

from .ways import ARGS, generate, load_from_disk

INSTALLED = importlib.util.find_spec("sglang") is not None
PURE = ("test_log_probs.py", "test_storage.py")
NEEDS_ENGINE = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {*PURE}
collect_ignore = [] if INSTALLED else sorted(NEEDS_ENGINE)

STUBS = str(Path(__file__).parent / "stubs")
if INSTALLED and not torch.cuda.is_available():
    # Schedulers are spawned, and find the stubs through the environment.
    sys.path.insert(0, STUBS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STUBS, os.environ.get("PYTHONPATH"))))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 8192,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang warns of much; only what comes from this project is an error."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in NEEDS_ENGINE:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::flashrl"))


@attrs.define
class EnginePool:
    """16-bit engines of one architecture each, and which are in use."""

    idle: dict[str, list[Any]] = attrs.field(factory=dict)
    started: list[Any] = attrs.field(factory=list)

    def start(self, checkpoint: Path, **args: Any) -> Any:
        """A new engine, shut down when the test run ends."""
        import sglang

        with pytest.MonkeyPatch.context() as environ:
            if "moe" in json.loads((checkpoint / "config.json").read_text())["model_type"]:
                # SGLang's shared expert ends in a Triton kernel, on a CPU too.
                environ.setenv("TRITON_INTERPRET", "1")
            ranks = args.get("tp_size", 1)
            if metadata.version("sglang") != "0.5.12":  # it counts those of one replica
                ranks *= args.get("dp_size", 1)
            if ranks > 1:  # else a rank a NUMA node
                environ.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0"] * ranks))
            engine = sglang.Engine(model_path=str(checkpoint), **{**ARGS, **args})
        engine.freeze_gc()  # SGLang collects garbage whenever it flushes its cache
        self.started.append(engine)
        return engine

    @contextmanager
    def running(self, checkpoint: Path, **args: Any) -> Iterator[Any]:
        """A new engine, shut down at the end of the block."""
        engine = self.start(checkpoint, **args)
        yield engine
        self.started.remove(engine)
        compat.shut_down(engine)

    def retire(self, architecture: str) -> None:
        """Shut down the idle engines of an architecture that no test uses any more."""
        for engine in self.idle.pop(architecture, []):
            self.started.remove(engine)
            compat.shut_down(engine)

    @contextmanager
    def borrow(self, checkpoint: Path, architecture: str) -> Iterator[Any]:
        """An engine that nobody uses, with a checkpoint of its architecture loaded."""
        waiting = self.idle.setdefault(architecture, [])
        if waiting:
            engine = waiting.pop()
            success, message = load_from_disk(engine, checkpoint)
            assert success, message
        else:
            engine = self.start(checkpoint)
        yield engine
        waiting.append(engine)


@pytest.fixture(scope="session")
def pool() -> Iterator[EnginePool]:
    """Every engine of the test run."""
    pool = EnginePool()
    yield pool
    for engine in pool.started:
        engine.shutdown()


@pytest.fixture(scope="session")
def make_checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Checkpoint, Checkpoint]]:
    """Two checkpoints of one shape."""

    def make(architecture: str, **config: Any) -> tuple[Checkpoint, Checkpoint]:
        folder = tmp_path_factory.mktemp(architecture)
        return (
            make_checkpoint(folder / "a", architecture, seed=0, **config),
            make_checkpoint(folder / "b", architecture, seed=1, **config),
        )

    return make


@pytest.fixture(scope="session")
def wide_checkpoints(
    make_checkpoints: Callable[..., tuple[Checkpoint, Checkpoint]],
) -> tuple[Checkpoint, Checkpoint]:
    """Checkpoints A and B of a Qwen2, which has biases; every part of it falls on blocks."""
    return make_checkpoints("qwen2", **WIDE)


@pytest.fixture(scope="session")
def launched(pool: EnginePool, wide_checkpoints: tuple[Checkpoint, Checkpoint]) -> Any:
    """An engine that was started 8-bit from A, as it was before anything was pushed."""
    return pool.start(wide_checkpoints[0].path, **flashrl.launch_args("sglang", "int8"))


@pytest.fixture(scope="session")
def launched_session(launched: Any) -> Session:
    """A session on the engine that was started 8-bit."""
    return flashrl.attach(launched, "int8")


@pytest.fixture(scope="session")
def fresh_answers(
    pool: Any, launched: Any, wide_checkpoints: tuple[Checkpoint, Checkpoint]
) -> tuple[list[list[int]], list[list[int]]]:
    """What engines say that never saw an update: one started 8-bit from A, one attached to B."""
    from_a = generate(launched)
    with (
        pool.borrow(wide_checkpoints[1].path, "qwen2") as engine,
        flashrl.attach(engine, "int8"),
    ):
        from_b = generate(engine)
    assert from_a != from_b
    return from_a, from_b


@pytest.fixture
def session(
    launched_session: Session,
    fresh_answers: object,
    wide_checkpoints: tuple[Checkpoint, Checkpoint],
) -> Session:
    """The engine that was started 8-bit, holding A."""
    launched_session.update_weights(wide_checkpoints[0].named_tensors())
    return launched_session


@pytest.fixture
def engine(session: Session, launched: Any) -> Any:
    """The same, as SGLang has it."""
    return launched
