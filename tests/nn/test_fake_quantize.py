"""Rounding to the values of a quantized format, and training with it (`qat`).

`nn.functional.fake_quantize` against torchao (tests/golden/quantized) and `quantize`, and adapted
layers that compute with rounded weights and inputs. `factors` multiply the scales; see also
test_fake_quantize_formulas.py. They are not the factors of a LoRA, `lora_down` and `lora_up`.
"""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError, DTypeError, ShapeError
from trainable_candle.nn import functional as F

GOLDEN = np.load(Path(__file__).parents[1] / "golden/quantized/torchao.npz")
FORMATS = ["int8", "int4", "fp8", "nf4"]
RANK, ALPHA = 4, 8.0


def matrix(rows: int, columns: int) -> np.ndarray:
    """Return a matrix of fixed values. The golden file is made from `matrix(6, 64)`."""
    i = np.arange(rows * columns, dtype=np.float64)
    values = (np.sin(i * 0.7) + np.sin(i * i * 0.013) * np.sin(i * 0.0031) ** 5) * 0.05
    return values.astype(np.float32).reshape(rows, columns)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_values_and_gradients_are_those_of_torchao(format: str) -> None:
    values = matrix(6, 64)
    values[2, :32] = 0  # an int4 group of zeros, as in the golden file
    x = tc.Var(tc.tensor(values))
    y = F.fake_quantize(x, format)
    np.testing.assert_allclose(y.numpy(), GOLDEN[f"{format}.values"], rtol=2e-7, atol=0)
    y.sum().backward()
    # No element is clipped in fp8, for which the golden file has no gradient.
    expected = GOLDEN[f"{format}.gradient"] if format != "fp8" else np.ones_like(values)
    np.testing.assert_array_equal(x.grad.numpy(), expected)
    # Only in int4 would some elements round to a number beyond the last code. They get no gradient.
    assert (expected == 0).any() == (format == "int4")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_values_are_those_of_the_format_bit_by_bit(format: str, dtype: str) -> None:
    weight = tc.tensor(matrix(37, 91)).to(dtype)
    expected = tc.quantize(weight, format).dequantize().to("f32").numpy()
    np.testing.assert_array_equal(F.fake_quantize(weight, format).to("f32").numpy(), expected)


