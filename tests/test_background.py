"""Background work is done in order, is never lost, and raises its errors in the calling thread."""

import errno
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from trainable_candle.background import BackgroundWriter


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_jobs_are_done_in_order() -> None:
    done: list[int] = []
    writer = BackgroundWriter("test", most=2)  # the queue has at most two jobs
    for number in range(50):
        writer.submit(partial(done.append, number))
    writer.wait()
    assert done == list(range(50))
    # The thread ended when the queue was empty; another job starts a new thread.
    assert "test" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]
    writer.submit(partial(done.append, 50))
    writer.wait()
    assert done[-1] == 50


def test_no_job_is_done_after_a_failure_until_its_error_is_raised() -> None:
    done: list[str] = []
    gate = threading.Event()
    writer = BackgroundWriter("test")
    writer.check()  # raises the error of a failed job, as `submit` and `wait` do
    writer.submit(gate.wait)
    writer.submit(fail)
    writer.submit(partial(done.append, "after"))
    writer.check()  # nothing has failed yet
    gate.set()
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    writer.wait()
    writer.submit(partial(done.append, "next"))
    writer.wait()
    assert done == ["next"]


@pytest.mark.parametrize("method", ["check", "submit"])
def test_a_failure_is_raised_once(method: str) -> None:
    writer = BackgroundWriter("test", most=1)
    failed = threading.Event()

    def job() -> None:
        try:
            fail()
        finally:
            failed.set()

    writer.submit(job)
    failed.wait()

    def use_until_it_raises() -> None:
        while True:  # the writer may store the error some time after `failed` is set
            writer.check() if method == "check" else writer.submit(lambda: None)

    with pytest.raises(OSError, match="No space left"):
        use_until_it_raises()
    writer.check()
    writer.wait()


def test_submit_waits_while_the_queue_is_full() -> None:
    gate, third_is_queued = threading.Event(), threading.Event()
    writer = BackgroundWriter("test", most=1)
    running = threading.Event()

    def run_until_gate() -> None:
        running.set()
        gate.wait()

    def submit_third() -> None:
        writer.submit(lambda: None)
        third_is_queued.set()

    writer.submit(run_until_gate)
    running.wait()
    writer.submit(lambda: None)
    thread = threading.Thread(target=submit_third)
    thread.start()
    assert not third_is_queued.is_set()
    gate.set()
    thread.join()
    writer.wait()
    assert third_is_queued.is_set()


def test_the_interpreter_waits_for_jobs_at_exit(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from trainable_candle.background import BackgroundWriter

def job():
    time.sleep(0.3)
    Path({str(tmp_path / "done")!r}).write_text("complete")

BackgroundWriter("test").submit(job)
raise SystemExit(3)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False)
    # The exit status of the code stays.
    assert run.returncode == 3
    assert (tmp_path / "done").read_text() == "complete"
