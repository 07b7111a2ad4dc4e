"""``FLASHRL_TEST_RELOAD``: push models into each engine that starts, and verify every tensor.

flash-llm-rl loaded the models that the variable names, one after the other, and left it to a
benchmark's score to tell whether that had worked.  Here an engine that holds anything else than
what was pushed does not start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from flashrl.core.config import Entry
from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.core.profiles.files import load_profile
from flashrl.core.updates import UpdateLedger
from flashrl.core.updates.verify import VerifyReport, compare, compute_expected
from flashrl.engines.vllm.attached import AttachedVLLM
from flashrl.engines.vllm.checkpoint_names import local_folder

__all__ = ["check_reload"]

logger = logging.getLogger(__name__)


def check_reload(engine: Any, entry: Entry, models: Sequence[str]) -> None:
    """Push models into an engine, one after the other, and compare each time.

    Args:
        engine: A ``vllm.LLM`` or an ``LLMEngine``, started by FLASHRL_CONFIG.
        entry: What FLASHRL_CONFIG says for it.
        models: Folders, or names in the local cache; the engine holds the last one afterwards.

    Raises:
        VerificationError: The engine does not hold what was pushed.
        WeightUpdateError: A model is not one of the engine's architecture.
        ProfileError: There is no such model here.
    """
    profile = load_profile(entry.profile) if entry.profile is not None else None
    attached = AttachedVLLM(engine, entry.quant_scheme, profile=profile)
    infos = attached.weights()
    for model in models:
        checkpoint = Checkpoint.open(local_folder(model))
        ledger = UpdateLedger(infos)
        attached.update_weights(ledger.admit(checkpoint))
        ledger.finish()
        comparisons = []
        for name, expected in compute_expected(
            UpdateLedger(infos).admit(checkpoint), infos, profile=profile
        ):
            [(_, held)] = attached.read_weights([name])
            comparisons.append(compare(name, held, expected, infos[name]))
        VerifyReport(version=None, comparisons=tuple(comparisons)).raise_for_mismatch()
        logger.info("FLASHRL_TEST_RELOAD: %s, %d tensors equal", model, len(comparisons))
