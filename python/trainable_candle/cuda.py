"""Memory, profiles and CUDA graphs of CUDA devices. A device is given by its name or its number."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainable_candle import _core
from trainable_candle._core import Tensor

__all__ = [
    "Captured",
    "KernelTime",
    "Profile",
    "capture",
    "device_count",
    "empty_cache",
    "get_device_name",
    "is_available",
    "memory_stats",
    "profile",
    "reset_peak_memory_stats",
    "set_memory_limit",
    "synchronize",
    "unavailable_reason",
]


def unavailable_reason() -> str | None:
    """Return why CUDA cannot be used, or None if it can.

    ```python
    if not tc.cuda.is_available():
        print(tc.cuda.unavailable_reason())
    ```
    """
    return _core.cuda_unavailable_reason()


def is_available() -> bool:
    """Return whether CUDA can be used.

    ```python
    if not tc.cuda.is_available():
        print(tc.cuda.unavailable_reason())
    ```
    """
    return unavailable_reason() is None


def device_count() -> int:
    """Return the number of CUDA devices, 0 if CUDA cannot be used."""
    return _core.cuda_device_count() if is_available() else 0


def synchronize(device: str | int = "cuda") -> None:
    """Wait until all work queued on `device` is done.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device, or a kernel failed.
        IndexOutOfRangeError: If an earlier operation on the GPU used an index out of range. The GPU
            reports this error only when a value is read or the device is synchronized.
    """
    _core.cuda_synchronize(_named(device))


def get_device_name(device: str | int = "cuda") -> str:
    """Return the product name of `device`, such as `NVIDIA H200`.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device.
    """
    return _core.cuda_device_name(_named(device))


def set_memory_limit(limit: int | None, device: str | int = "cuda") -> None:
    """Limit the memory of `device` that tensors and workspaces may take from now on.

    An allocation above the limit fails as if the memory of the device had run out. CUDA itself
    takes some hundred MiB, which the limit does not include.

    Args:
        limit: Bytes; None for no limit.
        device: A CUDA device.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device.
    """
    _core.cuda_set_memory_limit(_named(device), limit)


def memory_stats(device: str | int = "cuda") -> dict[str, int]:
    """Return the memory statistics of `device`.

    Returns:
        In bytes: `allocated` and `peak_allocated` (tensors and workspaces), `reserved` and
        `peak_reserved` (allocated, cached, or used by captured functions), `graphs` (used by
        captured functions), `free` and `total` (of the whole device, for any process). Counts:
        `allocations`, `growths` (how often memory was taken from the device), `retries` (how often
        memory ran out, cached memory was released, and the allocation was tried again).

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device.
    """
    names = (
        "allocated",
        "peak_allocated",
        "reserved",
        "peak_reserved",
        "graphs",
        "allocations",
        "growths",
        "retries",
        "free",
        "total",
    )
    return dict(zip(names, _core.cuda_memory_stats(_named(device)), strict=True))


def empty_cache(device: str | int = "cuda") -> int:
    """Release the cached memory of `device` to other processes; return how many bytes it was.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device.
    """
    return _core.cuda_empty_cache(_named(device))


def reset_peak_memory_stats(device: str | int = "cuda") -> None:
    """Set `peak_allocated` and `peak_reserved` of `memory_stats` to the current values.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device.
    """
    _core.cuda_reset_peak_memory_stats(_named(device))


@dataclass(frozen=True)
class KernelTime:
    """The GPU time of one kernel."""

    name: str
    """The kernel's name; for a matrix product, the product's sizes."""
    count: int
    """The number of launches."""
    milliseconds: float
    """The sum of the times of all launches."""


@dataclass
class Profile:
    """The GPU time of every kernel that was launched during a profile."""

    kernels: list[KernelTime] = field(default_factory=list)
    """The kernels, the longest total time first; empty until the profile ends."""

    @property
    def milliseconds(self) -> float:
        """The sum of the times of all kernels."""
        return sum(kernel.milliseconds for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """The number of launches of all kernels."""
        return sum(kernel.count for kernel in self.kernels)

    def __str__(self) -> str:
        """Format as a table: the totals, then a line for each kernel with its share of the time."""
        total = self.milliseconds
        divisor = total or 1.0
        lines = [f"{total:10.3f} ms  {self.launches:6} launches"]
        lines += [
            f"{k.milliseconds:10.3f} ms  {k.count:6}  {k.milliseconds / divisor:6.1%}  {k.name}"
            for k in self.kernels
        ]
        return "\n".join(lines)


@contextmanager
def profile(device: str | int = "cuda") -> Iterator[Profile]:
    """Measure how long the GPU takes for each kernel that is launched in this context.

    The GPU starts a batch of launches only when the host has queued the whole batch, so the times
    do not include waiting for the host. Copies are not measured, nor are the kernels of a graph
    that a captured function launches.

    Measure a training step::

        with tc.cuda.profile() as profile:
            step()
        print(profile)

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        DeviceError: If `device` is not a CUDA device, or a kernel failed.
        ArgumentError: If another profile is active.
    """
    _core.cuda_start_profile(_named(device))
    result = Profile()
    try:
        yield result
    finally:
        result.kernels = [KernelTime(*kernel) for kernel in _core.cuda_finish_profile()]


class Captured:
    """A function that runs as a CUDA graph after its first calls; `capture` makes one."""

    def __init__(self, function: Callable[..., Any], static_inputs: Sequence[Tensor]) -> None:
        checked_inputs = _checked_inputs(function, static_inputs)
        # A list, so that `call_flat` can change it. Empty until the first call; then one entry, the
        # structure of the function's last result. Replays do not call `call_flat`, so it stays.
        form: list[Any] = []

        def call_flat(*inputs: Tensor) -> list[Tensor]:
            tensors: list[Tensor] = []
            form[:] = [_flatten(function(*inputs), tensors)]
            return tensors

        self._form = form
        self._captured = _core.CapturedFunction(call_flat, checked_inputs)

    @property
    def is_recorded(self) -> bool:
        """Whether calls replay a graph."""
        return self._captured.is_recorded

    def __call__(self, *inputs: Tensor) -> Any:
        """Return what the function returns for `inputs`, as tensors detached from the tape.

        Gradients that the function itself computes (by `backward`) are kept.

        Raises:
            ArgumentError, ShapeError, DTypeError: If the number, a shape or a dtype of the inputs
                differs from those of the static inputs.
            DeviceError: If the function does something that a graph cannot record; raised by the
                call that records.
            TypeError: If an input is not a Tensor, or the function returns values that `capture`
                does not allow.
        """
        tensors = self._captured(list(inputs))
        return _unflatten(self._form[0], iter(tensors))


def capture(function: Callable[..., Any], static_inputs: Sequence[Tensor]) -> Captured:
    """Make a CUDA graph of `function`; one launch of the graph does all work of the function.

    The first call runs the function. The second call records the function as a graph and replays
    the graph. Later calls copy their inputs and replay the graph. (If the function computes
    gradients of variables that are not parameters of an adapter, the second call still runs the
    function, and the third records it.) Every call has the effects of a call without a graph: the
    same random numbers, gradients and parameters. A training step can be one function: forward,
    backward, `step`, `zero_grad`.

    Decisions of the function on the CPU (shapes, branches, Python numbers) are recorded once, and
    replays repeat them. The function cannot read values of tensors (`item`, `numpy`, `print`);
    return the tensors and read them after the call. A value that the function copies from the CPU
    to the GPU must be the same in each call: the recording makes it a constant, and replays do not
    notice a later change. Pass values that change as inputs, or set a `Var` between calls. The
    function must not keep tensors that it makes, because every replay overwrites them. No other
    thread may use CUDA during the recording.

    You may change the optimizer and its helpers (schedulers, `GradScaler`, `EMA`) between calls:
    replays use new learning rates and loaded states. A graph cannot be replayed in two cases: some
    variables have taken more steps than others, or a gradient is missing. Then the next call runs
    the function, and the call after it records again. Inside the function, changing the
    optimizer or its helpers raises an error. The exceptions are `step`, `zero_grad`, `update` of a
    `GradScaler` and one call of `update` of an `EMA`; every replay repeats these.

    Args:
        function: Takes tensors on the device; returns a tensor, None, or tuples, lists and dicts
            of them. Variables that it uses are not inputs.
        static_inputs: Tensors with the shapes and dtypes that the inputs of every call must have.
            Inputs are copied, and may also come from the CPU.

    Raises:
        CudaUnavailableError: If CUDA cannot be used.
        AutogradError: If a static input needs a gradient.
        TypeError: If `function` is not a function, or `static_inputs` has values that are not
            tensors.
    """
    return Captured(function, static_inputs)


def _named(device: str | int) -> str:
    """Return the name of a device: `cuda:N` for a number N; a name stays as it is."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return f"cuda:{device}" if is_number else str(device)


