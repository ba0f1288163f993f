"""One copy of streamed weights for all processes of a machine, in host memory or on the GPUs."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from trainable_candle import _core
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainable_candle.distributed.group import Group
    from trainable_candle.settings import TrainConfig


NVLINK: Final = "nvlink"
BUS: Final = "bus"
_NONE: Final = "none"
_ORDER: Final = (_NONE, BUS, NVLINK)
"""The links between GPUs, from slow to fast."""
_CURE: Final = "or leave out --stream-from peers"
"""The last advice of each message: what always ends the error."""


def machine() -> str:
    """Return a name that is the same in all processes that can share memory; empty if unknown."""
    return _core.memory_machine() or ""


def least_sharing(machines: Sequence[str]) -> int:
    """Return the smallest number of processes that share a copy of streamed weights.

    `machines` are the results of `machine` in all processes. A process with an empty name shares
    with no other.
    """
    return min(machines.count(name) if name else 1 for name in machines)


def require_peers(local_size: int) -> None:
    """Check that there are GPUs to stream from.

    Args:
        local_size: the number of processes on each machine.

    Raises:
        ConfigError: there is only one process on each machine.
    """
    if local_size < 2:
        raise ConfigError(
            "stream_from: a GPU has peers only if several train on its machine, and this one is "
            f"alone; give --gpus 2 or more, {_CURE}"
        )


def require_streams(config: TrainConfig) -> None:
    """Check that a complete configuration with `stream_from: peers` streams weights.

    Raises:
        ConfigError: the configuration has `stream_from: peers`, and streams no weights.
    """
    if config.from_peers and not config.streams:
        raise ConfigError(
            "stream_from: no weights are streamed, because all of the model is on each GPU; give "
            f"--stream-blocks N, {_CURE}"
        )


def slowest_link(group: Group, device: str) -> str:
    """Return the slowest link between two GPUs of a machine, over all machines: `NVLINK` or `BUS`.

    All processes of the group must call this. A process cannot test the link to a GPU that CUDA
    does not show to it. The link then counts as `BUS`; if there is no link, loading a model fails
    later.

    Raises:
        ConfigError: a GPU cannot read the memory of another GPU of its machine, or a process has no
            other process with which it can share memory.
        CudaUnavailableError, DeviceError: `device` is not a GPU, or the driver reports an error.
        DistributedError: another process has failed.
    """
    # "bus": the address of the GPU on the PCI bus, the same in all processes of the machine.
    mine = {"machine": machine(), "bus": _core.cuda_bus_id(device)}
    # `exchange` returns the bytes of all processes, in the order of their ranks.
    found = [json.loads(content) for content in group.exchange(json.dumps(mine).encode())]
    if least_sharing([facts["machine"] for facts in found]) < 2:
        raise ConfigError(
            "stream_from: a process has no peer with which it can share memory; start at least two "
            f"on each machine, as one user and in one container, {_CURE}"
        )
    here = [facts["bus"] for facts in found if facts["machine"] == mine["machine"]]
    others = [address for address in here if address != mine["bus"]]
    links = {address: _core.cuda_link(device, address) or BUS for address in others}
    # If the processes of the machine share one GPU, there are no links, and `peer` is empty.
    peer = min(links, key=lambda address: _ORDER.index(links[address]), default="")
    slowest_here = [links.get(peer, BUS), mine["bus"], peer]
    by_rank = [json.loads(content) for content in group.exchange(json.dumps(slowest_here).encode())]
    link, near, far = min(by_rank, key=lambda slowest: _ORDER.index(slowest[0]))
    if link == _NONE:
        raise ConfigError(
            f"stream_from: the GPU at {near} cannot read the memory of the one at {far}; choose "
            f"GPUs that reach each other (nvidia-smi topo -p2p r), {_CURE}"
        )
    return str(link)


@contextmanager
def shared_streams(group: Group, *, peers: bool = False) -> Iterator[None]:
    """Return a context in which a machine's processes share one copy of streamed weights.

    All processes of the group must enter the context, and load the same models in it, in the same
    order. With `peers`, each GPU has a slice of the copy, and models can be used only as long as
    all processes exist: call `group.barrier()` in all of them before the first one ends. Without
    `peers`, the copy is in host memory.

    Raises:
        ArgumentError: with `peers`, a process is alone on its machine.
        DistributedError: another process has failed.
    """
    if group.size == 1 and not peers:
        yield
        return
    _core.share_streamed(group.rank, group.exchange, peers)
    try:
        yield
    finally:
        _core.share_streamed()  # Ends the sharing.
