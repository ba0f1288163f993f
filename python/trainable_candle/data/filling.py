"""Groups the tasks that fill a cache, and reports their progress. A task encodes one entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from typing_extensions import Self

    Report = Callable[[str], None]

_Task = TypeVar("_Task")
_Kind = TypeVar("_Kind", bound="Hashable")

_LOGGED_FROM: Final = 100
"""If there are fewer tasks than this, their progress is not logged."""
_LOG_LINES: Final = 10
"""The greatest number of log lines from the first task to the last."""


@dataclass(frozen=True)
class Filled:
    """The result of filling a cache."""

    found: int
    """The number of entries that existed."""
    made: int
    """The number of entries that were missing and have been encoded."""
    removed: int
    """The number of removed entries: damaged ones, and entries of files that have since changed."""

    def __str__(self) -> str:
        """Return one line for the log."""
        gone = f", {self.removed} outdated or damaged removed" if self.removed else ""
        return f"{self.found} found, {self.made} made{gone}"


class Progress:
    """A progress bar; without a bar, at most ten log lines in all, if there are 100 tasks or more.

    Args:
        what: what the tasks encode, for the bar and the lines.
        total: the number of tasks.
        progress: whether to draw the bar if the output is a terminal.
        report: without a bar, gets the lines.
    """

    def __init__(self, what: str, total: int, progress: bool, report: Report | None) -> None:
        # With None, tqdm draws on terminals only.
        self._bar = tqdm(total=total, desc=what, disable=None if progress else True)
        self._what = what
        self._total = total
        self._report = report if self._bar.disable and total >= _LOGGED_FROM else None
        self._done = 0

    def __call__(self, count: int) -> None:
        """Count `count` more finished tasks."""
        self._bar.update(count)
        done_before, self._done = self._done, self._done + count
        # A line is due whenever another tenth of the tasks has finished.
        due_before, due_now = (_LOG_LINES * n // self._total for n in (done_before, self._done))
        if self._report is not None and due_before < due_now:
            self._report(f"{self._what}: {self._done} of {self._total} encoded")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def groups_of(
    tasks: Sequence[_Task], kind: Callable[[_Task], _Kind], size: Callable[[_Kind], int]
) -> list[list[_Task]]:
    """Group tasks whose `kind(task)` is equal; a group has at most `size(kind(task))` tasks."""
    by_kind: dict[_Kind, list[_Task]] = {}
    for task in tasks:
        by_kind.setdefault(kind(task), []).append(task)
    return [
        members[start : start + size(key)]
        for key, members in by_kind.items()
        for start in range(0, len(members), size(key))
    ]
