"""A decorator that puts a function's name in front of the messages of its errors."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from trainable_candle.errors import ArgumentError, Error

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with its name in front of the messages of its errors.

    The name of `__init__` is that of the class; other names lose their double underscores.
    `TypeError` and `AttributeError` become `TypeError`. `ValueError`, `IndexError`,
    `OverflowError` and `MemoryError` become `ArgumentError`. Other errors, and all errors of the
    classes in `trainable_candle.errors`, pass unchanged.
    """
    name = function.__name__
    if name == "__init__":
        name = function.__qualname__.split(".")[-2]
    name = name[2:-2] if name.startswith("__") else name

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Error:
            raise  # Many are subclasses of `ValueError` or `TypeError`, too.
        except (TypeError, AttributeError) as error:
            raise TypeError(_named(name, error)) from error
        except (ValueError, IndexError, OverflowError, MemoryError) as error:
            raise ArgumentError(_named(name, error)) from error

    return call


def _named(name: str, error: Exception) -> str:
    text = str(error)
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"
