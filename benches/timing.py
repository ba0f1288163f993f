"""Shared code of the benchmarks, which compare this library with torch.

The compared implementations ("sides") take turns, so that noise of the machine affects all alike.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

TURNS, REST, WARM_UP = 3, 0.3, 2
"""Turns of each side (`TURNS`), seconds of rest before a turn (`REST`), and untimed rounds at the
start of each turn (`WARM_UP`)."""


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of `--threads` and `--rounds`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads of this library and of torch"
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="timed rounds of each side (at least)"
    )
    return parser


def arguments(description: str) -> argparse.Namespace:
    """Do what `start` does, for a benchmark without options of its own."""
    return start(parser(description))


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options, set the threads of this library and of torch, and print the versions."""
    options = parser.parse_args()
    tc.set_num_threads(options.threads)
    torch = find_torch()
    if torch is not None:
        torch.set_num_threads(options.threads)
    version = torch.__version__ if torch else "not installed"
    print(
        f"{processor()}, {options.threads} threads, Python {platform.python_version()}, "
        f"trainable-candle {tc.__version__}, torch {version}"
    )
    return options


def find_torch() -> Any:
    """Return the torch module, or None if it is not installed: our own times need no torch."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def processor() -> str:
    """Return the processor's name, with the number of cores on Linux."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return f"{names[0]} ({os.cpu_count()} cores)"
    except (OSError, IndexError):
        return platform.processor() or "unknown processor"


def race(sides: dict[str, Callable[[], object]], rounds: int, inner: int = 1) -> dict[str, float]:
    """Return the median seconds of one call of each side.

    Each side has `TURNS` turns of several rounds. Before each turn the machine rests: the OpenMP
    threads of torch spin for some time after a call, and would take a core from the next side.

    Args:
        sides: the functions to time, by the names of the implementations.
        rounds: timed rounds of each side; rounded up to a multiple of `TURNS`.
        inner: calls in a round, for calls too short to time one by one.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    rounds_in_turn = -(-rounds // TURNS)  # rounded up
    for _ in range(TURNS):
        for name, call in sides.items():
            time.sleep(REST)
            for index in range(WARM_UP + rounds_in_turn):
                started = time.perf_counter()
                for _ in range(inner):
                    call()
                elapsed = (time.perf_counter() - started) / inner
                if index >= WARM_UP:
                    times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def report(title: str, seconds: dict[str, float], unit: float = 1e-3, symbol: str = "ms") -> None:
    """Print a line: the time of each side and, with torch, the ratio of our time to torch's.

    Args:
        title: the start of the line.
        seconds: the times, by the names of the sides.
        unit: the seconds of the unit in which times are printed.
        symbol: the symbol of this unit.
    """
    parts = [f"{name} {value / unit:.3f} {symbol}" for name, value in seconds.items()]
    ours, theirs = seconds.get("ours"), seconds.get("torch")
    ratio = f", ours/torch {ours / theirs:.2f}" if ours and theirs else ""
    print(f"{title}: {', '.join(parts)}{ratio}", flush=True)
