"""Trained factors of `fake_quantize`'s scales, against the definition of LSQ.

LSQ is learned step size quantization (arXiv:1902.08153).
"""

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ShapeError
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
GROUPS = {"int8": 64, "int4": 32, "fp8": 64, "nf4": 64}
# The largest magnitude in a group, divided by the group's scale.
LARGEST = {"int8": 127, "int4": 7.5, "fp8": 448, "nf4": 1}


def lsq(
    values: np.ndarray, factors: np.ndarray, gradient: np.ndarray, format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounded values, and the gradients of values and of factors (equations 1 to 3).

    `factors` has a number for each group, and `gradient` is the gradient of the rounded values.

    In the paper, only values between the first and the last code get a gradient. Here, values up
    to half a step beyond these codes get one, too. The step is the distance between the first two
    codes or the last two codes; in the paper, codes are integers.
    """
    codes = CODES[format]
    x = values.astype(np.float64).reshape(-1, GROUPS[format])
    plain_scale = np.abs(x).max(1, keepdims=True) / LARGEST[format]
    scale = plain_scale * factors[:, None]
    v = x / scale
    code = codes[np.abs(v[..., None] - codes).argmin(-1)]
    low = codes[0] - (codes[1] - codes[0]) / 2
    high = codes[-1] + (codes[-1] - codes[-2]) / 2
    inside = (v >= low) & (v <= high)
    scale_derivative = np.where(inside, code - v, code)  # the derivative of `code * scale`
    gradient = gradient.reshape(x.shape)
    factor_gradient = (gradient * scale_derivative * plain_scale).sum(1)
    shape = values.shape
    return (code * scale).reshape(shape), (gradient * inside).reshape(shape), factor_gradient


@pytest.mark.parametrize("format", CODES)
def test_values_and_gradients_are_those_of_lsq(format: str) -> None:
    random = np.random.default_rng(3)
    values, gradient = random.standard_normal((2, 16, 64)).astype(np.float32)
    factors = random.uniform(0.5, 1.4, values.size // GROUPS[format]).astype(np.float32)
    x, f = tc.Var(tc.tensor(values)), tc.Var(tc.tensor(factors))
    y = F.fake_quantize(x, format, f)
    (y * tc.tensor(gradient)).sum().backward()
    expected, value_gradient, factor_gradient = lsq(
        values, factors.astype(np.float64), gradient, format
    )
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(x.grad.numpy(), value_gradient.astype(np.float32))
    assert 0 < (value_gradient == 0).mean() < 0.2
    np.testing.assert_allclose(f.grad.numpy(), factor_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("format", CODES)
def test_factors_of_one_change_no_bit(format: str, dtype: str) -> None:
    random = np.random.default_rng(4)
    values = tc.tensor(random.standard_normal((24, 128)).astype(np.float32)).to(dtype)
    # int8 and fp8 have one scale for each row, which has 128 elements here.
    count = values.numel() // (128 if format in {"int8", "fp8"} else GROUPS[format])
    results = []
    for factors in (None, tc.ones((count,))):
        x = tc.Var(values)
        y = F.fake_quantize(x, format, factors)
        (y * y).sum().backward()
        results.append([part.to("f32").numpy() for part in (y.detach(), x.grad)])
    for plain, learned in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, learned)


def test_a_wrong_number_of_factors_is_rejected() -> None:
    with pytest.raises(ShapeError, match=r"found factors of shape \[8\], expected \(16,\)"):
        F.fake_quantize(tc.zeros((8, 64)), "int4", tc.ones((8,)))
