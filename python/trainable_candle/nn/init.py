"""Initial values of variables, like `torch.nn.init`.

A function whose name ends with `_` sets the variable `tensor` and returns it; it raises `TypeError`
if `tensor` is not a `Var`. Functions that draw random values take a `generator`; the default is the
library's own (see `manual_seed`).

`fan_in` is the number of inputs of each output, `fan_out` the number of outputs that each input
affects: for a weight (out, in, ...), `in` and `out` times the number of kernel elements.

In the examples, `model` is a `Sequential` whose first layer has a weight and a bias.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from trainable_candle import _core
from trainable_candle._explained import explained
from trainable_candle._generator import drawing
from trainable_candle.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from trainable_candle._core import Tensor, Var
    from trainable_candle._generator import Generator

__all__ = [
    "calculate_gain",
    "constant_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


# `explained` puts the function's name in front of the messages of Python's own exceptions. Inside
# `with drawing(name, generator)`, the library draws from `generator`.


@explained
def uniform_(
    tensor: Var, a: float = 0.0, b: float = 1.0, generator: Generator | None = None
) -> Var:
    """Set the elements to random values, uniform in [a, b); if a = b, all are a.

        tc.nn.init.uniform_(model[0].weight, -0.1, 0.1)

    Raises:
        ArgumentError: If b is less than a.
    """
    if not a <= b:
        raise ArgumentError(f"uniform_: a is {a} and b is {b}, expected a to be at most b")
    with drawing("uniform_", generator):
        drawn = _core.rand(_shape("uniform_", tensor), dtype="f32")
    return _set("uniform_", tensor, drawn * (b - a) + a)


@explained
def normal_(
    tensor: Var, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None
) -> Var:
    """Set the elements to normally distributed random values.

        tc.nn.init.normal_(model[0].weight, std=0.02)

    Raises:
        ArgumentError: If `std` is negative.
    """
    if not std >= 0:
        raise ArgumentError(f"normal_: std is {std}, expected at least 0")
    with drawing("normal_", generator):
        drawn = _core.randn(_shape("normal_", tensor), dtype="f32")
    return _set("normal_", tensor, drawn * std + mean)


@explained
def trunc_normal_(
    tensor: Var,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: Generator | None = None,
) -> Var:
    """Set the elements to normal random values; values outside [a, b] are drawn again.

        tc.nn.init.trunc_normal_(model[0].weight, std=0.02)

    Raises:
        ArgumentError: If `std` is not above 0, or the probability of a value in [a, b] is below
            0.001.
    """
    if not std > 0:
        raise ArgumentError(
            f"trunc_normal_: std is {std}, expected above 0; for equal values use constant_"
        )
    # The probabilities of values below a, and of values below b.
    below_a, below_b = (0.5 * (1 + math.erf((end - mean) / (std * math.sqrt(2)))) for end in (a, b))
    if below_b - below_a < 1e-3:
        raise ArgumentError(
            f"trunc_normal_: [{a}, {b}] has a probability of less than 0.001 with mean {mean} and "
            f"std {std}; widen it, or move it nearer to the mean"
        )
    values = np.full(_shape("trunc_normal_", tensor), np.nan)  # NaN: not drawn yet
    with drawing("trunc_normal_", generator):
        while (outside := ~((values >= a) & (values <= b))).any():
            count = int(outside.sum())
            values[outside] = _core.randn((count,), dtype="f64").numpy() * std + mean
    return _set("trunc_normal_", tensor, _core.tensor(values, dtype="f32"))


@explained
def constant_(tensor: Var, val: float) -> Var:
    """Set every element to a number.

    ```python
    tc.nn.init.constant_(model[0].bias, 0.5)
    ```
    """
    return _set("constant_", tensor, _core.full(tensor.shape, float(val), dtype="f32"))


@explained
def ones_(tensor: Var) -> Var:
    """Set every element to 1.

    ```python
    tc.nn.init.ones_(model[0].bias)
    ```
    """
    return constant_(tensor, 1.0)


@explained
def zeros_(tensor: Var) -> Var:
    """Set every element to 0.

    ```python
    tc.nn.init.zeros_(model[0].bias)
    ```
    """
    return constant_(tensor, 0.0)


@explained
def eye_(tensor: Var) -> Var:
    """Set a matrix to ones on the main diagonal and zeros elsewhere.

        tc.nn.init.eye_(model[0].weight)

    Raises:
        ShapeError: If the variable is not a matrix.
    """
    rows, columns = _matrix("eye_", tensor)
    return _set("eye_", tensor, _core.tensor(np.eye(rows, columns), dtype="f32"))


@explained
def xavier_uniform_(tensor: Var, gain: float = 1.0, generator: Generator | None = None) -> Var:
    """Draw uniform values of variance gain^2 * 2 / (fan_in + fan_out) (Glorot & Bengio 2010).

        tc.nn.init.xavier_uniform_(model[0].weight)

    Raises:
        ShapeError: If there are fewer than two dimensions.
    """
    bound = gain * math.sqrt(6 / sum(_fans("xavier_uniform_", tensor)))
    return uniform_(tensor, -bound, bound, generator)


@explained
def xavier_normal_(tensor: Var, gain: float = 1.0, generator: Generator | None = None) -> Var:
    """Draw normal values of variance gain^2 * 2 / (fan_in + fan_out) (Glorot & Bengio 2010).

        tc.nn.init.xavier_normal_(model[0].weight)

    Raises:
        ShapeError: If there are fewer than two dimensions.
    """
    std = gain * math.sqrt(2 / sum(_fans("xavier_normal_", tensor)))
    return normal_(tensor, 0.0, std, generator)


@explained
def kaiming_uniform_(
    tensor: Var,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Var:
    """Draw uniform values of variance gain^2 / fan (He et al. 2015, arXiv:1502.01852).

        tc.nn.init.kaiming_uniform_(model[0].weight, nonlinearity="relu")

    Args:
        tensor: The variable, of at least two dimensions.
        a: The slope below 0 of the leaky ReLU, if `nonlinearity` is "leaky_relu".
        mode: Which number `fan` is: "fan_in" or "fan_out".
        nonlinearity: The function that determines the gain; a name that `calculate_gain` takes.
        generator: Draws the values; default: the library's own (see `manual_seed`).

    Raises:
        ArgumentError: If the mode or the nonlinearity is unknown.
        ShapeError: If there are fewer than two dimensions.
    """
    bound = math.sqrt(3) * _kaiming_std("kaiming_uniform_", tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


@explained
def kaiming_normal_(
    tensor: Var,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Var:
    """Draw normal values of variance gain^2 / fan.

    The arguments and errors are those of `kaiming_uniform_`.

    ```python
    tc.nn.init.kaiming_normal_(model[0].weight, mode="fan_out")
    ```
    """
    std = _kaiming_std("kaiming_normal_", tensor, a, mode, nonlinearity)
    return normal_(tensor, 0.0, std, generator)


@explained
def orthogonal_(tensor: Var, gain: float = 1.0, generator: Generator | None = None) -> Var:
    """Set the elements to a random matrix of orthogonal rows of norm `gain` (arXiv:1312.6120).

    If the matrix has more rows than columns, its columns are orthogonal instead. All dimensions
    after the first are flattened into the columns.

        tc.nn.init.orthogonal_(model[0].weight)

    Raises:
        ShapeError: If there are fewer than two dimensions.
    """
    if tensor.ndim < 2:
        found = f"the shape is {tensor.shape}, expected two dimensions or more"
        raise ShapeError(f"orthogonal_: {found}")
    rows = tensor.shape[0]
    columns = math.prod(tensor.shape[1:])
    with drawing("orthogonal_", generator):
        drawn = _core.randn((max(rows, columns), min(rows, columns)), dtype="f64").numpy()
    q, r = np.linalg.qr(drawn)
    q *= np.sign(np.diag(r))  # makes the distribution of q uniform
    values = (q if rows >= columns else q.T).reshape(tensor.shape) * gain
    return _set("orthogonal_", tensor, _core.tensor(values, dtype="f32"))


@explained
def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the gain with which a layer and its activation together keep the input's variance.

        assert tc.nn.init.calculate_gain("linear") == 1

    Args:
        nonlinearity: "linear", "conv1d", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu" or
            "selu".
        param: The slope below 0 of the leaky ReLU; default 0.01.

    Raises:
        ArgumentError: If the nonlinearity is unknown.
    """
    # The gains are torch's. Those of sigmoid, tanh and selu keep the variance only roughly.
    slope = 0.01 if param is None else param
    gains = {"linear": 1.0, "conv1d": 1.0, "conv2d": 1.0, "sigmoid": 1.0, "tanh": 5 / 3}
    gains |= {"relu": math.sqrt(2), "leaky_relu": math.sqrt(2 / (1 + slope**2)), "selu": 0.75}
    if nonlinearity not in gains:
        raise ArgumentError(
            f"calculate_gain: nonlinearity is {nonlinearity!r}, expected one of {', '.join(gains)}"
        )
    return gains[nonlinearity]


