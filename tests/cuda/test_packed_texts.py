"""Attention inside packed texts and the loss without scores, on a GPU against the CPU in f64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

F = tc.nn.functional
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "f16": 3e-3}
"""Relative to the largest value."""


def gradients(
    function: Callable[..., tc.Tensor], arrays: list[np.ndarray], dtype: str, device: str
) -> list[np.ndarray]:
    """The result of a function and the gradients of its arguments, in f64."""
    variables = [tc.Var(tc.tensor(a).to(dtype).to(device)) for a in arrays]
    result = function(*variables)
    weights = np.random.default_rng(1).standard_normal(result.shape)
    wide = "f64" if dtype == "f64" else "f32"
    (result.to(wide) * tc.tensor(weights).to(wide).to(device)).sum().backward()
    found = [result, *(v.grad for v in variables)]
    return [t.detach().to("cpu").to("f64").numpy() for t in found]


def same(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "bounds", "window"),
    [
        (4, 2, 64, [0, 1, 130, 130, 389, 500], None),
        (6, 1, 128, [0, 333, 700, 701, 1024], None),
        (4, 4, 128, [0, 512], 100),
        (2, 1, 96, [0, 77, 200], 31),
    ],
)
def test_attention_inside_texts(
    heads: int, key_heads: int, width: int, bounds: list[int], window: int | None, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    rows = bounds[-1] + 12
    arrays = [rng.standard_normal((rows, n, width)) for n in (heads, key_heads, key_heads)]
    # Round the inputs first, so that only the computation differs.
    arrays = [tc.tensor(a).to(dtype).to("f64").numpy() for a in arrays]

    def attend(device: str) -> Callable[..., tc.Tensor]:
        cu = tc.tensor(np.array([*bounds, bounds[-1]])).to(device)
        return lambda q, k, v: F.varlen_attention(q, k, v, cu, window=window)

    expected = gradients(attend("cpu"), arrays, "f64", "cpu")
    same(gradients(attend("cuda"), arrays, dtype, "cuda"), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_loss_without_scores(dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows, width, words = 700, 64, 5003
    arrays = [rng.standard_normal((rows, width)), rng.standard_normal((words, width)) * 0.3]
    arrays = [tc.tensor(a).to(dtype).to("f64").numpy() for a in arrays]
    targets = rng.integers(0, words, rows)
    targets[::5] = -100

    def loss(device: str) -> Callable[..., tc.Tensor]:
        wanted = tc.tensor(targets).to(device)
        return lambda h, weight: F.linear_cross_entropy(h, weight, wanted)

    expected = gradients(loss("cpu"), arrays, "f64", "cpu")
    same(gradients(loss("cuda"), arrays, dtype, "cuda"), expected, TOLERANCE[dtype])
