"""Work done in order by a thread beside the caller's, which need not wait for it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

    from typing_extensions import Self


class Background:
    """A thread that does pieces of work one after the other.

    Used as a context: at its end every piece is done, and the first error of one is raised. After
    an error no later piece is begun. If the caller fails, the pieces that it has put are still
    done, and its own error is the one that goes on.

    Args:
        most: pieces that are not done yet, at most; whoever puts more waits. At least 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(1, "background")
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def put(self, work: Callable[[], object]) -> None:
        """Have a piece of work done after those put before.

        Raises:
            Exception: whatever an earlier piece raised.
        """
        while self._waiting and (len(self._waiting) >= self._most or self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._do, work))

    def _do(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except BaseException:
            self._failed = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                while self._waiting:
                    self._waiting.popleft().result()
        finally:
            self._pool.shutdown()
