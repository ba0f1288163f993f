"""SDXL as `train-lora` trains it and `sample` draws with it."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final

import trainable_candle as tc
from trainable_candle.data import LatentCache, TextCache
from trainable_candle.data.folder import counted
from trainable_candle.errors import ConfigError
from trainable_candle.models import AutoencoderKL, SDXLUNet
from trainable_candle.recipes.adapters import Adapters, adapter_config
from trainable_candle.recipes.base import SampleOptions, Split
from trainable_candle.recipes.sdxl import checks, files
from trainable_candle.recipes.sdxl.checks import TEXT_ENCODERS
from trainable_candle.recipes.sdxl.data import (
    PreparedSDXL,
    Texts,
    cache_options,
    folder_for_cache,
    read_datasets,
)
from trainable_candle.recipes.sdxl.estimate import (
    encode_area,
    estimate,
    sampling_bytes,
    text_adapter,
    text_parts,
)
from trainable_candle.recipes.sdxl.identity import latents_identity, text_identity
from trainable_candle.recipes.sdxl.sampling import draw
from trainable_candle.recipes.sdxl.text import TextEncoders
from trainable_candle.recipes.sdxl.tiles import TILE, WHOLE, tile_size
from trainable_candle.train.estimate import available_bytes, memory_limit, require_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    from trainable_candle import AdapterFile, Tensor
    from trainable_candle.data import Dataset
    from trainable_candle.models import Model
    from trainable_candle.train.config import TrainConfig
    from trainable_candle.train.estimate import Estimate

UNET_TARGETS: Final = (r".*attentions\.\d+\.proj_(in|out)", r".*\.transformer_blocks\..*")
"""Every layer of the transformers, as kohya's scripts choose."""
TEXT_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class SDXLRecipe:
    """SDXL; its parts are loaded when they are needed and dropped when they are not any more.

    Args:
        weights: a pipeline's folder or an original checkpoint.
        dtype: of the UNet and the text encoders; the autoencoder is f32.
        device: of everything.
    """

    name: ClassVar[str] = "sdxl"
    summary: ClassVar[str] = "Stable Diffusion XL (a tiny one that draws flowers is built in)"
    parts: ClassVar[tuple[str, ...]] = files.SUBFOLDERS
    unused: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, weights: Path, dtype: str | None, device: str) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._clip_skip = 0
        self._prediction_type: str | None = None
        self._resolution: int | None = None
        self._adapted: tuple[str, ...] = ()
        self._remembered: dict[str, dict[str, Tensor]] = {}

    @classmethod
    def default_weights(cls) -> Path | None:
        """The small checkpoint that the package ships."""
        return files.shipped()

    @classmethod
    def check(cls, weights: Path, config: TrainConfig, report: Callable[[str], None]) -> None:
        """Check the settings against the checkpoint's headers.

        Raises:
            ConfigError, ArgumentError: a value lies outside its range or does not suit the model.
            MissingFileError, WeightsFormatError: the checkpoint is no SDXL model, or the initial
                adapter no adapter.
        """
        checks.check(weights, config, UNET_TARGETS, TEXT_TARGETS, report)

    @classmethod
    def read(
        cls, weights: Path, config: TrainConfig, report: Callable[[str], None]
    ) -> Split[Dataset]:
        """Find and check the pictures and captions.

        Raises:
            DatasetError: they cannot be used.
            MissingFileError, WeightsFormatError: the checkpoint is no SDXL model.
        """
        data = read_datasets(config, config.resolution or files.resolution(weights))
        report(data.train.summary())
        if data.validation is not None:
            report(f"validation: {counted(len(data.validation), 'picture')}")
        return data

    @classmethod
    def estimate(
        cls, weights: Path, config: TrainConfig, data: Split[Dataset], limit: float = math.inf
    ) -> Estimate:
        """What a run will hold in memory, from the headers of the files alone.

        With more memory than `limit` leaves, more pictures are encoded at once.

        Raises:
            MissingFileError, WeightsFormatError: the checkpoint is no SDXL model.
        """
        return estimate(weights, config, data, UNET_TARGETS, TEXT_TARGETS, limit)

    @classmethod
    def load(cls, weights: Path, dtype: str | None, device: str) -> Self:
        """The model; its parts are read later.

        Raises:
            MissingFileError, WeightsFormatError: the checkpoint is no SDXL model.
        """
        files.facts(weights)
        return cls(weights, dtype, device)

    @cached_property
    def unet(self) -> SDXLUNet:
        """What is trained."""
        return SDXLUNet.from_pretrained(
            self._weights, dtype=self._dtype, device=self._device, subfolder="unet"
        )

    @cached_property
    def vae(self) -> AutoencoderKL:
        """From pictures to latents and back, in f32: in f16 its values overflow."""
        return AutoencoderKL.from_pretrained(
            self._weights, dtype="f32", device=self._device, subfolder="vae"
        )

    @cached_property
    def encoders(self) -> TextEncoders:
        """From captions to text features."""
        return TextEncoders.load(self._weights, self._dtype, self._device, self._clip_skip)

    def _drop(self, part: str) -> None:
        self.__dict__.pop(part, None)

    def prepare(
        self, data: Split[Dataset], config: TrainConfig, report: Callable[[str], None]
    ) -> Split[PreparedSDXL]:
        """Encode pictures and captions; drop the encoders that are not needed in training.

        Raises:
            DatasetError: a picture cannot be read any more.
            MissingFileError, WeightsFormatError, ConfigError: the checkpoint is no SDXL model.
        """
        self._clip_skip = config.clip_skip or 0
        self._prediction_type = config.prediction_type
        self._resolution = data.train.options.resolution
        # Before the text encoders are loaded, as for the estimate.
        area = encode_area(files.facts(self._weights), config, memory_limit(config))
        texts = self._texts(data, config, report)
        parts = [data.train] if data.validation is None else [data.train, data.validation]
        latents = [self._latents(part, config, area, report) for part in parts]
        facts = files.facts(self._weights)
        if config.cache == "off":
            # Now, rather than in the first step.
            _ = self.vae
        elif not config.sample_prompts:
            self._drop("vae")
        objectives = (
            checks.objective(self._weights, config, "cpu"),
            checks.objective(self._weights, config, self._device),
        )
        prepared = [
            PreparedSDXL(
                self.unet,
                objectives,
                part,
                encoded,
                texts,
                scaling_factor=facts.parts["vae"].config["scaling_factor"],
                factor=facts.factor,
                batch_size=config.batch_size,
                device=self._device,
            )
            for part, encoded in zip(parts, latents, strict=True)
        ]
        return Split(prepared[0], prepared[1] if len(prepared) > 1 else None)

    def _texts(
        self,
        data: Split[Dataset],
        config: TrainConfig,
        report: Callable[[str], None],
    ) -> Texts:
        """What is made of captions: remembered features if the encoders do not change."""
        if config.train_text_encoder:
            return Texts(self._tokens, self._features_of)
        if config.cache == "off" or not config.caption_variants:
            return Texts(tc.no_grad()(self._features))
        cache = TextCache(
            self._features,
            cache_options(config),
            {
                **text_identity(self._weights),
                "clip_skip": str(self._clip_skip),
                "dtype": str(self._dtype),
            },
            folder=folder_for_cache(config, data.train, report),
            encode_parts=text_parts(config),
            parts=self._chunks,
        )
        captions = data.train.possible_captions()
        if data.validation is not None:
            batches = data.validation.fixed_batches(1)
            captions += [caption for batch in batches for caption in batch.captions]
        report(f"captions: {cache.fill(captions, progress=True, report=report)}")
        for prompt in {*config.sample_prompts, config.negative_prompt}:
            with tc.no_grad():
                self._remembered[prompt] = self._features([prompt])
        self._drop("encoders")
        return Texts(cache.batch)

    # Methods, not those of the encoders: who holds on to these does not hold on to the encoders.
    def _features(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return self.encoders(captions)

    def _tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return self.encoders.tokens(captions)

    def _features_of(self, tokens: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
        return self.encoders.encode(tokens, batch)

    def _chunks(self, caption: str) -> int:
        return self.encoders.chunks(caption)

    def _latents(
        self,
        dataset: Dataset,
        config: TrainConfig,
        area: int,
        report: Callable[[str], None],
    ) -> LatentCache:
        def encode(pixels: npt.NDArray[np.uint8]) -> dict[str, Tensor]:
            # Bytes travel, and become numbers where they are encoded.
            image = tc.tensor(pixels, device=self._device).permute(0, 3, 1, 2).to("f32")
            height, width = image.shape[2:]
            tile = tile_size(width, height)
            mean, logvar = self.vae.encode(image / 127.5 - 1.0, tile_size=tile)
            return {"mean": mean, "logvar": logvar}

        cache = LatentCache(
            dataset,
            encode,
            cache_options(config),
            {
                **latents_identity(self._weights),
                "dtype": "f32",
                "tile": f"{TILE} above {WHOLE}",
            },
            folder=folder_for_cache(config, dataset, lambda _: None),
            encode_area=area,
        )
        pictures = counted(len(dataset), "picture")
        report(f"latents of {pictures}: {cache.fill(progress=True, report=report)}")
        return cache

    def attach(self, config: TrainConfig) -> Adapters:
        """Put adapters on the UNet, and on the text encoders if they are trained too.

        Raises:
            ConfigError: a target matches no layer.
        """
        sets = {"unet": self.unet.add_adapter(adapter_config(config, UNET_TARGETS))}
        if config.train_text_encoder:
            for name, model in self._text_models().items():
                adapter = text_adapter(config, name, files.facts(self._weights), TEXT_TARGETS)
                sets[name] = model.add_adapter(adapter)
        if config.gradient_checkpointing != "none":
            for name in sets:
                model = self._part(name)
                model.enable_gradient_checkpointing(config.gradient_checkpointing)
        self._adapted = tuple(sets)
        return Adapters(sets)

    def _text_models(self) -> dict[str, Model]:
        return dict(zip(TEXT_ENCODERS, self.encoders.models, strict=True))

    def _part(self, name: str) -> Model:
        return self.unet if name == "unet" else self._text_models()[name]

    def require_room(self, count: int, options: SampleOptions) -> None:
        """Check that there is memory to draw `count` pictures.

        Raises:
            OutOfMemoryError: there is too little.
            MissingFileError, WeightsFormatError: the checkpoint is no SDXL model.
        """
        side = files.resolution(self._weights)
        width, height = options.size or (side, side)
        needed = sampling_bytes(files.facts(self._weights), (width, height), count, self._dtype)
        limit = available_bytes(self._device)
        require_memory(f"{counted(count, 'picture')} of {width}x{height} px", needed, limit)

    def sample(
        self, prompts: Sequence[str], options: SampleOptions | None = None
    ) -> npt.NDArray[np.uint8]:
        """One picture a prompt; shape (n, height, width, 3).

        Raises:
            ConfigError: the size does not suit the model.
        """

        def features(texts: Sequence[str]) -> dict[str, Tensor]:
            if all(text in self._remembered for text in texts):
                return self._remembered[texts[0]]
            return self.encoders(texts)

        side = self._resolution or files.resolution(self._weights)
        return draw(
            self.unet,
            self.vae,
            files.schedule(self._weights, self._prediction_type),
            features,
            prompts,
            options or SampleOptions(),
            (side, side),
            self._device,
        )

    def adapter_file(
        self, adapters: Adapters, path: Path, config: TrainConfig, metadata: dict[str, str]
    ) -> AdapterFile:
        """The adapters of all parts for one file, by default under kohya's keys.

        Raises:
            ArgumentError: the format cannot hold these adapters.
        """
        return adapters.file(path, config, metadata)

    def load_adapter(self, path: Path, scale: float) -> Adapters:
        """Put the adapters of a file on the parts that it names.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the file is missing, damaged, or of
                another model.
        """
        sets = {
            name: self._part(name).load_adapter(path, scale=scale)
            for name in files.adapted_parts(path)
        }
        self._adapted = tuple(sets)
        return Adapters(sets)

    def save_merged(self, output: Path) -> None:
        """Write the whole model with its adapters merged into the weights.

        Args:
            output: a new or an empty folder for a pipeline, if the checkpoint is one; else, or if
                it ends in `.safetensors`, a file under the original names.

        Raises:
            ConfigError: there is something else.
            OSError: it cannot be written.
        """
        models = {name: self._part(name) for name in self._adapted}
        for model in models.values():
            model.merge_adapter()
        if output.suffix == ".safetensors":
            files.save_merged_file(self._weights, models, output)
        elif self._weights.is_dir():
            files.save_merged_folder(self._weights, models, output)
        else:
            raise ConfigError(
                f"--output is {output}, expected the name of a .safetensors file: "
                f"{self._weights.name} is one"
            )