def _shape(name: str, tensor: object) -> tuple[int, ...]:
    """Return the shape of a variable; raise a `TypeError` for anything else."""
    if not isinstance(tensor, _core.Var):
        raise TypeError(f"{name}: found {type(tensor).__name__}, expected a Var, which can change")
    return tensor.shape


def _set(name: str, tensor: Var, values: Tensor) -> Var:
    """Set a variable to values of any dtype on any device, and return it."""
    _shape(name, tensor)  # raises unless it is a variable
    tensor.set(values.to(tensor.dtype).to(tensor.device))
    return tensor


def _matrix(name: str, tensor: Var) -> tuple[int, int]:
    if tensor.ndim != 2:
        raise ShapeError(f"{name}: the shape is {tensor.shape}, expected a matrix")
    return tensor.shape[0], tensor.shape[1]


def _fans(name: str, tensor: Var) -> tuple[int, int]:
    """Return `fan_in` and `fan_out`."""
    if tensor.ndim < 2:
        raise ShapeError(f"{name}: the shape is {tensor.shape}, expected at least two dimensions")
    kernel_elements = math.prod(tensor.shape[2:])
    return tensor.shape[1] * kernel_elements, tensor.shape[0] * kernel_elements


def _kaiming_std(name: str, tensor: Var, a: float, mode: str, nonlinearity: str) -> float:
    """Return the standard deviation, gain / sqrt(fan)."""
    if mode not in {"fan_in", "fan_out"}:
        raise ArgumentError(f'{name}: mode is {mode!r}, expected "fan_in" or "fan_out"')
    fan_in, fan_out = _fans(name, tensor)
    fan = fan_in if mode == "fan_in" else fan_out
    return calculate_gain(nonlinearity, a) / math.sqrt(fan)