def test_nf4_has_the_codes_of_the_format_and_scales_in_f32() -> None:
    values = matrix(32, 64)
    parts = tc.quantize(tc.tensor(values), "nf4").tensors()
    # A byte has two codes, the first one in the upper four bits.
    unpacked = parts["codes"].numpy().reshape(-1, 1) >> np.array([4, 0]) & 15
    # Each block of 64 elements, here one row, has a scale. `table` gets the values of the codes
    # that occur.
    table = np.zeros(16, np.float32)
    rounded = F.fake_quantize(tc.tensor(values), "nf4").numpy()
    largest = np.abs(values).max(1, keepdims=True)
    codes = unpacked.reshape(values.shape)
    for code in range(16):
        if (codes == code).any():
            table[code] = (rounded / largest)[codes == code][0]
    np.testing.assert_allclose(rounded, table[codes] * largest, rtol=3e-7)
    assert (np.diff(table[np.unique(codes)]) > 0).all()
    assert (table.min(), table.max()) == (-1, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_rounded_values_are_representable_in_the_format(format: str) -> None:
    once = F.fake_quantize(tc.tensor(matrix(6, 64)), format)
    if format == "int4":
        # The largest element of a block is 7.5 steps, but the largest code is 7: a second rounding
        # has smaller steps. So check only that a block has at most 16 values.
        assert len(np.unique(once.numpy()[0, :32] / np.abs(once.numpy()[0, :32]).max())) <= 16
    else:
        again = F.fake_quantize(once, format).numpy()
        np.testing.assert_allclose(again, once.numpy(), rtol=3e-7)


def test_int8_rounds_a_negated_value_to_the_negated_code() -> None:
    """torchao's default, unlike this library, rounds the extremes 127.5 and -127.5 differently.

    Its codes are -128 to 127 and its scale is max / 127.5, so they become 127 and -128.
    """
    values = np.random.default_rng(7).standard_normal((64, 32)).astype(np.float32)
    found, negated = (F.fake_quantize(tc.tensor(x), "int8").numpy() for x in (values, -values))
    np.testing.assert_array_equal(found, -negated)
    # The largest magnitude of a row is a code, whatever its sign. With torchao's default, a
    # positive one would become 127 / 127.5 of itself.
    largest = np.abs(values).argmax(1)
    rows = np.arange(len(values))
    assert len(np.unique(np.sign(values[rows, largest]))) == 2
    np.testing.assert_allclose(found[rows, largest], values[rows, largest], rtol=2.0**-22)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
def test_factors_of_one_change_no_bit(format: str, dtype: str) -> None:
    random = np.random.default_rng(4)
    values = tc.tensor(random.standard_normal((24, 128)).astype(np.float32)).to(dtype)
    # int8 and fp8 have one scale for each row, which has 128 elements here.
    group = {"int8": 128, "int4": 32, "fp8": 128, "nf4": 64}[format]
    results = []
    for factors in (None, tc.ones((values.numel() // group,))):
        x = tc.Var(values)
        y = F.fake_quantize(x, format, factors)
        (y * y).sum().backward()
        results.append([part.to("f32").numpy() for part in (y.detach(), x.grad)])
    for plain, learned in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, learned)


@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_stays_nan_and_leaves_later_rows_finite(format: str) -> None:
    values = matrix(6, 64)
    values[1, 3] = np.nan
    rounded = F.fake_quantize(tc.tensor(values), format).numpy()
    assert np.isnan(rounded[1, 3])
    assert np.isfinite(rounded[2:]).all()


@pytest.mark.parametrize(
    ("shape", "format", "message"),
    [
        ((2, 3, 4), "int8", "expected a matrix"),
        ((4, 40), "int4", "found 40 in_features, expected a multiple of 32"),
        ((3, 20), "nf4", "found 60 elements, expected a multiple of 64"),
    ],
    ids=["no matrix", "int4", "nf4"],
)
def test_wrong_shapes_are_reported(shape: tuple[int, ...], format: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        F.fake_quantize(tc.zeros(shape), format)


def test_a_wrong_number_of_factors_is_rejected() -> None:
    with pytest.raises(ShapeError, match=r"found factors of shape \[8\], expected \(16,\)"):
        F.fake_quantize(tc.zeros((8, 64)), "int4", tc.ones((8,)))


def test_wrong_formats_and_dtypes_are_reported() -> None:
    with pytest.raises(ArgumentError, match="expected one of int8, int4, fp8, nf4"):
        F.fake_quantize(tc.zeros((2, 2)), "q8_0")
    with pytest.raises(DTypeError, match="expected a floating point tensor"):
        F.fake_quantize(tc.zeros((2, 2), dtype="u8"), "int8")


@pytest.mark.parametrize("layer", [tc.nn.LoRALinear, tc.nn.DoRALinear])
@pytest.mark.parametrize("format", ["int8", "fp8", "nf4"])
def test_an_adapted_layer_computes_with_its_rounded_weight(
    layer: type[tc.nn.LoRALinear | tc.nn.DoRALinear], format: str
) -> None:
    """For the same upstream gradient, the gradients equal those of a layer without rounding."""
    weight, x = tc.tensor(matrix(32, 64)), tc.tensor(matrix(5, 64)[::-1].copy())
    tc.manual_seed(0)
    aware = layer(weight, RANK, ALPHA, qat=format)
    tc.manual_seed(0)
    plain = layer(weight, RANK, ALPHA)
    up = tc.tensor(matrix(32, RANK) * 3)
    for each in (aware, plain):
        each.get_vars()[1].set(up)  # the variables: lora_down, lora_up and, in DoRA, magnitude
    merged = F.fake_quantize(plain.merge(), format)
    np.testing.assert_array_equal(aware.merge().numpy(), merged.numpy())
    y = aware(x)
    np.testing.assert_allclose(y.numpy(), F.linear(x, merged).numpy(), rtol=1e-5, atol=1e-7)
    y.sum().backward()
    plain(x).sum().backward()
    for aware_var, plain_var in zip(aware.get_vars(), plain.get_vars(), strict=True):
        found, expected = aware_var.grad.numpy(), plain_var.grad.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_clipped_elements_of_a_weight_pass_no_gradient_to_lora_down_and_lora_up() -> None:
    weight, x = tc.tensor(matrix(32, 64)), tc.tensor(matrix(5, 64)[::-1].copy())
    layer = tc.nn.LoRALinear(weight, RANK, ALPHA, qat="int4")
    down, up = layer.get_vars()
    up.set(tc.tensor(matrix(32, RANK) * 3))
    adapted = tc.Var(weight + layer.scale * (up.detach() @ down.detach()))
    F.fake_quantize(adapted, "int4").sum().backward()
    passes = adapted.grad.numpy()  # 0 for a clipped element, 1 for each of the others
    # Without `factors`, int4 clips only the largest element of a group, and only if it is positive.
    # The weight has 64 groups.
    assert 0 < (passes == 0).sum() < 80
    layer(x).sum().backward()
    # The gradient of the product `up @ down`.
    product_gradient = layer.scale * passes * x.numpy().sum(0)
    np.testing.assert_allclose(
        up.grad.numpy(), product_gradient @ down.detach().numpy().T, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        down.grad.numpy(), up.detach().numpy().T @ product_gradient, rtol=1e-4, atol=1e-6
    )


def test_sizes_dropouts_and_formats_that_rounding_does_not_support_are_rejected() -> None:
    weight = tc.tensor(matrix(8, 40))
    with pytest.raises(ConfigError, match=r"multiple of 32.*exclude_modules"):
        tc.nn.LoRALinear(weight, 2, 2.0, qat="int4")
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.5"):
        tc.nn.LoRALinear(weight, 2, 2.0, dropout=0.5, qat="int8")
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.5"):
        tc.LoraConfig(lora_dropout=0.5, qat="int8")
    with pytest.raises(ArgumentError, match="int16"):
        tc.LoraConfig(qat="int16")


class ConvAndLinear(tc.nn.Module):
    def __init__(self) -> None:
        self.conv = tc.nn.Conv2d(2, 4, 3)
        self.fc = tc.nn.Linear.init(16, 8)


def test_adapters_of_python_modules_round_weights_and_inputs_of_linear_layers() -> None:
    config = tc.LoraConfig(r=2, target_modules=["fc"], qat="int8")
    model = ConvAndLinear()
    before = model.fc.weight
    adapter = model.add_adapter(config)
    # A new adapter changes nothing, so the merged weight is the rounded weight.
    expected = F.fake_quantize(before.detach(), "int8").numpy()
    np.testing.assert_array_equal(adapter.merge().fc.weight.numpy(), expected)
    model = ConvAndLinear()
    config = tc.LoraConfig(r=2, target_modules=["fc"], qat="int8", qat_activations=True)
    adapter = model.add_adapter(config)
    x = tc.tensor(matrix(5, 16))
    found = model.fc(x).numpy()
    layer = adapter.merge().fc
    expected = F.linear(F.fake_quantize(x, "int8"), layer.weight, layer.bias).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_convolution_cannot_be_rounded() -> None:
    with pytest.raises(ConfigError, match=r"conv is a convolution.*exclude_modules"):
        ConvAndLinear().add_adapter(tc.LoraConfig(target_modules=["conv"], qat="int8"))


@pytest.mark.parametrize("layer", [tc.nn.LoRALinear, tc.nn.DoRALinear])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_inputs_are_rounded_with_a_scale_per_token(
    layer: type[tc.nn.LoRALinear | tc.nn.DoRALinear], format: str
) -> None:
    weight, x = tc.tensor(matrix(32, 64)), tc.Var(tc.tensor(matrix(6, 64).reshape(2, 3, 64)))
    aware = layer(weight, RANK, ALPHA, qat=format, qat_activations=True)
    aware.get_vars()[1].set(tc.tensor(matrix(32, RANK) * 3))  # lora_up
    tokens = F.fake_quantize(x.detach().reshape(6, 64), format)
    expected = F.linear(tokens, aware.merge()).reshape(2, 3, 32)
    y = aware(x)
    np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)
    unrounded = F.linear(x.detach(), aware.merge()).numpy()
    assert np.abs(y.numpy() - unrounded).max() > 1e-4
    # The gradient of the input passes through the rounding unchanged.
    y.sum().backward()
    expected_gradient = np.ones((6, 32), np.float32) @ aware.merge().numpy()
    np.testing.assert_allclose(
        x.grad.numpy().reshape(6, 64), expected_gradient, rtol=1e-4, atol=1e-6
    )


def test_inputs_are_rounded_only_to_formats_with_a_scale_per_row() -> None:
    weight = tc.tensor(matrix(32, 64))
    for format in (None, "int4", "nf4"):
        with pytest.raises(ConfigError, match=r"qat_activations .* expected int8 or fp8"):
            tc.nn.LoRALinear(weight, RANK, ALPHA, qat=format, qat_activations=True)
        with pytest.raises(ConfigError, match=r"qat_activations .* expected int8 or fp8"):
            tc.LoraConfig(qat=format, qat_activations=True)
