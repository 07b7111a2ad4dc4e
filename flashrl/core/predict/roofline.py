"""The roofline under :mod:`flashrl.core.predict`: seconds of a forward pass, and where they go.

A decode step reads every weight and the whole KV cache, and multiplies every weight with the token
of each running sequence; a prefill step does so with many tokens at once.  A linear layer takes the
longer of reading and multiplying (Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009).
The KV cache, the activations that pass through memory between the linears and the start of each
kernel come on top.  8 bit halves the reading, shortens the multiplying by the GPU's own ratio,
leaves the rest, and makes room for more sequences at a time.

Six constants turn data-sheet rates into rates that are reached.  Two were measured apart: a copy,
and matmuls of 8192 x 8192.  The other four were fitted, once and together, to ten figures measured
with vLLM 0.24 on one H200: Qwen2.5 7B and 32B shapes in BF16, INT8 and FP8, 256 sequences of
256 + 256 tokens; and 32B at a context of 6,000, with a BF16 and with an FP8 cache.  All ten are met
within 6 %, the speed-ups between them within 8 %.  Two figures were not used, BF16 on another
engine (SGLang 0.5.16): a 7B model is met within 2 %, a 0.5B model, nearly all of it overhead,
within 10 %.  Other GPUs, tensor parallelism and mixtures of experts follow from the same formulas
and have not been measured.

What is assumed: distinct prompts, all responses equally long, CUDA graphs, the engine always full.
Long tails in the response lengths and rollouts that wait for tools shrink every gain.
"""

from __future__ import annotations

import math

import attrs

from flashrl.core.predict.gpus import GPU
from flashrl.core.predict.shapes import ModelShape
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.errors import ConfigError, UnsupportedError

__all__ = ["Roofline", "TimeSplit", "Workload"]

ACHIEVED_BANDWIDTH = 0.886
"""Of the data sheet's memory bandwidth; measured: a copy, 4,252 of 4,800 GB/s."""

ACHIEVED_MATMUL = {16: 0.785, 8: 0.702}
"""Of the data sheet's matmul rate, by bits; measured: 777 of 989.5 and 1,390 of 1,979 TFLOP/s."""

DECODE_MATMUL = 0.70
"""Of :data:`ACHIEVED_MATMUL`, at one token a sequence: a few hundred rows fill no GPU.  Fitted."""

FP8_CACHE_BANDWIDTH = 0.62
"""Of :data:`ACHIEVED_BANDWIDTH`, when attention reads an FP8 cache (FlashAttention 3).  Fitted."""

STEP_SECONDS = 1.7e-3
"""Of every step, whatever the model: scheduling, sampling, the launch of the graph.  Fitted."""

KERNEL_SECONDS = 1.7e-6
"""Between one kernel and the next, inside a graph.  Fitted."""

# What follows is counted, not fitted.
KERNELS_PER_LAYER = 10  # two norms; qkv, o, gate-up, down; rope, cache write, attention; activation
QUANTIZE_KERNELS_PER_LAYER = 4  # the input of each of the four linears
PREFILL_TOKENS = 16384  # in one step, at most; vLLM's own default on these GPUs
USABLE_MEMORY = 0.99  # of the vendor's gigabytes, as CUDA reports them
RUNTIME_BYTES = 1e9  # CUDA context, graphs, the engine's own buffers
ALL_REDUCE_SECONDS = 10e-6  # to start one between GPUs of one host; not measured here
UPDATE_BANDWIDTH = 0.7  # of the copy rate, when BF16 is quantized in place: 23 ms of 33 for 32B


@attrs.frozen(kw_only=True)
class Workload:
    """What one engine generates in one step of training.

    Args:
        batch: Sequences to generate.
        prompt_length: Mean tokens of a prompt.
        response_length: Mean tokens of a response.
        tensor_parallel_size: GPUs that share one engine.
        generation_share: Fraction of a training step that generation takes in 16 bit.
        memory_utilization: Fraction of the GPU's memory that the engine may use.

    Raises:
        ConfigError: Values are outside their range; all of them are named.
    """

    batch: int = 256
    prompt_length: int = 512
    response_length: int = 2048
    tensor_parallel_size: int = 1
    generation_share: float = 0.7
    memory_utilization: float = 0.9

    def __attrs_post_init__(self) -> None:
        counts = ("batch", "prompt_length", "response_length", "tensor_parallel_size")
        faults = [
            f"{name} is {value!r}; it must be a positive integer"
            for name in counts
            if not isinstance(value := getattr(self, name), int) or value < 1
        ]
        faults += [
            f"{name} is {value!r}; it must be above 0 and at most 1"
            for name in ("generation_share", "memory_utilization")
            if not 0 < (value := getattr(self, name)) <= 1
        ]
        if faults:
            raise ConfigError("workload: " + "; ".join(faults))


