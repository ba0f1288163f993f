"""Matrices in formats of eight and four bits: codes, values, products and errors.

Expected NF4 values come from bitsandbytes (tests/golden/quantized). Expected 8-bit values come from
the definitions, written in numpy.
"""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional as F

GOLDEN = np.load(Path(__file__).parents[1] / "golden/quantized/nf4.npz")
FORMATS = ["int8", "fp8", "nf4"]


def matrix(rows: int, columns: int) -> np.ndarray:
    """Return the values that `matrix` in tests/golden/quantized/make_nf4.py returns."""
    i = np.arange(rows * columns, dtype=np.float64)
    values = (np.sin(i * 0.7) + np.sin(i * i * 0.013) * np.sin(i * 0.0031) ** 5) * 0.05
    return values.astype(np.float32).reshape(rows, columns)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("name", "shape"), [("whole", (96, 256)), ("ragged", (37, 91))])
def test_nf4_equals_that_of_bitsandbytes(name: str, shape: tuple[int, int], dtype: str) -> None:
    values = matrix(*shape)
    if name == "whole":
        # make_nf4.py sets these rows to zero, too, so that some blocks have only zeros.
        values[3:5] = 0
    found = tc.quantize(tc.tensor(values).to(dtype), "nf4")
    parts = {key: tensor.numpy() for key, tensor in found.tensors().items()}
    expected = {
        key: GOLDEN[f"{name}.{dtype}.{key}"] for key in ("codes", "scales", "outer", "values")
    }
    np.testing.assert_array_equal(parts["codes"], expected["codes"])
    # The golden `scales` are codes, and `outer` has the scales of these codes.
    np.testing.assert_array_equal(parts["scale_codes"], expected["scales"])
    # The offset is the mean of the scales. Its last digit depends on the order of summation.
    np.testing.assert_allclose(parts["offset"], GOLDEN[f"{name}.{dtype}.offset"], rtol=2e-7)
    np.testing.assert_allclose(parts["scales"], expected["outer"], rtol=1e-6)
    dequantized = found.dequantize().to("f32").numpy()
    tolerance = 2e-7 if dtype == "f32" else 4e-3
    # The golden file has the values of the first eight rows.
    np.testing.assert_allclose(dequantized[:8], expected["values"], rtol=tolerance, atol=1e-9)


def test_int8_rounds_to_even_with_one_scale_per_row() -> None:
    values = matrix(5, 33)
    values[2] = 0
    found = tc.quantize(tc.tensor(values), "int8")
    scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
    # A row of zeros has the scale 1.
    scales[2] = 1
    codes = np.rint(values / scales).astype(np.int8)
    assert codes.min() == -127 or codes.max() == 127
    parts = found.tensors()
    np.testing.assert_array_equal(parts["codes"].numpy().view(np.int8).reshape(5, 33), codes)
    np.testing.assert_array_equal(found.dequantize().numpy(), codes * scales)


