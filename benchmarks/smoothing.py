"""How much smoothing brings: log-probs of an 8-bit model against its own 16-bit weights.

    python benchmarks/smoothing.py [--model FOLDER] [--alphas 0.3 0.5 0.7] [--output FILE]

Every step is a command that a user has: ``flashrl profile --calibrate`` computes the factors, with
which a W8A8 copy is written as llm-compressor writes one; ``flashrl profile -qm`` recovers them
from that copy; ``flashrl setup`` writes the configuration; the embedded engine takes it.

Weights are rounded to BF16 first, and all arithmetic but the 8-bit products is in float32, so that
the error is that of quantization.  The model is calibrated on the first half of a text and measured
on the second.  Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from record import record
from safetensors.torch import save_file

import flashrl
from flashrl.cli import main as flashrl_command
from flashrl.core.config import load_config
from flashrl.core.names import LayerRules
from flashrl.core.profiles import Profile
from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.core.profiles.files import load_profile
from flashrl.core.quantize import compute_scale, quantize_into
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.demo.model import prepare_model

WINDOW = 256  # tokens


def run(*arguments: object) -> dict[str, Any]:
    """A ``flashrl`` command; its JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        flashrl_command([*map(str, arguments), "--json"], standalone_mode=False)
    found: dict[str, Any] = json.loads(stdout.getvalue())
    return found


def write_copy(base: Path, folder: Path, scheme: QuantScheme, profile: Profile) -> None:
    """Smooth and quantize a checkpoint into compressed-tensors' layout."""
    rules = LayerRules.from_scheme(scheme)
    tensors = {}
    for name, tensor in Checkpoint.open(base):
        smoothed = profile.smooth(name, tensor, dtype=torch.float32)
        if name.endswith("_proj.weight") and rules.matches(name):
            scale = compute_scale(smoothed, scheme, name=name)
            tensors[name] = torch.empty(smoothed.shape, dtype=scheme.dtype)
            quantize_into(smoothed, tensors[name], scale, scheme=scheme, name=name)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = smoothed.to(torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if scheme.type == "int" else "float-quantized",
        "ignore": list(scheme.ignore),
    }
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def score(model: Any, windows: list[list[int]]) -> torch.Tensor:
    """Log-prob of every token of every window but its first, float32 (tokens,)."""
    found = []
    for ids in windows:
        tokens = torch.tensor([ids])
        log_probs = model(tokens[:, :-1]).logits.float().log_softmax(-1)
        found.append(log_probs.gather(-1, tokens[:, 1:, None]).flatten())
    return torch.cat(found)


def measure(
    base: Path,
    scheme: QuantScheme,
    windows: list[list[int]],
    reference: torch.Tensor,
    profile: Profile | None = None,
) -> dict[str, float]:
    """Errors of the log-probs of an engine with or without a profile."""
    model = load(base)
    with flashrl.attach(model, scheme, profile=profile):
        error = (score(model, windows) - reference).double()
    return {
        "mean_absolute_error": float(error.abs().mean()),
        "p99_absolute_error": float(error.abs().quantile(0.99)),
        "max_absolute_error": float(error.abs().max()),
        "mean_error": float(error.mean()),
    }


def benchmark(base: Path, text: str, scheme: QuantScheme, alphas: list[float]) -> dict[str, Any]:
    """Plain round-to-nearest, and smoothing by each alpha."""
    folder = base.parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids = tokenizer(text)["input_ids"]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    prompts, windows = windows[: len(windows) // 2], windows[len(windows) // 2 :]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    reference = score(load(base), windows)
    plain = measure(base, scheme, windows, reference)
    cases: dict[str, dict[str, float]] = {"round to nearest": plain}
    direct, recovered = folder / "direct.safetensors", folder / "recovered.safetensors"
    common = ["--fn", scheme.name, "-m", base, "--no-static-scales"]
    for alpha in alphas:
        calibrate = ["--calibrate", folder / "prompts.jsonl", "--alpha", alpha]
        run("profile", *common, *calibrate, "-o", direct)
        write_copy(base, folder / "copy", scheme, load_profile(direct))
        run("profile", *common, "-qm", folder / "copy", "-o", recovered)
        run("setup", "-p", recovered, "--fn", scheme.name, "-o", folder / "config.yaml")
        entry = load_config(folder / "config.yaml").for_rank(0)
        profile = load_profile(entry.profile or "")
        found = measure(base, entry.quant_scheme, windows, reference, profile)
        found["lower_by"] = 1 - found["mean_absolute_error"] / plain["mean_absolute_error"]
        cases[f"alpha {alpha:g}"] = found
        print(json.dumps({"alpha": alpha, **found}), file=sys.stderr)
    # What is lost by the detour over a copy, whose norms are BF16.
    of_direct = measure(base, scheme, windows, reference, load_profile(direct))
    cases[f"alpha {alphas[-1]:g}, no copy"] = of_direct
    return {
        "num_calibration_tokens": sum(map(len, prompts)),
        "num_scored_tokens": len(reference),
        "mean_log_prob": float(reference.mean()),
        "log_probs": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a local checkpoint; default SmolLM2-135M")
    parser.add_argument("--scheme", default="int8")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(__file__).parents[1] / "LICENSE",
        help="to calibrate on and to score; default the license",
    )
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    source = prepare_model(arguments.model)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        model.save_pretrained(base)
        transformers.AutoTokenizer.from_pretrained(source).save_pretrained(base)
        del model
        found = benchmark(
            base, arguments.text.read_text(), get_scheme(arguments.scheme), arguments.alphas
        )
    report = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": source.name,
        "scheme": arguments.scheme,
        "text": arguments.text.name,
        **found,
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    record(report, output=arguments.output)


if __name__ == "__main__":
    main()
