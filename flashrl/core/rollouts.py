"""What goes into a rollout and what comes out, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import attrs
import torch

from flashrl.errors import ConfigError, ShapeError

__all__ = ["Rollout", "SamplingParams"]

# field -> (type, which values are allowed, the same in words)
_RULES: Mapping[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (Integral, lambda v: v >= 1, "an integer, at least 1"),
    "temperature": (
        Real,
        lambda v: v == 0 or 1e-5 <= v < math.inf,
        "0 (greedy), or a finite number of at least 1e-5",
    ),
    "top_k": (Integral, lambda v: v >= 0, "an integer, at least 0 (keep all)"),
    "top_p": (Real, lambda v: 0 < v <= 1, "above 0, at most 1 (keep all)"),
    "min_p": (Real, lambda v: 0 <= v <= 1, "0 (keep all) to 1"),
    "repetition_penalty": (Real, lambda v: 0 < v < math.inf, "above 0, finite; 1 is off"),
    "presence_penalty": (Real, lambda v: math.isfinite(v), "a finite number; 0 is off"),
    "frequency_penalty": (Real, lambda v: math.isfinite(v), "a finite number; 0 is off"),
}


def _is(value: object, kind: type, allowed: Callable[[Any], bool]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and allowed(value)


def _is_token_id(value: object) -> bool:
    return _is(value, Integral, lambda v: bool(v >= 0))


# A value of the wrong kind passes through: validation names it together with the other faults.
def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) else value


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the next token is drawn; a token's log-probability is that of the result of all of it.

    Applied in vLLM's order: logit bias, penalties (repetition, frequency, presence), temperature,
    min-p, top-k, top-p.

    Args:
        max_tokens: Most tokens to generate for one prompt.
        temperature: Divides the logits; 0 is greedy, whose log-probability is the untempered
            log-softmax.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        min_p: Keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: Divides (positive) or multiplies (negative) the logits of tokens that
            stand in the prompt or the output.
        presence_penalty: Subtracted from the logits of tokens that stand in the output.
        frequency_penalty: Subtracted once for each time a token stands in the output.
        logit_bias: Added to the logits of single tokens, by token id.
        stop_token_ids: Generation ends with any of these, which is part of the response.
        seed: Makes a draw repeatable; None does not.

    Raises:
        ConfigError: Values are outside their range; the message lists all of them.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.95).truncates
        True
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_as_dict)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple)
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        faults = [
            f"{name} is {getattr(self, name)!r}; allowed: {words}"
            for name, (kind, allowed, words) in _RULES.items()
            if not _is(getattr(self, name), kind, allowed)
        ]
        if self.seed is not None and not _is(self.seed, Integral, lambda v: 0 <= v < 2**63):
            faults.append(
                f"seed is {self.seed!r}; allowed: None, or an integer from 0 to 2**63 - 1"
            )
        stops: object = self.stop_token_ids
        if not (isinstance(stops, tuple) and all(map(_is_token_id, stops))):
            faults.append(f"stop_token_ids is {stops!r}; allowed: token ids")
        biases: object = self.logit_bias
        if not isinstance(biases, dict):
            faults.append(f"logit_bias is {biases!r}; allowed: a mapping of token id to number")
        else:
            faults += [
                f"logit_bias[{token!r}] is {bias!r}; allowed: an integer token id and a finite "
                "number"
                for token, bias in biases.items()
                if not (_is_token_id(token) and _is(bias, Real, math.isfinite))
            ]
        if faults:
            raise ConfigError("sampling parameters: " + "; ".join(faults))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, and nothing is drawn."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p can remove tokens from the support."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalizes(self) -> bool:
        """Whether a penalty makes the distribution depend on what was said before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@attrs.frozen(kw_only=True, eq=False)
class Rollout:
    """A batch of generated responses with the log-probability of every sampled token.

    Responses are right-padded.  Padding has mask 0, log-probability 0 and token ``pad_token_id``;
    nothing reads it.

    Args:
        response_ids: Sampled tokens, int64, (batch, response_length).
        response_mask: 1 where a token was sampled, (batch, response_length).
        rollout_log_probs: log μ of each sampled token in nats, float32,
            (batch, response_length).
        log_mass: log S, the log of the probability that survived top-k, top-p and min-p before
            renormalising, float32, (batch, response_length); zeros where nothing was removed,
            None where the engine does not report it.
        version: The weight version that generated it, or None if none was given.

    Raises:
        ShapeError: Two of the tensors disagree in shape or device, or one has the wrong dtype.
    """

    response_ids: torch.Tensor
    response_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    log_mass: torch.Tensor | None = None
    version: int | None = None

    def __attrs_post_init__(self) -> None:
        ids = self.response_ids
        if ids.ndim != 2 or ids.is_floating_point():
            raise ShapeError(
                f"response_ids has shape {tuple(ids.shape)} and dtype {ids.dtype}; "
                "allowed: integers, (batch, response_length)"
            )
        for name in ("response_mask", "rollout_log_probs", "log_mass"):
            tensor = getattr(self, name)
            if tensor is None and name == "log_mass":
                continue
            if (tensor.shape, tensor.device) != (ids.shape, ids.device):
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)} on {tensor.device}, response_ids "
                    f"{tuple(ids.shape)} on {ids.device}; both must be (batch, response_length) on "
                    "one device"
                )
            if name != "response_mask" and not tensor.is_floating_point():
                raise ShapeError(f"{name} has dtype {tensor.dtype}; allowed: a float type")
