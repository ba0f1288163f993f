"""Multi-head attention with torch's constructor, masks and parameter names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainable_candle._core import Tensor, Var, full, tensor, where, zeros, zeros_like
from trainable_candle._explained import explained
from trainable_candle.errors import ArgumentError, DTypeError, ShapeError
from trainable_candle.nn import functional, init
from trainable_candle.nn.layers import whole
from trainable_candle.nn.linear import Linear
from trainable_candle.nn.module import Module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle._core import DType

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Module):
    """Multi-head attention with its projections (Vaswani et al. 2017, arXiv:1706.03762).

    If `need_weights` is False and no dropout applies, the matrix of the scores of queries and keys
    is never stored.

        attention = tc.nn.MultiheadAttention(8, 2, batch_first=True)
        x = tc.randn(4, 5, 8)
        result, weights = attention(x, x, x)
        assert weights.shape == (4, 5, 5)

    Args:
        embed_dim: E, the number of features of queries, keys, values and results.
        num_heads: The number of heads; must divide `embed_dim`.
        dropout: The probability with which an attention weight is set to 0 in training.
        bias: Whether the projections have biases.
        batch_first: Whether tensors are (batch, length, E), instead of (length, batch, E).
        dtype: The floating point dtype of the parameters; default f32.
        device: The device of the parameters.

    Raises:
        TypeError: If a number of features or heads is not whole.
        ArgumentError: If such a number is below 1, the heads do not divide the features, or the
            probability is out of range.
    """

    # `explained`: the message of every error begins with the name of the class.
    @explained
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
        embed_dim = whole("MultiheadAttention", "embed_dim", embed_dim)
        # `num_heads` is only checked: it keeps its type, such as one of numpy's integers.
        if embed_dim % whole("MultiheadAttention", "num_heads", num_heads):
            raise ArgumentError(
                f"MultiheadAttention: num_heads is {num_heads}, expected a divisor of embed_dim, "
                f"{embed_dim}"
            )
        if not 0 <= dropout < 1:
            raise ArgumentError(
                f"MultiheadAttention: dropout is {dropout}, expected a number from 0 to below 1"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.dropout, self.batch_first = dropout, batch_first
        shape = (3 * embed_dim, embed_dim)
        self.in_proj_weight: Tensor = Var(zeros(shape, dtype=dtype, device=device))
        init.xavier_uniform_(self.in_proj_weight)
        self.in_proj_bias: Tensor | None = None
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias, dtype=dtype, device=device)
        if bias:
            self.in_proj_bias = Var(zeros(shape[0], dtype=dtype, device=device))
            self.out_proj.bias = Var(zeros(embed_dim, dtype=dtype, device=device))

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
        """Attend from queries to keys.

        Masks are as in torch: a u8 mask is 1 where attention is forbidden; a floating point mask
        is added to the scores. B is the size of the batch.

        Args:
            query: S queries: (S, B, E), or (B, S, E) with `batch_first`, or (S, E) without batch.
            key: L keys: (L, B, E), or (B, L, E) with `batch_first`, or (L, E) without batch.
            value: The value of each key, in the shape of `key`.
            key_padding_mask: A mask of keys, (B, L), or (L,) without batch.
            need_weights: Whether the attention weights are returned.
            attn_mask: A mask of queries and keys, (S, L), or (B * num_heads, S, L), with B = 1
                without batch.
            average_attn_weights: Whether the returned weights are averaged over the heads.
            is_causal: Whether query i attends only to keys 0 to i; ignored if `attn_mask` is given.

        Returns:
            The result, in the shape of `query`, and the attention weights, or None without
            `need_weights`. The weights are (B, S, L), or (B, num_heads, S, L) if they are not
            averaged; without batch, (S, L) or (num_heads, S, L).

        Raises:
            ShapeError, DTypeError, DeviceError: If the shapes, dtypes or devices of the tensors do
                not fit together.
        """
        if query.ndim not in {2, 3} or {key.ndim, value.ndim} != {query.ndim}:
            raise ShapeError(
                f"MultiheadAttention: found shapes {query.shape}, {key.shape} and {value.shape}, "
                "expected three tensors of two or of three dimensions"
            )
        batched = query.ndim == 3
        length_first = batched and not self.batch_first
        inputs = [x.transpose(0, 1) if length_first else x for x in (query, key, value)]
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
        # From here on, all inputs are (B, length, E).
        q_shape, k_shape, v_shape = (x.shape for x in inputs)
        if k_shape[:2] != v_shape[:2] or q_shape[0] != k_shape[0]:
            form = (
                "(batch, length, embed_dim)" if self.batch_first else "(length, batch, embed_dim)"
            )
            form += f", as batch_first={self.batch_first} says"
            form = form if batched else "(length, embed_dim)"
            raise ShapeError(
                f"MultiheadAttention: found shapes {query.shape}, {key.shape} and {value.shape}, "
                "expected one batch size for all tensors, and one length for key and value; each "
                f"tensor is {form}"
            )
        q, k, v = self._projected(inputs)
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        mask = self._mask(q, k, masks, batched=batched, is_causal=is_causal)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights or dropout:
            scores = q.matmul(k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]))
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = functional.dropout(weights, dropout, self.training).matmul(v)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask)
        batch, heads, length, width = mixed.shape
        result = self.out_proj(mixed.transpose(1, 2).reshape((batch, length, heads * width)))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            result = result.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        result = result.transpose(0, 1) if length_first else result
        return result, weights if need_weights else None

    def _projected(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return queries, keys and values, each (B, heads, S or L, features of a head)."""
        size, heads = self.embed_dim, self.num_heads
        projected = []
        # The rows of `in_proj_weight` are those for queries, then for keys, then for values.
        for index, x in enumerate(inputs):
            weight = self.in_proj_weight.narrow(0, index * size, size)
            bias = self.in_proj_bias
            bias = None if bias is None else bias.narrow(0, index * size, size)
            y = functional.linear(x, weight, bias)
            y = y.reshape((*y.shape[:2], heads, size // heads))
            projected.append(y.transpose(1, 2).contiguous())
        return projected

    def _mask(
        self,
        q: Tensor,
        k: Tensor,
        masks: dict[str, Tensor | None],
        *,
        batched: bool,
        is_causal: bool,
    ) -> Tensor | None:
        """Return the sum of all masks, to be added to the scores: (1 or B, 1 or heads, 1 or S, L).

        None if there is no mask. With `is_causal`, adds a missing `attn_mask` to `masks`.
        """
        batch, heads, queries, keys = (*q.shape[:3], k.shape[2])
        if masks["attn_mask"] is None and is_causal:
            is_later = [[j > i for j in range(keys)] for i in range(queries)]
            masks["attn_mask"] = tensor(is_later, device=q.device)
        # The accepted shapes of each mask, with the shape in which it is added to the scores.
        accepted: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {
            "attn_mask": {
                (queries, keys): (1, 1, queries, keys),
                (batch * heads, queries, keys): (batch, heads, queries, keys),
            },
            "key_padding_mask": {((batch, keys) if batched else (keys,)): (batch, 1, 1, keys)},
        }
        total = None
        for name, mask in masks.items():
            if mask is not None:
                added = _added(name, mask, accepted[name], q.dtype)
                total = added if total is None else total + added
        return total

    def _facts(self) -> str:
        """Return the text between the parentheses of `repr`."""
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"


def _added(
    name: str, mask: Tensor, accepted: dict[tuple[int, ...], tuple[int, ...]], dtype: DType
) -> Tensor:
    """Return the values that a mask adds to the scores, in `dtype`.

    `accepted` maps each allowed shape of the mask to the shape of these values; `name` is the
    mask's name in messages.

    Raises:
        ShapeError: the mask has another shape.
        DTypeError: the mask is neither u8 nor floating point.
    """
    if mask.shape not in accepted:
        shapes = " or ".join(map(str, accepted))
        raise ShapeError(f"MultiheadAttention: {name} has shape {mask.shape}, expected {shapes}")
    shape = accepted[mask.shape]
    if mask.dtype == "u8":
        forbidden = full((), -math.inf, dtype=dtype, device=mask.device)
        return where(mask, forbidden, zeros_like(mask, dtype=dtype)).reshape(shape)
    if mask.dtype not in {"f32", "f64", "f16", "bf16"}:
        raise DTypeError(
            f"MultiheadAttention: {name} has dtype {mask.dtype}, expected u8, which is 1 where "
            f'attention is forbidden (mask.to("u8")), or numbers to add, such as {dtype}'
        )
    return mask.to(dtype).reshape(shape)
