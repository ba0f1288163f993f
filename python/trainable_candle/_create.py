"""Functions that make tensors, with torch's `requires_grad` and `generator`; and its `device`."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from trainable_candle import _core
from trainable_candle.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import SupportsIndex

    from typing_extensions import Self

    from trainable_candle._core import DType, Tensor

__all__ = [
    "Generator",
    "device",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
]

_NAME = re.compile(r"(cpu|cuda)(?::(\d+))?")


class device(str):  # noqa: N801 - torch's name
    """The name of a device, with its kind and number.

    It is the text that functions take and tensors have: `tc.device("cuda", 1) == "cuda:1"`.

    Args:
        type: "cpu", "cuda" or "cuda:1".
        index: The number of the GPU, if the text does not have it.

    Raises:
        DeviceError: If there is no such kind of device.

    Example:
        >>> tc.device("cuda", 1).index
        1
        >>> tc.zeros(2, device=tc.device("cpu")).device
        'cpu'
    """

    __slots__ = ()

    def __new__(cls, type: str, index: int | None = None) -> Self:
        """See the class."""
        text = str(type) if index is None else f"{type}:{index}"
        if not _NAME.fullmatch(text):
            raise DeviceError(f'unknown device "{text}"; expected "cpu", "cuda" or "cuda:1"')
        return super().__new__(cls, text)

    @property
    def type(self) -> str:
        """`cpu` or `cuda`."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]  # torch's name, as str's method
        """The number of the GPU, if the text has it."""
        number = self.partition(":")[2]
        return int(number) if number else None


class Generator:
    """A stream of random numbers of its own, for `randn`, `rand` and `randint`.

    The numbers do not depend on the device, and what else draws does not affect them.

    Args:
        device: Ignored; for code that names one.

    Example:
        >>> generator = tc.Generator().manual_seed(0)
        >>> first = tc.randn(3, generator=generator)
        >>> bool((first == tc.randn(3, generator=tc.Generator().manual_seed(0))).all())
        True
    """

    def __init__(self, device: str = "cpu") -> None:
        del device
        self._state = (0, 0)
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> Generator:
        """Start the stream of a seed; returns the generator.

        Raises:
            ArgumentError: If the seed is no whole number of 64 bits.
        """
        earlier = _core.get_rng_state()
        try:
            _core.manual_seed(seed)
            self._state = _core.get_rng_state()
        finally:
            _core.set_rng_state(earlier)
        return self

    def get_state(self) -> tuple[int, int]:
        """Where the stream is."""
        return self._state

    def set_state(self, state: tuple[int, int]) -> Generator:
        """Go where a stream was; returns the generator."""
        self._state = state
        return self

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Within this context the library draws from this stream."""
        earlier = _core.get_rng_state()
        _core.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = _core.get_rng_state()
            _core.set_rng_state(earlier)


def tensor(
    data: Any, dtype: DType | str | None = None, device: str = "cpu", requires_grad: bool = False
) -> Tensor:
    """Make a tensor with a copy of `data`.

    Args:
        data: A number, nested lists of numbers, a numpy array, or anything with `__dlpack__` or
            `__array__`.
        dtype: The dtype; by default an array keeps its own, Python floats become f32, integers i64,
            bools u8. Narrower integers of arrays become i64 (u16: u32).
        device: The device.
        requires_grad: Whether it is a `Var`, which can be trained.

    Raises:
        DTypeError: If the data are not numbers, or of a kind that no dtype holds (complex, uint64).
        ShapeError: If nested lists are ragged.
        DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.

    Example:
        >>> tc.tensor([[1, 2], [3, 4]]).shape
        (2, 2)
    """
    return _trained(_core.tensor(data, dtype, device), requires_grad)


def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    value: Tensor | float,
    dtype: DType | str | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
) -> Tensor:
    """Make a tensor with one value everywhere.

    Args:
        shape: The sizes.
        value: The value.
        dtype: The dtype; default f32 for a float and i64 for an integer.
        device: The device.
        requires_grad: Whether it is a `Var`, which can be trained.

    Raises:
        ArgumentError, DTypeError: If an integer dtype does not hold the value.
        OutOfMemoryError: If it does not fit.
    """
    return _trained(_core.full(shape, value, dtype, device), requires_grad)


def zeros(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
) -> Tensor:
    """Make a tensor of zeros.

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: The dtype; default f32.
        device: The device.
        requires_grad: Whether it is a `Var`, which can be trained.

    Raises:
        OutOfMemoryError: If it does not fit.
    """
    return _trained(_core.zeros(*shape, dtype=dtype, device=device), requires_grad)


def ones(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
) -> Tensor:
    """Make a tensor of ones.

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: The dtype; default f32.
        device: The device.
        requires_grad: Whether it is a `Var`, which can be trained.

    Raises:
        OutOfMemoryError: If it does not fit.
    """
    return _trained(_core.ones(*shape, dtype=dtype, device=device), requires_grad)


def rand(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Draw uniform values in [0, 1).

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: A floating point dtype; default f32.
        device: The device.
        requires_grad: Whether it is a `Var`, which can be trained.
        generator: What they are drawn from; default the library's (`manual_seed`).

    Raises:
        DTypeError: If the dtype is not floating point.
        OutOfMemoryError: If it does not fit.
    """
    with _drawing("rand", generator):
        return _trained(_core.rand(*shape, dtype=dtype, device=device), requires_grad)


def randn(
    *shape: int | tuple[int, ...] | list[int],
    dtype: DType | str | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Draw standard normal values.

    Args:
        shape: The sizes, as arguments or one sequence.
        dtype: A floating point dtype; default f32.
        device: The device.
        requires_grad: Whether it is a `Var`, which can be trained.
        generator: What they are drawn from; default the library's (`manual_seed`).

    Raises:
        DTypeError: If the dtype is not floating point.
        OutOfMemoryError: If it does not fit.
    """
    with _drawing("randn", generator):
        return _trained(_core.randn(*shape, dtype=dtype, device=device), requires_grad)


def randint(
    low: SupportsIndex,
    high: SupportsIndex,
    shape: SupportsIndex | Sequence[SupportsIndex],
    device: str = "cpu",
    generator: Generator | None = None,
) -> Tensor:
    """Draw integers in [low, high), i64.

    Args:
        low: The smallest value.
        high: One more than the largest value.
        shape: The sizes.
        device: The device.
        generator: What they are drawn from; default the library's (`manual_seed`).

    Raises:
        ArgumentError: If the range is empty or has more than 2**32 - 1 values.
        OutOfMemoryError: If it does not fit.
    """
    with _drawing("randint", generator):
        return _core.randint(low, high, shape, device)


def _trained(made: Tensor, requires_grad: bool) -> Tensor:
    return _core.Var(made) if requires_grad else made


def _drawing(name: str, generator: Generator | None) -> AbstractContextManager[None]:
    if generator is None:
        return _NOTHING
    if not isinstance(generator, Generator):
        raise TypeError(f"{name}: generator is {generator!r}, expected a tc.Generator")
    return generator._drawing()  # noqa: SLF001


_NOTHING = nullcontext()
