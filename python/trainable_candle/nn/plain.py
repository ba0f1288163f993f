"""Layers without parameters; each applies one function of `nn.functional`.

`_facts` returns the arguments that `repr` shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainable_candle.errors import ArgumentError
from trainable_candle.nn import functional
from trainable_candle.nn.module import Module

if TYPE_CHECKING:
    from trainable_candle._core import Tensor

__all__ = [
    "ELU",
    "GELU",
    "AvgPool2d",
    "LeakyReLU",
    "LogSoftmax",
    "MaxPool2d",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
]


class ReLU(Module):
    """Applies max(x, 0) to each element x.

    ```python
    assert tc.nn.ReLU()(tc.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    ```
    """

    def __init__(self, inplace: bool = False) -> None:
        del inplace  # accepted as by torch; the result is always a new tensor

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.relu(input)


class SiLU(Module):
    """Applies x * sigmoid(x) to each element x.

    ```python
    assert tc.nn.SiLU()(tc.zeros(2)).tolist() == [0.0, 0.0]
    ```
    """

    def __init__(self, inplace: bool = False) -> None:
        del inplace  # accepted as by torch; the result is always a new tensor

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.silu(input)


class Sigmoid(Module):
    """Applies the logistic function 1 / (1 + exp(-x)) to each element x.

    ```python
    assert tc.nn.Sigmoid()(tc.zeros(2)).tolist() == [0.5, 0.5]
    ```
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.sigmoid(input)


class Tanh(Module):
    """Applies the hyperbolic tangent to each element.

    ```python
    assert tc.nn.Tanh()(tc.zeros(2)).tolist() == [0.0, 0.0]
    ```
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.tanh(input)


class GELU(Module):
    """Applies GELU to each element x: x * Phi(x) (arXiv:1606.08415).

    Phi is the standard normal distribution function.

        assert tc.nn.GELU()(tc.zeros(2)).tolist() == [0.0, 0.0]

    Args:
        approximate: "none" for the exact function, "tanh" for its approximation.

    Raises:
        ArgumentError: If `approximate` is another value.
    """

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in {"none", "tanh"}:
            raise ArgumentError(f'GELU: approximate is {approximate!r}, expected "none" or "tanh"')
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.gelu(input, self.approximate)

    def _facts(self) -> str:
        return f"approximate={self.approximate!r}"


class Softmax(Module):
    """Divides exp(input) by its sum along a dimension.

        assert tc.nn.Softmax()(tc.zeros(2)).tolist() == [0.5, 0.5]

    Args:
        dim: The dimension along which the results sum to 1.
    """

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Return the probabilities, in the shape of the input.

        Raises:
            IndexOutOfRangeError: If there is no such dimension.
        """
        return functional.softmax(input, self.dim)

    def _facts(self) -> str:
        return f"dim={self.dim}"


class LeakyReLU(Module):
    """Multiplies each element below 0 by `negative_slope`.

    ```python
    assert tc.nn.LeakyReLU(0.5)(tc.tensor([-1.0, 2.0])).tolist() == [-0.5, 2.0]
    ```
    """

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        del inplace  # accepted as in torch, but the result is always a new tensor
        self.negative_slope = negative_slope

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.leaky_relu(input, self.negative_slope)

    def _facts(self) -> str:
        return f"negative_slope={self.negative_slope}"


class ELU(Module):
    """Replaces each element x below 0 by alpha * (exp(x) - 1).

    ```python
    assert tc.nn.ELU()(tc.zeros(2)).tolist() == [0.0, 0.0]
    ```
    """

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        del inplace  # accepted as in torch, but the result is always a new tensor
        self.alpha = alpha

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.elu(input, self.alpha)

    def _facts(self) -> str:
        return f"alpha={self.alpha}"


class Softplus(Module):
    """Applies log(1 + exp(beta * x)) / beta, a smooth ReLU, to each element x.

    ```python
    # log(2) is 0.693.
    assert tc.nn.Softplus()(tc.zeros(1)).item() > 0.69
    ```
    """

    def __init__(self, beta: float = 1.0) -> None:
        self.beta = beta

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function to each element."""
        return functional.softplus(input, self.beta)

    def _facts(self) -> str:
        return f"beta={self.beta}"


class LogSoftmax(Module):
    """Computes the logarithm of the softmax along a dimension.

    ```python
    # The softmax of one element is 1.
    assert tc.nn.LogSoftmax(dim=-1)(tc.zeros(1)).tolist() == [0.0]
    ```
    """

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Return the logarithms of probabilities, in the shape of the input."""
        return functional.log_softmax(input, self.dim)

    def _facts(self) -> str:
        return f"dim={self.dim}"


class _Pool2d(Module):
    """The base of pooling layers; each argument is one number or a pair (height, width).

    If `stride` is None, it is `kernel_size`.
    """

    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def _facts(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool2d(_Pool2d):
    """Takes the largest element of each window; see `functional.max_pool2d`.

    ```python
    assert tc.nn.MaxPool2d(2)(tc.zeros(1, 3, 8, 8)).shape == (1, 3, 4, 4)
    ```
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, C, height, width) to (B, C, height', width'), one value per window."""
        return functional.max_pool2d(input, self.kernel_size, self.stride, self.padding)


class AvgPool2d(_Pool2d):
    """Takes the mean of each window; see `functional.avg_pool2d`.

    ```python
    assert tc.nn.AvgPool2d(2)(tc.zeros(1, 3, 8, 8)).shape == (1, 3, 4, 4)
    ```
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, C, height, width) to (B, C, height', width'), one value per window."""
        return functional.avg_pool2d(input, self.kernel_size, self.stride, self.padding)