def test_fp8_has_the_codes_of_e4m3() -> None:
    values = matrix(5, 33)
    found = tc.quantize(tc.tensor(values), "fp8")
    scales = np.abs(values).max(1, keepdims=True) / np.float32(448)  # the largest value of E4M3
    # E4M3 codes have a sign, four exponent bits (bias 7) and three fraction bits; 0x7f is NaN.
    code = np.arange(0x7F)
    # The exponent e and the fraction f give (1 + f / 8) * 2**(e - 7) = (8 + f) * 2**(e - 10). Codes
    # with e = 0 are subnormal: f / 8 * 2**-6.
    normal = (8 + code % 8) * 2.0 ** (code // 8 - 10)
    table = np.where(code < 8, code * 2.0**-9, normal).astype(np.float32)
    distance = np.abs(np.abs(values / scales)[..., None] - table)
    # The nearest code; of two equally near ones, the even code.
    is_odd = np.broadcast_to(code % 2, distance.shape)
    codes = np.lexsort((is_odd, distance))[..., 0]
    negative = np.signbit(values)
    found_codes = found.tensors()["codes"].numpy().reshape(5, 33)
    np.testing.assert_array_equal(found_codes, codes + 0x80 * negative)
    expected = np.where(negative, -table[codes], table[codes]) * scales
    np.testing.assert_array_equal(found.dequantize().numpy(), expected)


# Exact scales and rounding to the nearest code give about 0.0074, 0.0263 and 0.0916.
@pytest.mark.parametrize(("format", "bound"), [("int8", 0.009), ("fp8", 0.027), ("nf4", 0.093)])
def test_relative_rounding_errors_of_gaussian_weights_are_below_bounds(
    format: str, bound: float
) -> None:
    tc.manual_seed(3)
    weight = tc.randn((256, 512)).numpy()
    found = tc.quantize(tc.tensor(weight), format).dequantize().numpy()
    assert np.sqrt(((found - weight) ** 2).mean() / (weight**2).mean()) < bound


def test_quantized_tensors_have_the_expected_bytes_and_repr() -> None:
    weight = tc.zeros((96, 256), dtype="bf16")
    sizes = {format: tc.quantize(weight, format).nbytes for format in FORMATS}
    blocks = 96 * 256 // 64
    # int8 and fp8 have an f32 scale for each row. NF4 has a byte for the scale of each block of 64
    # values, and an f32 scale for every 256 of these bytes.
    assert sizes == {
        "int8": 96 * 256 + 96 * 4,
        "fp8": 96 * 256 + 96 * 4,
        "nf4": 96 * 256 // 2 + blocks + 4 * -(-blocks // 256),
    }
    found = tc.quantize(weight, "nf4")
    assert (found.shape, found.dtype, found.format) == ((96, 256), "bf16", "nf4")
    assert repr(found) == 'QuantizedTensor(96 x 256, "nf4", bf16, 12680 bytes)'


@pytest.mark.parametrize("format", FORMATS)
def test_a_linear_layer_takes_a_quantized_weight(format: str) -> None:
    tc.manual_seed(1)
    weight = tc.quantize(tc.randn((24, 40)), format)
    x = tc.Var(tc.randn((3, 40)))
    bias = tc.randn((24,))
    y = F.linear(x, weight, bias)
    expected = F.linear(x, weight.dequantize(), bias)
    np.testing.assert_array_equal(y.numpy(), expected.numpy())
    (found,) = tc.grad(y.sum(), [x])
    (wanted,) = tc.grad(expected.sum(), [x])
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def test_a_large_weight_is_dequantized_in_parts() -> None:
    """The weight has more than 2**22 elements, the most that the CPU dequantizes at once."""
    tc.manual_seed(1)
    weight = tc.quantize(tc.randn((2100, 4096)), "nf4")
    x = tc.randn((2, 4096))
    np.testing.assert_allclose(
        F.linear(x, weight).numpy(), F.linear(x, weight.dequantize()).numpy(), rtol=1e-5, atol=1e-5
    )


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(tc.errors.ShapeError, match="expected a matrix"):
        tc.quantize(tc.zeros((2, 3, 4)), "nf4")
    with pytest.raises(tc.errors.DTypeError, match="expected floating point"):
        tc.quantize(tc.zeros((2, 3), dtype="u8"), "int8")
    with pytest.raises(tc.errors.ArgumentError, match="int8, fp8, nf4"):
        tc.quantize(tc.zeros((2, 3)), "nf5")
    with pytest.raises(tc.errors.ArgumentError, match="detach"):
        tc.quantize(tc.Var(tc.zeros((2, 3))), "nf4")
    for value in (float("nan"), float("inf")):
        for format in FORMATS:
            with pytest.raises(tc.errors.ArgumentError, match="non-finite"):
                tc.quantize(tc.tensor([[1.0, value]]), format)
    weight = tc.quantize(tc.zeros((4, 6)), "int8")
    with pytest.raises(tc.errors.ShapeError, match=r"\(\.\.\., 6\)"):
        F.linear(tc.zeros((2, 5)), weight)
    with pytest.raises(tc.errors.DTypeError, match="expected floating point"):
        weight.dequantize("u8")
