"""Functions that make a tensor with the shape of a given tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainable_candle import _core
from trainable_candle._creation import rand, randn

if TYPE_CHECKING:
    from trainable_candle._core import DType, Tensor
    from trainable_candle._generator import Generator

__all__ = ["full_like", "rand_like", "randn_like"]


def full_like(input: Tensor, value: float, dtype: DType | str | None = None) -> Tensor:
    """Return a tensor filled with one value, with the shape and on the device of `input`.

    The dtype is that of `input` unless `dtype` gives another one.

    ```python
    assert tc.full_like(tc.zeros(2), 0.5).tolist() == [0.5, 0.5]
    ```
    """
    shape, dtype = _properties("full_like", input, dtype)
    return _core.full(shape, value, dtype, input.device)


def rand_like(
    input: Tensor, dtype: DType | str | None = None, *, generator: Generator | None = None
) -> Tensor:
    """Return uniform values in [0, 1), like `rand`, with the shape and on the device of `input`.

    The dtype is that of `input` unless `dtype` gives another one.

    ```python
    assert tc.rand_like(tc.zeros(2, 3)).shape == (2, 3)
    ```
    """
    shape, dtype = _properties("rand_like", input, dtype)
    return rand(shape, dtype=dtype, device=input.device, generator=generator)


def randn_like(
    input: Tensor, dtype: DType | str | None = None, *, generator: Generator | None = None
) -> Tensor:
    """Return standard normal values, like `randn`, with the shape and on the device of `input`.

    The dtype is that of `input` unless `dtype` gives another one.

    ```python
    assert tc.randn_like(tc.zeros(2, 3)).shape == (2, 3)
    ```
    """
    shape, dtype = _properties("randn_like", input, dtype)
    return randn(shape, dtype=dtype, device=input.device, generator=generator)


def _properties(name: str, input: Tensor, dtype: DType | str | None) -> tuple[Any, DType | str]:
    """Return the shape of `input`, and its dtype or the given one."""
    if not isinstance(input, _core.Tensor):
        raise TypeError(f"{name}: input is {type(input).__name__}, expected a Tensor")
    return input.shape, input.dtype if dtype is None else dtype
