"""`fake_quantize` against formulas in float64, and trained factors of its scales against LSQ.

`fake_quantize` rounds each value to the nearest code times the scale of the value's group. Each
group may have a factor, which multiplies its scale and can be trained, as in LSQ: learned step size
quantization (arXiv:1902.08153).
"""

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional as F

# The table of NF4 in appendix E of the QLoRA paper (https://arxiv.org/abs/2305.14314).
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
# The values of e4m3 from 0 on: subnormal ones, then normal ones. Its last code is a NaN.
SUBNORMAL = [fraction * 2.0**-9 for fraction in range(8)]
NORMAL = [(1 + fraction / 8) * 2.0**power for power in range(-6, 9) for fraction in range(8)]
E4M3 = [*SUBNORMAL, *NORMAL[:-1]]
CODES = {
    "int8": np.arange(-127, 128.0),
    "int4": np.arange(-8, 8.0),
    "fp8": np.unique([sign * value for value in E4M3 for sign in (-1, 1)]),
    "nf4": np.array(NF4),
}
# The number of elements that share a scale, for rows of 64 elements.
GROUP_SIZES = {"int8": 64, "int4": 32, "fp8": 64, "nf4": 64}
# The largest magnitude in a group, divided by the group's scale. For int4 it is between the
# magnitudes of the last code, 7, and of the first, -8.
LARGEST = {"int8": 127, "int4": 7.5, "fp8": 448, "nf4": 1}


def nearest(v: np.ndarray, format: str) -> np.ndarray:
    """Return the code that is nearest to each value; `v` has values divided by their scales."""
    codes = CODES[format]
    found: np.ndarray = codes[np.abs(v[..., None] - codes).argmin(-1)]
    return found


def inside(v: np.ndarray, format: str) -> np.ndarray:
    """Return the mask of the values at most half a step beyond the first or the last code."""
    codes = CODES[format]
    low = codes[0] - (codes[1] - codes[0]) / 2
    high = codes[-1] + (codes[-1] - codes[-2]) / 2
    return np.asarray((v >= low) & (v <= high))


def rounded(values: np.ndarray, format: str) -> np.ndarray:
    """Return the values rounded to a format, without factors, in float64."""
    x = values.astype(np.float64).reshape(-1, GROUP_SIZES[format])
    scale = np.abs(x).max(1, keepdims=True) / LARGEST[format]
    return (nearest(x / scale, format) * scale).reshape(values.shape)


