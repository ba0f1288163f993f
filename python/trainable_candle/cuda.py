"""CUDA devices."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainable_candle._core import Tensor
from trainable_candle.errors import CudaUnavailableError

__all__ = [
    "capture",
    "device_count",
    "is_available",
    "memory_stats",
    "reset_peak_memory_stats",
    "synchronize",
    "unavailable_reason",
]


def unavailable_reason() -> str | None:
    """Return why CUDA cannot be used, or None if it can."""
    return "this build has no CUDA support"


def is_available() -> bool:
    """Return whether CUDA can be used."""
    return unavailable_reason() is None


def device_count() -> int:
    """Return the number of CUDA devices."""
    return 0


def synchronize() -> None:
    """Wait until all work on the current device is done.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
    """
    _refuse()


def memory_stats() -> dict[str, int]:
    """Return bytes in use and at peak on the current device.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
    """
    _refuse()


def reset_peak_memory_stats() -> None:
    """Start counting peak memory anew.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
    """
    _refuse()


def capture(function: Callable[..., Any], static_inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Record `function` as a CUDA graph; the result copies new inputs in and replays it.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
    """
    del function, static_inputs
    _refuse()


def _refuse() -> NoReturn:
    raise CudaUnavailableError(f"CUDA is unavailable: {unavailable_reason()}")
