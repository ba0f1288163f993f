"""Work beside the main thread whose errors are not lost."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class BackgroundWriter:
    """Does jobs one after the other in a thread of its own.

    After a job that fails no later one is done; the error is raised by the next `submit`, `check`
    or `wait`, and with it the failure is over. The thread ends when there is nothing to do, and the
    interpreter waits for it before it exits.

    Args:
        name: of the thread.
        most: jobs that may wait for their turn, at least 1; with so many, `submit` waits.
    """

    def __init__(self, name: str, most: int = 8) -> None:
        self._name = name
        self._most = most
        self._jobs: deque[Callable[[], object]] = deque()
        self._is_working = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], object]) -> None:
        """Do `job` after those that were submitted before.

        Raises:
            BaseException: what an earlier job raised; `job` will not be done.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._jobs) < self._most)
            self._raise_error()
            self._jobs.append(job)
            if not self._is_working:
                self._is_working = True
                # Not a daemon: a file that is half-written is finished before the process ends.
                threading.Thread(target=self._work, name=self._name).start()

    def check(self) -> None:
        """Raise what a job has raised, without waiting for the others."""
        with self._changed:
            self._raise_error()

    def wait(self) -> None:
        """Wait until all jobs are done, and raise what one of them has raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_working)
            self._raise_error()

    def _raise_error(self) -> None:
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
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                with self._changed:
                    self._error = error
                    self._jobs.clear()
                    self._changed.notify_all()
            # What the job holds goes before the next one begins.
            del job
