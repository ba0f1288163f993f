"""Floor division and remainders, which follow Python and torch."""

import math
import operator
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

VALUES = [-7.5, -3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.5, 7.0]
DIVISORS = [-2.0, -0.7, -0.1, 0.1, 0.3, 1.0, 3.0]
# The names of our dtypes in torch.
TORCH = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64",
         "u8": "uint8"}  # fmt: skip


def operands(dividend_dtype: str, divisor_dtype: str) -> Iterator[tc.Tensor]:
    """Yield a tensor of dividends and one of divisors: every pair of VALUES and DIVISORS.

    If the divisors have an integer dtype, those that become 0 are left out. If either dtype is u8,
    both tensors hold absolute values.
    """
    dtypes = (dividend_dtype, divisor_dtype)
    has_integer_divisors, is_signed = "f" not in divisor_dtype, "u8" not in dtypes
    pairs = [(a, b) for a, b in product(VALUES, DIVISORS) if int(b) or not has_integer_divisors]
    for dtype, numbers in zip(dtypes, zip(*pairs, strict=True), strict=True):
        values = np.array(numbers if is_signed else np.abs(numbers))
        yield tc.tensor(values if "f" in dtype else values.astype(np.int64)).to(dtype)


@pytest.mark.parametrize("function", [operator.floordiv, operator.mod])
@pytest.mark.parametrize(
    ("dividend_dtype", "divisor_dtype"),
    [(d, d) for d in ("f64", "f32", "f16", "bf16", "i64", "u8")]
    + [("i64", "f16"), ("u8", "i64"), ("f16", "bf16"), ("f64", "i64")],
)
def test_results_equal_those_of_torch(
    function: Callable[..., Any], dividend_dtype: str, divisor_dtype: str
) -> None:
    torch = pytest.importorskip("torch")

    def theirs(x: tc.Tensor) -> Any:
        dtype = getattr(torch, TORCH[str(x.dtype)])
        return torch.tensor(x.to("f64").tolist(), dtype=torch.float64).to(dtype)

    def compare(x: Any, y: Any) -> None:
        found = function(x, y)
        expected = function(*(theirs(v) if isinstance(v, tc.Tensor) else v for v in (x, y)))
        assert getattr(torch, TORCH[str(found.dtype)]) == expected.dtype
        np.testing.assert_array_equal(found.to("f64").numpy(), expected.double().numpy())

    a, b = operands(dividend_dtype, divisor_dtype)
    compare(a, b)
    # A number as the divisor, and as the dividend.
    for number in (3, -2.5):
        compare(a, number)
        compare(number, b)


def test_large_integers_stay_exact() -> None:
    x = tc.tensor([2**62 + 1, -(2**62) - 1])
    assert (x // 1).tolist() == [2**62 + 1, -(2**62) - 1]
    assert (x % 10).tolist() == [(2**62 + 1) % 10, (-(2**62) - 1) % 10]


def test_numbers_and_arrays_divide_and_are_divided() -> None:
    assert (tc.tensor([5, 6]) // 2.5).tolist() == [2.0, 2.0]
    assert (5 // tc.tensor([2, 3])).tolist() == [2, 1]
    assert (np.array([5, 7]) % tc.tensor([2, 4])).tolist() == [1, 3]


def test_remainders_have_torchs_gradients() -> None:
    x, y = tc.Var(tc.tensor([5.5, -5.5])), tc.Var(tc.tensor([2.0, 2.0]))
    # Floor division is constant between its jumps, so it has no gradient.
    assert ((x // y) * 2).requires_grad is False
    remainders = x % y
    assert remainders.tolist() == [1.5, 0.5]
    remainders.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]
    assert y.grad is not None
    # The remainder is x - (x // y) * y, so its gradient for y is -(x // y).
    assert y.grad.tolist() == [-2.0, 3.0]


X = tc.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: X // 0, tc.ArgumentError, "floordiv: the divisor is 0"),
        (
            lambda: X % tc.tensor([1, 0]),
            tc.ArgumentError,
            "mod: the divisor is 0, or has an element 0",
        ),
        (lambda: X // tc.ones(3), tc.ShapeError, r"floordiv: shapes \[2\] and \[3\] do not"),
        (lambda: X.to("u8") % 300, tc.ArgumentError, "mod: the number 300 does not fit into u8"),
        (lambda: X // "a", TypeError, "unsupported operand type.* for //: .*Tensor' and 'str'"),
        (lambda: None % X, TypeError, "unsupported operand type.* for %: 'NoneType' and"),
    ],
)
def test_impossible_divisions_are_reported(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("dtype", "dividend", "divisor"),
    [("f32", 1e38, 1e-38), ("f64", 1e300, 1e-300), ("f16", 60000.0, 1e-3), ("bf16", 1e38, 1e-38)],
)
def test_a_remainder_whose_quotient_overflows_is_a_number(
    dtype: str, dividend: float, divisor: float
) -> None:
    x, y = tc.tensor([dividend], dtype=dtype), tc.Var(tc.tensor([divisor], dtype=dtype))
    remainders = x % y
    assert remainders.tolist() == (x % y.detach()).tolist()
    remainders.sum().backward()
    assert y.grad is not None
    assert -np.inf < y.grad.item() < -dividend


def test_the_remainder_by_infinity_is_the_dividend() -> None:
    dividend, divisor = tc.Var([3.0, 2.5]), tc.Var([math.inf, 2.0])
    remainders = dividend % divisor
    assert remainders.tolist() == [3.0, 0.5]
    remainders.sum().backward()
    assert dividend.grad.tolist() == [1.0, 1.0]
    # As above, the gradient of a divisor is minus the quotient.
    assert divisor.grad.tolist() == [0.0, -1.0]
