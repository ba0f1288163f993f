"""Messages between processes, and the errors in all processes if one fails.

Each process is a thread here, which is possible because a link has no global state.
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
    return World(rank, size, rank, size, address, job, seconds)


def together(size: int, work: Callable[[Link], Any], address: Address) -> list[Any]:
    """What `work` returns or raises for each rank, in the order of the ranks."""

    def run(rank: int) -> Any:
        try:
            return work(Link(world(rank, size, address), {"version": "1"}))
        except DistributedError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture
def place() -> Address:
    """An address with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "127.0.0.1", free.getsockname()[1]


def test_received_messages_are_in_the_order_of_ranks(place: Address) -> None:
    def work(one: Link) -> Any:
        mine = bytes([one.rank]) * (one.rank * 100_000)
        found = (
            one.exchange(mine),
            one.gather(mine),
            one.scatter(b"from 0" if not one.rank else b""),
        )
        one.close()
        return found

    every = [bytes([rank]) * (rank * 100_000) for rank in range(3)]
    at_rank_0 = (every, every, b"from 0")
    at_others = (every, [], b"from 0")
    # Compare all ranks at once: if a rank raised an error, the failure message shows it.
    assert together(3, work, place) == [at_rank_0, at_others, at_others]


def test_processes_of_one_machine_can_connect_by_a_socket_in_a_folder(tmp_path: Path) -> None:
    path = str(tmp_path / "s") if len(str(tmp_path)) < 90 else f"/tmp/{time.time_ns()}"
    assert together(2, lambda one: one.exchange(b"%d" % one.rank), path) == [[b"0", b"1"]] * 2


def test_a_process_that_ends_is_an_error_in_all_others(place: Address) -> None:
    stopped = threading.Event()

    def work(one: Link) -> Any:
        one.on_failure(stopped.set)
        one.exchange(b"")
        if one.rank == 1:
            # When a process is killed, the operating system closes its connections.
            for connection in [*one._data.values(), *one._watch.values()]:
                connection.close()
            return None
        return one.exchange(b"")

    found = together(3, work, place)
    for rank in (0, 2):
        assert "rank 1 has ended" in str(found[rank]), found
    assert stopped.is_set()


def test_the_reason_of_a_failure_reaches_all_processes(place: Address) -> None:
    def work(one: Link) -> Any:
        one.exchange(b"")
        if one.rank == 2:
            one.fail("rank 2: the disk is full")
        return one.exchange(b"")

    for error in together(3, work, place):
        assert "rank 2: the disk is full" in str(error)


def test_a_process_that_is_busy_for_too_long_has_failed(
    place: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GRACE", 0.5)

    def work(one: Link) -> Any:
        one.exchange(b"")
        if one.rank == 1:
            one.enter("a step", 1.0)
            while one.failure is None:
                time.sleep(0.05)
        return one.exchange(b"")

    for error in together(2, work, place):
        assert "rank 1 has been busy with a step for" in str(error)


def test_settings_that_differ_are_reported_by_both_processes(place: Address) -> None:
    def run(rank: int) -> Any:
        try:
            return Link(world(rank, 2, place), {"learning_rate": f"{rank}"})
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
)
def test_a_process_with_another_first_message_is_rejected(place: Address, hello: Any) -> None:
    def other() -> Any:
        connection = reach(world(1, 2, place), time.monotonic() + 20)
        connection.send_bytes(json.dumps(hello).encode())
        assert connection.poll(5)
        return json.loads(connection.recv_bytes())

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(other)
        with pytest.raises(DistributedError, match="does not belong to this run") as caught:
            Link(world(0, 2, place, seconds=10.0), {})
        assert str(caught.value) == f"distributed: {answer.result()['failure']}"


def test_a_process_that_does_not_connect_is_reported(place: Address) -> None:
    with pytest.raises(DistributedError, match=r"within 0.5 s: 1, 2; read"):
        Link(world(0, 3, place, seconds=0.5), {})
    with pytest.raises(DistributedError, match="rank 1 cannot reach rank 0 at"):
        Link(world(1, 3, place, seconds=0.5), {})


def test_another_job_is_rejected(place: Address) -> None:
    def run(rank: int) -> str:
        try:
            Link(world(rank, 2, place, f"job {rank}", 3.0), {})
        except DistributedError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert "did not connect" in first
    assert "another job or program listens" in second


def test_a_port_in_use_is_reported(place: Address) -> None:
    with socket.socket() as other:
        other.bind(place)
        other.listen()
        with pytest.raises(DistributedError, match=r"cannot listen at .* choose a free port"):
            Link(world(0, 2, place, seconds=1.0), {})
