"""Matrices in ggml's block formats. Expected values are from gguf-py (tests/golden/quantized)."""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional as F

GOLDEN = np.load(Path(__file__).parents[1] / "golden/quantized/gguf.npz")
FORMATS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]


def example(format: str, dtype: str = "f32") -> tc.QuantizedTensor:
    """Return the matrix of the golden blocks."""
    return tc.QuantizedTensor.from_blocks(tc.tensor(GOLDEN[f"{format}.blocks"]), format, dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_values_equal_those_of_gguf_bit_by_bit(format: str) -> None:
    expected = GOLDEN[f"{format}.values"]
    found = example(format)
    assert (found.shape, found.format) == (expected.shape, format)
    assert found.nbytes == GOLDEN[f"{format}.blocks"].size
    values = found.dequantize().numpy()
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))
    rounded = found.dequantize("bf16")
    expected_bf16 = tc.tensor(expected).to("bf16")
    np.testing.assert_array_equal(rounded.to("f32").numpy(), expected_bf16.to("f32").numpy())


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
def test_quantize_makes_the_blocks_that_gguf_makes(format: str) -> None:
    # `FORMAT.made`: the blocks that gguf-py makes of `weights`.
    found = tc.quantize(tc.tensor(GOLDEN["weights"]), format)
    parts = found.tensors()
    assert list(parts) == ["codes"]
    np.testing.assert_array_equal(parts["codes"].numpy(), GOLDEN[f"{format}.made"].ravel())


@pytest.mark.parametrize("format", ["q4_0", "q8_0", "q6_k"])
def test_a_linear_layer_takes_a_quantized_weight(format: str) -> None:
    tc.manual_seed(1)
    if format != "q6_k":
        weight = tc.quantize(tc.randn((24, 288)), format)
    else:
        # `quantize` cannot make q6_k. Draw random blocks of 210 bytes, two in each row. A block
        # ends with its f16 scale. Set this to 1/8, because random bytes may be NaN.
        blocks = np.random.default_rng(0).integers(0, 256, (24, 2 * 210), np.uint8)
        blocks.reshape(24, 2, 210)[:, :, 208:] = np.float16([0.125]).view(np.uint8)
        weight = tc.QuantizedTensor.from_blocks(tc.tensor(blocks), format, "f32")
    x = tc.Var(tc.randn((3, weight.shape[1])))
    y = F.linear(x, weight)
    expected = F.linear(x, weight.dequantize())
    np.testing.assert_array_equal(y.numpy(), expected.numpy())
    (found,) = tc.grad(y.sum(), [x])
    (wanted,) = tc.grad(expected.sum(), [x])
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def test_a_large_weight_is_dequantized_in_parts() -> None:
    """The weight has more elements than the CPU dequantizes at once."""
    tc.manual_seed(1)
    weight = tc.quantize(tc.randn((2100, 4096)), "q8_0")
    x = tc.randn((2, 4096))
    np.testing.assert_allclose(
        F.linear(x, weight).numpy(), F.linear(x, weight.dequantize()).numpy(), rtol=1e-5, atol=1e-5
    )


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(tc.errors.ShapeError, match="multiple of 32, the block size of q8_0"):
        tc.quantize(tc.zeros((2, 33)), "q8_0")
    with pytest.raises(tc.errors.ArgumentError, match="read from GGUF files"):
        tc.quantize(tc.zeros((2, 256)), "q4_k")
    # The f16 scale of values of 3e38 is infinite.
    for value in (float("nan"), float("inf"), 3e38):
        for format in ("q8_0", "q4_0"):
            with pytest.raises(tc.errors.ArgumentError, match="non-finite"):
                tc.quantize(tc.full((1, 32), value), format)
    blocks = tc.zeros((2, 35), dtype="u8")
    with pytest.raises(tc.errors.ShapeError, match="multiple of 34, the bytes of a block of q8_0"):
        tc.QuantizedTensor.from_blocks(blocks, "q8_0")
    # The message lists the known formats, such as q4_k.
    with pytest.raises(tc.errors.ArgumentError, match="q4_k"):
        tc.QuantizedTensor.from_blocks(blocks, "q3_k")
    with pytest.raises(tc.errors.DTypeError, match="expected u8 blocks"):
        tc.QuantizedTensor.from_blocks(tc.zeros((2, 34)), "q8_0")