_INSTEAD = {
    "manual_seed": "use tc.manual_seed, whose numbers are the same on every device",
    "manual_seed_all": "use tc.manual_seed, whose numbers are the same on every device",
    "memory_allocated": 'use tc.cuda.memory_stats()["allocated"]',
    "max_memory_allocated": 'use tc.cuda.memory_stats()["peak_allocated"]',
    "memory_reserved": 'use tc.cuda.memory_stats()["reserved"]',
    "max_memory_reserved": 'use tc.cuda.memory_stats()["peak_reserved"]',
    "mem_get_info": 'use "free" and "total" of tc.cuda.memory_stats()',
    "set_device": 'give device="cuda:1" where tensors and models are made',
    "current_device": 'name the device in each call; "cuda" is always GPU 0',
    "amp": "load a model in bf16; tc.optim.GradScaler scales the loss of f16",
    "Event": "use tc.cuda.profile, or time.perf_counter after tc.cuda.synchronize()",
    "CUDAGraph": "use tc.cuda.capture",
    "graph": "use tc.cuda.capture",
}
"""Advice on names that torch.cuda has and this module lacks."""


def __getattr__(name: str) -> Any:
    advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no {name!r}{advice}")


def _checked_inputs(function: object, static_inputs: object) -> list[Tensor]:
    """Check the arguments of `capture`; returns the static inputs.

    Raises:
        TypeError: `function` is not a function, `static_inputs` is a Tensor, or a static input is
            not a Tensor.
    """
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"capture: function is a value of type {kind}, expected a function")
    if isinstance(static_inputs, Tensor):
        raise TypeError("capture: static_inputs is a Tensor, expected a list of Tensors: [tensor]")
    inputs: list[Tensor] = []
    # A value that is not a sequence gives the same error as a sequence that contains it.
    for given in static_inputs if isinstance(static_inputs, Iterable) else [static_inputs]:
        if not isinstance(given, Tensor):
            kind = type(given).__name__
            message = f"static_inputs has a value of type {kind}, expected Tensors"
            raise TypeError(f"capture: {message}")
        inputs.append(given)
    return inputs


class _Leaf:
    """Stands for a tensor in the structure of a function's result; has no instances."""


def _flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with `_Leaf` in place of each tensor, and append the tensors to `tensors`.

    Raises:
        TypeError: `value` has something other than tensors, None, tuples, lists and dicts.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Leaf
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: _flatten(item, tensors) for name, item in value.items()}
    if isinstance(value, list):
        return [_flatten(item, tensors) for item in value]
    if isinstance(value, tuple):
        return tuple(_flatten(item, tensors) for item in value)
    kind = type(value).__name__
    expected = "a Tensor, None, or tuples, lists and dicts of them"
    raise TypeError(f"capture: the function returned a value of type {kind}, expected {expected}")


def _unflatten(form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return `form` with the next of `tensors` in place of each `_Leaf`."""
    if form is _Leaf:
        return next(tensors)
    if isinstance(form, dict):
        return {name: _unflatten(item, tensors) for name, item in form.items()}
    if isinstance(form, list):
        return [_unflatten(item, tensors) for item in form]
    if isinstance(form, tuple):
        return tuple(_unflatten(item, tensors) for item in form)
    return form
