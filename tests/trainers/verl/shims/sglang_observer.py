"""Writes down what SGLang's scheduler gets and holds; a plugin of SGLang's.

verl has one update a sync here, for all weights fit into a bucket.
"""

from __future__ import annotations

from typing import Any

import observer

from flashrl.trainers.patches import Patches


def observe_updates(patches: Patches, module: Any) -> None:
    """Note what each update brings, and dump the weights after it."""
    cls = module.ModelRunner
    update = cls.update_weights_from_tensor

    def update_weights_from_tensor(self: Any, named_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        device = module.torch.device(self.device)
        received = [
            (name, module._unwrap_tensor(tensor, tp_rank=self.tp_rank, device=device))
            for name, tensor in named_tensors
        ]
        observer.note_received(received)
        result = update(self, received, *args, **kwargs)
        observer.dump_engine(self.model)
        return result

    patches.replace(cls, "update_weights_from_tensor", update_weights_from_tensor)


def register() -> None:
    Patches({"sglang.srt.model_executor.model_runner": observe_updates}).install()
