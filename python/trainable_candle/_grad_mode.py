"""Turn the recording of operations on and off."""

from contextlib import ContextDecorator
from types import TracebackType

from trainable_candle._core import set_grad_enabled

__all__ = ["enable_grad", "no_grad"]


class _GradMode(ContextDecorator):
    """Sets the mode on entry and restores the previous one on exit; may be nested and reused."""

    _enabled: bool

    def __init__(self) -> None:
        self._earlier: list[bool] = []

    def _recreate_cm(self) -> "_GradMode":
        """Give each call of a decorated function its own instance."""
        return type(self)()

    def __enter__(self) -> None:
        self._earlier.append(set_grad_enabled(self._enabled))

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        set_grad_enabled(self._earlier.pop())


class no_grad(_GradMode):  # noqa: N801 - torch's name
    """Do not record operations of this thread: nothing is saved for a backward pass.

    A context manager and a decorator:

        with tc.no_grad():
            prediction = model(x)

        @tc.no_grad()
        def evaluate(model): ...
    """

    _enabled = False


class enable_grad(_GradMode):  # noqa: N801 - torch's name
    """Record operations of this thread, also inside `no_grad`."""

    _enabled = True
