"""How the processes of a distributed run find each other: addresses, ports and the time limit.

Processes that cannot connect end within the time limit with an error that says why.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from trainable_candle.distributed.world import JOIN, JOIN_SECONDS

SCRIPT = "import trainable_candle as tc; print(tc.distributed.init('cpu'))"


@pytest.fixture
def port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def run_ranks(
    host: str, port: int, *, ranks: tuple[int, ...] = (0, 1), seconds: int = 2
) -> list[tuple[int, str]]:
    """Run some ranks of a run of two processes; return the exit status and stderr of each.

    Their environment says that rank 0 is at `host` and `port`. Each process waits `seconds` for the
    other one.
    """
    meeting = {"MASTER_ADDR": host, "TRAINABLE_CANDLE_PORT": str(port), JOIN: str(seconds)}
    # The environment variables of two machines with one process each.
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **meeting, **sizes, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    # The time limit begins when the interpreter has started. Allow 10 s for this start.
    assert time.monotonic() - began < seconds + 10
    return [(p.returncode, text) for p, text in zip(processes, errors, strict=True)]


def test_the_default_time_limit_is_below_30_seconds() -> None:
    assert JOIN_SECONDS < 30


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("203.0.113.7", "Cannot assign requested address"),  # reserved for documentation
        ("no-such-host.invalid", "not known|failure in name resolution|No address"),
    ],
    ids=["another machine", "unknown name"],
)
def test_a_wrong_address_is_reported_by_both_ranks(host: str, reason: str, port: int) -> None:
    (status_0, error_0), (status_1, error_1) = run_ranks(host, port)
    assert status_0 != 0
    assert status_1 != 0
    assert f"rank 0 cannot listen at {host}:{port}" in error_0
    assert "MASTER_ADDR must be the name or an address of the machine of rank 0" in error_0
    assert re.search(reason, error_0)
    assert f"rank 1 cannot reach rank 0 at {host}:{port} within 2 s" in error_1
    assert "check MASTER_ADDR" in error_1


@pytest.fixture(params=["silent", "talkative"])
def foreign_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield the port of another program: a silent one, or one with another protocol."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def talk() -> None:
            try:
                while True:
                    visitor, _ = server.accept()
                    # The first four bytes are the length of a message of `multiprocessing`, so the
                    # client reads the other 15 bytes as a whole message, which is a wrong one.
                    visitor.sendall(b"\0\0\0\x0fHTTP/1.1 400 No")
                    visitor.close()
            except OSError:
                return

        if request.param == "talkative":
            threading.Thread(target=talk, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_port_of_another_program_is_reported_by_both_ranks(foreign_port: int) -> None:
    (status_0, error_0), (status_1, error_1) = run_ranks("127.0.0.1", foreign_port)
    assert status_0 != 0
    assert status_1 != 0
    assert "Address already in use); choose a free port on this machine" in error_0
    assert f"127.0.0.1:{foreign_port}" in error_1
    assert re.search("another (job or )?program", error_1)


def test_the_error_of_rank_0_alone_names_the_missing_rank(port: int) -> None:
    ((status, error),) = run_ranks("127.0.0.1", port, ranks=(0,))
    assert status != 0
    assert (
        "of 2 processes, these ranks did not connect to rank 0 at "
        f"127.0.0.1:{port} within 2 s: 1; read their output"
    ) in error


def test_rank_0_at_localhost_is_found_at_its_network_address(port: int) -> None:
    """Some launchers give rank 0 the address localhost, and the other ranks its network address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        try:
            # With UDP, this sends nothing: the system only chooses the address to send from.
            outward.connect(("203.0.113.7", 9))
        except OSError:
            pytest.skip("this machine has no network")
        address = outward.getsockname()[0]
    results: list[tuple[int, str]] = []
    rank_1 = threading.Thread(
        target=lambda: results.extend(run_ranks(address, port, ranks=(1,), seconds=20))
    )
    rank_1.start()
    results.extend(run_ranks("localhost", port, ranks=(0,), seconds=20))
    rank_1.join()
    assert [status for status, _ in results] == [0, 0], results
