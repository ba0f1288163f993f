"""The output folder of a demo: a new demo removes what an earlier demo has trained there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.files import write_atomically
from trainable_candle.run import ADAPTER
from trainable_candle.train import state as run_state

if TYPE_CHECKING:
    from pathlib import Path

VERDICT: Final = "verdict.json"
"""The file with the result of a finished demo."""
MARK: Final = "demo.txt"
"""The file that says that a demo writes to the folder."""
_TEXT: Final = "The next `trainable-candle demo` in this folder removes this run's checkpoints.\n"


def begin(output: Path) -> None:
    """Remove what an earlier demo, perhaps an interrupted one, has trained; mark the folder.

    A folder with a run that is not a demo's stays as it is, without a mark. Training then raises an
    error, because it does not overwrite an earlier run.

    Raises:
        OSError: a file cannot be removed or written.
    """
    # Earlier versions wrote no mark, but the verdict of a finished demo.
    if (output / MARK).exists() or (output / VERDICT).exists():
        run_state.remove_run(output, ADAPTER)
    if not run_state.checkpoints(output) and not (output / ADAPTER).exists():
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / MARK, _TEXT)
