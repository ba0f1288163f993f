"""Convolutions, norms, embeddings and other layers, with torch's names and initial values."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from trainable_candle._core import Tensor, Var, init_linear, ones, randn, zeros
from trainable_candle.errors import ArgumentError
from trainable_candle.nn import functional
from trainable_candle.nn.module import Module

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "Identity",
    "LayerNorm",
    "RMSNorm",
]


class Embedding(Module):
    """Looks up rows of a table, `weight`, by their indices.

    The table's initial values are normal with a standard deviation of 1.

        table = tc.nn.Embedding(10, 4)
        assert table(tc.tensor([1, 2, 9])).shape == (3, 4)

    Args:
        num_embeddings: The number of rows of the table.
        embedding_dim: The number of features of a row.
        dtype: The floating point dtype of the table; default f32.
        device: The device of the table.

    Raises:
        TypeError: If a number is not whole.
        ArgumentError: If a number is below 1.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        shape = (
            whole("Embedding", "num_embeddings", num_embeddings),
            whole("Embedding", "embedding_dim", embedding_dim),
        )
        self.weight: Tensor = Var(randn(shape, dtype=dtype, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """Map i64 or u32 row indices of any shape (...) to their rows, (..., embedding_dim).

        Raises:
            IndexOutOfRangeError: If an index is out of range.
            DTypeError: If the input is neither i64 nor u32.
            DeviceError: If the input is not on the device of the table.
        """
        return functional.embedding(input, self.weight)

    # The text between the parentheses of `repr`; the other layers have this method too.
    def _facts(self) -> str:
        return ", ".join(map(str, self.weight.shape))


class Conv2d(Module):
    """Two-dimensional convolution of (B, in_channels, height, width).

    Initial values are uniform between -bound and bound, as in torch, where bound is
    1 / sqrt(in_channels / groups * height * width) for a kernel of (height, width).

        layer = tc.nn.Conv2d(3, 8, kernel_size=3, padding=1)
        assert layer(tc.randn(1, 3, 6, 6)).shape == (1, 8, 6, 6)

    Args:
        in_channels: The number of channels of the input.
        out_channels: The number of channels of the result.
        kernel_size: The kernel's height and width, or one number for both. `stride`, `padding` and
            `dilation` also take two numbers, for height and width, or one for both.
        stride: How many input positions the kernel moves from one output position to the next.
        padding: The number of zeros on each side of the input; "valid": none; "same": as many as
            make the result as large as the input.
        dilation: How many input positions one kernel element is from the next.
        groups: The number of groups of channels; an output channel reads only the input channels of
            its own group. Must divide `in_channels` and `out_channels`.
        bias: Whether there is a bias.
        dtype: The floating point dtype of the parameters; default f32.
        device: The device of the parameters.

    Raises:
        TypeError: If a number is not whole.
        ArgumentError: If a number is out of range, or `groups` or `padding` does not suit the other
            arguments.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        height, width = _pair("Conv2d", "kernel_size", kernel_size, least=1)
        self.stride = _pair("Conv2d", "stride", stride, least=1)
        self.dilation = _pair("Conv2d", "dilation", dilation, least=1)
        if isinstance(padding, str):
            padding = self._padding(padding, (height, width))
        self.padding = _pair("Conv2d", "padding", padding, least=0)
        self.groups = whole("Conv2d", "groups", groups)
        inputs_per_group, remainder = divmod(
            whole("Conv2d", "in_channels", in_channels), self.groups
        )
        if remainder or whole("Conv2d", "out_channels", out_channels) % self.groups:
            raise ArgumentError(
                f"Conv2d: groups is {groups}, expected a divisor of in_channels, {in_channels}, "
                f"and of out_channels, {out_channels}"
            )
        fan_in = inputs_per_group * height * width
        weight, initial_bias = init_linear(fan_in, out_channels, bias, dtype, device)
        shape = (out_channels, inputs_per_group, height, width)
        self.weight: Tensor = Var(weight.detach().reshape(shape))
        self.bias: Tensor | None = initial_bias

    def _padding(self, name: str, kernel: tuple[int, int]) -> tuple[int, int]:
        """Return the number of zeros on each side, in height and in width, for "same" or "valid".

        Raises:
            ArgumentError: the name is another, or the stride or the kernel does not suit "same".
        """
        if name not in {"same", "valid"}:
            raise ArgumentError(f'Conv2d: padding is {name!r}, expected numbers, "same" or "valid"')
        if name == "valid":
            return 0, 0
        if self.stride != (1, 1):
            raise ArgumentError(f'Conv2d: padding is "same", expected stride 1, not {self.stride}')
        # The zeros of both sides together, in height and in width.
        needed = [
            dilation * (size - 1) for dilation, size in zip(self.dilation, kernel, strict=True)
        ]
        if any(count % 2 for count in needed):
            raise ArgumentError(
                f'Conv2d: padding "same" needs {needed} zeros in height and width for kernel_size '
                f"{kernel}, expected an even number of zeros; take an odd kernel_size"
            )
        return needed[0] // 2, needed[1] // 2

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, in_channels, height, width) to (B, out_channels, height', width').

        Raises:
            ShapeError, DTypeError, DeviceError: If the input does not fit.
        """
        return functional.conv2d(
            input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )

    def _facts(self) -> str:
        outputs, inputs_per_group, *kernel = self.weight.shape
        return (
            f"{inputs_per_group * self.groups}, {outputs}, kernel_size={tuple(kernel)}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={self.bias is not None}"
        )


class LayerNorm(Module):
    """Layer normalisation over the trailing dimensions (Ba et al. 2016, arXiv:1607.06450).

        assert tc.nn.LayerNorm(4)(tc.randn(2, 4)).shape == (2, 4)

    Args:
        normalized_shape: The sizes of the trailing dimensions, or the size of the last dimension.
        eps: Added to the variance.
        elementwise_affine: Whether there is a scale, initially ones.
        bias: Whether there is also a shift, initially zeros; ignored if there is no scale.
        dtype: The floating point dtype of the parameters; default f32.
        device: The device of the parameters.

    Raises:
        TypeError: If a size is not whole.
        ArgumentError: If a size is below 1.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        self.normalized_shape = _shape("LayerNorm", normalized_shape)
        self.eps = eps
        affine, shape = elementwise_affine, self.normalized_shape
        self.weight: Tensor | None = _ones(shape, dtype, device) if affine else None
        self.bias: Tensor | None = _zeros(shape, dtype, device) if affine and bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (..., *normalized_shape).

        Raises:
            ShapeError, DTypeError, DeviceError: If the input does not fit.
        """
        shape = self.normalized_shape
        return functional.layer_norm(input, shape, self.weight, self.bias, self.eps)

    def _facts(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class RMSNorm(Module):
    """RMS normalisation of the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

        assert tc.nn.RMSNorm(4)(tc.randn(2, 4)).shape == (2, 4)

    Args:
        normalized_shape: The size of the last dimension, or a sequence with only this size.
        eps: Added to the mean square.
        elementwise_affine: Whether there is a scale, initially ones.
        dtype: The floating point dtype of the parameters; default f32.
        device: The device of the parameters.

    Raises:
        TypeError: If the size is not whole.
        ArgumentError: If the size is below 1.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        self.normalized_shape = _shape("RMSNorm", normalized_shape)
        self.eps = eps
        affine = elementwise_affine
        self.weight: Tensor | None = _ones(self.normalized_shape, dtype, device) if affine else None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (..., normalized_shape).

        Raises:
            ShapeError, DTypeError, DeviceError: If the input does not fit.
        """
        return functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def _facts(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class GroupNorm(Module):
    """Group normalisation of (B, num_channels, ...) (Wu & He 2018, arXiv:1803.08494).

        assert tc.nn.GroupNorm(2, 4)(tc.randn(1, 4, 3, 3)).shape == (1, 4, 3, 3)

    Args:
        num_groups: The number of groups; divides `num_channels`.
        num_channels: The second dimension of the input.
        eps: Added to the variance.
        affine: Whether there are a scale and a shift, initially ones and zeros.
        dtype: The floating point dtype of the parameters; default f32.
        device: The device of the parameters.

    Raises:
        TypeError: If a number of groups or channels is not whole.
        ArgumentError: If such a number is below 1, or the groups do not divide the channels.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        channels = whole("GroupNorm", "num_channels", num_channels)
        if channels % whole("GroupNorm", "num_groups", num_groups):
            raise ArgumentError(
                f"GroupNorm: num_groups is {num_groups}, expected a divisor of num_channels, "
                f"{num_channels}"
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight: Tensor | None = _ones((num_channels,), dtype, device) if affine else None
        self.bias: Tensor | None = _zeros((num_channels,), dtype, device) if affine else None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, num_channels, ...).

        Raises:
            ShapeError, DTypeError, DeviceError: If the input does not fit.
        """
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def _facts(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class Dropout(Module):
    """In training, sets elements to 0 with probability p, and multiplies the others by 1 / (1 - p).

        layer = tc.nn.Dropout(0.1).eval()
        assert tc.allclose(layer(x), x)

    Args:
        p: The probability, in [0, 1].

    Raises:
        TypeError: If `p` is not a number.
        ArgumentError: If `p` is out of range.
    """

    def __init__(self, p: float = 0.5) -> None:
        if not isinstance(p, (int, float)):
            raise TypeError(f"Dropout: p is {p!r}, expected a number")
        if not 0 <= p <= 1:
            raise ArgumentError(f"Dropout: p is {p}, expected a number from 0 to 1")
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout in training mode; otherwise return the input itself."""
        return functional.dropout(input, self.p, self.training)

    def _facts(self) -> str:
        return f"p={self.p}"


class Flatten(Module):
    """Joins neighbouring dimensions into one.

        assert tc.nn.Flatten()(tc.zeros(2, 3, 4)).shape == (2, 12)

    Args:
        start_dim: The first dimension to join.
        end_dim: The last dimension to join.
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with dimensions `start_dim` to `end_dim` joined."""
        return input.flatten(self.start_dim, self.end_dim)


class Identity(Module):
    """Returns its input.

    ```python
    assert tc.nn.Identity()(x) is x
    ```
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


def whole(layer: str, name: str, value: object, least: int = 1) -> int:
    """Return the value of a layer's argument as an integer.

    Raises:
        TypeError: the value is not a whole number.
        ArgumentError: the value is below `least`.
    """
    try:
        number = index(value)  # type: ignore[arg-type]  # raises if it is not an integer
    except TypeError:
        raise TypeError(f"{layer}: {name} is {value!r}, expected a whole number") from None
    if number < least:
        raise ArgumentError(f"{layer}: {name} is {value!r}, expected at least {least}")
    return number


def _shape(layer: str, value: object) -> tuple[int, ...]:
    """Return `normalized_shape`, which may be one number, as a tuple."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(whole(layer, "normalized_shape", number) for number in values)


def _pair(layer: str, name: str, value: object, *, least: int) -> tuple[int, int]:
    """Return the height and the width that an argument gives, which may be one number for both."""
    values = value if isinstance(value, (list, tuple)) else (value, value)
    if len(values) != 2:
        raise ArgumentError(f"{layer}: {name} is {value!r}, expected one or two numbers")
    return whole(layer, name, values[0], least), whole(layer, name, values[1], least)


def _ones(shape: tuple[int, ...], dtype: str | None, device: str) -> Var:
    return Var(ones(shape, dtype=dtype, device=device))


def _zeros(shape: tuple[int, ...], dtype: str | None, device: str) -> Var:
    return Var(zeros(shape, dtype=dtype, device=device))
