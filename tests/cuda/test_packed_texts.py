"""Packed texts on a GPU: attention inside each text, and cross-entropy that stores no logits.

The expected values are computed on the CPU in f64, or by attention over each text alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

F = tc.nn.functional
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "f16": 3e-3}
"""The accepted errors by dtype, relative to the largest expected value."""


def result_and_gradients(
    function: Callable[..., tc.Tensor], arrays: list[np.ndarray], dtype: str, device: str
) -> list[np.ndarray]:
    """The result of a function and the gradients of its arguments, computed in `dtype`.

    The gradients are those of a weighted sum of the result. The returned arrays are f64.
    """
    variables = [tc.Var(tc.tensor(a).to(dtype).to(device)) for a in arrays]
    result = function(*variables)
    weights = np.random.default_rng(1).standard_normal(result.shape)
    wide = "f64" if dtype == "f64" else "f32"
    (result.to(wide) * tc.tensor(weights).to(wide).to(device)).sum().backward()
    found = [result, *(v.grad for v in variables)]
    return [t.detach().to("cpu").to("f64").numpy() for t in found]


def assert_near(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "bounds", "window"),
    [
        (4, 2, 64, [0, 1, 130, 130, 389, 500], None),
        (6, 1, 128, [0, 333, 700, 701, 1024], None),
        (4, 4, 128, [0, 512], 100),
        (2, 1, 96, [0, 77, 200], 31),
    ],
    ids=["empty text", "one key head", "window of 100", "window of 31"],
)
def test_attention_inside_texts_is_near_that_of_the_cpu(
    heads: int, key_heads: int, width: int, bounds: list[int], window: int | None, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    # Text i has the rows from bounds[i] to bounds[i + 1]. The last twelve rows belong to no text.
    # `with_empty` repeats the last bound, so the last text is empty.
    rows = bounds[-1] + 12
    arrays = [rng.standard_normal((rows, n, width)) for n in (heads, key_heads, key_heads)]
    # Round the inputs first, so that both devices compute from the same values.
    arrays = [tc.tensor(a).to(dtype).to("f64").numpy() for a in arrays]

    def attend(device: str) -> Callable[..., tc.Tensor]:
        with_empty = tc.tensor(np.array([*bounds, bounds[-1]])).to(device)
        return lambda q, k, v: F.varlen_attention(q, k, v, with_empty, window=window)

    expected = result_and_gradients(attend("cpu"), arrays, "f64", "cpu")
    assert_near(
        result_and_gradients(attend("cuda"), arrays, dtype, "cuda"), expected, TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    "bounds",
    [[0, 2048], [0, 700, 701, 1500, 2048], [256 * i for i in range(9)]],
    ids=["one text", "four texts", "eight equal texts"],
)
def test_attention_over_packed_texts_is_near_attention_over_each_text(
    bounds: list[int], width: int, dtype: str
) -> None:
    heads, key_heads = 12, 2
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((bounds[-1], n, width)) for n in (heads, key_heads, key_heads)]

    def packed(q: tc.Tensor, k: tc.Tensor, v: tc.Tensor) -> tc.Tensor:
        return F.varlen_attention(q, k, v, tc.tensor(bounds).to("cuda"))

    def one_by_one(*packed_inputs: tc.Tensor) -> tc.Tensor:
        parts = []
        for start, end in pairwise(bounds):
            q, k, v = (x[start:end].transpose(0, 1).contiguous() for x in packed_inputs)
            # Repeat each key head for all query heads that share it.
            grouped = (key_heads, heads // key_heads, end - start, width)
            k, v = (x.unsqueeze(1).expand(grouped).reshape(q.shape) for x in (k, v))
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            parts.append(result.transpose(0, 1))
        return tc.cat(parts, 0)

    expected = result_and_gradients(one_by_one, arrays, dtype, "cuda")
    assert_near(result_and_gradients(packed, arrays, dtype, "cuda"), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_loss_without_stored_logits_is_near_that_of_the_cpu(dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows, width, vocabulary = 700, 64, 5003
    arrays = [rng.standard_normal((rows, width)), rng.standard_normal((vocabulary, width)) * 0.3]
    arrays = [tc.tensor(a).to(dtype).to("f64").numpy() for a in arrays]
    targets = rng.integers(0, vocabulary, rows)
    targets[::5] = -100  # ignored

    def loss(device: str) -> Callable[..., tc.Tensor]:
        labels = tc.tensor(targets).to(device)
        return lambda hidden, weight: F.linear_cross_entropy(hidden, weight, labels)

    expected = result_and_gradients(loss("cpu"), arrays, "f64", "cpu")
    assert_near(
        result_and_gradients(loss("cuda"), arrays, dtype, "cuda"), expected, TOLERANCE[dtype]
    )
