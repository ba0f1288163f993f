"""Reads what adapter files record about quantization: formats in training, and learned scales."""

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

_PEFT_FILE: Final = "adapter_model.safetensors"
_SCALES: Final = "qat_scales."
"""The prefix of the keys of learned scales; a layer's name follows."""
_CURES: Final = {form: f": use merge --to {form}" for form in FORMATS}
"""For each format that `merge --to` can write, the end of the note about `--qat`. `--qat` also has
int4, for which the note has no such end."""


def notes(adapter: Path, base: str | None, merged: str | None = None) -> list[str]:
    """Return a note for each difference between the quantization in training and in this command.

    A file without metadata about its training, or one that cannot be read, gets no notes.

    Args:
        adapter: a file, or a folder in peft's form.
        base: the format of the quantized base in this command; None if it is not quantized.
        merged: the format to which `merge --to` quantizes the merged weights; None if it does not.
    """
    path = adapter / _PEFT_FILE if adapter.is_dir() else adapter
    try:
        metadata = safetensors_metadata(path)
    except (OSError, ValueError):
        return []  # Loading the adapter reports what is wrong.
    found = []
    trained_base, qat = metadata.get(BASE), metadata.get(QAT)
    if trained_base not in {None, base}:
        has_loftq_start = metadata.get(INIT) == LOFTQ
        loftq_note = " and offsets this base's rounding error" if has_loftq_start else ""
        found.append(
            f"note: {adapter.name} was trained over a base in {trained_base}{loftq_note}, but here "
            f"the base is in {base or 'its own precision'}: give --base-precision {trained_base}"
        )
    if qat not in {None, merged, base}:
        found.append(
            f"note: {adapter.name} was trained for weights rounded to {qat} (--qat), but here "
            f"the weights are not rounded to {qat}{_CURES.get(str(qat), '')}"
        )
    return found


def learned_scales(adapter: Path, to: str) -> dict[str, Tensor]:
    """Return the learned scales of an adapter, by layer: factors on the scales of rounded weights.

    The result is empty if the adapter was trained for another format than `to`, or without learned
    scales.

    Args:
        adapter: a file, or a folder in peft's form.
        to: the format to which the merged weights are quantized.

    Raises:
        ConfigError: scales were learned, but the file does not have them.
        WeightsFormatError, OSError: the file cannot be read.
    """
    path = adapter / _PEFT_FILE if adapter.is_dir() else adapter
    metadata = safetensors_metadata(path)
    # Without an entry for the format (None), the file may still have scales.
    if metadata.get(QAT) not in {None, to}:
        return {}
    scales = {
        key.removeprefix(_SCALES): value
        for key, value in tc.load_file(path).items()
        if key.startswith(_SCALES)
    }
    if QAT_SCALES in metadata and not scales:
        raise ConfigError(
            f"--adapter: {path} was trained with --qat-learned-scales and lacks the learned "
            "scales; folders in peft's form do not have them: give the adapter file of the run"
        )
    return scales
