"""A family whose weights are a pipeline of diffusers, or an original checkpoint of its parts."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from trainable_candle import _core
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.families.pipeline import estimate as sizes
from trainable_candle.families.pipeline import saving
from trainable_candle.families.pipeline.facts import Loading, facts, source
from trainable_candle.families.pipeline.identity import parts_identity
from trainable_candle.models import load
from trainable_candle.settings.checks import existing
from trainable_candle.tasks.estimate import memory_limit
from trainable_candle.tasks.latent.coders import KLCoder
from trainable_candle.tasks.latent.family import LatentFamily

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.data import Dataset
    from trainable_candle.families.pipeline.facts import Facts
    from trainable_candle.models import Model
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.estimate import Estimate, Shape
    from trainable_candle.tasks.task import Split


class Encoders(Protocol):
    """The text encoders of a pipeline with their tokenizers."""

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Text features of captions, (B, ...) by name."""

    def chunks(self, caption: str) -> int:
        """How many rows of the encoders' length a caption needs."""


E = TypeVar("E", bound=Encoders)


class PipelineFamily(LatentFamily, Generic[E]):
    """What all pipelines have in common; a family adds its text encoders and conditions."""

    text_tokens: ClassVar[int]
    """The number of tokens of a caption that the denoiser reads."""
    coder_kind: ClassVar[type[KLCoder]] = KLCoder
    """The class that turns the autoencoder's latents into the denoiser's."""

    @property
    def facts(self) -> Facts:
        """The facts from the headers of the checkpoint.

        Raises:
            MissingFileError, WeightsFormatError: the checkpoint is missing, or of another model.
        """
        return facts(self.weights, self.name, self._others)

    @property
    def _others(self) -> list[Path]:
        """Files and folders of single models that the settings name.

        Raises:
            MissingFileError: one of them does not exist.
        """
        given = [("text_encoder", path) for path in self.config.text_encoder]
        given += [("vae", self.config.vae)] if self.config.vae else []
        return [existing(name, Path(path).expanduser()) for name, path in given]

    def require_own(self) -> None:
        """Check that the checkpoint has the parts of this pipeline."""
        _ = self.facts

    def check_format(self, form: str, layers: Collection[str]) -> None:
        """See `LatentFamily.check_format`; fused layers must be adapted together."""
        try:
            self.facts.parts[self.component].check_format(form, self.config.adapter, list(layers))
        except ArgumentError as error:
            raise ConfigError(f"--format {form}: {error}") from None

    @property
    def resolution(self) -> int:
        """The side of the images that the model was made for, px."""
        return self.facts.checkpoint.resolution or 0

    def layers(self) -> Mapping[str, Shape]:
        """The layers of the denoiser."""
        return self.facts.parts[self.component].layers

    def text_layers(self) -> Mapping[str, Mapping[str, Shape]]:
        """The layers of the text encoders that can be trained."""
        if not self.text_targets:
            return {}
        return {name: self.facts.parts[name].layers for name in self.facts.text_encoders}

    # What a run holds in memory.

    @property
    @abstractmethod
    def text_values(self) -> int:
        """The number of values in a caption's features."""

    @property
    @abstractmethod
    def text_working_values(self) -> int:
        """The most values that the encoders hold while they encode a caption."""

    @abstractmethod
    def predicting_values(self, latents: int) -> int:
        """Values that predicting an image of this many latents holds without a tape."""

    def estimate(self, config: TrainConfig, data: Split[Dataset], limit: float) -> Estimate:
        """Estimate from the configuration of the denoiser and the headers of the files."""
        return sizes.estimate(self, config, data, limit)

    def drawing_bytes(self, size: tuple[int, int], count: int) -> int:
        """The memory of models, predictions with guidance, decoding and images."""
        return sizes.sampling_bytes(self, size, count)

    def encode_area(self) -> int:
        """How many pixels are encoded at once: on a GPU, as many as memory allows."""
        return sizes.encode_area(self.facts, self.config, memory_limit(self.config))

    def text_parts(self) -> int:
        """Rows of tokens that are encoded at once."""
        return sizes.text_parts(self, self.config, memory_limit(self.config))

    # Its models.

    @cached_property
    def model(self) -> Model:
        """The denoiser."""
        return load(
            **self.source(self.component),
            **self.config.streaming,
            dtype=self.dtype,
            device=self.device,
        )

    def use_model(self, path: Path) -> None:
        """Use the denoiser of another checkpoint; the other parts stay the same.

        Raises:
            MissingFileError, WeightsFormatError: the checkpoint has no denoiser of this family.
        """
        where = source(path, self.component)
        self.model = load(**where, quantize=None, dtype=self.dtype, device=self.device)

    def source(self, part: str) -> Loading:
        """The arguments of `from_pretrained` to load a part."""
        where = source(self.facts.parts[part].path, part)
        quantize = self.config.base_format if part == self.component else None
        if part in self.facts.text_encoders:
            quantize = self.config.text_encoder_format
        return {**where, "quantize": quantize}

    @property
    def text_precision(self) -> str:
        """The dtype of the text encoders, with their format if they are quantized."""
        return f"{self.dtype} {self.config.text_encoder_format or ''}".rstrip()

    @cached_property
    def coder(self) -> KLCoder:
        """The autoencoder."""
        config, factor = self.facts.parts["vae"].config, self.facts.factor
        return self.coder_kind(
            self.source("vae"), config, factor, self.device, self._latents_identity
        )

    def _latents_identity(self) -> Mapping[str, str]:
        return parts_identity(self.facts, ("vae",))

    @cached_property
    def encoders(self) -> E:
        """The text encoders with their tokenizers."""
        return self.load_encoders()

    @abstractmethod
    def load_encoders(self) -> E:
        """Read the text encoders and their tokenizers."""

    def drop_text_models(self) -> None:
        """Free the text encoders."""
        self.__dict__.pop("encoders", None)

    def features(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """The text encoders' features of captions."""
        return self.encoders(captions)

    def text_length(self, caption: str) -> int:
        """How many rows of the encoders' length a caption needs."""
        return self.encoders.chunks(caption)

    # Files.

    def adapted_parts(self, path: Path) -> Sequence[str]:
        """The parts that an adapter file is for, in any naming style."""
        return _core.adapted_parts(path, self.name)

    def save_merged(self, models: Mapping[str, Model], output: Path) -> None:
        """Write a `.safetensors` file if `output` names one, else a folder.

        Raises:
            ConfigError: `output` exists and is not an empty folder, or the checkpoint is a file and
                `output` does not end in `.safetensors`.
            OSError: the checkpoint cannot be written.
        """
        saving.save_merged(self.weights, self.parts, models, output)

    def save_quantized(self, models: Mapping[str, Model], output: Path, to: str) -> None:
        """Write one file under the original names, the denoiser in ComfyUI's 8-bit format.

        Raises:
            ConfigError: `output` is not the name of a new `.safetensors` file.
            OSError: the file cannot be written.
        """
        if output.suffix != ".safetensors":
            raise ConfigError(
                f"--output is {output}; with --to, expected the name of a new .safetensors file"
            )
        saving.save_file(self.weights, self.parts, models, output, {self.component: to})
