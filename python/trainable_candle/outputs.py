"""The files in a run's output folder, by which data sets recognise such a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.errors import DatasetError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: Final = "config.yaml"
LOG: Final = "train.csv"
JSON_LOG: Final = "train.jsonl"
CURVE: Final = "loss.png"


def is_output(folder: Path) -> bool:
    """Whether a run has written to a folder; every run writes these three files."""
    return all((folder / name).is_file() for name in (CONFIG, LOG, JSON_LOG))


def require_no_output(folder: Path) -> None:
    """Check that a folder of a data set is not the output of a run.

    Raises:
        DatasetError: a run has written to the folder.
    """
    if is_output(folder):
        raise DatasetError(
            f"dataset: {folder} is the output of a run (it has {CONFIG}, {LOG} and {JSON_LOG}), "
            "whose logs and images would be trained on; move the data to a folder of its own"
        )
