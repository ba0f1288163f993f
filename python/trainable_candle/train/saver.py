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

    Training waits for copies to the host alone. The next checkpoint begins when the one before is
    written, so that the host holds the copies of one.
    """

    def __init__(self) -> None:
        self._writer = BackgroundWriter("checkpoints")
        self._draft: Draft | None = None

    def begin(
        self,
        folder: Path,
        snapshot: Callable[[], Snapshot],
        more: Callable[[Path], None],
        then: Callable[[], None],
    ) -> None:
        """Begin a checkpoint, once the previous one is complete.

        Args:
            folder: where it will be.
            snapshot: takes the copies.
            more: puts what else belongs to it into the folder that it is given, now or by `submit`.
            then: done when the checkpoint has its name.

        Raises:
            OSError: this one cannot be begun, or what was begun earlier could not be written.
        """
        self.wait()
        self._draft = draft = Draft(folder)
        try:
            self._writer.submit(partial(draft.write, snapshot()))
            more(draft.path)
            self._writer.submit(draft.finish)
            self._writer.submit(then)
        except BaseException:
            self.settle()
            draft.discard()
            raise

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after the jobs begun so far; raises as `check`."""
        self.check()
        self._writer.submit(job)

    def check(self) -> None:
        """Raise the error of a failed write, without waiting.

        Raises:
            OSError: a write failed; older checkpoints are intact.
        """
        self._discarding(self._writer.check)

    def wait(self) -> None:
        """Wait until everything is written; raises as `check`."""
        self._discarding(self._writer.wait)

    def settle(self) -> None:
        """Wait until no write is in progress; errors are not reported."""
        with suppress(Exception):
            self.wait()

    def _discarding(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except Exception:
            # No job runs after a failed one: nothing writes to the folder any more.
            if self._draft is not None:
                self._draft.discard()
            raise
