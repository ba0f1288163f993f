"""Contexts and decorators that turn the recording of operations on the tape on and off."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import wraps
from inspect import isgeneratorfunction
from types import TracebackType
from typing import Any, TypeVar, cast

from trainable_candle._core import set_grad_enabled as _switch

# `_switch(mode)` sets whether this thread records, and returns the mode that it replaces.

__all__ = ["enable_grad", "inference_mode", "no_grad", "set_grad_enabled"]

F = TypeVar("F", bound=Callable[..., Any])


class _Decorator(ContextDecorator, ABC):
    """A context manager that also decorates functions, including generator functions."""

    def __call__(self, function: F) -> F:
        """Decorate a function."""
        if not isgeneratorfunction(function):
            return super().__call__(function)

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # The mode applies to the generator's own code, not to the code that uses its values.
            generator = function(*args, **kwargs)
            resume, argument = generator.send, None
            try:
                while True:
                    with self._recreate_cm():
                        value = resume(argument)
                    try:
                        argument = yield value
                        resume = generator.send
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - the generator handles it
                        resume, argument = generator.throw, error
            except StopIteration as end:
                return end.value
            finally:
                with self._recreate_cm():
                    generator.close()

        return cast("F", wrapper)

    @abstractmethod
    def _recreate_cm(self) -> Any:
        """Return a new context with the same mode; each call of a decorated function has its own.

        `ContextDecorator` calls this method.
        """


class _GradMode(_Decorator):
    """Sets the mode on entry and restores the previous one on exit; may be nested and reused."""

    _enabled: bool
    """The mode inside of the context: whether operations are recorded."""

    def __new__(cls, mode: Any = None) -> Any:
        """Make a context or, if `mode` is a function, decorate it (`@no_grad` alone)."""
        if callable(mode):
            return cls()(mode)
        return super().__new__(cls)

    def __init__(self) -> None:
        self._earlier: list[bool] = []

    def _recreate_cm(self) -> "_GradMode":
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

    A context manager, and a decorator with parentheses or without:

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
    """Do not record operations of this thread, like `no_grad`.

        with tc.inference_mode():
            assert not model(x).requires_grad

    Args:
        mode: Whether recording is off; False turns it on, like `enable_grad`.
    """

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self._enabled = not mode

    def _recreate_cm(self) -> "inference_mode":
        return type(self)(mode=not self._enabled)


class set_grad_enabled(_Decorator):  # noqa: N801 - torch's name
    """Turn this thread's recording on or off.

    A call alone sets the mode from now on. In a `with` statement, the mode applies to the block;
    as a decorator, it applies to the calls of the function.

        with tc.set_grad_enabled(False):
            assert not model(x).requires_grad

    Args:
        mode: Whether operations are recorded.
    """

    def __init__(self, mode: bool) -> None:
        self._mode = bool(mode)
        # As in torch, `__exit__` restores the mode before this call, not the mode on entry.
        self._earlier = _switch(self._mode)

    def _recreate_cm(self) -> "set_grad_enabled":
        return type(self)(self._mode)

    def __call__(self, function: F) -> F:
        """Decorate a function; the mode applies only to its calls."""
        _switch(self._earlier)  # undoes what `__init__` did
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
