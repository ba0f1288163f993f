"""The dtype of an operation on tensors of two dtypes: torch's rules."""

from itertools import product
from typing import Any

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
    (a, b): found
    for (a, row) in zip(DTYPES, SUMS.split("\n")[1:-1], strict=True)
    for (b, found) in zip(DTYPES, row.split(), strict=True)
}
TORCH = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64",
         "u8": "uint8"}  # fmt: skip


def made(dtype: str, *shape: int) -> tc.Tensor:
    return tc.ones(*shape, dtype=dtype) * 2


@pytest.mark.parametrize(("a", "b"), list(product(DTYPES, DTYPES)))
def test_sums_have_torchs_dtypes(a: str, b: str) -> None:
    found = made(a, 3) + made(b, 3)
    assert str(found.dtype) == TABLE[a, b]
    assert found.to("f64").tolist() == [4.0] * 3
    assert str((made(a, 3) * made(b, 3)).dtype) == TABLE[a, b]
    assert (made(a, 3) <= made(b, 3)).tolist() == [1] * 3


@pytest.mark.parametrize(("a", "b"), list(product(DTYPES, DTYPES)))
def test_the_table_equals_that_of_torch(a: str, b: str) -> None:
    torch = pytest.importorskip("torch")
    x, y = (torch.ones(3, dtype=getattr(torch, TORCH[name])) for name in (a, b))
    assert (x + y).dtype == getattr(torch, TORCH[TABLE[a, b]])
    whole = {"i64", "u8"} >= {a, b}
    assert (x / y).dtype == getattr(torch, "float32" if whole else TORCH[TABLE[a, b]])


@pytest.mark.parametrize(
    ("found", "dtype"),
    [
        (lambda: made("f16", 2) + tc.tensor(1.0, dtype="f32"), "f16"),
        (lambda: tc.tensor(1.0, dtype="f64") * made("f32", 2), "f32"),
        (lambda: made("i64", 2) + tc.tensor(1.0, dtype="f16"), "f16"),
        (lambda: made("u8", 2) + tc.tensor(1), "u8"),
        (lambda: made("i64", 2) * 2.5, "f32"),
        (lambda: 2.5 - made("u8", 2), "f32"),
        (lambda: made("i64", 2) / 2, "f32"),
        (lambda: 1 / made("i64", 2), "f32"),
        (lambda: made("i64", 2) / made("u8", 2), "f32"),
        (lambda: made("f16", 2) / 2, "f16"),
    ],
)
def test_numbers_and_tensors_without_dimensions_only_turn_integers_into_floats(
    found: Any, dtype: str
) -> None:
    assert str(found().dtype) == dtype


def test_values_and_gradients_pass_through_the_conversion() -> None:
    x = tc.Var(tc.tensor([1.0, 2.0], dtype="f16"))
    y = tc.Var(tc.tensor([3.0, 5.0], dtype="f32"))
    (x * y).sum().backward()
    assert (str(x.grad.dtype), x.grad.tolist()) == ("f16", [3.0, 5.0])
    assert (str(y.grad.dtype), y.grad.tolist()) == ("f32", [1.0, 2.0])
    mask = tc.tensor([0, 1], dtype="u8")
    assert (y.detach() * mask).tolist() == [0.0, 5.0]
    assert (tc.tensor([7, 8]) / tc.tensor([2, 5])).numpy().tolist() == np.float32(
        [3.5, 1.6]
    ).tolist()


def test_matrix_products_and_numpy_arrays_of_another_dtype_are_rejected() -> None:
    with pytest.raises(tc.DTypeError, match="matmul: dtypes f32 and f16 differ"):
        tc.ones(2, 3) @ tc.ones(3, 2, dtype="f16")
    with pytest.raises(tc.DTypeError, match="add: dtypes f32 and f64 differ"):
        tc.ones(2) + np.ones(2)
