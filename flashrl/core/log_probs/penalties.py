"""What a sequence has said so far, and how that weakens its next token.

Counting is the caller's: the embedded engine appends the token it has drawn, verification of a
whole response counts each position's prefix.
"""

from __future__ import annotations

import attrs
import torch

from flashrl.core.rollouts import SamplingParams
from flashrl.errors import RolloutError, ShapeError

__all__ = ["TokenHistory", "check_token_ids"]


@attrs.frozen(kw_only=True, eq=False)
class TokenHistory:
    """Which tokens each sequence has seen so far; what the penalties are computed from.

    Args:
        in_prompt: Whether the prompt holds the token, bool, (batch, vocab).
        counts: How often the response holds it, int32, (batch, vocab); grows in place.

    Example:
        >>> history = TokenHistory.start(torch.tensor([[0, 1]]), vocab_size=4)
        >>> history.append(torch.tensor([3]))
        >>> history.counts
        tensor([[0, 0, 0, 1]], dtype=torch.int32)
    """

    in_prompt: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def start(
        cls,
        prompt_ids: torch.Tensor,
        *,
        vocab_size: int,
        prompt_mask: torch.Tensor | None = None,
    ) -> TokenHistory:
        """A history that knows the prompt and no response yet.

        Args:
            prompt_ids: Prompts, padded on either side, int64, (batch, prompt_length); may be
                (batch, 0).
            vocab_size: Width of the logits.
            prompt_mask: 1 at tokens, 0 at padding; None means no padding.

        Returns:
            The history.

        Raises:
            ShapeError: The mask does not fit the ids.
            RolloutError: An id lies outside the vocabulary.
        """
        if prompt_ids.ndim != 2:
            raise ShapeError(
                f"prompt_ids has shape {tuple(prompt_ids.shape)}; allowed: (batch, prompt_length)"
            )
        prompt_ids = check_token_ids(
            prompt_ids, mask=prompt_mask, vocab_size=vocab_size, name="prompt_ids"
        )
        empty = torch.zeros(
            len(prompt_ids), vocab_size, dtype=torch.int32, device=prompt_ids.device
        )
        prompt = cls(in_prompt=empty > 0, counts=empty)
        prompt.append(prompt_ids, prompt_mask)
        return cls(in_prompt=prompt.counts > 0, counts=torch.zeros_like(empty))

    def append(self, token_ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Count response tokens, in place.

        Args:
            token_ids: The next token of each sequence, int64, (batch,), or several, (batch, n).
            mask: 0 at tokens not to count (padding, a finished sequence), of the same shape.
        """
        ones = torch.ones_like(token_ids, dtype=torch.int32) if mask is None else mask.ne(0).int()
        rows = (len(self.counts), -1)
        self.counts.scatter_add_(1, (token_ids * ones).reshape(rows), ones.reshape(rows))

    def prefixes(self, token_ids: torch.Tensor, mask: torch.Tensor | None = None) -> TokenHistory:
        """The history as it stood before each of the next n tokens; this one does not change.

        Args:
            token_ids: Tokens that follow, int64, (batch, n).
            mask: 0 at tokens not to count, (batch, n).

        Returns:
            A history of shape (batch, n, vocab).
        """
        ones = torch.ones_like(token_ids, dtype=torch.int32) if mask is None else mask.ne(0).int()
        counts = self.counts.new_zeros(*token_ids.shape, self.counts.shape[-1])
        counts[:, 0] = self.counts
        counts[:, 1:].scatter_add_(2, (token_ids * ones)[:, :-1, None], ones[:, :-1, None])
        counts = counts.cumsum(1, dtype=torch.int32)
        return TokenHistory(in_prompt=self.in_prompt[:, None].expand_as(counts), counts=counts)

    def __getitem__(self, index: slice | torch.Tensor) -> TokenHistory:
        """The history of some sequences, or of the positions where a mask is true."""
        return TokenHistory(in_prompt=self.in_prompt[index], counts=self.counts[index])

    def penalize(self, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """Apply the repetition, frequency and presence penalties.

        Sources: repetition, Keskar et al. 2019 (arXiv:1909.05858); frequency and presence, the
        OpenAI API's definition; order, vLLM.

        Args:
            logits: Float32, (batch, vocab), or any shape that the history broadcasts to.
            params: Only its penalties are read.

        Returns:
            The penalised logits, a new tensor.
        """
        used = self.counts > 0
        if params.repetition_penalty != 1.0:
            weaker = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits = torch.where(self.in_prompt | used, weaker, logits)
        if params.frequency_penalty:
            logits = logits - params.frequency_penalty * self.counts
        if params.presence_penalty:
            logits = logits - params.presence_penalty * used
        return logits


def check_token_ids(
    token_ids: torch.Tensor, *, mask: torch.Tensor | None, vocab_size: int, name: str
) -> torch.Tensor:
    """Token ids as int64 with 0 outside the mask, or an error for the first that is no token."""
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise ShapeError(f"{name} has dtype {token_ids.dtype}; allowed: an integer type")
    if mask is not None and mask.shape != token_ids.shape:
        raise ShapeError(
            f"{name} has shape {tuple(token_ids.shape)}, its mask {tuple(mask.shape)}; "
            "both must be the same"
        )
    token_ids = token_ids.long() if mask is None else token_ids.long().masked_fill(mask == 0, 0)
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        position = tuple(outside.nonzero()[0].tolist())
        raise RolloutError(
            f"{name}{list(position)} is {token_ids[position].item()}, outside the vocabulary of "
            f"{vocab_size}; mask padding, and score tokens with the model that drew them"
        )
    return token_ids