@attrs.frozen(kw_only=True)
class TimeSplit:
    """Seconds, by what they are spent on.

    Args:
        weights: Reading weights faster would shorten these.
        compute: Multiplying faster would.
        kv_cache: Reading the KV cache faster would.
        overhead: Activations between the linears, kernel launches, scheduling, sampling.
        communication: All-reduces between tensor-parallel GPUs.
    """

    weights: float = 0.0
    compute: float = 0.0
    kv_cache: float = 0.0
    overhead: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return math.fsum(attrs.astuple(self))

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        parts = attrs.asdict(self)
        return max(parts, key=parts.__getitem__)

    def __add__(self, other: TimeSplit) -> TimeSplit:
        mine, theirs = attrs.asdict(self), attrs.asdict(other)
        return TimeSplit(**{part: mine[part] + theirs[part] for part in mine})

    def __mul__(self, times: float) -> TimeSplit:
        return TimeSplit(**{part: times * value for part, value in attrs.asdict(self).items()})


@attrs.frozen(kw_only=True)
class Roofline:
    """One model in one scheme on one kind of GPU; every figure is per GPU.

    Args:
        model: The model's sizes.
        gpu: The GPU's data sheet.
        scheme: How linears and KV cache are stored.
        workload: What is generated.
    """

    model: ModelShape
    gpu: GPU
    scheme: QuantScheme
    workload: Workload

    @property
    def _bandwidth(self) -> float:
        return self.gpu.bandwidth_gb_s * 1e9 * ACHIEVED_BANDWIDTH

    @property
    def _shards(self) -> int:
        return self.workload.tensor_parallel_size

    def check(self) -> None:
        """Refuse what cannot run at all."""
        self.gpu.matmul_tflops(self.scheme)
        heads = self.model.num_attention_heads
        if heads % self._shards:
            raise UnsupportedError(
                f"{self.model.name} has {heads} attention heads, which do not divide among "
                f"{self._shards} GPUs; choose a tensor_parallel_size that divides {heads}"
            )
        if self.max_sequences() < 1:
            raise UnsupportedError(
                f"{self.model.name} in {self.scheme.name} does not fit: its weights take "
                f"{self.weight_bytes() / 1e9:.1f} GB of the {self._memory_bytes() / 1e9:.1f} GB "
                f"that the engine may use on each {self.gpu.board}, and no sequence fits beside "
                "them; raise tensor_parallel_size or memory_utilization"
            )

    def weight_bytes(self) -> float:
        """Weights; their scales are under a thousandth and left out."""
        bytes_each = self.scheme.num_bits / 8
        linears = self.model.num_linear_parameters * bytes_each
        return (linears + 2 * self.model.num_unquantized_parameters) / self._shards

    def cache_bytes_per_token(self) -> float:
        """Keys and values of one token."""
        heads = max(self.model.num_key_value_heads / self._shards, 1)  # fewer heads are replicated
        bytes_each = 1 if self.scheme.kv_cache == "fp8" else 2
        return 2 * self.model.num_layers * heads * self.model.head_dim * bytes_each

    def max_sequences(self) -> int:
        """Whole sequences whose cache fits beside the weights and a prefill step's activations.

        Of those, gate, up and their product are alive at a time, and some six hidden states.
        """
        width = max(self.model.intermediate_size, self.model.expert_intermediate_size)
        live = 3 * width / self._shards + 6 * self.model.hidden_size
        working = 2 * PREFILL_TOKENS * live + RUNTIME_BYTES
        free = self._memory_bytes() - self.weight_bytes() - working
        length = self.workload.prompt_length + self.workload.response_length
        return max(0, math.floor(free / (self.cache_bytes_per_token() * length)))

    def num_running(self) -> int:
        """Sequences generated at a time."""
        return min(self.workload.batch, self.max_sequences())

    def generation(self) -> TimeSplit:
        """The whole batch: prompts in full steps, then waves of ``num_running`` sequences."""
        load = self.workload
        prompt_tokens = load.batch * load.prompt_length
        num_steps = math.ceil(prompt_tokens / PREFILL_TOKENS)
        prefill = self._step(
            tokens=prompt_tokens / num_steps,
            sequences=load.batch / num_steps,
            context=load.prompt_length / 2,
            matmul=1.0,
        )
        num_decode_steps = load.response_length * load.batch / self.num_running()
        return prefill * num_steps + self.decode_step() * num_decode_steps

    def decode_step(self) -> TimeSplit:
        """One token for each running sequence, half-way through the responses."""
        running = self.num_running()
        context = self.workload.prompt_length + self.workload.response_length / 2
        return self._step(tokens=running, sequences=running, context=context, matmul=DECODE_MATMUL)

    def update_seconds(self) -> float:
        """One set of BF16 weights, already on the GPU: 2 bytes read and 1 or 2 written of each."""
        written = self.scheme.num_bits / 8
        linears = self.model.num_linear_parameters * (2 + written)
        total = (linears + 4 * self.model.num_unquantized_parameters) / self._shards
        return total / (self._bandwidth * UPDATE_BANDWIDTH)

    def cautions(self) -> tuple[str, ...]:
        """What the figures do not say."""
        found = []
        if self.scheme.quantized and self.scheme.type in self.gpu.cautions:
            found.append(self.gpu.cautions[self.scheme.type])
        if self.num_running() < self.workload.batch:
            found.append(f"{self.num_running()} of {self.workload.batch} sequences fit at a time")
        return tuple(found)

    def _step(self, *, tokens: float, sequences: float, context: float, matmul: float) -> TimeSplit:
        """One forward pass.

        Args:
            tokens: Tokens that pass through the linears.
            sequences: Sequences that need logits at its end.
            context: Mean tokens that a token attends to.
            matmul: Fraction of the achieved matmul rate.
        """
        model, bits = self.model, self.scheme.num_bits
        touched = model.compute_touched_parameters(tokens) * bits / 8
        linears = self._roofline(touched, tokens * model.compute_active_parameters(), bits, matmul)
        logits = self._roofline(
            2 * model.num_head_parameters, sequences * model.num_head_parameters, 16, matmul
        )
        return linears + logits + self._attention(tokens, sequences, context) + self._rest(tokens)

    def _roofline(self, num_bytes: float, products: float, bits: int, matmul: float) -> TimeSplit:
        """Linear layers: reading and multiplying overlap, so the longer of the two counts."""
        rate = self.gpu.matmul_tflops(self.scheme if bits == 8 else PRESETS["bf16"])
        read = num_bytes / self._shards / self._bandwidth
        multiply = 2 * products / self._shards / (rate * 1e12 * ACHIEVED_MATMUL[bits] * matmul)
        return TimeSplit(weights=read) if read > multiply else TimeSplit(compute=multiply)

    def _attention(self, tokens: float, sequences: float, context: float) -> TimeSplit:
        """Attention: reads each sequence's cache once; multiplies twice for each pair, in BF16."""
        fraction = FP8_CACHE_BANDWIDTH if self.scheme.kv_cache == "fp8" else 1.0
        cache = sequences * context * self.cache_bytes_per_token()
        read = cache / (self._bandwidth * fraction)
        width = self.model.num_attention_heads * self.model.head_dim * self.model.num_layers
        rate = self.gpu.bf16_tflops * 1e12 * ACHIEVED_MATMUL[16] * self._shards
        multiply = 4 * tokens * context * width / rate
        return TimeSplit(kv_cache=read) if read > multiply else TimeSplit(compute=multiply)

    def _rest(self, tokens: float) -> TimeSplit:
        """Activations that pass through memory, kernel launches, all-reduces."""
        model, layers = self.model, self.model.num_layers
        kernels = KERNELS_PER_LAYER + QUANTIZE_KERNELS_PER_LAYER * self.scheme.quantized
        activations = tokens * self._activation_bytes() * layers / self._bandwidth
        communication = 0.0
        if self._shards > 1:  # two all-reduces a layer, each a ring
            sent = 2 * (self._shards - 1) / self._shards * tokens * model.hidden_size * 2
            link = self.gpu.link_gb_s * 1e9 * ACHIEVED_BANDWIDTH
            communication = 2 * layers * (sent / link + ALL_REDUCE_SECONDS)
        return TimeSplit(
            overhead=activations + layers * kernels * KERNEL_SECONDS + STEP_SECONDS,
            communication=communication,
        )

    def _activation_bytes(self) -> float:
        """Bytes a token moves in one layer, apart from attention: every read and every write.

        Hidden states: four in each norm with its residual, one into each of qkv and gate-up, one
        out of each of o and down.  Queries, keys and values: out of qkv, through rope and the
        cache, into o.  MLP: gate and up out and in, their product out and in.  Quantizing reads
        two bytes and writes one of each linear's input, which the linear then reads as one.
        """
        model = self.model
        heads = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        width = model.intermediate_size
        if model.num_moe_layers:
            width = model.num_experts_per_token * model.expert_intermediate_size
            width += model.shared_intermediate_size
        moved = 12 * model.hidden_size + (6 * heads + 6 * width) / self._shards
        if self.scheme.quantized:
            queries = model.num_attention_heads * model.head_dim
            moved += 2 * model.hidden_size + (queries + width) / self._shards
        return 2 * moved

    def _memory_bytes(self) -> float:
        share = USABLE_MEMORY * self.workload.memory_utilization
        return self.gpu.memory_gb * 2**30 * share
