"""8-bit rollouts in vLLM: a quantization whose weights load 16-bit shards in place."""

from flashrl.engines.vllm.adapter import VLLMAdapter

__all__ = ["VLLMAdapter"]
