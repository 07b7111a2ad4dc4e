"""What verl's plug-in entry point names: importing it adds FlashRL to this process.

verl imports it in every process, and only logs at DEBUG what goes wrong there.  So nothing is
raised: a fault is logged as an error, and verl runs without guards and metrics.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

try:
    from flashrl.core.config import load_config

    if load_config() is not None:
        from flashrl.trainers.verl.plugin import install

        install()
except Exception:
    logger.exception("FLASHRL_CONFIG is set, and FlashRL could not be added to verl")
