"""The conformance suite that every engine adapter passes, ours or yours.

Subclass :class:`EngineConformance`, override its ``open_session`` fixture, and run pytest::

    class TestMyEngine(EngineConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def open_session(cls):
            @contextmanager
            def open_session(checkpoint, scheme):
                engine = my_engine.start(checkpoint)
                try:
                    yield flashrl.attach(engine, scheme)
                finally:
                    engine.stop()
            return open_session
"""

from flashrl.testing.checkpoints import ARCHITECTURES, Checkpoint, make_checkpoint
from flashrl.testing.conformance import EngineConformance

__all__ = ["ARCHITECTURES", "Checkpoint", "EngineConformance", "make_checkpoint"]
