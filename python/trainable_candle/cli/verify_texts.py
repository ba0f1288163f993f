"""The lines that `trainable-candle verify` prints only for adapters of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle import export, families
from trainable_candle.errors import ConfigError
from trainable_candle.settings.texts import Texts
from trainable_candle.tasks.text import TextTask

if TYPE_CHECKING:
    from pathlib import Path

    from trainable_candle import AdapterReport
    from trainable_candle.tasks.text.family import TextFamily

_FOR_VERIFY: Final = (None, "peft")
"""The results of `export.form_of` for adapters that `verify_adapter` reads.

None is a safetensors file alone.
"""


def is_text(model: str) -> bool:
    """Return whether a name for `--model` stands for language models."""
    # Only language models have this group of settings.
    return Texts in families.find(model).groups


def is_exported(path: Path) -> bool:
    """Return whether `path` is an adapter in llama.cpp's, mlx-lm's or Ollama's form."""
    return export.form_of(path) not in _FOR_VERIFY


def exported_lines(path: Path, model: str, weights: Path | None) -> list[str]:
    """Return the report on an adapter that another program reads and this library does not.

    Args:
        path: a file or a folder for which `is_exported` is true.
        model: the model's name for `--model`.
        weights: the model's folder; None: the adapter is not compared with a model.

    Raises:
        ConfigError: llama.cpp's name of the model's architecture is not known.
        MissingFileError: there are no such weights.
        WeightsFormatError: the files are damaged, or are not for the model in `weights`.
    """
    form = str(export.form_of(path))  # not None, because `is_exported` is true
    lines = [f"{path}: an adapter for {export.READERS[form]}, {export.summary(path, form)}"]
    family = _family(model, weights)
    if weights is not None:
        export.require_fit(path, form, family.settings, family.layers())
    else:
        lines.append("note: not compared with a model; give --weights")
    return [*lines, *_verdicts(path, family)]


def reader_lines(path: Path, model: str, weights: Path | None) -> list[str]:
    """Return, for each program that loads language models' adapters, what it does with this one.

    Each program has one line.

    Args:
        path: the adapter: a safetensors file, or peft's folder.
        model: the model's name for `--model`.
        weights: the model's folder; None: the only line says that the folder is needed.
    """
    if weights is None:
        programs = ", ".join(export.READERS.values())
        return [f"note: give --weights to see what these programs do with the file: {programs}"]
    return _verdicts(path, _family(model, weights))


def outside(path: Path, report: AdapterReport) -> set[str]:
    """Return the modules and tensors that peft loads and this library does not."""
    return export.outside(report, export.settings_of(path))


def _family(model: str, weights: Path | None) -> TextFamily:
    task = families.load(model, weights, dtype=None, device="cpu")
    if not isinstance(task, TextTask):
        raise ConfigError(f"--model {model} draws images, expected a language model")
    return task.family


def _verdicts(path: Path, family: TextFamily) -> list[str]:
    verdicts = export.verdicts(path, family)
    return [f"{export.READERS[reader]}: {verdict}" for reader, verdict in verdicts.items()]
