"""Pinned host memory, from which a GPU copies: how much the system gives, or a ring instead."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trainable_candle import _core
from trainable_candle.tasks.estimate import size

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle.distributed.group import Group
    from trainable_candle.tasks.budget import Budget, Plan
    from trainable_candle.tasks.speed import Rates, Work

LIMIT: Final = "TRAINABLE_CANDLE_PINNED_BYTES"
"""The environment variable that limits pinned memory."""
PROBED: Final = 2**29
"""`probed` asks the system only if a plan needs at least this many pinned bytes, because pinning
takes time. WSL2, the system that gives the least, gives about twice this number."""
TRIED: Final = 2**32
"""The most bytes that `probed` asks for. On the host of an H100, pinning a GiB took 0.7 s."""
_LEFT: Final = 0.3
"""The share of pinned memory that streamed weights leave to other data if the weights do not all
fit into it."""
HOST_COPY: Final = 10e9
"""Bytes that a thread of the host copies from memory to memory in a second.

This is the usual rate of one core of a desktop or server with DDR4 or DDR5; no run measures it."""


def pinned_limit() -> float:
    """Return the bytes that this process may pin by `LIMIT`; infinity if it is not an integer."""
    with contextlib.suppress(ValueError):
        return float(int(os.environ.get(LIMIT, "")))
    return math.inf


def probed(budget: Budget, plan: Plan, group: Group, report: Callable[[str], None]) -> Budget:
    """Return `budget`, limited to the memory that the system pins if that is less than needed.

    Each process pins the memory that the plan needs, but at most `TRIED` bytes and no more than the
    budget allows, and frees it again. Call this before anything is loaded. If the system pins that
    much in every process, the result is `budget` as it is. All processes of the run must call this
    function with the same plan.

    Args:
        budget: the budget of the plan.
        plan: names the device and the memory to pin.
        group: the processes of the run.
        report: gets a line if the system pins less.

    Raises:
        DeviceError: the driver reports an error.
        DistributedError: another process has failed.
    """
    wanted = min(budget.pinned_need(plan.estimate), budget.pinned)
    if not plan.config.on_gpu or wanted < PROBED:
        return budget
    tried = int(min(wanted, TRIED))
    pinned_here = _core.cuda_pinnable_bytes(plan.config.device, tried)
    pinned_by_rank = group.exchange(json.dumps(pinned_here).encode())
    found = min(json.loads(message) for message in pinned_by_rank)
    if found >= tried:
        return budget
    report(
        f"plan: the system pins {size(found)} of the {size(wanted)} of host memory that the run "
        "wants to copy from; a thread copies the rest, which is slower"
    )
    return replace(budget, pinned=float(found))


def ring_share(streamed: float, pinned: float, *, shared: bool) -> float:
    """Return the share of streamed weights that a thread copies through a ring of pinned memory.

    The ring is a small buffer that is filled again and again, for weights that cannot be pinned.

    Args:
        streamed: bytes of streamed weights in host memory.
        pinned: bytes that a process may pin.
        shared: whether processes share the weights. Shared weights are all pinned, or none.
    """
    if streamed <= pinned:
        return 0.0
    pinned_weights = 0.0 if shared else (1 - _LEFT) * pinned
    return 1 - pinned_weights / streamed


def can_pin(work: Work, streamed: float, pinned: float, *, shared: bool) -> bool:
    """Return whether the pinned memory that streamed weights leave suffices for all other data.

    The other data are the optimizer's states and the offloaded inputs of blocks.

    Args:
        work: has the bytes of the states and of the inputs.
        streamed: as for `ring_share`.
        pinned: as for `ring_share`.
        shared: as for `ring_share`.
    """
    room = pinned - streamed
    if room < 0:
        # The weights do not all fit. If shared, none is pinned; if not, they take all but `_LEFT`.
        room = pinned if shared else _LEFT * pinned
    return work.states + work.offloaded <= room


def with_ring(rates: Rates, share: float) -> Rates:
    """Return the rates if `share` of the streamed weights goes through the ring of pinned memory.

    Other streamed weights are copied at the rate of the link between host and GPU. The host copies
    into the ring while the GPU copies from it, so the slower copy limits both.
    """
    if share == 0:
        return rates
    seconds_per_byte = (1 - share) / rates.link + share / min(rates.link, HOST_COPY)
    return replace(rates, streams=1 / seconds_per_byte)
