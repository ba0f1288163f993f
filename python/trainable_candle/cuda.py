"""CUDA devices."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainable_candle import _core
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
    return _core.cuda_unavailable_reason()


def is_available() -> bool:
    """Return whether CUDA can be used."""
    return unavailable_reason() is None


def device_count() -> int:
    """Return the number of CUDA devices, 0 if CUDA cannot be used."""
    return _core.cuda_device_count() if is_available() else 0


def synchronize(device: str = "cuda") -> None:
    """Wait until all work queued on `device` is done.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device, or a kernel failed.
    """
    _core.cuda_synchronize(device)


def memory_stats(device: str = "cuda") -> dict[str, int]:
    """Return what `device` holds, in bytes.

    Returns:
        `allocated` and `peak_allocated` (tensors and workspaces), `reserved` and `peak_reserved`
        (allocated, or kept for later), `free` and `total` (of the whole device, for any process).

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device.
    """
    names = ("allocated", "peak_allocated", "reserved", "peak_reserved", "free", "total")
    return dict(zip(names, _core.cuda_memory_stats(device), strict=True))


def reset_peak_memory_stats(device: str = "cuda") -> None:
    """Start counting peak memory anew, from what is held now.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device.
    """
    _core.cuda_reset_peak_memory_stats(device)


def capture(function: Callable[..., Any], static_inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Record `function` as a CUDA graph; the result copies new inputs in and replays it.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
    """
    del function, static_inputs
    _refuse()


def _refuse() -> NoReturn:
    reason = unavailable_reason() or "this version captures no graphs"
    raise CudaUnavailableError(f"CUDA is unavailable: {reason}")
