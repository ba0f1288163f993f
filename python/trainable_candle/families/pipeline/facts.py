"""Facts about a pipeline's checkpoint, found without reading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict

from trainable_candle import inspect
from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainable_candle import CheckpointFacts, PartFacts
    from trainable_candle.settings import TrainConfig

DENOISERS = ("unet", "transformer")
"""The possible names of the denoiser's folder in a pipeline."""


class Source(TypedDict):
    """The arguments of `from_pretrained` that say where a part is."""

    path: Path
    subfolder: str | None


class Loading(Source):
    """The arguments of `from_pretrained` that say where a part is, and how it is quantized."""

    quantize: str | None


def source(path: Path, part: str) -> Source:
    """Return the arguments of `from_pretrained` that load a part.

    Args:
        path: a pipeline's folder, a checkpoint's file, or the part's own folder.
        part: the name of the part's folder in a pipeline.
    """
    is_own_folder = path.is_dir() and not (path / part).is_dir()
    return {"path": path, "subfolder": None if is_own_folder else part}


@dataclass(frozen=True)
class Facts:
    """What is known of a pipeline's checkpoint without reading its weights."""

    checkpoint: CheckpointFacts
    """The result of `trainable_candle.inspect`."""

    @property
    def parts(self) -> Mapping[str, PartFacts]:
        """The models of the pipeline, by the names of their folders."""
        return self.checkpoint.parts

    @property
    def denoiser(self) -> PartFacts:
        """The model that is fine-tuned."""
        return next(self.parts[name] for name in DENOISERS if name in self.parts)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the denoiser."""
        return self.denoiser.config

    @property
    def vae_width(self) -> int:
        """The number of channels of the autoencoder's first level."""
        config = self.parts["vae"].config
        # Qwen-Image's autoencoder has other names of fields, here and in `latent_channels`.
        return int(config.get("base_dim") or config["block_out_channels"][0])

    @property
    def latent_channels(self) -> int:
        """The number of channels of the autoencoder's latents."""
        config = self.parts["vae"].config
        return int(config.get("z_dim") or config["latent_channels"])

    @property
    def factor(self) -> int:
        """Pixels per latent pixel along one side of an image; 1 without an autoencoder."""
        return self.checkpoint.factor or 1

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The names of the text encoders' folders, sorted."""
        return tuple(sorted(name for name in self.parts if name.startswith("text_encoder")))

    def text_formats(self, config: TrainConfig) -> Mapping[str, str | None]:
        """Return the format of each quantized text encoder, None for others, by folder name."""
        stored = {name: self.parts[name].stored_format for name in self.text_encoders}
        return {name: config.text_encoder_format(form) for name, form in stored.items()}

    def text_bytes(self, dtype: str, config: TrainConfig) -> int:
        """Return the bytes of the text encoders' weights, in their formats or else in `dtype`."""
        formats = self.text_formats(config)
        return sum(self.parts[name].weight_bytes(dtype, form) for name, form in formats.items())

    def bytes(self, dtype: str, *parts: str, quantize: str | None = None) -> int:
        """Return the bytes of the weights of `parts`, in the format `quantize` or in `dtype`."""
        return sum(self.parts[part].weight_bytes(dtype, quantize) for part in parts)


def index_of(weights: Path) -> Mapping[str, Any]:
    """Return the fields of `model_index.json` in a pipeline's folder.

    The result is empty if there is no such file, or if the file does not hold an object.

    Raises:
        ConfigError: the file is not JSON.
    """
    index = weights / "model_index.json"
    if not index.is_file():
        return {}
    try:
        fields = parse_json(index.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{index}: {error}") from error
    return fields if isinstance(fields, dict) else {}


def facts(weights: Path, model: str, others: Sequence[Path] = ()) -> Facts:
    """Return the facts of `weights`, a pipeline's folder or a checkpoint in one file.

    Args:
        weights: the folder or the file.
        model: the name of the family.
        others: files and folders of single parts, which replace those parts of `weights`.

    Raises:
        MissingFileError: there is nothing at `weights` or at one of `others`.
        WeightsFormatError, ConfigError: a file is damaged or of another model, or a part is
            missing.
    """
    weights = weights.resolve()
    if not weights.exists():
        raise MissingFileError(f"weights: there is no file or folder {weights}")
    return _facts(weights, model, tuple(others))


# Cached, because families ask for these facts often. A run has one checkpoint.
@lru_cache(maxsize=1)
def _facts(weights: Path, model: str, others: tuple[Path, ...]) -> Facts:
    return Facts(inspect(weights, model, list(others)))
