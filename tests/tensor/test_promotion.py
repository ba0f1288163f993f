"""Operators over two dtypes: torch's rules."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

DTYPES = ("u8", "i64", "f16", "bf16", "f32", "f64")
OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv)


def test_results_have_the_wider_dtype() -> None:
    i, f = tc.tensor([1, 2], dtype="i64"), tc.tensor([0.5, 1.0])
    assert (i + f).dtype == (f + i).dtype == "f32"
    assert (i + f).tolist() == [1.5, 3.0]
    assert (i / 2).tolist() == [0.5, 1.0]
    assert (2 / i).tolist() == [2.0, 1.0]
    assert (i * 2.5).tolist() == [2.5, 5.0]
    assert (2.5 - i).tolist() == [1.5, 0.5]
    assert (i * 2).dtype == "i64"
    assert (f.to("f16") + f).dtype == "f32"
    assert (f.to("f16") + f.to("bf16")).dtype == "f32"
    assert (i > f).tolist() == [1, 1]
    assert (f == i).dtype == "u8"


def test_a_tensor_without_dimensions_does_not_widen() -> None:
    f = tc.tensor([0.5, 1.0], dtype="bf16")
    assert (f * tc.tensor(2.0)).dtype == "bf16"
    assert (tc.tensor(2) + f).dtype == "bf16"
    assert (tc.tensor([1, 2]) * tc.tensor(0.5, dtype="f64")).dtype == "f64"


def test_gradients_pass_in_the_dtypes_of_the_operands() -> None:
    v, w = tc.Var(tc.ones(3, dtype="f16")), tc.Var(tc.full((3,), 2.0))
    (v * w + tc.tensor([1, 2, 3])).sum().backward()
    assert v.grad is not None
    assert w.grad is not None
    assert (v.grad.dtype, w.grad.dtype) == ("f16", "f32")
    assert v.grad.tolist() == [2.0] * 3


def test_tensors_of_others_are_named() -> None:
    class Foreign:
        def __dlpack__(self) -> None: ...

    with pytest.raises(TypeError, match="Foreign"):
        tc.ones(2) * Foreign()


@pytest.mark.parametrize("function", OPERATORS)
def test_dtypes_are_torchs(function: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    names = {"u8": "uint8", "i64": "int64", "f16": "float16", "f32": "float32"}
    names |= {"bf16": "bfloat16", "f64": "float64"}
    back = {theirs: ours for ours, theirs in names.items()}
    values = (np.arange(1, 4), np.array(2))
    for one, two in itertools.product(DTYPES, repeat=2):
        for a, b in itertools.product(values, repeat=2):
            theirs = [
                torch.tensor(v, dtype=getattr(torch, names[d])) for v, d in ((a, one), (b, two))
            ]
            expected = back[str(function(*theirs).dtype).removeprefix("torch.")]
            found = function(tc.tensor(a, dtype=one), tc.tensor(b, dtype=two))
            assert found.dtype == expected, (one, a.shape, two, b.shape)
    for one, number in itertools.product(DTYPES, (2, 2.5)):
        expected = function(torch.ones(2, dtype=getattr(torch, names[one])), number).dtype
        found = function(tc.ones(2, dtype=one), number)
        assert names[str(found.dtype)] == str(expected).removeprefix("torch.")
