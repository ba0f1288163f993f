"""Random numbers of a run, in streams.

The run's seed, a purpose and a number, such as the index of a sample, select a stream. The random
numbers thus do not depend on earlier draws, on how samples are put into batches, or on which
process draws. The purposes are listed in `rust/core/src/rng/purpose.rs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from trainable_candle._core import draw_from, normal_samples, stream_seed

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

__all__ = ["draw_from", "drawn", "generator", "normal_samples", "pair", "stream_seed"]


def generator(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """Return a numpy generator that begins the stream for `seed`, `purpose` and `number`."""
    return np.random.Generator(np.random.Philox(key=stream_seed(seed, purpose, number)))


def drawn(seed: int, purpose: str, number: int, function: Callable[[], T]) -> T:
    """Return the result of `function`; its draws come from a stream of their own.

    During the call, the stream for `seed`, `purpose` and `number` replaces the library's random
    generator.
    """
    result: T = draw_from(stream_seed(seed, purpose, number), function)
    return result


def pair(high: int, low: int) -> int:
    """Return two numbers below 2**32 packed into one, which can be the `number` of a stream."""
    return high << 32 | low