def lsq(
    values: np.ndarray, factors: np.ndarray, gradient: np.ndarray, format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounded values, and the gradients of values and of factors (equations 1 to 3).

    `factors` has a number for each group, and `gradient` is the gradient of the rounded values.

    In the paper, only values between the first and the last code get a gradient. Here, values up
    to half a step beyond these codes get one, too. The step is the distance between the first two
    codes or the last two codes; in the paper, codes are integers.
    """
    x = values.astype(np.float64).reshape(-1, GROUP_SIZES[format])
    plain_scale = np.abs(x).max(1, keepdims=True) / LARGEST[format]
    scale = plain_scale * factors[:, None]
    v = x / scale
    code, passes = nearest(v, format), inside(v, format)
    # The derivative of `code * scale` with respect to `scale`.
    scale_derivative = np.where(passes, code - v, code)
    gradient = gradient.reshape(x.shape)
    factor_gradient = (gradient * scale_derivative * plain_scale).sum(1)
    shape = values.shape
    return (code * scale).reshape(shape), (gradient * passes).reshape(shape), factor_gradient


@pytest.mark.parametrize("format", CODES)
def test_values_and_gradients_are_those_of_lsq(format: str) -> None:
    random = np.random.default_rng(3)
    values, gradient = random.standard_normal((2, 16, 64)).astype(np.float32)
    factors = random.uniform(0.5, 1.4, values.size // GROUP_SIZES[format]).astype(np.float32)
    x, f = tc.Var(tc.tensor(values)), tc.Var(tc.tensor(factors))
    y = F.fake_quantize(x, format, f)
    (y * tc.tensor(gradient)).sum().backward()
    expected, value_gradient, factor_gradient = lsq(
        values, factors.astype(np.float64), gradient, format
    )
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(x.grad.numpy(), value_gradient.astype(np.float32))
    # Factors below 1 move some values beyond the first or the last code: these get no gradient.
    assert 0 < (value_gradient == 0).mean() < 0.2
    np.testing.assert_allclose(f.grad.numpy(), factor_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", CODES)
def test_gradients_are_finite_differences_of_a_straight_through_function(format: str) -> None:
    """The function adds a constant to `x / scale` in place of rounding, and clips with constants.

    The constants are those that give the rounded values for the given values and factors.
    """
    random = np.random.default_rng(5)
    values, gradient = random.standard_normal((2, 4, 64)).astype(np.float32)
    factors = random.uniform(0.5, 1.4, values.size // GROUP_SIZES[format]).astype(np.float32)
    x0 = values.astype(np.float64).reshape(-1, GROUP_SIZES[format])
    f0, weights = factors.astype(np.float64)[:, None], gradient.reshape(x0.shape)
    plain_scale = np.abs(x0).max(1, keepdims=True) / LARGEST[format]
    v0 = x0 / (plain_scale * f0)
    code, passes = nearest(v0, format), inside(v0, format)

    def through(x: np.ndarray, f: np.ndarray) -> np.ndarray:
        v = np.where(passes, x / (plain_scale * f) + (code - v0), code)
        return weights * v * plain_scale * f

    step = 1e-5
    of_values = (through(x0 + step, f0) - through(x0 - step, f0)) / (2 * step)
    of_factors = (through(x0, f0 + step) - through(x0, f0 - step)) / (2 * step)
    x, f = tc.Var(tc.tensor(values)), tc.Var(tc.tensor(factors))
    (F.fake_quantize(x, format, f) * tc.tensor(gradient)).sum().backward()
    np.testing.assert_allclose(x.grad.numpy().reshape(x0.shape), of_values, rtol=1e-6, atol=1e-8)
    # A factor's gradient is a sum of f32 products with `code - v`, in which most digits cancel.
    # So the rounding errors are proportional to `code` and `v`, not to their difference.
    eps = np.finfo(np.float32).eps
    bound = 4 * eps * np.abs(weights * plain_scale * np.maximum(np.abs(v0), np.abs(code))).sum(1)
    assert (np.abs(f.grad.numpy() - of_factors.sum(1)) < bound).all()


@pytest.mark.parametrize("format", CODES)
def test_values_are_the_nearest_codes_times_the_scale(format: str) -> None:
    """The codes of NF4 are those of the published table, and those of int8 leave -128 out."""
    groups = np.random.default_rng(6).standard_normal((32, 32)).astype(np.float32)
    # Make the element of the largest magnitude in each group positive. A negative one would be -7.5
    # steps of int4, which is half way between two codes.
    groups *= np.sign(groups[np.arange(32), np.abs(groups).argmax(1)])[:, None]
    values = groups.reshape(16, 64)
    found = F.fake_quantize(tc.tensor(values), format).numpy()
    # The scale and the product are rounded to f32.
    np.testing.assert_allclose(found, rounded(values, format), rtol=2.0**-22)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_layer_with_rounded_inputs_multiplies_rounded_matrices(format: str) -> None:
    random = np.random.default_rng(8)
    weight, x = (random.standard_normal((n, 64)).astype(np.float32) for n in (24, 5))
    # A LoRA of rank 4 and alpha 8; a new one does not change the weight.
    layer = tc.nn.LoRALinear(tc.tensor(weight), 4, 8.0, qat=format, qat_activations=True)
    left, right = rounded(x, format), rounded(weight, format)
    # 64 f32 products are added up.
    bound = 64 * np.finfo(np.float32).eps * (np.abs(left) @ np.abs(right).T)
    found = layer(tc.tensor(x)).numpy()
    assert (np.abs(found - left @ right.T) < bound).all()
    # With inputs that are not rounded, most results would be outside this bound.
    assert (np.abs(x.astype(np.float64) @ right.T - left @ right.T) > bound).mean() > 0.9
