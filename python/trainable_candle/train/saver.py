"""Checkpoints written while training continues."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from trainable_candle.background import BackgroundWriter
from trainable_candle.train.state import Draft

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainable_candle.train.state import Snapshot


class Saver:
    """Writes one checkpoint at a time in the background, complete or not at all.

    Training waits until the values are copied to host memory, and before that until the previous
    checkpoint is written. So host memory holds the copies of one checkpoint at a time.
    """

    def __init__(self) -> None:
        self._writer = BackgroundWriter("checkpoints")
        self._draft: Draft | None = None
        """The checkpoint begun last, in a temporary folder until it is complete."""

    def begin(
        self,
        folder: Path,
        snapshot: Callable[[], Snapshot],
        write_others: Callable[[Path], None],
        when_complete: Callable[[], None],
    ) -> None:
        """Wait until the previous checkpoint is complete, then begin a checkpoint.

        Args:
            folder: the final folder of the checkpoint.
            snapshot: copies the values of the checkpoint to host memory.
            write_others: takes the folder that is being written, and writes further files to it,
                at once or in jobs that it gives to `submit`.
            when_complete: called in the background when the checkpoint has its final name.

        Raises:
            OSError: this checkpoint cannot be begun, or an earlier one could not be written.
            Exception: any error of `snapshot`, `write_others`, or a job that was submitted before.
        """
        self.wait()
        self._draft = draft = Draft(folder)
        try:
            self._writer.submit(partial(draft.write, snapshot()))
            write_others(draft.path)
            self._writer.submit(draft.finish)
            self._writer.submit(when_complete)
        except BaseException:
            self.settle()
            draft.discard()
            raise

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after the jobs submitted so far; for errors of those jobs, see `check`."""
        self.check()
        self._writer.submit(job)

    def check(self) -> None:
        """Raise the error of a failed job, without waiting.

        Raises:
            OSError: a write failed; older checkpoints are intact.
            Exception: a job that `submit` got failed in another way.
        """
        self._discarding(self._writer.check)

    def wait(self) -> None:
        """Wait until everything is written; for errors, see `check`."""
        self._discarding(self._writer.wait)

    def settle(self) -> None:
        """Wait until no write is in progress, and ignore errors of writes."""
        with suppress(Exception):
            self.wait()

    def _discarding(self, action: Callable[[], None]) -> None:
        """Call `action`; if it raises an error, remove the checkpoint begun last if unfinished."""
        try:
            action()
        except Exception:
            # After a failed job no other job runs, so nothing writes to the folder any more.
            if self._draft is not None:
                self._draft.discard()
            raise
