"""Initial values of variables, with torch's names; each changes its argument and returns it.

tc.nn.init.xavier_uniform_(layer.weight)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainable_candle import _create
from trainable_candle._core import Tensor, Var, eye
from trainable_candle.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from trainable_candle._create import Generator

__all__ = [
    "calculate_gain",
    "constant_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]

_GAINS = {
    "linear": 1.0,
    "conv1d": 1.0,
    "conv2d": 1.0,
    "sigmoid": 1.0,
    "tanh": 5 / 3,
    "relu": math.sqrt(2),
    "selu": 3 / 4,
}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return by what a layer before `nonlinearity` should be scaled.

    Args:
        nonlinearity: "linear", "conv1d", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu", "selu".
        param: The slope of a leaky ReLU; default 0.01.

    Raises:
        ArgumentError: If it is another function.
    """
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else param
        return math.sqrt(2 / (1 + slope**2))
    if nonlinearity not in _GAINS:
        known = ", ".join([*_GAINS, "leaky_relu"])
        raise ArgumentError(f"init: nonlinearity is {nonlinearity!r}, expected one of {known}")
    return _GAINS[nonlinearity]


def uniform_(
    tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Draw values from [a, b).

    Raises:
        TypeError: If it is not a variable.
        ArgumentError: If b is below a.
    """
    if b < a:
        raise ArgumentError(f"init: found the range {a} to {b}, expected the smaller bound first")
    return _set(tensor, _drawn(tensor, generator, normal=False) * (b - a) + a)


def normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Draw normal values.

    Raises:
        TypeError: If it is not a variable.
        ArgumentError: If the deviation is negative.
    """
    if std < 0:
        raise ArgumentError(f"init: std is {std}, expected at least 0")
    return _set(tensor, _drawn(tensor, generator, normal=True) * std + mean)


def trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: Generator | None = None,
) -> Tensor:
    """Draw normal values between a and b: those outside are drawn again.

    Raises:
        TypeError: If it is not a variable.
        ArgumentError: If nearly all values lie outside, four deviations or more from the mean.
    """
    far = 4 * std
    if not a < b or mean + far < a or mean - far > b or std <= 0:
        raise ArgumentError(f"init: nearly no value of mean {mean} and std {std} is in {a} to {b}")
    values = _drawn(tensor, generator, normal=True) * std + mean
    while True:
        outside = (values < a) + (values > b)
        if not bool((outside > 0).any()):
            return _set(tensor, values)
        again = _drawn(tensor, generator, normal=True) * std + mean
        values = values.masked_fill(outside > 0, 0.0) + again.masked_fill(outside == 0, 0.0)


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Set all values to one.

    Raises:
        TypeError: If it is not a variable.
    """
    return _set(tensor, tensor.detach() * 0.0 + val)


def zeros_(tensor: Tensor) -> Tensor:
    """Set all values to 0.

    Raises:
        TypeError: If it is not a variable.
    """
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Set all values to 1.

    Raises:
        TypeError: If it is not a variable.
    """
    return constant_(tensor, 1.0)


def eye_(tensor: Tensor) -> Tensor:
    """Set a matrix to ones on its diagonal and zeros elsewhere.

    Raises:
        TypeError: If it is not a variable.
        ShapeError: If it is not a matrix.
    """
    if tensor.ndim != 2:
        raise ShapeError(f"init: eye_ of a tensor of shape {tensor.shape}, expected a matrix")
    rows, columns = tensor.shape
    square = eye(max(rows, columns), dtype=str(tensor.dtype), device=str(tensor.device))
    return _set(tensor, square[:rows, :columns])


def xavier_uniform_(
    tensor: Tensor, gain: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Draw uniform values of variance 2 gain² / (fan_in + fan_out) (Glorot and Bengio, 2010).

    Raises:
        TypeError: If it is not a variable.
        ShapeError: If it has fewer than two dimensions.
    """
    bound = gain * math.sqrt(6 / sum(_fans(tensor)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Draw normal values of variance 2 gain² / (fan_in + fan_out) (Glorot and Bengio, 2010).

    Raises:
        TypeError: If it is not a variable.
        ShapeError: If it has fewer than two dimensions.
    """
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(_fans(tensor))), generator)


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Draw uniform values of variance gain² / fan (arXiv:1502.01852).

    Args:
        tensor: The variable.
        a: The slope of the leaky ReLU that follows.
        mode: "fan_in" or "fan_out".
        nonlinearity: What follows; as for `calculate_gain`.
        generator: What is drawn from.

    Raises:
        TypeError: If it is not a variable.
        ShapeError: If it has fewer than two dimensions.
        ArgumentError: If the mode or the nonlinearity is unknown.
    """
    bound = math.sqrt(3) * _deviation(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Draw normal values of variance gain² / fan (arXiv:1502.01852).

    Args:
        tensor: The variable.
        a: The slope of the leaky ReLU that follows.
        mode: "fan_in" or "fan_out".
        nonlinearity: What follows; as for `calculate_gain`.
        generator: What is drawn from.

    Raises:
        TypeError: If it is not a variable.
        ShapeError: If it has fewer than two dimensions.
        ArgumentError: If the mode or the nonlinearity is unknown.
    """
    return normal_(tensor, 0.0, _deviation(tensor, a, mode, nonlinearity), generator)


def _deviation(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    fans = dict(zip(("fan_in", "fan_out"), _fans(tensor), strict=True))
    if mode not in fans:
        raise ArgumentError(f'init: mode is {mode!r}, expected "fan_in" or "fan_out"')
    return calculate_gain(nonlinearity, a) / math.sqrt(fans[mode])


def _fans(tensor: Tensor) -> tuple[int, int]:
    """Inputs and outputs of each unit of a layer whose weight is `tensor`."""
    if tensor.ndim < 2:
        raise ShapeError(f"init: shape {tensor.shape} has no fan, expected two dimensions or more")
    kernel = math.prod(tensor.shape[2:])
    return tensor.shape[1] * kernel, tensor.shape[0] * kernel


def _drawn(tensor: Tensor, generator: Generator | None, *, normal: bool) -> Tensor:
    draw = _create.randn if normal else _create.rand
    dtype, device = str(tensor.dtype), str(tensor.device)
    return draw(tensor.shape, dtype=dtype, device=device, generator=generator)


def _set(tensor: Tensor, values: Tensor) -> Tensor:
    if not isinstance(tensor, Var):
        raise TypeError(
            f"init: found {type(tensor).__name__}, expected a Var; tensors do not change"
        )
    tensor.set(values)
    return tensor
