"""The dtype of a result, if the operands have two dtypes, follows torch's rules."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

import trainable_candle as tc

DTYPES = ("f64", "f32", "f16", "bf16", "i64", "u8")
# The dtypes that torch 2.9 gives to a + b, where both tensors have at least one dimension. A row is
# the dtype of a, a column the dtype of b; both have the order of DTYPES.
SUMS = """
f64 f64 f64 f64 f64 f64
f64 f32 f32 f32 f32 f32
f64 f32 f16 f32 f16 f16
f64 f32 f32 bf16 bf16 bf16
f64 f32 f16 bf16 i64 i64
f64 f32 f16 bf16 i64 u8
"""
TABLE = {
    (a, b): dtype
    for (a, row) in zip(DTYPES, SUMS.split("\n")[1:-1], strict=True)
    for (b, dtype) in zip(DTYPES, row.split(), strict=True)
}
TORCH = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64",
         "u8": "uint8"}  # fmt: skip


def twos(dtype: str, *shape: int) -> tc.Tensor:
    """Return a tensor whose elements are 2."""
    return tc.ones(*shape, dtype=dtype) * 2


@pytest.mark.parametrize(("a", "b"), list(product(DTYPES, DTYPES)))
def test_sums_have_torchs_dtypes(a: str, b: str) -> None:
    found = twos(a, 3) + twos(b, 3)
    assert str(found.dtype) == TABLE[a, b]
    assert found.to("f64").tolist() == [4.0] * 3
    assert str((twos(a, 3) * twos(b, 3)).dtype) == TABLE[a, b]
    assert (twos(a, 3) <= twos(b, 3)).tolist() == [1] * 3


@pytest.mark.parametrize(("a", "b"), list(product(DTYPES, DTYPES)))
def test_torch_has_the_dtypes_of_the_table_and_divides_integers_in_f32(a: str, b: str) -> None:
    torch = pytest.importorskip("torch")
    x, y = (torch.ones(3, dtype=getattr(torch, TORCH[name])) for name in (a, b))
    assert (x + y).dtype == getattr(torch, TORCH[TABLE[a, b]])
    both_are_integers = {"i64", "u8"} >= {a, b}
    assert (x / y).dtype == getattr(torch, "float32" if both_are_integers else TORCH[TABLE[a, b]])


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: twos("f16", 2) + tc.tensor(1.0, dtype="f32"), "f16"),
        (lambda: tc.tensor(1.0, dtype="f64") * twos("f32", 2), "f32"),
        (lambda: twos("i64", 2) + tc.tensor(1.0, dtype="f16"), "f16"),
        (lambda: twos("u8", 2) + tc.tensor(1), "u8"),
        (lambda: twos("i64", 2) * 2.5, "f32"),
        (lambda: 2.5 - twos("u8", 2), "f32"),
        (lambda: twos("i64", 2) / 2, "f32"),
        (lambda: 1 / twos("i64", 2), "f32"),
        (lambda: twos("i64", 2) / twos("u8", 2), "f32"),
        (lambda: twos("f16", 2) / 2, "f16"),
    ],
)
def test_scalars_and_divisions_change_only_integer_dtypes(
    call: Callable[[], tc.Tensor], dtype: str
) -> None:
    assert str(call().dtype) == dtype


def test_values_and_gradients_pass_through_the_conversion() -> None:
    x = tc.Var(tc.tensor([1.0, 2.0], dtype="f16"))
    y = tc.Var(tc.tensor([3.0, 5.0], dtype="f32"))
    (x * y).sum().backward()
    assert (str(x.grad.dtype), x.grad.tolist()) == ("f16", [3.0, 5.0])
    assert (str(y.grad.dtype), y.grad.tolist()) == ("f32", [1.0, 2.0])
    mask = tc.tensor([0, 1], dtype="u8")
    assert (y.detach() * mask).tolist() == [0.0, 5.0]
    quotients = tc.tensor([7, 8]) / tc.tensor([2, 5])
    assert quotients.numpy().tolist() == np.float32([3.5, 1.6]).tolist()


def test_matrix_products_and_numpy_arrays_of_another_dtype_are_rejected() -> None:
    with pytest.raises(tc.DTypeError, match="matmul: dtypes f32 and f16 differ"):
        tc.ones(2, 3) @ tc.ones(3, 2, dtype="f16")
    with pytest.raises(tc.DTypeError, match="add: dtypes f32 and f64 differ"):
        tc.ones(2) + np.ones(2)
