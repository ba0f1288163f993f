"""Connections of all processes to rank 0, for small messages and for detecting failures.

Each other rank has two connections to rank 0. On the first, the main threads exchange messages, in
the same order in all processes. On the second, other threads of both ends report every second what
their process is doing. A process has failed if it closes the second connection without notice,
reports nothing for too long, or exceeds the time limit of what it is doing. Rank 0 then informs all
other processes. So a run ends in all processes even if NCCL would wait for ever for a process that
has ended.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.distributed.meeting import address_text, knock, listen, reach
from trainable_candle.distributed.world import JOIN
from trainable_candle.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from trainable_candle.distributed.world import World

BEAT: Final = 1.0
"""Seconds between two heartbeats."""
SILENCE = 25.0
"""Seconds without a heartbeat after which a process counts as failed, even if it is busy."""
GRACE: Final = 10.0
"""Seconds by which a process may exceed a time limit before it counts as failed."""
_POLL: Final = 0.1
"""Seconds between two checks whether the run has failed, while this process waits for a message."""
_NO_ANSWER: Final = f"rank 0 does not answer; read its output, or set {JOIN} to wait longer"


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return the differences between the facts of another process and those of rank 0.

    Facts, such as versions and settings, must be equal in all processes.

    Args:
        theirs: the facts of the other process, by name.
        ours: the facts of rank 0, by name.

    Returns:
        A phrase of an error message for each difference.
    """
    names = [*ours, *(name for name in theirs if name not in ours)]
    missing = "missing"
    return [
        f"{name} is {theirs.get(name, missing)} there and {ours.get(name, missing)} on rank 0"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


class Link:
    """The connections of this process: to all other ranks if it is rank 0, else to rank 0.

    Args:
        world: the rank of this process, the number of processes, and the address of rank 0.
        facts: what must be equal in all processes, by name: versions and settings.

    Raises:
        DistributedError: the processes do not connect in time; or the number of processes or the
            facts of a process differ from those of rank 0. The message names the process.
    """

    def __init__(self, world: World, facts: dict[str, str]) -> None:
        self.rank, self.size = world.rank, world.size
        self.failure: str | None = None
        """Why the run has failed; None while it has not."""
        self._world = world
        self._facts = facts
        self._stops: list[Callable[[], None]] = []
        self._phase: tuple[str, float | None] = ("starting", None)
        """What this process does, and its time limit in seconds; None: no limit."""
        self._since = time.monotonic()
        """When the phase began."""
        self._lock = threading.Lock()
        self._closing = False
        self._data: dict[int, Connection[Any, Any]] = {}
        """The connections for messages, by the rank of the other process."""
        self._watch: dict[int, Connection[Any, Any]] = {}
        """The connections for heartbeats and failures, by the rank of the other process."""
        deadline = time.monotonic() + world.join_seconds
        if self.rank == 0:
            self._listen(deadline)
        else:
            self._connect(deadline)
        for rank, connection in self._watch.items():
            threading.Thread(target=self._hear, args=(rank, connection), daemon=True).start()
        threading.Thread(target=self._speak, daemon=True).start()

    def on_failure(self, stop: Callable[[], None]) -> None:
        """Call `stop`, perhaps from another thread, when the run fails."""
        self._stops.append(stop)

    def enter(self, phase: str, limit: float | None = None) -> tuple[str, float | None]:
        """Set the phase, which is what this process does from now on, and its limit in seconds.

        Returns:
            The previous phase and its limit.
        """
        with self._lock:
            before, self._phase = self._phase, (phase, limit)
            self._since = time.monotonic()
        return before

    def exchange(self, message: bytes) -> list[bytes]:
        """Send a message to all processes; return the messages of all processes, by rank.

        Raises:
            DistributedError: another process has failed.
        """
        if self.rank != 0:
            self._send(0, message)
            return [self._receive(0) for _ in range(self.size)]
        messages = [message, *(self._receive(rank) for rank in range(1, self.size))]
        for rank in range(1, self.size):
            for each in messages:
                self._send(rank, each)
        return messages

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all processes, by rank, in rank 0; an empty list in other ranks.

        Raises:
            DistributedError: another process has failed.
        """
        if self.rank != 0:
            self._send(0, message)
            return []
        return [message, *(self._receive(rank) for rank in range(1, self.size))]

    def scatter(self, message: bytes) -> bytes:
        """Return the message of rank 0 in all processes; the messages of other ranks are ignored.

        Raises:
            DistributedError: another process has failed.
        """
        if self.rank != 0:
            return self._receive(0)
        for rank in range(1, self.size):
            self._send(rank, message)
        return message

    def fail(self, reason: str) -> None:
        """Make the run end in all processes, with the reason; only the first reason counts."""
        with self._lock:
            if self.failure is not None or self._closing:
                return
            self.failure = reason
        for connection in self._watch.values():
            with suppress(OSError, ValueError):
                connection.send_bytes(json.dumps({"failure": reason}).encode())
        for stop in self._stops:
            stop()

    def require_alive(self) -> None:
        """Check that the run has not failed.

        Raises:
            DistributedError: it has failed; the message has the reason.
        """
        if self.failure is not None:
            raise DistributedError(f"distributed: {self.failure}; this process ends, too")

    def close(self) -> None:
        """Close the connections, after informing the other ends that this is no failure."""
        with self._lock:
            self._closing = True
        for connection in self._watch.values():
            with suppress(OSError, ValueError):
                connection.send_bytes(b'{"bye": true}')
        for connection in [*self._data.values(), *self._watch.values()]:
            connection.close()

    def _listen(self, deadline: float) -> None:
        """Wait, as rank 0, until all other ranks have made both connections.

        Raises:
            DistributedError: see `Link`.
        """
        arrived: Queue[tuple[Connection[Any, Any], Any] | OSError] = Queue()
        listener = listen(self._world)
        done = threading.Event()

        def accept() -> None:
            while not done.is_set():
                try:
                    connection = listener.accept()
                    arrived.put((connection, json.loads(connection.recv_bytes())))
                except (AuthenticationError, EOFError, ValueError, ConnectionError):  # noqa: PERF203
                    continue  # A client that is no process of the run must not end the run.
                except OSError as error:
                    arrived.put(error)
                    return

        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            while len(self._data) + len(self._watch) < 2 * (self.size - 1):
                try:
                    arrival = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
                except Empty:
                    connected = set(self._data) & set(self._watch)
                    missing = sorted(set(range(1, self.size)) - connected)
                    ranks = ", ".join(map(str, missing))
                    where = address_text(self._world.address)
                    raise self._refusal(
                        f"of {self.size} processes, these ranks did not connect to rank 0 at "
                        f"{where} within {self._world.join_seconds:g} s: "
                        f"{ranks}; read their output, or set {JOIN} to wait longer"
                    ) from None
                if isinstance(arrival, OSError):
                    raise DistributedError(
                        f"distributed: rank 0 cannot listen: {arrival}"
                    ) from arrival
                self._welcome(*arrival)
        finally:
            done.set()
            # The thread is blocked in `accept` and keeps the port: wake it up.
            knock(self._world.address)
            acceptor.join(GRACE)  # more than `accept` needs to return
            listener.close()
        # `_welcome` has answered once on each connection. A second answer, on the connection for
        # messages, tells each rank that all processes have connected.
        for connection in self._data.values():
            connection.send_bytes(b"{}")

    def _welcome(self, connection: Connection[Any, Any], hello: Any) -> None:
        """Keep a connection from the process that has sent `hello`.

        Raises:
            DistributedError: the process does not belong to this run.
        """
        match hello:
            case {"rank": int(rank), "size": int(), "kind": "data" | "watch", "facts": dict()}:
                pass
            case _:
                raise self._refusal(
                    "a process that connected to rank 0 does not belong to this run: its first "
                    "message does not say its rank and settings; start all processes with the "
                    "same version of trainable-candle",
                    connection,
                )
        by_rank = self._data if hello["kind"] == "data" else self._watch
        differences = differing(hello["facts"], self._facts)
        if rank in by_rank:
            differences = ["there are two processes of this rank"]
        elif hello["size"] != self.size:
            differences = [f"it expects {hello['size']} processes, rank 0 expects {self.size}"]
        elif not 0 < rank < self.size:
            differences = [f"the ranks of the others are 1 to {self.size - 1}"]
        if not differences:
            by_rank[rank] = connection
            connection.send_bytes(b"{}")
            return
        reason = f"rank {rank} does not belong to this run: {'; '.join(differences)}"
        raise self._refusal(reason, connection)

    def _refusal(self, reason: str, *rejected: Connection[Any, Any]) -> DistributedError:
        """Return the error of a run that cannot begin, after sending the reason.

        The processes at the `rejected` connections and those already connected get the reason.
        """
        # A process that has made both connections waits for the second answer on the one in
        # `_data`.
        for connection in [*rejected, *self._data.values()]:
            with suppress(OSError):
                connection.send_bytes(json.dumps({"failure": reason}).encode())
        return DistributedError(f"distributed: {reason}")

    def _connect(self, deadline: float) -> None:
        """Make both connections to rank 0, and wait until all processes have done so.

        Raises:
            DistributedError: see `Link`.
        """
        for kind, by_rank in (("data", self._data), ("watch", self._watch)):
            by_rank[0] = reach(self._world, deadline)
            hello = {"rank": self.rank, "size": self.size, "kind": kind, "facts": self._facts}
            by_rank[0].send_bytes(json.dumps(hello).encode())
            self._await_answer(by_rank[0], deadline)
        # Rank 0 answers once more when all processes have connected.
        self._await_answer(self._data[0], deadline)

    def _await_answer(self, connection: Connection[Any, Any], deadline: float) -> None:
        """Wait until rank 0 answers.

        Raises:
            DistributedError: rank 0 rejects a process, has ended or does not answer.
        """
        # After `deadline`, the error of rank 0 may still arrive: it says more than `_NO_ANSWER`.
        try:
            answered = connection.poll(max(0.0, deadline - time.monotonic() + GRACE))
            answer = json.loads(connection.recv_bytes()) if answered else {"failure": _NO_ANSWER}
        except (EOFError, OSError):
            answer = {"failure": "rank 0 has ended; read its output"}
        if "failure" in answer:
            raise DistributedError(f"distributed: {answer['failure']}")

    def _send(self, rank: int, message: bytes) -> None:
        self.require_alive()
        try:
            self._data[rank].send_bytes(message)
        except OSError as error:
            self._lost(rank, error)

    def _receive(self, rank: int) -> bytes:
        self.require_alive()
        connection = self._data[rank]
        try:
            while not connection.poll(_POLL):
                self.require_alive()
            return connection.recv_bytes()
        except (OSError, EOFError) as error:
            self._lost(rank, error)
            raise AssertionError from error  # Not reached: `_lost` always raises.

    def _lost(self, rank: int, error: Exception) -> None:
        """Raise the error of a run in which the connection to `rank` broke.

        Raises:
            DistributedError: always.
        """
        # Another process may have failed first. Then `_hear`, in another thread, soon gets the
        # reason on the second connection and sets `failure`.
        deadline = time.monotonic() + 1.0
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        self.fail(f"rank {rank} has ended")
        raise DistributedError(f"distributed: {self.failure}; this process ends, too") from error

    def _speak(self) -> None:
        """Send heartbeats until this process closes the link or the run fails."""
        while not self._closing and self.failure is None:
            with self._lock:
                (phase, limit), age = self._phase, time.monotonic() - self._since
            beat = json.dumps({"phase": phase, "limit": limit, "age": age}).encode()
            for connection in self._watch.values():
                with suppress(OSError, ValueError):
                    connection.send_bytes(beat)
            time.sleep(BEAT)

    def _hear(self, rank: int, connection: Connection[Any, Any]) -> None:
        """Receive the heartbeats of `rank`; make the run fail if they stop.

        The run also fails if the process has exceeded the time limit of its phase by `GRACE`.
        """
        beat: dict[str, Any] = {"phase": "starting", "limit": None, "age": 0.0}
        heard_at = time.monotonic()
        try:
            while not self._closing and self.failure is None:
                if connection.poll(BEAT):
                    message = json.loads(connection.recv_bytes())
                    if "failure" in message:
                        self.fail(message["failure"])
                        return
                    if "bye" in message:
                        return
                    beat, heard_at = message, time.monotonic()
                silent = time.monotonic() - heard_at
                age = beat["age"] + silent  # seconds since the phase of `rank` began
                limit = beat["limit"]
                if limit is not None and age > limit + GRACE:
                    self.fail(f"rank {rank} has been busy with {beat['phase']} for {age:.0f} s")
                elif silent > SILENCE:
                    self.fail(f"rank {rank} has not been heard from for {silent:.0f} s")
        except (OSError, EOFError, ValueError, TypeError):
            # `poll` raises TypeError if `close` has just closed the connection.
            self.fail(f"rank {rank} has ended")
