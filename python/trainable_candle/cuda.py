"""CUDA devices."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trainable_candle import _core
from trainable_candle._core import Tensor
from trainable_candle.errors import CudaUnavailableError

__all__ = [
    "KernelTime",
    "Profile",
    "capture",
    "device_count",
    "is_available",
    "memory_stats",
    "profile",
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


@dataclass(frozen=True)
class KernelTime:
    """How long a GPU took for the launches of one kernel."""

    name: str
    """The kernel's name; of a matrix product its sizes."""
    count: int
    """How many launches."""
    milliseconds: float
    """Of all of them together."""


@dataclass
class Profile:
    """Where the time of a GPU went."""

    kernels: list[KernelTime] = field(default_factory=list)
    """The longest first; empty until the profile has ended."""

    @property
    def milliseconds(self) -> float:
        """Of all kernels."""
        return sum(kernel.milliseconds for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """Of all kernels."""
        return sum(kernel.count for kernel in self.kernels)

    def __str__(self) -> str:
        """A table."""
        whole = self.milliseconds
        lines = [f"{whole:10.3f} ms  {self.launches:6} launches"]
        lines += [
            f"{k.milliseconds:10.3f} ms  {k.count:6}  {k.milliseconds / whole:6.1%}  {k.name}"
            for k in self.kernels
        ]
        return "\n".join(lines)


@contextmanager
def profile(device: str = "cuda") -> Iterator[Profile]:
    """Measure how long the GPU takes for each kernel that is launched in this context.

    The GPU is held back while launches are queued, so that waiting for the host counts for none of
    them; copies and launches of captured functions are left out::

        with tc.cuda.profile() as profile:
            step()
        print(profile)

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device, or a kernel failed.
        ArgumentError: If a profile is being made.
    """
    _core.cuda_start_profile(device)
    found = Profile()
    try:
        yield found
    finally:
        found.kernels = [KernelTime(*kernel) for kernel in _core.cuda_finish_profile()]


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
