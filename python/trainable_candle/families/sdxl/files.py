"""What can be said of an SDXL checkpoint without reading its weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle import _core, inspect
from trainable_candle._core import pipeline_parts
from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.files import sync_folder
from trainable_candle.models import load, save_checkpoint
from trainable_candle.train.objective import NoiseSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle import CheckpointFacts, PartFacts
    from trainable_candle.models import Model

NAME: Final = "sdxl"
SUBFOLDERS: Final = tuple(pipeline_parts(NAME))
TEXT_ENCODERS: Final = tuple(name for name in SUBFOLDERS if name.startswith("text_encoder"))
"""CLIP-L and OpenCLIP-bigG."""


@dataclass(frozen=True)
class Facts:
    """An SDXL checkpoint."""

    checkpoint: CheckpointFacts
    """What the library says of it."""

    @property
    def parts(self) -> Mapping[str, PartFacts]:
        """Its models by the names of their folders."""
        return self.checkpoint.parts

    @property
    def config(self) -> Mapping[str, Any]:
        """Of the UNet."""
        return self.parts["unet"].config

    @property
    def vae_width(self) -> int:
        """Channels of the autoencoder's first level."""
        return int(self.parts["vae"].config["block_out_channels"][0])

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        return int(self.parts["vae"].config["latent_channels"])

    @property
    def factor(self) -> int:
        """Pixels on a side of a latent."""
        return self.checkpoint.factor or 1

    @property
    def context(self) -> int:
        """Width of the text's tokens."""
        return int(self.config["cross_attention_dim"])

    @property
    def pooled(self) -> int:
        """Width of the pooled text."""
        sizes = 6 * int(self.config["addition_time_embed_dim"])
        return int(self.config["projection_class_embeddings_input_dim"]) - sizes

    def values(self, *parts: str) -> int:
        """Numbers that parts consist of."""
        return sum(self.parts[part].elements for part in parts)


def shipped() -> Path | None:
    """The small checkpoint in the package."""
    folder = Path(str(files("trainable_candle") / "assets" / "sdxl_tiny"))
    return folder if folder.is_dir() else None


def facts(weights: Path) -> Facts:
    """What there is at `weights`, a pipeline's folder or an original checkpoint.

    Raises:
        MissingFileError: there is nothing.
        WeightsFormatError, ConfigError: it is damaged, or another model, or a part is missing.
    """
    weights = weights.resolve()
    if not weights.exists():
        raise MissingFileError(f"weights: there is no file or folder {weights}")
    return _facts(weights)


@lru_cache(maxsize=1)
def _facts(weights: Path) -> Facts:
    return Facts(inspect(weights, NAME))


def resolution(weights: Path) -> int:
    """The side of the pictures that the model was made for, px.

    Raises:
        MissingFileError, WeightsFormatError: as `facts`.
    """
    return facts(weights).checkpoint.resolution or 0


def schedule(weights: Path, prediction_type: str | None) -> NoiseSchedule:
    """The noise that the model was trained with, and what it predicts.

    Args:
        weights: a pipeline's folder, whose scheduler says it; an original checkpoint says that it
            predicts velocities by a tensor `v_pred`, and that its last timestep is noise alone by
            `ztsnr`, as ComfyUI reads them.
        prediction_type: overrules it.

    Raises:
        ConfigError: the scheduler's configuration is wrong.
    """
    if weights.is_dir():
        has_scheduler = (weights / "scheduler" / "scheduler_config.json").is_file()
        found = NoiseSchedule.from_pretrained(weights) if has_scheduler else NoiseSchedule()
        if prediction_type in {None, found.prediction_type}:
            return found
        return NoiseSchedule(
            prediction_type=prediction_type or found.prediction_type,
            rescale_betas_zero_snr=found.rescale_betas_zero_snr,
            timestep_spacing=found.timestep_spacing,
        )
    checkpoint = facts(weights).checkpoint
    return NoiseSchedule(
        prediction_type=prediction_type or checkpoint.prediction_type or "epsilon",
        rescale_betas_zero_snr=checkpoint.zero_snr,
    )


def adapted_parts(path: Path) -> list[str]:
    """The parts of the model that an adapter file is for, whatever its names' style.

    Raises:
        MissingFileError, WeightsFormatError: it is missing or damaged.
    """
    return _core.adapted_parts(path, NAME)


def save_merged_file(weights: Path, models: Mapping[str, Model], output: Path) -> None:
    """Write one file under the original names, all but `models` as it is in `weights`.

    Raises:
        ConfigError: the file exists.
        OSError: it cannot be written.
    """
    if output.exists():
        raise ConfigError(f"--output is {output}, which exists; expected a new file")
    if weights.is_dir():
        others = {name: load(weights, subfolder=name) for name in SUBFOLDERS if name not in models}
        save_checkpoint(output, {**models, **others})
    else:
        save_checkpoint(output, dict(models), base=weights)


def save_merged_folder(weights: Path, models: Mapping[str, Model], output: Path) -> None:
    """Write a pipeline's folder, all but `models` as it is in `weights`.

    Raises:
        ConfigError: the folder exists and holds something.
        OSError: it cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output is {output}, which exists; expected a new or an empty folder")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    names = {path.name for path in weights.iterdir()} & {
        *SUBFOLDERS, "tokenizer", "tokenizer_2", "scheduler", "model_index.json"
    }  # fmt: skip
    partial.mkdir(parents=True)
    for name in sorted(names - models.keys()):
        if (weights / name).is_dir():
            shutil.copytree(weights / name, partial / name)
        else:
            shutil.copy2(weights / name, partial / name)
    for name, model in models.items():
        model.save_pretrained(partial / name)
    if output.exists():
        output.rmdir()
    partial.rename(output)
    sync_folder(output.parent)
