"""What goes into a rollout and what comes out, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from flashrl.errors import ShapeError

__all__ = ["Rollout", "SamplingParams"]


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the next token is drawn; a token's log-probability is that of the result of all of it.

    Applied in this order (vLLM's): penalties and logit bias, temperature, min-p, top-k, top-p.

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
        logit_bias: Added to the logits of single tokens.
        stop_token_ids: Generation ends with any of these, which is part of the response.
        seed: Makes a draw repeatable; None does not.

    Raises:
        ValueError: A value is outside its range.
    """

    max_tokens: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    temperature: float = attrs.field(default=1.0, validator=attrs.validators.ge(0.0))
    top_k: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    top_p: float = attrs.field(
        default=1.0, validator=[attrs.validators.gt(0.0), attrs.validators.le(1.0)]
    )
    min_p: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)]
    )
    repetition_penalty: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=tuple)
    seed: int | None = None

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p can remove tokens from the support."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


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
        ShapeError: Two of the tensors disagree in shape.
    """

    response_ids: torch.Tensor
    response_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    log_mass: torch.Tensor | None = None
    version: int | None = None

    def __attrs_post_init__(self) -> None:
        shape = self.response_ids.shape
        for name in ("response_mask", "rollout_log_probs", "log_mass"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}, response_ids {tuple(shape)}; "
                    "both must be (batch, response_length)"
                )
