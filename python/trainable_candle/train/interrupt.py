"""Ctrl-C (or SIGTERM) as a request to finish the current step, save the state and stop."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_NOTICE: Final = b"\nstopping after this step; press Ctrl-C again to stop at once\n"


class InterruptGuard:
    """A context in which the first SIGINT (Ctrl-C) or SIGTERM does not end the program.

    The signal sets the attribute `signal` and prints a notice. A second signal of either kind acts
    as it would outside the context. The context has an effect in the main thread only,
    because Python runs the handlers of signals there.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that was received in the context."""
        self._previous: dict[signal.Signals, Any] = {}
        """The handlers from before the context."""

    def __enter__(self) -> Self:
        """Take over the two signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous handlers of the signals."""
        self._restore()

    def _request(self, number: int, _frame: object) -> None:
        """Handle the first signal."""
        self.signal = signal.Signals(number)
        self._restore()
        # Not `print`, because the handler may interrupt another `print`.
        with suppress(OSError):
            os.write(2, _NOTICE)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
