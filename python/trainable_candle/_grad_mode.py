"""Turn the recording of operations on and off."""

from contextlib import ContextDecorator
from types import TracebackType

from trainable_candle._core import set_grad_enabled as _core_set_grad_enabled

__all__ = ["enable_grad", "inference_mode", "no_grad", "set_grad_enabled"]


class _GradMode(ContextDecorator):
    """Sets the mode on entry and restores the previous one on exit; may be nested and reused."""

    _enabled: bool

    def __init__(self) -> None:
        self._earlier: list[bool] = []

    def _recreate_cm(self) -> "_GradMode":
        """Give each call of a decorated function its own instance."""
        return type(self)()

    def __enter__(self) -> None:
        self._earlier.append(_core_set_grad_enabled(self._enabled))

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _core_set_grad_enabled(self._earlier.pop())


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


class inference_mode(_GradMode):  # noqa: N801 - torch's name
    """As `no_grad`, or with False as `enable_grad`.

    Tensors that are made within it are ordinary ones.

    Args:
        mode: Whether operations are not recorded.
    """

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self._enabled = not mode

    def _recreate_cm(self) -> "inference_mode":
        return inference_mode(not self._enabled)


class set_grad_enabled:  # noqa: N801 - torch's name
    """Record operations of this thread or not, from now on; as a context manager until its end.

    Args:
        mode: Whether operations are recorded.
    """

    def __init__(self, mode: bool) -> None:
        self._earlier = _core_set_grad_enabled(bool(mode))

    def __enter__(self) -> None:
        """Nothing: the mode is set already."""

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Go back to the earlier mode."""
        _core_set_grad_enabled(self._earlier)
