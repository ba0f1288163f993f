"""Linear layers that multiply 8-bit codes (W8A8) of inputs and weights, compared with numpy."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional as F

Matrix = npt.NDArray[np.float64]
LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest number of each format."""
# By dtype: the largest allowed error of a result's element, relative to the result's largest
# element. The error comes from sums in f32 and from rounding to the dtype.
ROUNDING = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}


@pytest.fixture(autouse=True)
def w8a8() -> Iterator[None]:
    """Switch on the multiplication of codes."""
    tc.set_w8a8(True)
    yield
    tc.set_w8a8(False)


def nearest(x: Matrix, format: str) -> Matrix:
    """Round each element of x to the nearest number of the format, ties to even."""
    if format == "int8":
        return np.rint(x)
    # E4M3: the least exponent of a normal number is -6, and the fraction has three bits. The bound
    # 2**-20 only avoids the logarithm of 0.
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6)
    step = 2.0 ** (exponent - 3)
    return np.rint(x / step) * step


def rounded(x: Matrix, format: str) -> Matrix:
    """Round each row of x to a scale times numbers of the format.

    The scale is computed in f32, as in the library, because the scale decides which values are
    ties.
    """
    single = x.astype(np.float32)
    largest = np.abs(single).max(axis=1, keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(LARGEST[format]), np.float32(1))
    numbers = nearest((single / scale).astype(np.float64), format)
    return np.asarray(numbers * scale.astype(np.float64))


def random_tensor(shape: tuple[int, ...], dtype: str) -> tc.Tensor:
    return tc.randn(shape).to(dtype)


def values_of(x: tc.Tensor) -> Matrix:
    return np.asarray(x.detach().to("cpu").to("f64").numpy())


def check(found: tc.Tensor, expected: Matrix, dtype: str) -> None:
    error = np.abs(values_of(found) - expected).max() / np.abs(expected).max()
    assert error < ROUNDING[dtype], error


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_both_passes_multiply_codes(format: str, dtype: str, rows: int) -> None:
    tc.manual_seed(rows)
    weight = tc.quantize(random_tensor((48, 64), dtype), format)
    x, bias = tc.Var(random_tensor((rows, 64), dtype)), random_tensor((48,), dtype)
    y = F.linear(x, weight, bias)
    weight_values = values_of(weight.dequantize("f64"))
    check(y, rounded(values_of(x), format) @ weight_values.T + values_of(bias), dtype)
    output_gradient = random_tensor((rows, 48), dtype)
    gradient = tc.grad((y * output_gradient).to("f32").sum(), [x])[0]
    # The backward pass multiplies the gradient by the scales of the weight's rows before it rounds.
    row_scales = weight.tensors()["scales"].numpy()
    check(
        gradient,
        rounded(values_of(output_gradient) * row_scales, format)
        @ (weight_values / row_scales[:, None]),
        dtype,
    )


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_non_finite_row_makes_only_its_own_result_nan(format: str) -> None:
    weight = tc.quantize(tc.randn((16, 32)), format)
    x = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    x[1, 3], x[2, 5] = np.nan, np.inf
    y = F.linear(tc.tensor(x), weight, None).numpy()
    assert np.isnan(y[1:3]).all()
    assert np.isfinite(y[[0, 3]]).all()


def test_inputs_of_zeros_give_zeros() -> None:
    weight = tc.quantize(tc.randn((16, 32)), "int8")
    np.testing.assert_array_equal(
        F.linear(tc.zeros((3, 32)), weight, None).numpy(), np.zeros((3, 16))
    )


@pytest.mark.parametrize(
    ("shape", "format"),
    # Codes need int8 or fp8, and numbers of features that are multiples of 16.
    [((16, 24), "int8"), ((20, 32), "fp8"), ((16, 64), "nf4")],
)
def test_layers_whose_weights_cannot_multiply_codes_multiply_values(
    shape: tuple[int, int], format: str
) -> None:
    weight = tc.quantize(tc.randn(shape), format)
    x = tc.randn((5, shape[1]))
    found = F.linear(x, weight, None)
    tc.set_w8a8(False)
    np.testing.assert_array_equal(found.numpy(), F.linear(x, weight, None).numpy())
