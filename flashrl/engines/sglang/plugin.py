"""SGLang calls :func:`register` in the main process and in every scheduler, before it starts."""

from __future__ import annotations

import functools
import logging
import os
import sys

__all__ = ["register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Make FlashRL's quantizations known; with FLASHRL_CONFIG set, use them.  Idempotent.

    SGLang logs what a plugin raises and goes on without it.  When FLASHRL_CONFIG asks for 8 bit,
    going on in 16 bit would be silent, so the process ends instead.

    Raises:
        SystemExit: FLASHRL_CONFIG is set and cannot be followed.
    """
    try:
        _set_up()
    except Exception as error:
        if not os.environ.get("FLASHRL_CONFIG"):
            raise
        logger.exception("flashrl could not be set up in SGLang")
        sys.exit(
            f"FLASHRL_CONFIG={os.environ['FLASHRL_CONFIG']!r} cannot be followed in SGLang: {error}"
        )


def _set_up() -> None:
    from flashrl.core.logs import follow_environment
    from flashrl.engines.sglang import entries

    follow_environment()
    _add_to_sglang()
    if "FLASHRL_CONFIG" in os.environ:
        entries.check_entries()


@functools.cache
def _add_to_sglang() -> None:
    """The one table of what is added to SGLang, and where."""
    from flashrl.engines.sglang import compat, hooks
    from flashrl.engines.sglang.quantization import CONFIGS

    compat.register_quantizations(CONFIGS)
    for place, hook in (
        ("arguments", hooks.ask_for_8_bit),
        ("scheduler", compat.note_rank),
        ("configuration", hooks.follow_config),
        ("new model", hooks.guard_model),
        ("loaded model", hooks.check_start),
        ("direct load", hooks.load_direct),
        ("update from tensors", hooks.survive_update),
        ("update from a group", hooks.survive_update),
        ("update from disk", hooks.survive_update_from_disk),
        ("release of memory", hooks.note_release),
        ("request", hooks.refuse_without_weights),
    ):
        compat.hook(place, hook)
    compat.add_command(hooks.handle_command)
