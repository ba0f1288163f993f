"""Shared code of the benchmarks on a GPU: the times of our calls and torch's, and floors.

A floor is the larger of two times: the time to do the arithmetic at the rate of a large matrix
product, and the time to read each input and write each result once at the rate of a large copy.
`start` measures both rates with this library, so the floors are those of the GPU in use.
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
RATE_SECONDS = 0.3
"""How long to time a call that measures a rate."""
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Machine:
    """The GPU, the rates that it reaches, and the options that the cases share."""

    device: str
    flops: dict[str, float]
    """Floating-point operations a second of a large matrix product, by dtype."""
    bandwidth: float
    """Bytes a second that a large copy reads and writes, both counted."""
    torch: Any | None
    """The torch module; None if it is not installed, cannot use CUDA or is left out."""
    seconds: float
    """How long to time a case."""
    base: str | None = None
    """The format of the quantized frozen model, if it is quantized."""

    def floor(self, dtype: str, flops: float, moved: float) -> float:
        """Return the floor, in seconds, of `flops` operations and `moved` bytes read or written."""
        return max(flops / self.flops[dtype], moved / self.bandwidth)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that the benchmarks on a GPU share."""
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
    """Measure the machine's rates, print them and the versions, and set W8A8 as the options say.

    W8A8 multiplies the 8-bit codes of weights and inputs. Without CUDA, the benchmark ends with the
    reason.
    """
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


def title_suffix(machine: Machine) -> str:
    """Return what to append to a case's title: a quantized base's format, "products" for W8A8."""
    products = " and products" if tc.get_w8a8() else ""
    return f", {machine.base} base{products}" if machine.base else ""


def product_rate(device: str, dtype: str, size: int = 8192) -> float:
    """Return the operations a second of a product of two square matrices of random numbers."""
    a, b = (tc.randn((size, size), device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: a @ b, device, RATE_SECONDS)


def copy_rate(device: str) -> float:
    """Return the bytes a second that a copy of 2 GiB reads and writes, both counted."""
    source = tc.randn((1 << 29,), device=device)
    # A product with a number reads and writes each element once, as a copy does.
    return 2 * source.nbytes / timed(lambda: source * 1.0, device, RATE_SECONDS)


def fresh(device: str) -> None:
    """Free the GPU memory of earlier cases, and reset the peaks: of this library and of torch."""
    gc.collect()
    tc.cuda.synchronize(device)
    tc.cuda.empty_cache(device)
    tc.cuda.reset_peak_memory_stats(device)
    torch = timing.find_torch()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(call: Callable[[], object], device: str, seconds: float) -> float:
    """Return the median seconds of a call, with the device's work, after untimed calls.

    Calls that take less than 2 ms are timed in groups of about 2 ms, because waiting for the device
    after each call would add to its time.

    Args:
        call: what to time.
        device: the device on which the call works.
        seconds: about how long to time, with at least 5 and at most 200 groups.
    """
    return _median(call, lambda: tc.cuda.synchronize(device), seconds)


def torch_timed(torch: Any, call: Callable[[], object], seconds: float) -> float:
    """Return what `timed` returns, for a call of torch."""
    return _median(call, torch.cuda.synchronize, seconds)


def _median(call: Callable[[], object], wait: Callable[[], object], seconds: float) -> float:
    def mean_seconds(count: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return (time.perf_counter() - started) / count

    mean_seconds(3)  # untimed
    once = mean_seconds(1)
    group = max(1, round(2e-3 / once))
    rounds = min(max(5, round(seconds / (once * group))), 200)
    return statistics.median(mean_seconds(group) for _ in range(rounds))


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """Return the call as a CUDA graph.

    The graph drops the results of the call, because each replay would copy them.
    """

    def run(_: tc.Tensor) -> None:
        call()

    # The input only tells `capture` the device.
    unused = tc.zeros((1,), device=device)
    graph = tc.cuda.capture(run, [unused])
    return lambda: graph(unused)


def milliseconds(**seconds: float | None) -> str:
    """Return `name 1.234 ms` for each time in seconds that is not None, joined by commas."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value * 1e3:.3f} ms"
        for name, value in seconds.items()
        if value is not None
    )


def traced(torch: Any, graph: Callable[[], object], device: str, rows: int = 40) -> None:
    """Print where the GPU's time goes in a replay of a graph, as torch's profiler measures it.

    The lines are those of the whole replay and of the `rows` kernels that take longest.
    """
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
        spent = kernel.self_device_time_total / 1e3
        print(f"{spent:10.3f} ms {kernel.count:7d} {kernel.key[:80]}", flush=True)


def profiled(call: Callable[[], object], device: str, rows: int = 40) -> None:
    """Print where the GPU's time goes in a call that replays no graph, in `rows` kernels.

    The call first runs once unmeasured.
    """
    call()
    with tc.cuda.profile(device) as profile:
        call()
    # The first line has the totals.
    print("\n".join(str(profile).splitlines()[: rows + 1]), flush=True)
