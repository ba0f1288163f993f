"""Attention over several heads, with torch's constructor, parameters and masks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainable_candle._core import Tensor, Var, zeros
from trainable_candle.errors import ArgumentError, ShapeError
from trainable_candle.nn import functional, init
from trainable_candle.nn.linear import Linear
from trainable_candle.nn.module import Module

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Module):
    """Queries attend to keys in several heads (Vaswani et al. 2017, arXiv:1706.03762).

    Initial values are torch's: Xavier for the projections in, zero for biases.

    Args:
        embed_dim: Width of queries, keys and values.
        num_heads: Number of heads, which share the width equally.
        dropout: Probability with which weights of attention are dropped in training.
        bias: Whether the projections have biases.
        batch_first: Whether tensors are (B, S, E) rather than (S, B, E).
        dtype: A floating point dtype; default f32.
        device: The device.

    Raises:
        ArgumentError: If the heads do not share the width equally.

    Example:
        >>> attention = tc.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = tc.randn(1, 5, 8)
        >>> attention(x, x, x, need_weights=False)[0].shape
        (1, 5, 8)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ArgumentError(
                f"MultiheadAttention: {num_heads} heads cannot share {embed_dim} features; "
                "expected a divisor"
            )
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.in_proj_weight: Tensor = Var(
            zeros(3 * embed_dim, embed_dim, dtype=dtype, device=device)
        )
        init.xavier_uniform_(self.in_proj_weight)
        self.in_proj_bias: Tensor | None = None
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias, dtype=dtype, device=device)
        if bias:
            self.in_proj_bias = Var(zeros(3 * embed_dim, dtype=dtype, device=device))
            if self.out_proj.bias is not None:
                init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (S, B, E), with `batch_first` (B, S, E).
            key: (L, B, E) or (B, L, E).
            value: As the keys.
            key_padding_mask: (B, L): 1 (u8) where a key is not seen, or numbers that are added to
                the scores.
            need_weights: Whether the weights are returned, which takes a matrix of scores.
            attn_mask: (S, L), or (B heads, S, L): likewise for each query.
            average_attn_weights: Whether the weights are the mean over the heads.
            is_causal: Whether position i sees positions up to i alone.

        Returns:
            The result in the form of the queries, and the weights (B, S, L) or (B, heads, S, L), if
            they are asked for.

        Raises:
            ShapeError, DTypeError: If the operands do not fit.
        """
        if query.ndim != 3 or key.ndim != 3 or value.ndim != 3:
            raise ShapeError(
                f"MultiheadAttention: found {query.ndim} dimensions of the queries, expected 3"
            )
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected((query, key, value))
        mask = self._mask(key_padding_mask, attn_mask, q.shape[0])
        drops = self.dropout > 0 and self.training
        weights = None
        if need_weights or drops:
            weights = self._weights(q, k, mask, is_causal)
            used = functional.dropout(weights, self.dropout) if drops else weights
            mixed = used @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        batch, _, length, _ = mixed.shape
        result = self.out_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        if not self.batch_first:
            result = result.transpose(0, 1)
        if not need_weights or weights is None:
            return result, None
        return result, weights.mean(1) if average_attn_weights else weights

    def _projected(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values as (B, heads, S, E / heads)."""
        width = self.in_proj_weight.shape[1]
        parts = []
        for index, x in enumerate(inputs):
            rows = slice(index * width, (index + 1) * width)
            bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            projected = functional.linear(x, self.in_proj_weight[rows], bias)
            batch, length, _ = projected.shape
            parts.append(projected.reshape(batch, length, self.num_heads, -1).transpose(1, 2))
        return parts

    def _mask(self, padding: Tensor | None, mask: Tensor | None, batch: int) -> Tensor | None:
        """Both masks as numbers that are added to the scores, (B or 1, heads or 1, S or 1, L)."""
        found = None
        if padding is not None:
            found = self._added(padding.reshape(batch, 1, 1, -1))
        if mask is not None:
            shape = mask.shape
            whole = (batch, self.num_heads, *shape[1:]) if mask.ndim == 3 else (1, 1, *shape)
            added = self._added(mask.reshape(whole))
            found = added if found is None else found + added
        return found

    def _added(self, mask: Tensor) -> Tensor:
        """A mask as numbers: minus infinity where u8 is 1."""
        dtype = self.in_proj_weight.dtype
        if str(mask.dtype) != "u8":
            return mask.to(dtype)
        return zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        if is_causal:
            length, keys = scores.shape[-2:]
            later = zeros(length, keys, dtype="f32", device=scores.device) + 1.0
            scores = scores.masked_fill(later.tril() == 0, -math.inf)
        return functional.softmax(scores, -1)
