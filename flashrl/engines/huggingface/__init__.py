"""The embedded engine: any Hugging Face causal language model, on CPU or GPU."""
