"""Random numbers of a generator of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainable_candle import _core

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Generator"]


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
        """Let the library's generator continue where it was."""
        self._state = _core.get_rng_state()
        _core.set_rng_state(self._outside.pop())
