"""The rendezvous of a run's processes: rank 0 listens, and the other ranks connect to it.

An address is a pair of host and port, or the path of a Unix socket.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.distributed.world import JOIN, PORT
from trainable_candle.errors import DistributedError

if TYPE_CHECKING:
    from trainable_candle.distributed.world import Address, World

_RETRY_SECONDS: Final = 0.1
"""Seconds between two attempts to reach rank 0, and the shortest time limit of an attempt."""
_LOOPBACK: Final = ("localhost", "127.")
"""The beginnings of loopback addresses, which lead back to the machine itself."""


def listen(world: World) -> Listener:
    """Listen for other ranks, as rank 0.

    Raises:
        DistributedError: rank 0 cannot listen at the address, for example because it belongs to
            another machine or its port is taken.
    """
    address = world.address
    has_other_machines = world.local_size < world.size
    if isinstance(address, tuple) and has_other_machines and address[0].startswith(_LOOPBACK):
        # Some launchers give rank 0 the loopback address, and the other ranks the machine's name:
        # listen on all addresses of the machine.
        address = "", address[1]
    try:
        # Each of the other ranks makes two connections.
        return Listener(address, backlog=2 * world.size, authkey=_key(world))
    except OSError as error:
        cure = f"choose a free port on this machine with MASTER_PORT or {PORT}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            cure = "MASTER_ADDR must be the name or an address of the machine of rank 0"
        raise DistributedError(
            f"distributed: rank 0 cannot listen at {address_text(world.address)} "
            f"({error.strerror or error}); {cure}"
        ) from error


def reach(world: World, deadline: float) -> Connection[Any, Any]:
    """Return a connection to rank 0, which may not be listening yet.

    Args:
        world: the address of rank 0, the name of the job, and the rank of this process.
        deadline: the time of `time.monotonic` at which to give up.

    Raises:
        DistributedError: rank 0 cannot be reached by `deadline`, or another program listens at its
            address.
    """
    where = address_text(world.address)
    while True:
        try:
            return _connect_once(world, deadline)
        # Python before 3.12 raises AssertionError if the other end does not speak its protocol.
        except (AuthenticationError, AssertionError) as error:  # noqa: PERF203 - a loop of attempts
            raise DistributedError(
                f"distributed: another job or program listens at {where}; choose another "
                f"port with MASTER_PORT or {PORT}, the same in all processes"
            ) from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"distributed: rank {world.rank} cannot reach rank 0 at {where} within "
                    f"{world.join_seconds:g} s ({error}); check MASTER_ADDR and that the port "
                    f"is open and not in use by another program, or set {JOIN} to wait longer"
                ) from error
            time.sleep(_RETRY_SECONDS)


def _connect_once(world: World, deadline: float) -> Connection[Any, Any]:
    """Return a connection to rank 0, after a single attempt.

    The call that connects has no time limit: without an answer, it may take minutes. So another
    thread makes it, and this thread waits for it until `deadline`.

    Raises:
        TimeoutError: the call has not returned by `deadline`.
        OSError, EOFError, AuthenticationError, AssertionError: those of the call.
    """
    outcome: Queue[Connection[Any, Any] | BaseException] = Queue()

    def attempt() -> None:
        try:
            outcome.put(Client(world.address, authkey=_key(world)))
        except BaseException as error:  # noqa: BLE001 - `_connect_once` raises it
            outcome.put(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        result = outcome.get(timeout=max(_RETRY_SECONDS, deadline - time.monotonic()))
    except Empty:
        raise TimeoutError("no answer") from None
    if isinstance(result, BaseException):
        raise result
    return result


def knock(address: Address) -> None:
    """Connect and disconnect, so that a listener blocked in `accept` continues."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with suppress(OSError), socket.socket(family) as visitor:
        visitor.settimeout(1.0)
        visitor.connect(address)


def address_text(address: Address) -> str:
    """Return an address as text, for messages."""
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else address


def _key(world: World) -> bytes:
    """Return the key that both ends of a connection must have: it is the same in a whole job."""
    return f"trainable-candle {world.job}".encode()
