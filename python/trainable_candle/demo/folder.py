"""The folder of a demo, which the next demo may use again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.files import write_atomically
from trainable_candle.run import ADAPTER
from trainable_candle.train import state as run_state

if TYPE_CHECKING:
    from pathlib import Path

VERDICT: Final = "verdict.json"
MARK: Final = "demo.txt"
"""The file that says that a demo writes to the folder."""
_TEXT: Final = "The next `trainable-candle demo` in this folder removes this run's checkpoints.\n"


def begin(output: Path) -> None:
    """Remove what an earlier demo, perhaps an interrupted one, has trained; mark the folder.

    Training does not overwrite an earlier run. A folder with another run stays as it is.

    Raises:
        OSError: a file cannot be removed or written.
    """
    if (output / MARK).exists() or (output / VERDICT).exists():
        run_state.remove_run(output, ADAPTER)
    if not run_state.checkpoints(output) and not (output / ADAPTER).exists():
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / MARK, _TEXT)
