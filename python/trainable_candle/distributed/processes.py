"""The group of several processes that train together: how they add up gradients and communicate.

NCCL connects the GPUs. All other data goes through rank 0.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle import _core
from trainable_candle.distributed.link import Link
from trainable_candle.errors import CudaUnavailableError, DistributedError, Error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from trainable_candle import Tensor, Var
    from trainable_candle.distributed.world import World

NCCL_SECONDS: Final = 300.0
"""Seconds that NCCL may take to connect the processes after all of them have started."""
STEP_SECONDS: Final = 600.0
"""Seconds that a step may take before its process counts as hung."""
_TEST_SECONDS: Final = 60.0
"""Seconds that the test sum of a new group of GPUs may take."""
_FOR_EVER: Final = 1e9
"""Seconds to wait for the GPU without a limit. If another process fails, the link ends the wait."""


class Processes:
    """A group of several processes: NCCL adds up tensors on GPUs, rank 0 adds up those on the CPU.

    Training on several CPU processes is for tests and small models. Rank 0 adds in the order of the
    ranks, so the sums on CPUs repeat bit for bit.

    Args:
        world: the rank of this process among all and on its machine, and where the processes meet.
        device: the device on which this process computes; not `auto`.
        facts: what must be equal in all processes, by name. Versions and the kind of device (`cpu`
            or `cuda`) are added.
        narrow: whether GPUs send each other gradients as bf16.
        step_seconds: the seconds that a step may take before its process counts as hung.

    Raises:
        DistributedError: the processes do not find each other, their facts differ, another process
            has failed, or a test sum over the GPUs is wrong.
        CudaUnavailableError: NCCL cannot be used.
    """

    def __init__(
        self,
        world: World,
        device: str,
        facts: Mapping[str, str],
        *,
        narrow: bool = False,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self.rank, self.size, self.local_size = world.rank, world.size, world.local_size
        self.device = device
        self._narrow = narrow
        self._step_seconds = step_seconds
        on_gpu = device != "cpu"
        own_facts = {"trainable-candle": _core.__version__, "device": device.partition(":")[0]}
        if on_gpu:
            own_facts["NCCL"] = str(_core.nccl_version())
        self._link = Link(world, {**own_facts, **facts})
        self._communicator: _core.NcclCommunicator | None = None
        if on_gpu:
            try:
                self._join()
            except BaseException as error:
                self._link.fail(f"rank {self.rank}: {error}")
                raise

    def _join(self) -> None:
        """Connect the GPUs with NCCL, and test a sum.

        Raises:
            CudaUnavailableError, DistributedError: see `Processes`.
        """
        own_id = _core.nccl_unique_id() if self.rank == 0 else b""
        # `scatter` returns the message of rank 0 in all processes.
        unique_id = self._link.scatter(bytes(own_id))
        self._communicator = _core.NcclCommunicator(
            self.device, self.rank, self.size, unique_id, NCCL_SECONDS
        )
        self._link.on_failure(self._communicator.stop)
        # If GPUs cannot reach each other, some drivers return zeros or hang: check a sum.
        total = self._communicator.all_reduce(tc.tensor([self.rank + 1.0], device=self.device))
        self._wait_for_gpu(_TEST_SECONDS)
        expected = self.size * (self.size + 1) / 2  # 1 + 2 + ... + size
        if float(total) != expected:
            raise DistributedError(
                f"distributed: the sum over {self.size} GPUs is {float(total)}, expected "
                f"{expected}; set NCCL_P2P_DISABLE=1, or turn off ACS and the IOMMU"
            )

    def sum_gradients(self, parameters: Mapping[str, Var], tail: Tensor) -> Tensor:
        """Add up the gradients of all processes, in place.

        Args:
            parameters: the same variables in all processes; a missing gradient counts as zeros.
            tail: more numbers to add up, on the device of the variables.

        Returns:
            The sum of the tails.

        Raises:
            DistributedError: another process has failed.
        """
        variables = list(parameters.values())
        if self._communicator is not None:
            with self._explained():
                return self._communicator.all_reduce_gradients(variables, tail, self._narrow)
        # The gradients, concatenated to a few vectors, which are summed one after the other.
        vectors = _core.gradient_vectors(variables)
        sums = [_like(vector, self._sum(_numbers(vector))) for vector in vectors]
        _core.set_gradient_vectors(variables, sums)
        return tc.tensor(self._sum(tail.numpy()))

    def broadcast_(self, parameters: Mapping[str, Var]) -> None:
        """Set the variables to the values that they have in rank 0.

        Raises:
            DistributedError: another process has failed.
        """
        for var in parameters.values():
            if self._communicator is not None:
                with self._explained():
                    self._communicator.broadcast_(var, 0)
                continue
            values = _numbers(var.detach())
            sent = self._link.scatter(values.tobytes())  # the bytes of rank 0
            var.set(_like(var, np.frombuffer(sent, values.dtype).reshape(values.shape)))
        self.wait()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on the tensor's device.

        Raises:
            DistributedError: another process has failed.
        """
        if self._communicator is not None and tensor.device != "cpu":
            with self._explained():
                return self._communicator.all_reduce(tensor)
        return _like(tensor, self._sum(_numbers(tensor)))

    def exchange(self, message: bytes) -> list[bytes]:
        """Send a message to all processes; return the messages of all processes, by rank.

        Raises:
            DistributedError: another process has failed.
        """
        return self._link.exchange(message)

    def barrier(self) -> None:
        """Wait until all processes have called this.

        Raises:
            DistributedError: another process has failed.
        """
        with self._busy("waiting for the others"):
            # Returns when all have sent a message.
            self.exchange(b"")

    def wait(self) -> None:
        """Wait until the GPU has done all queued work.

        Raises:
            DistributedError: another process has failed.
        """
        if self._communicator is not None:
            with self._busy("waiting for the others"):
                self._wait_for_gpu(_FOR_EVER)
        self._link.require_alive()

    def in_step(self) -> AbstractContextManager[None]:
        """Return a context for one step; if it takes too long, this process counts as failed."""
        return self._busy("a step", self._step_seconds)

    @contextmanager
    def _busy(self, phase: str, limit: float | None = None) -> Iterator[None]:
        """Return a context in which the other processes know that this process is in `phase`.

        If it stays there for more than `limit` seconds, it counts as failed.
        """
        previous = self._link.enter(phase, limit)
        try:
            yield
        finally:
            self._link.enter(*previous)

    def fail(self, reason: str) -> None:
        """Make all processes end; their error messages give the reason."""
        self._link.fail(reason)

    def close(self) -> None:
        """Leave the group, after informing the other processes."""
        self._communicator = None
        self._link.close()

    def _wait_for_gpu(self, seconds: float) -> None:
        """Wait until the GPU has done all queued work, for at most `seconds`.

        Raises:
            DistributedError: it takes longer, or another process has failed.
        """
        assert self._communicator is not None
        with self._explained():
            self._communicator.wait(seconds)

    def _sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Add up the values of all processes, in the order of the ranks, in the values' dtype."""
        parts = self._link.gather(values.tobytes())
        # `parts` has the bytes of each rank, but is empty in all ranks but 0. Rank 0 adds the parts
        # of the others to its own values, and `scatter` sends them this total instead of theirs.
        total = values
        for part in parts[1:]:
            total = total + np.frombuffer(part, values.dtype).reshape(values.shape)
        sent = self._link.scatter(total.tobytes())
        return np.frombuffer(sent, values.dtype).reshape(values.shape)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Return a context that raises NCCL's errors as `DistributedError`.

        If the run has failed already, the error gives the reason for that failure instead.
        `CudaUnavailableError` stays as it is.
        """
        try:
            yield
        except CudaUnavailableError:
            raise
        except Error as error:
            if self._link.failure is not None:
                self._link.require_alive()  # raises the error with the reason
            self._link.fail(f"rank {self.rank}: {error}")
            raise DistributedError(f"distributed: {error}") from error


def _numbers(tensor: Tensor) -> NDArray[Any]:
    """Return the values as an array; bf16 becomes f32, because numpy has no bf16."""
    return (tensor.to("f32") if tensor.dtype == "bf16" else tensor).numpy()


def _like(tensor: Tensor, values: NDArray[Any]) -> Tensor:
    """Return the array `values` as a tensor with the dtype of `tensor`."""
    return tc.tensor(values).to(tensor.dtype)
