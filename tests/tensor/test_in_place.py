"""In-place methods and item assignment of `Var`; some are compared with torch, if installed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

X = np.array([[1.5, -2.0, 0.5], [3.0, 0.25, -1.0]], np.float32)
# Y is f64, wider than X: a variable must keep its dtype, f32. It is broadcast over X's rows.
Y = np.array([2.0, -0.5, 4.0])

CHANGES: list[Callable[[Any, Any], Any]] = [
    lambda v, y: v.add_(y),
    lambda v, y: v.add_(y, alpha=-0.5),
    lambda v, y: v.sub_(y),
    lambda v, y: v.mul_(y),
    lambda v, y: v.div_(y),
    # torch's `lerp_` requires equal dtypes.
    lambda v, y: v.lerp_(y.to(v.dtype).reshape((1, 3)), 0.25),
    lambda v, y: v.copy_(y.reshape((1, 3)) + v.detach()),
    lambda v, _: v.clamp_(-1.0, 1.0),
    lambda v, _: v.clamp_(min=0.0).add_(1).mul_(2.0),
    lambda v, _: v.fill_(math.inf).fill_(3.0),
]


@pytest.mark.parametrize(
    "change",
    CHANGES,
    ids=["add", "add alpha", "sub", "mul", "div", "lerp", "copy", "clamp", "chain", "fill"],
)
def test_values_equal_those_of_torch_and_the_dtype_stays(change: Callable[[Any, Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    v, y = tc.Var(tc.tensor(X)), tc.tensor(Y)
    assert change(v, y) is v
    expected = change(torch.tensor(X), torch.tensor(Y))
    assert v.dtype == "f32"
    np.testing.assert_allclose(v.numpy(), expected.numpy(), rtol=1e-6)


def test_adding_a_tensor_of_a_wider_dtype_keeps_the_dtype() -> None:
    v = tc.Var(tc.tensor([1.0, 2.0], dtype="bf16"))
    v.add_(tc.tensor([1.0, 2.0], dtype="f64"))
    assert (str(v.dtype), v.tolist()) == ("bf16", [2.0, 4.0])


@pytest.mark.parametrize(("dtype", "value"), [("f64", 1 / 3), ("bf16", 0.5), ("f16", 0.25)])
def test_setting_an_element_keeps_every_bit_of_the_value(dtype: str, value: float) -> None:
    v = tc.Var(tc.zeros(2, dtype=dtype))
    v[1] = tc.tensor(value, dtype=dtype)
    assert (str(v.dtype), v.tolist()) == (dtype, [0, value])


def test_a_mask_inside_an_index_selects_the_elements_to_set() -> None:
    v = tc.Var(tc.zeros(3, 2))
    v[tc.tensor([1, 0, 1], dtype="u8"), 0] = 1
    assert v.tolist() == [[1, 0], [0, 0], [1, 0]]


def test_a_fill_replaces_non_finite_values() -> None:
    v = tc.Var(tc.tensor([math.nan, math.inf]))
    assert v.fill_(2.0).tolist() == [2.0, 2.0]


def test_random_numbers_are_drawn_in_place_and_wrong_limits_are_rejected() -> None:
    v = tc.Var(tc.zeros(2000))
    # A new `Generator` has the seed 0.
    assert v.normal_(3.0, 0.5, generator=tc.Generator()) is v
    assert float(v.mean()) == pytest.approx(3.0, abs=0.05)
    assert float(v.std()) == pytest.approx(0.5, abs=0.05)
    v.uniform_(-1.0, 2.0)
    assert -1 <= float(v.min()) < float(v.max()) < 2
    with pytest.raises(tc.ArgumentError, match=r"normal_: std is -1\.0"):
        v.normal_(0.0, -1.0)
    with pytest.raises(tc.ArgumentError, match=r"uniform_: a is .* expected a to be at most b"):
        v.uniform_(1.0, 0.0)
