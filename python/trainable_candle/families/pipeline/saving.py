"""Writes a copy of a pipeline's checkpoint in which some models have changed weights."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from trainable_candle.errors import ConfigError
from trainable_candle.files import sync_folder
from trainable_candle.models import load, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainable_candle.models import Model


def save_merged(
    weights: Path, parts: Sequence[str], models: Mapping[str, Model], output: Path
) -> None:
    """Write a checkpoint: a `.safetensors` file if `output` names one, else a folder.

    Args:
        weights: the original checkpoint, from which everything but `models` is taken.
        parts: the names of the folders that hold the pipeline's models.
        models: the changed models, by the names of their folders.
        output: a new file that ends in `.safetensors`; or, if the checkpoint is a folder, a new or
            an empty folder.

    Raises:
        ConfigError: `output` exists and is not an empty folder, the folder of a new file does not
            exist, or the checkpoint is a file and `output` does not end in `.safetensors`.
        OSError: the new checkpoint cannot be written.
    """
    if output.suffix == ".safetensors":
        save_file(weights, parts, models, output, {})
    elif weights.is_dir():
        save_folder(weights, parts, models, output, {})
    else:
        raise ConfigError(
            f"--output is {output}, expected the name of a .safetensors file, because "
            f"the checkpoint {weights.name} is a file"
        )


def save_file(
    weights: Path,
    parts: Sequence[str],
    models: Mapping[str, Model],
    output: Path,
    quantize: Mapping[str, str],
) -> None:
    """Write one file with `models` in place of those in `weights`.

    The tensors have the names of original checkpoints, not those of diffusers' folders.

    Args:
        weights: the original checkpoint, from which everything but `models` is taken.
        parts: the names of the folders that hold the pipeline's models.
        models: the changed models, by the names of their folders.
        output: a new file.
        quantize: for each model to quantize, its 8-bit format, by the name of the model's folder.

    Raises:
        ConfigError: `output` exists, or its folder does not.
        OSError: the file cannot be written.
    """
    require_new_file(output)
    if weights.is_dir():
        others = {name: load(weights, subfolder=name) for name in parts if name not in models}
        save_checkpoint(output, {**models, **others}, quantize=dict(quantize))
    else:
        save_checkpoint(output, dict(models), base=weights, quantize=dict(quantize))


def require_new_file(output: Path) -> None:
    """Check that `output` can be a new file.

    Raises:
        ConfigError: `output` exists, or its folder does not.
    """
    if output.exists():
        raise ConfigError(f"--output is {output}, which exists; expected a new file")
    if not output.parent.is_dir():
        raise ConfigError(f"--output is {output}, but there is no folder {output.parent}; make it")


def require_empty_folder(output: Path) -> None:
    """Check that `output` can be a new folder, or is an empty one.

    Raises:
        ConfigError: `output` is something else.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output is {output}, which exists; expected a new or an empty folder")


def save_folder(
    weights: Path,
    parts: Sequence[str],
    models: Mapping[str, Model],
    output: Path,
    quantize: Mapping[str, str],
) -> None:
    """Write a pipeline's folder with `models` in place of those in `weights`.

    Copies the other models, the tokenizers, the scheduler and `model_index.json`. The new folder
    appears only when it is complete.

    Args:
        weights: the pipeline's folder, from which everything but `models` is taken.
        parts: the names of the folders that hold the pipeline's models.
        models: the changed models, by the names of their folders.
        output: a new or an empty folder.
        quantize: for each model to quantize, "nf4", by the name of the model's folder.

    Raises:
        ConfigError: `output` exists and is not an empty folder.
        OSError: the folder cannot be written.
    """
    require_empty_folder(output)
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # The tokenizer of `text_encoder_2` is in `tokenizer_2`.
    tokenizers = {name.replace("text_encoder", "tokenizer") for name in parts}
    names = {path.name for path in weights.iterdir()} & {
        *parts, *tokenizers, "scheduler", "model_index.json"
    }  # fmt: skip
    partial.mkdir(parents=True)
    # The disk takes bytes faster than one thread writes them, so a second thread copies files.
    with ThreadPoolExecutor(1) as copier:
        copied = copier.submit(_copy, weights, sorted(names - models.keys()), partial)
        for name, model in models.items():
            model.save_pretrained(partial / name, quantize.get(name))
        copied.result()
    if output.exists():
        output.rmdir()
    partial.rename(output)
    # Make the renaming last through a power failure.
    sync_folder(output.parent)


def _copy(folder: Path, names: Sequence[str], to: Path) -> None:
    """Copy the files and folders with these names from `folder` into the folder `to`."""
    for name in names:
        if (folder / name).is_dir():
            shutil.copytree(folder / name, to / name)
        else:
            shutil.copy2(folder / name, to / name)
