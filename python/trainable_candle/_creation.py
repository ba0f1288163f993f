"""Functions that make tensors, most with torch's arguments `requires_grad` or `generator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainable_candle import _core
from trainable_candle._generator import drawing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex

    from trainable_candle._core import DType, Tensor
    from trainable_candle._generator import Generator

__all__ = ["full", "ones", "rand", "randint", "randn", "tensor", "zeros"]


def tensor(
    data: Any,
    dtype: DType | str | None = None,
    device: str | None = None,
    *,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor with a copy of the data.

        x = tc.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert x.shape == (2, 2)
        v = tc.tensor([1.0, 2.0], requires_grad=True)
        (v * v).sum().backward()
        assert v.grad.tolist() == [2.0, 4.0]

    Args:
        data: A number, nested lists of numbers, a tensor, a numpy array, or anything with
            `__dlpack__` or `__array__`.
        dtype: The dtype. By default, a tensor or an array keeps its dtype, except that int8, int16
            and int32 become i64, uint16 becomes u32, and bool becomes u8. Numbers and lists become
            f32 if they contain a float or are empty, u8 if all are bools, and i64 otherwise.
        device: The device. By default, a tensor keeps its device, and other data are put on the
            CPU.
        requires_grad: Whether the result is a `Var`, which must be floating point.

    Raises:
        DTypeError: If the data are not numbers, are of a kind for which there is no dtype (complex,
            uint64), or are integers while `requires_grad` is True.
        ShapeError: If nested lists are ragged, or deeper than 32.
        ArgumentError: If a number in lists is outside the range of the dtype, or lists contain a
            tensor.
        DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
        OutOfMemoryError: If the copy does not fit into memory.
    """
    return _leaf(_core.tensor(data, dtype, device), requires_grad=requires_grad)


def zeros(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of zeros.

        assert tc.zeros(2, 3).sum() == 0

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: The dtype; default f32.
        device: The device.
        requires_grad: Whether the result is a `Var`, which must be floating point.

    Raises:
        ShapeError: If a size is negative.
        DTypeError, DeviceError, CudaUnavailableError: If dtype or device cannot be used.
        OutOfMemoryError: If the tensor does not fit into memory.
    """
    result = _core.zeros(*shape, dtype=dtype, device=device)
    return _leaf(result, requires_grad=requires_grad)


def ones(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of ones.

        assert tc.ones((2, 3), dtype="i64").sum() == 6

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: The dtype; default f32.
        device: The device.
        requires_grad: Whether the result is a `Var`, which must be floating point.

    Raises:
        ShapeError: If a size is negative.
        DTypeError, DeviceError, CudaUnavailableError: If dtype or device cannot be used.
        OutOfMemoryError: If the tensor does not fit into memory.
    """
    result = _core.ones(*shape, dtype=dtype, device=device)
    return _leaf(result, requires_grad=requires_grad)


def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    value: Tensor | float,
    dtype: DType | str | None = None,
    device: str = "cpu",
    *,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor whose elements all have one value.

        assert tc.full((2,), 0.5).tolist() == [0.5, 0.5]

    Args:
        shape: The sizes.
        value: The value, a number or a tensor of one element.
        dtype: The dtype; by default a float becomes f32, an integer i64.
        device: The device.
        requires_grad: Whether the result is a `Var`, which must be floating point.

    Raises:
        ShapeError: If a size is negative, or `value` is a tensor that does not have one element.
        ArgumentError: If an integer is outside the range of the dtype.
        DTypeError: If `value` is a float and the dtype is an integer dtype, or the dtype cannot be
            used.
        DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
        OutOfMemoryError: If the tensor does not fit into memory.
    """
    return _leaf(_core.full(shape, value, dtype, device), requires_grad=requires_grad)


def rand(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    generator: Generator | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return random values, uniform in [0, 1).

        x = tc.rand(100)
        assert 0 <= float(x.min()) and float(x.max()) < 1

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: A floating point dtype; default f32.
        device: The device.
        generator: The generator that draws the values; by default the library's (`manual_seed`).
        requires_grad: Whether the result is a `Var`, which must be floating point.

    Raises:
        TypeError: If `generator` is not a `Generator`.
        ShapeError: If a size is negative.
        DTypeError, DeviceError, CudaUnavailableError: If dtype or device cannot be used.
        OutOfMemoryError: If the tensor does not fit into memory.
    """
    with drawing("rand", generator):
        result = _core.rand(*shape, dtype=dtype, device=device)
    return _leaf(result, requires_grad=requires_grad)


def randn(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    generator: Generator | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return random values from the standard normal distribution.

        noise = tc.randn(2, 3, generator=tc.Generator().manual_seed(0))
        assert noise.shape == (2, 3)

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: A floating point dtype; default f32.
        device: The device.
        generator: The generator that draws the values; by default the library's (`manual_seed`).
        requires_grad: Whether the result is a `Var`, which must be floating point.

    Raises:
        TypeError: If `generator` is not a `Generator`.
        ShapeError: If a size is negative.
        DTypeError, DeviceError, CudaUnavailableError: If dtype or device cannot be used.
        OutOfMemoryError: If the tensor does not fit into memory.
    """
    with drawing("randn", generator):
        result = _core.randn(*shape, dtype=dtype, device=device)
    return _leaf(result, requires_grad=requires_grad)


def randint(
    low: SupportsIndex,
    high: SupportsIndex,
    shape: SupportsIndex | Sequence[SupportsIndex],
    device: str = "cpu",
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Return random i64 integers in [low, high).

        steps = tc.randint(0, 1000, (4,))
        assert 0 <= int(steps.min()) and int(steps.max()) < 1000

    Args:
        low: The smallest integer.
        high: One more than the largest integer.
        shape: The sizes.
        device: The device.
        generator: The generator that draws the values; by default the library's (`manual_seed`).

    Raises:
        TypeError: If `generator` is not a `Generator`.
        ArgumentError: If the range is empty, or has more than 2**32 - 1 integers.
        ShapeError: If a size is negative.
        DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
        OutOfMemoryError: If the tensor does not fit into memory.
    """
    with drawing("randint", generator):
        return _core.randint(low, high, shape, device)


def _leaf(values: Tensor, *, requires_grad: bool) -> Tensor:
    """Return a `Var` with the values of a tensor if `requires_grad`, else the tensor."""
    return _core.Var(values) if requires_grad else values
