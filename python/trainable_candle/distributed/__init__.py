"""Several processes that train together, each with its own part of the data.

`train-lora --gpus 2` starts such processes by itself. A training loop of your own, started by
torchrun, srun or mpirun, looks like this:

    device = tc.distributed.init("cpu")  # or "cuda", or "auto"
    model.to(device)
    tc.distributed.broadcast_(model.parameters())
    loss.backward()  # the loss of a batch that only this process has
    tc.distributed.average_gradients_(model.parameters())
    optimizer.step()
    tc.distributed.close()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import trainable_candle as tc
from trainable_candle import _core
from trainable_candle.distributed.group import Alone, Group, make_group
from trainable_candle.distributed.world import World, from_environment
from trainable_candle.errors import ArgumentError
from trainable_candle.placement import AUTO, choose

if TYPE_CHECKING:
    from trainable_candle import Tensor, Var

__all__ = [
    "Group",
    "World",
    "all_reduce",
    "all_reduce_",
    "average_gradients_",
    "barrier",
    "broadcast_",
    "close",
    "init",
    "rank",
    "world_size",
]

_group: Group = Alone()
"""The processes that this process has joined with `init`; only itself until then."""


def init(device: str = "auto") -> str:
    """Join the processes that a launcher has started together with this one.

    Without a launcher, this process is the only one. If this process has joined a group before,
    that group is closed.

    ```python
    device = tc.distributed.init("cpu")
    model.to(device)
    tc.distributed.close()
    ```

    Args:
        device: `cuda` for this process's own GPU, `cpu`, or `auto` for the GPU if there is one.

    Returns:
        The device of this process.

    Raises:
        ArgumentError: there are several processes, and `device` is another name, such as `cuda:1`.
        ConfigError: a variable of the launcher is missing or wrong, or there are too few GPUs.
        CudaUnavailableError: there is no GPU, or NCCL cannot be used.
        DistributedError: the processes do not find each other, differ in version or device, or a
            test sum over the GPUs is wrong.
    """
    global _group  # noqa: PLW0603
    world = from_environment()
    if world is None:
        device = choose(device, precision=AUTO).device
    chosen = device_of(world, device)
    close()
    # A loop of the user's own has no settings that must be equal in all processes.
    _group = make_group(world, chosen, facts={})
    return chosen


def device_of(world: World | None, device: str) -> str:
    """Return the device of this process; `cuda` means the GPU of its rank on this machine.

    With several processes, `auto` means `cuda` if CUDA is available, else `cpu`. If `world` is
    None, there is a single process, and the result is `device` unchanged.

    Raises:
        ConfigError: there are fewer GPUs than processes on this machine.
        ArgumentError: there are several processes, and `device` is another name, such as `cuda:1`.
    """
    if world is None:
        return device
    if device == "auto":
        device = "cuda" if tc.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    if device != "cuda":
        raise ArgumentError(
            f"distributed: device is {device!r} for {world.size} processes, expected auto, cpu or "
            "cuda; with cuda, each process takes a GPU of its own"
        )
    return world.device(_core.cuda_device_count())


def rank() -> int:
    """Return the number of this process, from 0.

    ```python
    assert tc.distributed.rank() < tc.distributed.world_size()
    ```
    """
    return _group.rank


def world_size() -> int:
    """Return how many processes there are.

    ```python
    assert tc.distributed.rank() < tc.distributed.world_size()
    ```
    """
    return _group.size


def barrier() -> None:
    """Wait until all processes have called this.

    ```python
    tc.distributed.barrier()
    ```

    Raises:
        DistributedError: another process has failed.
    """
    _group.barrier()


def all_reduce(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes.

    ```python
    total = tc.distributed.all_reduce(tc.tensor([1.0]))
    assert total.item() == tc.distributed.world_size()
    ```

    Raises:
        DistributedError: another process has failed.
    """
    return _group.all_reduce(tensor)


def all_reduce_(parameters: Mapping[str, Var] | Iterable[Var]) -> None:
    """Set variables to the sums of their values over all processes.

    ```python
    counts = [tc.Var([1.0])]
    tc.distributed.all_reduce_(counts)
    ```

    Raises:
        DistributedError: another process has failed.
    """
    for var in _named(parameters).values():
        var.set(_group.all_reduce(var.detach()))


def broadcast_(parameters: Mapping[str, Var] | Iterable[Var]) -> None:
    """Set variables to the values that they have in rank 0.

    ```python
    tc.distributed.broadcast_(model.parameters())  # now equal to rank 0's
    ```

    Raises:
        DistributedError: another process has failed.
    """
    _group.broadcast_(_named(parameters))


def average_gradients_(parameters: Mapping[str, Var] | Iterable[Var]) -> None:
    """Replace the gradients by their mean over all processes.

    ```python
    loss.backward()
    tc.distributed.average_gradients_(model.parameters())
    optimizer.step()
    ```

    Args:
        parameters: the same variables in all processes. A variable without a gradient counts as if
            its gradient were zeros.

    Raises:
        DistributedError: another process has failed.
    """
    if _group.size == 1:
        return
    named = _named(parameters)
    if not named:
        return
    device = next(iter(named.values())).device
    # `sum_gradients` also sums further numbers of each process. Here are none, so pass a zero.
    unused = tc.zeros((1,), dtype="f64", device=device)
    _group.sum_gradients(named, unused)
    # The summed gradients, in one or more flat vectors.
    vectors = _core.gradient_vectors(named)
    _core.set_gradient_vectors(named, [vector * (1.0 / _group.size) for vector in vectors])


def close() -> None:
    """Leave the group of processes; call this at the end of a program.

    ```python
    tc.distributed.close()
    ```
    """
    global _group  # noqa: PLW0603
    _group.close()
    _group = Alone()


def _named(parameters: Mapping[str, Var] | Iterable[Var]) -> dict[str, Var]:
    """Return variables by name; their positions are their names if they have none."""
    if isinstance(parameters, Mapping):
        return dict(parameters)
    return {str(number): var for number, var in enumerate(parameters)}
