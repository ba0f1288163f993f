"""Shared code of the benchmarks on a GPU: timing with synchronisation, torch's times, floors.

A floor is the larger of two times: the time to do the arithmetic at the rate of a large matrix
product, and the time to read each input and write each result once at the rate of a large copy.
Each benchmark first measures both rates with this library, so the floors are those of the GPU in
use.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import timing

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 2**30
FORMATS = ("int8", "fp8", "nf4")
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Machine:
    """The GPU, the rates that it reaches, and torch if it is installed."""

    device: str
    flops: dict[str, float]
    """Floating-point operations a second of a large matrix product, by dtype."""
    bandwidth: float
    """Bytes a second of a large copy, read and written."""
    torch: Any | None
    seconds: float
    """How long to time a case."""
    base: str | None = None
    """The format of the quantized frozen model, if it is quantized."""

    def floor(self, dtype: str, flops: float, moved: float) -> float:
        """The least seconds for `flops` operations, and for `moved` bytes read or written."""
        return max(flops / self.flops[dtype], moved / self.bandwidth)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all benchmarks on a GPU have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--only", default="", help="run the cases whose title contains this")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long to time a case")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out")
    parser.add_argument("--base-precision", choices=FORMATS, help="format of our frozen layers")
    parser.add_argument("--w8a8", action="store_true", help="multiply the codes of an 8-bit base")
    parser.add_argument("--profile", action="store_true", help="print our time by kernel")
    return parser


def start(options: argparse.Namespace) -> Machine:
    """Measure the machine, and print the versions and rates."""
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        raise SystemExit(f"no CUDA: {reason}")
    tc.manual_seed(0)
    torch = None if options.no_torch else timing.find_torch()
    if torch is not None and not torch.cuda.is_available():
        torch = None
    device = options.device
    print(f"trainable-candle {tc.__version__}, {device}, torch {torch and torch.__version__}")
    flops = {dtype: product_rate(device, dtype) for dtype in DTYPES}
    bandwidth = copy_rate(device)
    rates = ", ".join(f"{dtype} {rate / 1e12:.0f} TFLOP/s" for dtype, rate in flops.items())
    print(f"rates: {rates}, {bandwidth / 1e9:.0f} GB/s", flush=True)
    fresh(device)
    tc.set_w8a8(options.w8a8)
    return Machine(device, flops, bandwidth, torch, options.seconds, options.base_precision)


def on(machine: Machine) -> str:
    """What to append to the title of a case: the format of the base, and "products" for W8A8."""
    products = " and products" if tc.get_w8a8() else ""
    return f", {machine.base} base{products}" if machine.base else ""


def product_rate(device: str, dtype: str, size: int = 8192) -> float:
    """Operations a second of a product of two square matrices of random numbers."""
    a, b = (tc.randn((size, size), device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: a @ b, device, 0.3)


def copy_rate(device: str) -> float:
    """Bytes a second of a copy of 2 GiB, read and written."""
    source = tc.randn((1 << 29,), device=device)
    return 2 * source.nbytes / timed(lambda: source * 1.0, device, 0.3)


def fresh(device: str) -> None:
    """Free the memory of earlier cases, and reset the peaks."""
    gc.collect()
    tc.cuda.synchronize(device)
    tc.cuda.empty_cache(device)
    tc.cuda.reset_peak_memory_stats(device)
    torch = timing.find_torch()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(call: Callable[[], object], device: str, seconds: float) -> float:
    """Median seconds of a call until the device has done its work, after three untimed calls.

    Short calls are timed in groups of about 2 ms, because waiting after each call would add to its
    time.
    """
    return _median(call, lambda: tc.cuda.synchronize(device), seconds)


def torch_timed(torch: Any, call: Callable[[], object], seconds: float) -> float:
    """Like `timed`, for torch."""
    return _median(call, torch.cuda.synchronize, seconds)


def _median(call: Callable[[], object], wait: Callable[[], object], seconds: float) -> float:
    def run(count: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return (time.perf_counter() - started) / count

    run(3)
    once = run(1)
    inner = max(1, round(2e-3 / once))
    rounds = min(max(5, round(seconds / (once * inner))), 200)
    return statistics.median(run(inner) for _ in range(rounds))


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """The call as a CUDA graph that returns nothing, because a replay would copy the results."""

    def run(_: tc.Tensor) -> None:
        call()

    unused = tc.zeros((1,), device=device)
    graph = tc.cuda.capture(run, [unused])
    return lambda: graph(unused)


def milliseconds(**seconds: float | None) -> str:
    """`name 1.234 ms` for each time that is not None."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value * 1e3:.3f} ms"
        for name, value in seconds.items()
        if value is not None
    )


def traced(torch: Any, graph: Callable[[], object], device: str, rows: int = 40) -> None:
    """Print where the GPU's time goes in a replay of a graph, as torch's profiler measures it."""
    for _ in range(3):
        graph()
    tc.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph()
        tc.cuda.synchronize(device)
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    print(
        f"{total / 1e3:10.3f} ms {sum(kernel.count for kernel in kernels):7d} kernels of a replay"
    )
    for kernel in kernels[:rows]:
        milliseconds = kernel.self_device_time_total / 1e3
        print(f"{milliseconds:10.3f} ms {kernel.count:7d} {kernel.key[:80]}", flush=True)


def profiled(call: Callable[[], object], device: str, rows: int = 40) -> None:
    """Print where the GPU's time goes in a call that is not a graph."""
    call()
    with tc.cuda.profile(device) as profile:
        call()
    print("\n".join(str(profile).splitlines()[: rows + 1]), flush=True)
