"""Run by test_smollm2.py in an environment with llm-compressor: a SmoothQuant W8A8 copy.

    python compress.py CHECKPOINT PROMPTS FOLDER

PROMPTS holds a JSON string a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import SmoothQuantModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    checkpoint, prompts, folder = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    oneshot(
        model=model,
        dataset=Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in texts]),
        recipe=[
            SmoothQuantModifier(smoothing_strength=0.5),
            QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
        ],
        max_seq_length=128,
        num_calibration_samples=len(texts),
    )
    model.save_pretrained(folder, save_compressed=True)
    tokenizer.save_pretrained(folder)
