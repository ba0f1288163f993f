"""Reads what adapter files record about quantization: formats in training, learned scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.files import safetensors_metadata
from trainable_candle.settings.initial import LOFTQ
from trainable_candle.settings.machine import FORMATS
from trainable_candle.train.metadata import BASE, INIT, QAT, QAT_SCALES

if TYPE_CHECKING:
    from pathlib import Path

    from trainable_candle import Tensor

_IN_PEFT: Final = "adapter_model.safetensors"
_SCALES: Final = "qat_scales."
"""The prefix of the keys of learned scales; a layer's name follows."""
_CURES: Final = {form: f": use merge --to {form}" for form in FORMATS}


def notes(adapter: Path, base: str | None, merged: str | None = None) -> list[str]:
    """Return a note for each difference between the quantization in training and in this command.

    A file without metadata about its training gets no notes.

    Args:
        adapter: a file, or a folder of peft.
        base: the format that the base is loaded in, if it is quantized.
        merged: the quantized format of the merged weights (`merge --to`), if they are quantized.
    """
    path = adapter / _IN_PEFT if adapter.is_dir() else adapter
    try:
        facts = safetensors_metadata(path)
    except (OSError, ValueError):
        return []  # loading the adapter reports what is wrong
    found = []
    trained, grid = facts.get(BASE), facts.get(QAT)
    if trained not in {None, base}:
        why = " and offsets this base's rounding error" if facts.get(INIT) == LOFTQ else ""
        found.append(
            f"note: {adapter.name} was trained over a base in {trained}{why}, but here the base is "
            f"in {base or 'its own precision'}: give --base-precision {trained}"
        )
    if grid not in {None, merged, base}:
        found.append(
            f"note: {adapter.name} was trained for weights rounded to {grid} (--qat), but here "
            f"the weights are not rounded to {grid}{_CURES.get(str(grid), '')}"
        )
    return found


def learned_scales(adapter: Path, to: str) -> dict[str, Tensor]:
    """Return the factors of quantization scales that were learned with an adapter, by layer.

    The result is empty if the adapter was trained for another format than `to`, or without learned
    scales.

    Args:
        adapter: a file, or a folder of peft.
        to: the quantized format of the merged weights.

    Raises:
        ConfigError: factors were learned, but the file does not have them.
        WeightsFormatError, OSError: the file cannot be read.
    """
    path = adapter / _IN_PEFT if adapter.is_dir() else adapter
    facts = safetensors_metadata(path)
    if facts.get(QAT) not in {None, to}:
        return {}
    found = {
        key.removeprefix(_SCALES): value
        for key, value in tc.load_file(path).items()
        if key.startswith(_SCALES)
    }
    if QAT_SCALES in facts and not found:
        raise ConfigError(
            f"--adapter: {path} was trained with --qat-learned-scales and lacks the learned "
            "scales; folders of peft do not have them: give the adapter file of the run"
        )
    return found
