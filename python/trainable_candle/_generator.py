"""Random numbers of a generator of one's own, and leaves that need a gradient."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from trainable_candle import _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from trainable_candle._core import Tensor

__all__ = ["Generator", "creation"]


class Generator:
    """A stream of random numbers beside the library's, for `generator=` of the drawing functions.

    As a context manager it is the library's generator inside.

        noise = tc.randn(2, 3, generator=tc.Generator().manual_seed(0))

    Args:
        device: Ignored: every device draws from the same streams.
    """

    def __init__(self, device: str = "cpu") -> None:
        del device
        self._outside: list[tuple[int, int]] = []
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> Generator:
        """Start the stream of a seed, 0 to 2**64 - 1, and return the generator."""
        before = _core.get_rng_state()
        try:
            _core.manual_seed(seed)
            self._state = _core.get_rng_state()
        finally:
            _core.set_rng_state(before)
        return self

    def initial_seed(self) -> int:
        """Return the seed."""
        return self._state[0]

    def get_state(self) -> tuple[int, int]:
        """Return the seed and the position."""
        return self._state

    def set_state(self, state: tuple[int, int]) -> Generator:
        """Continue from what `get_state` returned."""
        self._state = state
        return self

    def __enter__(self) -> Self:
        """Be the library's generator."""
        self._outside.append(_core.get_rng_state())
        _core.set_rng_state(self._state)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the library's generator go on where it was."""
        self._state = _core.get_rng_state()
        _core.set_rng_state(self._outside.pop())


def creation(function: Callable[..., Tensor], *, draws: bool = False) -> Callable[..., Tensor]:
    """Let a function that makes tensors take `requires_grad`, and `generator` if it draws."""
    name = function.__name__

    @wraps(function)
    def make(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        generator = kwargs.pop("generator", None) if draws else None
        if generator is None:
            made = function(*args, **kwargs)
        elif isinstance(generator, Generator):
            with generator:
                made = function(*args, **kwargs)
        else:
            kind = type(generator).__name__
            raise TypeError(f"{name}: generator is {kind}, expected a tc.Generator or None")
        return _core.Var(made) if requires_grad else made

    return make
