"""Pinned memory of the host: how much the system gives, and what copies cost without it."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trainable_candle.doctor import is_wsl

if TYPE_CHECKING:
    from trainable_candle.tasks.speed import Rates, Work

LIMIT: Final = "TRAINABLE_CANDLE_PINNED_BYTES"
"""The environment variable that limits pinned memory."""
_WSL: Final = 2**30
"""The pinned memory that Windows gives to a process in WSL2."""
_LEFT: Final = 0.3
"""The share of pinned memory that streamed weights leave to other uses if they do not fit."""
HOST_COPY: Final = 10e9
"""Bytes that a thread of the host copies from memory to memory in a second.

This is the usual rate of one core of a desktop or server with DDR4 or DDR5; no run measures it."""


def pinned_limit() -> float:
    """Bytes of memory that this process may pin; infinity if only the host's memory limits it."""
    limit = float(_WSL) if is_wsl() else math.inf
    with contextlib.suppress(ValueError):
        limit = min(limit, float(int(os.environ.get(LIMIT, ""))))
    return limit


def ring_share(streamed: float, pinned: float, *, shared: bool) -> float:
    """The share of streamed weights that a thread copies through a ring of pinned memory.

    The ring is a small buffer that is filled again and again, for weights that cannot be pinned.

    Args:
        streamed: bytes of streamed weights in host memory.
        pinned: bytes that a process may pin.
        shared: whether processes share the weights, which are then pinned as a whole or not at all.
    """
    if streamed <= pinned:
        return 0.0
    return 1.0 if shared else 1 - (1 - _LEFT) * pinned / streamed


def can_pin(work: Work, streamed: float, pinned: float, *, shared: bool) -> bool:
    """Whether the optimizer's states can be pinned beside streamed weights and blocks' inputs.

    Args:
        work: has the bytes of the states and of the offloaded inputs of blocks.
        streamed: as for `ring_share`.
        pinned: as for `ring_share`.
        shared: as for `ring_share`.
    """
    left = pinned - streamed
    if left < 0:
        left = pinned if shared else _LEFT * pinned
    return work.states + work.offloaded <= left


def with_ring(rates: Rates, share: float) -> Rates:
    """The rates if a share of streamed weights goes through the ring of pinned memory.

    The host copies into the ring while the GPU copies from it, so the slower copy limits both.
    """
    if share == 0:
        return rates
    seconds = (1 - share) / rates.link + share / min(rates.link, HOST_COPY)
    return replace(rates, streams=1 / seconds)
