"""The base of families whose weights are a diffusers pipeline or a checkpoint in one file.

Such a file has the layout in which the model's authors published the weights.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from trainable_candle import _core
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.families.pipeline import estimate as memory
from trainable_candle.families.pipeline import saving
from trainable_candle.families.pipeline.facts import Loading, facts, source
from trainable_candle.families.pipeline.identity import parts_identity
from trainable_candle.models import load
from trainable_candle.settings import flag
from trainable_candle.settings.checks import existing
from trainable_candle.settings.machine import SAME
from trainable_candle.tasks.estimate import memory_limit
from trainable_candle.tasks.latent.coders import KLCoder
from trainable_candle.tasks.latent.family import LatentFamily
from trainable_candle.tasks.w8a8 import multiplying_codes

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
        """Return text features of B captions, (B, ...) by name."""

    def size_of(self, caption: str) -> int:
        """Return a caption's size; captions of equal size can be encoded in one batch.

        For SDXL the size is the number of rows of 77 tokens that the caption needs. In other
        pipelines the size depends on the number of tokens, or is always 1.
        """

    def truncates(self, caption: str) -> bool:
        """Return whether a caption has more tokens than the encoders read."""


E = TypeVar("E", bound=Encoders)


class PipelineFamily(LatentFamily, Generic[E]):
    """The base of families whose models are a pipeline.

    A family adds its text encoders, its noise levels and its predictions.
    """

    text_tokens: ClassVar[int]
    """The number of tokens of a caption that memory estimates assume."""
    coder_kind: ClassVar[type[KLCoder]] = KLCoder
    """The class of `coder`."""
    _replaced: Mapping[str, Path] = MappingProxyType({})
    """The checkpoints from which parts are read instead of `weights`, by the names of the parts."""

    @property
    def facts(self) -> Facts:
        """What the configurations and the weight files' headers say about the checkpoint.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the checkpoint, or a file that
                `--text-encoder` or `--vae` names, is missing, damaged or of another model.
        """
        return facts(self.weights, self.name, self._single_parts)

    @property
    def _single_parts(self) -> list[Path]:
        """The files and folders that `--text-encoder` and `--vae` name.

        Raises:
            MissingFileError: one of them does not exist.
            ConfigError: one of them is the folder of a pipeline.
        """
        given = [("text_encoder", path) for path in self.config.text_encoder]
        given += [("vae", self.config.vae)] if self.config.vae else []
        # `existing` returns the path, or raises MissingFileError.
        paths = [(name, existing(name, Path(path).expanduser())) for name, path in given]
        for name, path in paths:
            if (path / "model_index.json").is_file():
                raise ConfigError(
                    f"{flag(name)}: {path} is the folder of a pipeline; give the folder of one "
                    f"part, such as {path / name}"
                )
        return [path for _, path in paths]

    def require_own(self) -> None:
        """Check that the checkpoint has the parts of this pipeline.

        Raises:
            MissingFileError, WeightsFormatError: a file is missing or damaged, or the checkpoint
                lacks a part.
            ConfigError: the path of `--vae` is not an autoencoder, a path of `--text-encoder` is
                one, or a file is of another model.
        """
        # `facts` tells from the contents of the given files which one is the autoencoder, whatever
        # the flag. Reading `facts` also raises the errors for missing and damaged files.
        vae, given = self.facts.parts["vae"].path.resolve(), self.config.vae
        if given and Path(given).expanduser().resolve() != vae:
            raise ConfigError(
                f"--vae: {given} is not an autoencoder; give text encoders with --text-encoder"
            )
        for path in self.config.text_encoder:
            if Path(path).expanduser().resolve() == vae:
                raise ConfigError(f"--text-encoder: {path} is an autoencoder; give it with --vae")

    def check_format(self, form: str, layers: Collection[str]) -> None:
        """See `LatentModel.check_format`; layers that a format fuses must be adapted together.

        Raises:
            ConfigError: the format cannot represent the adapters.
        """
        try:
            self.facts.parts[self.component].check_format(form, self.config.adapter, list(layers))
        except ArgumentError as error:
            raise ConfigError(f"--format {form}: {error}") from None

    @property
    def resolution(self) -> int:
        """The side in pixels of the square images that the model was made for; 0 if unknown."""
        return self.facts.checkpoint.resolution or 0

    def layers(self) -> Mapping[str, Shape]:
        """Return the shapes of the weights of the denoiser's layers, by the layers' names."""
        return self.facts.parts[self.component].layers

    def text_layers(self) -> Mapping[str, Mapping[str, Shape]]:
        """Return the shapes of the weights of each text encoder's layers, by the folder's name.

        The result is empty if the family cannot train text encoders.
        """
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
        """The most values that the encoders hold while they encode one row of tokens."""

    @abstractmethod
    def predicting_values(self, latents: int) -> int:
        """Return the most values that predicting `latents` latent pixels holds without a tape."""

    def estimate(self, config: TrainConfig, data: Split[Dataset], limit: float) -> Estimate:
        """Estimate a run's memory; see `estimate.estimate`."""
        return memory.estimate(self, config, data, limit)

    def drawing_bytes(self, size: tuple[int, int], count: int) -> int:
        """Return roughly the bytes that drawing `count` images of `size` (width, height) takes.

        They include the text encoders, the autoencoder, predictions with guidance, decoding, the
        images and, unless it is loaded already, the denoiser.
        """
        loaded = "model" in vars(self)  # where `cached_property` stores the denoiser
        return memory.sampling_bytes(self, self.config, size, count, loaded=loaded)

    def encode_area(self) -> int:
        """Return how many pixels to encode at once; see `estimate.encode_area`."""
        return memory.encode_area(self.facts, self.config, memory_limit(self.config))

    def text_rows_at_once(self) -> int:
        """Return how many rows of tokens to encode at once; see `estimate.text_rows_at_once`."""
        return memory.text_rows_at_once(self, self.config, memory_limit(self.config))

    # The models of the pipeline.

    @cached_property
    def model(self) -> Model:
        """The denoiser, which is loaded on first use."""
        where = self.source(self.component)  # `component`: the name of the denoiser's part
        with multiplying_codes(self.config):  # `--w8a8`
            return load(**where, **self.config.streaming, dtype=self.dtype, device=self.device)

    def use_parts(self, path: Path, parts: Collection[str]) -> None:
        """Use these parts of another checkpoint, dequantized; the other parts stay the same.

        The denoiser and the text encoders are loaded anew when they are next used.
        """
        self._replaced = dict.fromkeys(parts, path)
        self.__dict__.pop("model", None)
        self.drop_text_models()

    def source(self, part: str) -> Loading:
        """Return the arguments of `load` and `from_pretrained` for a part; see `Loading`."""
        if part in self._replaced:
            return {**source(self._replaced[part], part), "quantize": None}
        where = source(self.facts.parts[part].path, part)
        quantize = self.config.base_format if part == self.component else None
        if part in self.facts.text_encoders:
            quantize = self.facts.text_formats(self.config)[part]
        return {**where, "quantize": quantize}

    @property
    def text_precision(self) -> str:
        """The text encoders' dtype, followed by the format that they are quantized to, if any.

        If their formats differ, the dtype is followed by the format of each encoder, "same" for one
        that is not quantized. Caches of captions depend on this text.
        """
        formats = list(self.facts.text_formats(self.config).values())
        if len(set(formats)) == 1:
            return f"{self.dtype} {formats[0] or ''}".rstrip()
        return " ".join([str(self.dtype), *(form or SAME for form in formats)])

    @cached_property
    def coder(self) -> KLCoder:
        """The autoencoder with the conversion of its latents to those that the denoiser reads."""
        # `factor`: pixels per latent pixel along one side of an image.
        config, factor = self.facts.parts["vae"].config, self.facts.factor
        return self.coder_kind(
            self.source("vae"), config, factor, self.device, self._latents_identity
        )

    def _latents_identity(self) -> Mapping[str, str]:
        return parts_identity(self.facts, ("vae",))

    @cached_property
    def encoders(self) -> E:
        """The text encoders with their tokenizers, which are loaded on first use."""
        return self.load_encoders()

    @abstractmethod
    def load_encoders(self) -> E:
        """Load the text encoders and their tokenizers."""

    def drop_text_models(self) -> None:
        """Free the text encoders."""
        self.__dict__.pop("encoders", None)

    def features(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the text encoders' features of B captions, (B, ...) by name."""
        return self.encoders(captions)

    def text_length(self, caption: str) -> int:
        """Return a caption's size; see `Encoders.size_of`."""
        return self.encoders.size_of(caption)

    def truncates(self, caption: str) -> bool:
        """Return whether the text encoders do not read the end of a caption."""
        return self.encoders.truncates(caption)

    # Files.

    def adapted_parts(self, path: Path) -> Sequence[str]:
        """Return the parts whose layers an adapter file has factors for, in any naming style."""
        return _core.adapted_parts(path, self.name)

    def save_merged(self, models: Mapping[str, Model], output: Path) -> None:
        """Write the merged checkpoint: a `.safetensors` file if `output` names one, else a folder.

        Raises:
            ConfigError: `output` exists and is not an empty folder, the folder of a new file does
                not exist, or the checkpoint is a file and `output` does not end in `.safetensors`.
            OSError: the checkpoint cannot be written.
        """
        saving.save_merged(self.weights, self.parts, models, output)

    def require_quantized(self, output: Path, to: str) -> None:
        """See `LatentModel.require_quantized`.

        Raises:
            ConfigError: `output` or the weights do not suit `to`, or `output` exists.
        """
        if to == "nf4":
            if not self.weights.is_dir():
                raise ConfigError(
                    f"--to nf4 writes a folder for diffusers, but --weights {self.weights} is one "
                    "file; give the model's folder, or give --to fp8 or --to int8, which write one "
                    "file"
                )
            if output.suffix == ".safetensors":
                raise ConfigError(
                    f"--output is {output}, but --to nf4 writes a folder for diffusers; give the "
                    "name of a new folder, or give --to fp8 or --to int8, which write one file"
                )
            saving.require_empty_folder(output)
            return
        if output.suffix != ".safetensors":
            raise ConfigError(
                f"--output is {output}; with --to {to}, expected the name of a new .safetensors "
                "file"
            )
        saving.require_new_file(output)

    def save_quantized(self, models: Mapping[str, Model], output: Path, to: str) -> None:
        """Write the merged checkpoint with a quantized denoiser.

        "nf4" writes a folder that diffusers loads with bitsandbytes. "fp8" and "int8" write one
        file with the tensors' original names and the denoiser in ComfyUI's format.

        Raises:
            ConfigError: as `require_quantized`.
            OSError: the checkpoint cannot be written.
        """
        self.require_quantized(output, to)
        save = saving.save_folder if to == "nf4" else saving.save_file
        save(self.weights, self.parts, models, output, {self.component: to})
