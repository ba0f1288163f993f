"""Messages between processes, and the errors in all processes if one fails.

Here, a thread stands for each process. This works because a link has no global state.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.distributed import link
from trainable_candle.distributed.link import Link
from trainable_candle.distributed.meeting import reach
from trainable_candle.distributed.world import Address, World
from trainable_candle.errors import DistributedError


def world(rank: int, size: int, address: Address, job: str = "job", seconds: float = 20.0) -> World:
    """Return the world of a process that trains on one machine with all others.

    `seconds` is how long the process waits for the others at the start.
    """
    return World(
        rank, size, local_rank=rank, local_size=size, address=address, job=job, join_seconds=seconds
    )


def together(size: int, work: Callable[[Link], Any], address: Address) -> list[Any]:
    """Run `work` on each rank; return its results or its errors in the order of the ranks."""

    def run(rank: int) -> Any:
        try:
            # The dict has the facts that must be equal in all processes.
            return work(Link(world(rank, size, address), {"version": "1"}))
        except DistributedError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture
def address() -> Address:
    """Return an address with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", probe.getsockname()[1]


def test_each_rank_receives_the_messages_of_all_ranks_in_order(address: Address) -> None:
    def work(mine: Link) -> Any:
        message = bytes([mine.rank]) * (mine.rank * 100_000)  # The message of rank 0 is empty.
        received = (
            mine.exchange(message),
            mine.gather(message),
            mine.scatter(b"from 0" if not mine.rank else b""),
        )
        mine.close()
        return received

    messages = [bytes([rank]) * (rank * 100_000) for rank in range(3)]
    at_rank_0 = (messages, messages, b"from 0")
    at_others = (messages, [], b"from 0")  # Only rank 0 gathers.
    # Compare all ranks at once: if a rank raised an error, the failure message shows it.
    assert together(3, work, address) == [at_rank_0, at_others, at_others]


def test_processes_of_one_machine_can_connect_by_a_socket_in_a_folder(tmp_path: Path) -> None:
    # Linux limits the path of a socket to 107 bytes.
    path = str(tmp_path / "s") if len(str(tmp_path)) < 90 else f"/tmp/{time.time_ns()}"
    assert together(2, lambda mine: mine.exchange(b"%d" % mine.rank), path) == [[b"0", b"1"]] * 2


def test_a_process_that_ends_is_an_error_in_all_others(address: Address) -> None:
    notified = threading.Event()

    def work(mine: Link) -> Any:
        mine.on_failure(notified.set)
        mine.exchange(b"")
        if mine.rank == 1:
            # When a process is killed, the operating system closes its connections.
            for connection in [*mine._data.values(), *mine._watch.values()]:
                connection.close()
            return None
        return mine.exchange(b"")

    errors = together(3, work, address)
    for rank in (0, 2):
        assert "rank 1 has ended" in str(errors[rank]), errors
    assert notified.is_set()


def test_the_reason_of_a_failure_reaches_all_processes(address: Address) -> None:
    def work(mine: Link) -> Any:
        mine.exchange(b"")
        if mine.rank == 2:
            mine.fail("rank 2: the disk is full")
        return mine.exchange(b"")

    for error in together(3, work, address):
        assert "rank 2: the disk is full" in str(error)


def test_a_process_that_is_busy_for_too_long_ends_all_processes(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GRACE", 0.5)

    def work(mine: Link) -> Any:
        mine.exchange(b"")
        if mine.rank == 1:
            mine.enter("a step", 1.0)  # The step may take 1 s, and GRACE more.
            while mine.failure is None:
                time.sleep(0.05)
        return mine.exchange(b"")

    for error in together(2, work, address):
        assert "rank 1 has been busy with a step for" in str(error)


def test_settings_that_differ_are_reported_by_both_processes(address: Address) -> None:
    def run(rank: int) -> Any:
        try:
            return Link(world(rank, 2, address), {"learning_rate": f"{rank}"})
        except DistributedError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(run, range(2)):
            assert "rank 1 does not belong to this run" in message
            assert "learning_rate is 1 there and 0 on rank 0" in message


@pytest.mark.parametrize(
    "hello",
    [
        {"size": 2, "kind": "data", "facts": {}},
        {"rank": "1", "size": 2, "kind": "data", "facts": {}},
        {"rank": 2, "size": 2, "kind": "data", "facts": {}},
        [1, 2],
        None,
    ],
    ids=["no rank", "text as rank", "rank too large", "list", "null"],
)
def test_a_process_with_a_wrong_first_message_is_rejected(address: Address, hello: Any) -> None:
    def say_hello() -> Any:
        connection = reach(world(1, 2, address), time.monotonic() + 20)
        connection.send_bytes(json.dumps(hello).encode())
        assert connection.poll(5)
        return json.loads(connection.recv_bytes())

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(say_hello)
        with pytest.raises(DistributedError, match="does not belong to this run") as caught:
            Link(world(0, 2, address, seconds=10.0), {})
        assert str(caught.value) == f"distributed: {answer.result()['failure']}"


def test_processes_that_cannot_be_reached_are_reported(address: Address) -> None:
    # Rank 0 names the ranks that are missing.
    with pytest.raises(DistributedError, match=r"within 0.5 s: 1, 2; read"):
        Link(world(0, 3, address, seconds=0.5), {})
    with pytest.raises(DistributedError, match="rank 1 cannot reach rank 0 at"):
        Link(world(1, 3, address, seconds=0.5), {})


def test_processes_of_different_jobs_do_not_connect(address: Address) -> None:
    def run(rank: int) -> str:
        try:
            Link(world(rank, 2, address, f"job {rank}", seconds=3.0), {})
        except DistributedError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        error_0, error_1 = pool.map(run, range(2))
    assert "did not connect" in error_0
    assert "another job or program listens" in error_1


def test_a_port_in_use_is_reported(address: Address) -> None:
    with socket.socket() as server:
        server.bind(address)
        server.listen()
        with pytest.raises(DistributedError, match=r"cannot listen at .* choose a free port"):
            Link(world(0, 2, address, seconds=1.0), {})
