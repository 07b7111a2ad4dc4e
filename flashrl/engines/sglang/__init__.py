"""8-bit rollouts in SGLang."""

from flashrl.engines.sglang.adapter import SGLangAdapter

__all__ = ["SGLangAdapter"]
