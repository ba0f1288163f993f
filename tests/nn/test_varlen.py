"""Attention inside the segments of packed rows: `varlen_attention` against numpy and torch."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional
from trainable_candle.testing import assert_close

# The number of rows (tokens of all segments, and padding after the last bound), the number of query
# heads, the number of key heads, the width of a head, the bounds of the segments (`cu_seqlens`),
# and the window, which is the largest number of keys that a query attends to.
CASES: list[tuple[int, int, int, int, list[int], int | None]] = [
    (11, 2, 2, 8, [0, 11], None),
    (40, 6, 2, 16, [0, 1, 18, 18, 40], None),
    (50, 4, 1, 8, [0, 33, 34, 41, 41, 41], None),
    (300, 4, 2, 32, [0, 7, 270, 290], 100),
    (290, 2, 1, 64, [0, 290], 3),
    (33, 3, 3, 8, [0, 20, 33], 1),
]


def random_inputs(rows: int, heads: int, key_heads: int, width: int) -> list[np.ndarray[Any, Any]]:
    """Return queries, keys and values."""
    rng = np.random.default_rng(rows)
    return [rng.standard_normal((rows, n, width)) for n in (heads, key_heads, key_heads)]


def visible(length: int, window: int | None) -> np.ndarray[Any, Any]:
    """Return a segment's causal mask: whether a query (first axis) attends to a key (second)."""
    distance = np.arange(length)[:, None] - np.arange(length)
    return (distance >= 0) & (distance < (window or length))


@pytest.mark.parametrize(("rows", "heads", "key_heads", "width", "bounds", "window"), CASES)
@pytest.mark.parametrize("bounds_dtype", ["i64", "u32"])
def test_attention_equals_numpy_in_each_segment(
    rows: int,
    heads: int,
    key_heads: int,
    width: int,
    bounds: list[int],
    window: int | None,
    bounds_dtype: str,
) -> None:
    q, k, v = random_inputs(rows, heads, key_heads, width)
    expected = np.zeros_like(q)  # rows after the last bound stay zero
    for start, end in pairwise(bounds):
        for head in range(heads):
            key_head = head // (heads // key_heads)
            scores = q[start:end, head] @ k[start:end, key_head].T / np.sqrt(width)
            weights = np.exp(np.where(visible(end - start, window), scores, -np.inf))
            weights /= weights.sum(-1, keepdims=True)
            expected[start:end, head] = weights @ v[start:end, key_head]
    tensors = [tc.tensor(x) for x in (q, k, v)]
    y = functional.varlen_attention(*tensors, tc.tensor(bounds, dtype=bounds_dtype), window=window)
    assert_close(y, expected)


@pytest.mark.parametrize(("rows", "heads", "key_heads", "width", "bounds", "window"), CASES)
def test_results_and_gradients_are_those_of_torch(
    rows: int, heads: int, key_heads: int, width: int, bounds: list[int], window: int | None
) -> None:
    torch = pytest.importorskip("torch")
    values = random_inputs(rows, heads, key_heads, width)
    grad = np.random.default_rng(1).standard_normal((rows, heads, width))
    theirs = [torch.from_numpy(x).requires_grad_() for x in values]
    segments = []
    for start, end in pairwise(bounds):
        q, k, v = (x[start:end].transpose(0, 1) for x in theirs)
        mask = torch.from_numpy(visible(end - start, window))
        attend = torch.nn.functional.scaled_dot_product_attention
        segments.append(attend(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(0, 1))
    # Torch gets no rows of padding. The gradients of q, k and v are zero there, although `grad` is
    # not.
    torch.cat(segments).backward(torch.from_numpy(grad[: bounds[-1]]))
    ours = [tc.Var(x) for x in values]
    y = functional.varlen_attention(*ours, tc.tensor(bounds), window=window, scale=0.3)
    y.backward(tc.tensor(grad))
    assert_close(y.detach()[: bounds[-1]], torch.cat(segments).detach().numpy())
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found.grad, expected.grad.numpy())


def test_wrong_arguments_are_reported() -> None:
    # Shapes (rows, heads, width): 4 rows in one segment, 6 query heads, 2 key heads.
    q, k, bounds = tc.ones(4, 6, 8), tc.ones(4, 2, 8), tc.tensor([0, 4])
    attend = functional.varlen_attention
    for error, message, call in [
        (tc.ShapeError, r"q has shape \[4, 6\]", lambda: attend(q[:, :, 0], k, k, bounds)),
        (tc.ShapeError, "divides 6", lambda: attend(q, tc.ones(4, 4, 8), k, bounds)),
        (tc.ShapeError, "v has shape", lambda: attend(q, k, q, bounds)),
        (
            tc.ShapeError,
            r"expected \(segments \+ 1,\)",
            lambda: attend(q, k, k, tc.tensor([[0, 4]])),
        ),
        (tc.DTypeError, "the tensor v f16", lambda: attend(q, k, k.to("f16"), bounds)),
        (tc.DTypeError, "cu_seqlens is f32", lambda: attend(q, k, k, tc.tensor([0.0, 4.0]))),
        (
            tc.IndexOutOfRangeError,
            "bound 1 of cu_seqlens is 5",
            lambda: attend(q, k, k, tc.tensor([0, 5])),
        ),
        (tc.ArgumentError, "window is 0", lambda: attend(q, k, k, bounds, window=0)),
    ]:
        with pytest.raises(error, match=f"varlen_attention: .*{message}"):
            call()
