"""Jobs, such as writing files, in a background thread.

Their errors are raised in the threads that submit jobs or wait for them.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class BackgroundWriter:
    """Runs jobs one after the other in its own thread.

    If a job fails, the jobs that are still in the queue are dropped, and the next call of `submit`,
    `check` or `wait` raises the error. After that, new jobs run as usual. The thread ends when the
    queue is empty; the next job starts another one. The interpreter waits for the end of the thread
    before it exits.

    Args:
        name: the thread's name.
        most: the greatest length of the queue, at least 1; `submit` waits while the queue is full.
    """

    def __init__(self, name: str, most: int = 8) -> None:
        self._name = name
        self._most = most
        self._jobs: deque[Callable[[], object]] = deque()
        self._is_working = False  # whether there is a thread that runs jobs
        self._error: BaseException | None = None  # of a failed job, until a call raises it
        self._changed = threading.Condition()  # guards the fields above

    def submit(self, job: Callable[[], object]) -> None:
        """Append `job` to the queue; if the queue is full, wait until a job leaves it.

        Raises:
            BaseException: the error of an earlier job; `job` does not run.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._jobs) < self._most)
            self._raise_error()
            self._jobs.append(job)
            if not self._is_working:
                self._is_working = True
                # No daemon thread: the process must not end with a half-written file.
                threading.Thread(target=self._work, name=self._name).start()

    def check(self) -> None:
        """Raise the error of a failed job, if there is one; do not wait for other jobs."""
        with self._changed:
            self._raise_error()

    def wait(self) -> None:
        """Wait until all jobs are done or dropped, and raise the error of one that failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_working)
            self._raise_error()

    def _raise_error(self) -> None:
        """Raise the error that no call has raised yet, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_working = False
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
                self._changed.notify_all()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - `_raise_error` raises it
                with self._changed:
                    self._error = error
                    self._jobs.clear()
                    self._changed.notify_all()
            # Release the job's memory before the next one begins.
            del job
