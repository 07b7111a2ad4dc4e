"""The embedded engine: any Hugging Face causal language model, on CPU or GPU."""

from flashrl.engines.huggingface.adapter import HuggingFaceAdapter

__all__ = ["HuggingFaceAdapter"]
