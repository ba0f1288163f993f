"""Turn the recording of operations on and off."""

from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, TypeVar

from trainable_candle._core import set_grad_enabled as _switch

__all__ = ["enable_grad", "inference_mode", "no_grad", "set_grad_enabled"]

F = TypeVar("F", bound=Callable[..., Any])


class _GradMode(ContextDecorator):
    """Sets the mode on entry and restores the previous one on exit; may be nested and reused."""

    _enabled: bool

    def __init__(self) -> None:
        self._earlier: list[bool] = []

    def _recreate_cm(self) -> "_GradMode":
        """Give each call of a decorated function its own instance."""
        return type(self)()

    def __enter__(self) -> None:
        self._earlier.append(_switch(self._enabled))

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _switch(self._earlier.pop())


class no_grad(_GradMode):  # noqa: N801 - torch's name
    """Do not record operations of this thread: nothing is saved for a backward pass.

    A context manager and a decorator:

        with tc.no_grad():
            prediction = model(x)

        @tc.no_grad()
        def evaluate(model):
            return model(x)
    """

    _enabled = False


class enable_grad(_GradMode):  # noqa: N801 - torch's name
    """Record operations of this thread, also inside `no_grad`.

    ```python
    with tc.no_grad(), tc.enable_grad():
        assert model(x).requires_grad
    ```
    """

    _enabled = True


class inference_mode(_GradMode):  # noqa: N801 - torch's name
    """Torch's name of `no_grad`.

        with tc.inference_mode():
            assert not model(x).requires_grad

    Args:
        mode: False to leave recording on.
    """

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self._enabled = not mode

    def _recreate_cm(self) -> "inference_mode":
        return type(self)(mode=not self._enabled)


class set_grad_enabled(ContextDecorator):  # noqa: N801 - torch's name
    """Record operations of this thread, or not: at once, or inside a `with`, or of a function.

        with tc.set_grad_enabled(False):
            assert not model(x).requires_grad

    Args:
        mode: Whether operations are recorded.
    """

    def __init__(self, mode: bool) -> None:
        self._mode = bool(mode)
        self._earlier = _switch(self._mode)

    def _recreate_cm(self) -> "set_grad_enabled":
        return type(self)(self._mode)

    def __call__(self, function: F) -> F:
        """Decorate a function; the mode is for its calls alone."""
        _switch(self._earlier)
        return super().__call__(function)

    def __enter__(self) -> None:
        _switch(self._mode)

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _switch(self._earlier)
