"""Random number generators in addition to the library's own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from trainable_candle import _core

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Generator", "drawing"]


class Generator:
    """A random number generator apart from the library's, for arguments named `generator`.

    In a `with` block of a generator, all functions draw from it instead of the library's generator.
    Such blocks may be nested, also those of one generator.

        noise = tc.randn(2, 3, generator=tc.Generator().manual_seed(0))

    Args:
        device: Ignored: every device draws from the same streams.
    """

    _entered: ClassVar[list[Generator]] = []
    """The generators of open `with` blocks; the last one replaces the library's generator."""
    _library: ClassVar[tuple[int, int]] = (0, 0)
    """The state of the library's own generator while any `with` block is open.

    A state is a seed and a position in the seed's stream.
    """

    def __init__(self, device: str = "cpu") -> None:
        del device
        self._state = (0, 0)
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> Generator:
        """Start the stream of a seed, 0 to 2**64 - 1, and return the generator.

        Raises:
            TypeError: If the seed is not an integer.
            ArgumentError: If the seed is out of range.
        """
        # Seed the library's generator for a moment: this checks the seed and gives the state.
        state_in_use = _core.get_rng_state()
        try:
            _core.manual_seed(seed)
            state = _core.get_rng_state()
        finally:
            _core.set_rng_state(state_in_use)
        return self.set_state(state)

    def initial_seed(self) -> int:
        """Return the seed."""
        return self.get_state()[0]

    def get_state(self) -> tuple[int, int]:
        """Return the seed and the position in the seed's stream."""
        return _core.get_rng_state() if self._is_in_use() else self._state

    def set_state(self, state: tuple[int, int]) -> Generator:
        """Set the seed and the position, as `get_state` returns them, and return the generator."""
        if self._is_in_use():
            _core.set_rng_state(state)
        self._state = state
        return self

    def __enter__(self) -> Self:
        """Replace the library's generator."""
        self._save_state_in_use()
        self._entered.append(self)
        _core.set_rng_state(self._state)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Continue with the generator of the enclosing `with` block, or with the library's."""
        self._save_state_in_use()
        self._entered.pop()
        outer = self._entered[-1]._state if self._entered else Generator._library  # noqa: SLF001
        _core.set_rng_state(outer)

    def _is_in_use(self) -> bool:
        """Return whether the innermost `with` block is one of this generator."""
        return bool(self._entered) and self._entered[-1] is self

    def _save_state_in_use(self) -> None:
        """Save the state of the generator that is in use, which may be the library's."""
        state = _core.get_rng_state()
        if self._entered:
            self._entered[-1]._state = state  # noqa: SLF001
        else:
            Generator._library = state


def drawing(function: str, generator: object) -> Any:
    """Return a context in which functions draw from `generator`; None changes nothing.

    Args:
        function: The name of the function that draws, for error messages.
        generator: The function's argument `generator`.

    Raises:
        TypeError: If `generator` is neither a `Generator` nor None.
    """
    if generator is None:
        return nullcontext()
    if not isinstance(generator, Generator):
        kind = type(generator).__name__
        raise TypeError(f"{function}: generator is {kind}, expected a tc.Generator or None")
    return generator
