"""Pictures and captions as SDXL is trained on them: latents, text features, sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trainable_candle as tc
from trainable_candle.data import (
    Batch,
    CacheOptions,
    CaptionOptions,
    Dataset,
    DatasetOptions,
    cache_folder,
    load_dataset,
    parse_sources,
)
from trainable_candle.draws import normal_samples
from trainable_candle.errors import ConfigError
from trainable_candle.recipes.base import Split, held_out_items
from trainable_candle.train.objective import NoisedLatents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.data import DatasetBatches, LatentCache
    from trainable_candle.models import SDXLUNet
    from trainable_candle.settings import TrainConfig
    from trainable_candle.train.objective import DiffusionObjective
    from trainable_candle.train.trainer import Inputs

VALIDATION_EXAMPLES: Final = 16
"""Noises and timesteps that a validation meets at least; with fewer pictures each is seen again."""
_STEPS: Final = (64, 32, 16, 8)


def dataset_options(config: TrainConfig, dataset: str, resolution: int) -> DatasetOptions:
    """What the settings say about pictures.

    Raises:
        ConfigError: two settings contradict each other.
    """
    step = config.bucket_step or default_bucket_step(resolution)
    return DatasetOptions(
        parse_sources(dataset, config.caption),
        resolution=resolution,
        bucketing=config.bucketing,
        bucket_step=step,
        min_side=config.min_side,
        max_side=config.max_side,
        upscale=config.upscale,
        crop=config.crop,
        random_crops=config.random_crops,
        flip=config.flip,
        mask=config.mask,
        prior_loss_weight=config.prior_loss_weight,
        skip_bad=config.skip_bad,
    )


def default_bucket_step(resolution: int) -> int:
    """64 px, or less where that would leave a model for small pictures with a single bucket."""
    suiting = (s for s in _STEPS if resolution % s == 0 and resolution >= 4 * s)
    return next(suiting, _STEPS[-1])


def caption_options(config: TrainConfig) -> CaptionOptions:
    """What the settings say about captions.

    Raises:
        ConfigError: two settings contradict each other.
    """
    return CaptionOptions(
        dropout=config.caption_dropout,
        shuffle=config.caption_shuffle,
        keep_tokens=config.caption_keep_tokens,
        tag_dropout=config.caption_tag_dropout,
        separator=config.caption_separator,
        trigger=config.trigger,
        variants=config.caption_variants,
    )


def cache_options(config: TrainConfig) -> CacheOptions:
    """What the settings say about caches."""
    folder = Path(config.cache_dir).expanduser() if config.cache_dir else None
    return CacheOptions(config.cache, folder)


def read_datasets(config: TrainConfig, resolution: int) -> Split[Dataset]:
    """The checked pictures of a run.

    Raises:
        DatasetError: pictures or captions cannot be used.
        ConfigError: settings contradict each other, or have no effect on these pictures.
    """
    captions = caption_options(config)
    options = dataset_options(config, config.dataset, resolution)
    if config.prior_loss_weight != 1 and not any(s.regularization for s in options.sources):
        raise ConfigError(
            "--prior-loss-weight has no effect: no folder of the dataset is for regularization"
        )
    dataset = load_dataset(options, captions, config.seed)
    if config.mask != "off" and not any(item.has_mask for item in dataset.items):
        what = "a mask file" if config.mask == "file" else "transparency"
        raise ConfigError(f"--mask {config.mask} has no effect: no picture has {what}")
    if config.validation_dataset:
        options = dataset_options(config, config.validation_dataset, resolution)
        return Split(dataset, load_dataset(options, captions, config.seed))
    if not config.validation_split:
        return Split(dataset)
    held_out = set(held_out_items(len(dataset), config.validation_split, config.seed))

    def part(*, validation: bool) -> Dataset:
        items = [item for n, item in enumerate(dataset.items) if (n in held_out) == validation]
        return Dataset(items, dataset.options, captions, config.seed, dataset.summary())

    return Split(part(validation=False), part(validation=True))


def folder_for_cache(
    config: TrainConfig, dataset: Dataset, report: Callable[[str], None]
) -> Path | None:
    """Where latents and text features are kept.

    Raises:
        ConfigError: no place can be written to.
    """
    output = Path(config.output).expanduser()
    folder, note = cache_folder(cache_options(config), dataset.options, output)
    if note:
        report(note)
    return folder


@dataclass(frozen=True)
class Texts:
    """From captions to what the UNet is told."""

    inputs: Callable[[Sequence[str]], Mapping[str, Tensor]]
    """What is made of captions outside of the step."""
    features: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]] | None = None
    """From that and the size of the batch to `encoder_hidden_states` and `text_embeds`, within the
    step; None if they are made outside."""


class PreparedSDXL:
    """A data set whose latents can be had, and the loss of a UNet on it.

    Args:
        unet: predicts.
        objectives: what, for latents in host memory and for predictions on the device.
        dataset: the pictures.
        latents: their latents' distributions, in host memory.
        texts: from captions to features.
        scaling_factor: of the latents.
        factor: pixels on a side of a latent.
        batch_size: of validations.
        device: of the model.
    """

    def __init__(
        self,
        unet: SDXLUNet,
        objectives: tuple[DiffusionObjective, DiffusionObjective],
        dataset: Dataset,
        latents: LatentCache,
        texts: Texts,
        *,
        scaling_factor: float,
        factor: int,
        batch_size: int,
        device: str,
    ) -> None:
        self._unet = unet
        self._noising, self._objective = objectives
        self._dataset = dataset
        self._weighs = any(item.loss_weight != 1 for item in dataset.items)
        self._latents = latents
        self._texts = texts
        self._scaling_factor = scaling_factor
        self._factor = factor
        self._batch_size = batch_size
        self._device = device

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, batch_size: int, seed: int) -> DatasetBatches:  # noqa: ARG002
        """Batches of pictures of one size; the data set knows the seed."""
        return self._dataset.batches(batch_size)

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """What the loss needs; what is random of each sample by its number, drawn on the host."""
        found = self._latents.batch(batch)
        mean = found["mean"]
        seed = self._dataset.seed
        drawn = normal_samples(mean.shape[1:], batch.samples, seed, "latents")
        latents = (mean + (found["logvar"] * 0.5).exp() * drawn) * self._scaling_factor
        made = self._inputs(batch, self._noising.noise(latents, batch.samples, seed))
        if self._weighs:
            made["weights"] = tc.tensor(batch.loss_weights, device=self._device)
        return made

    def loss(self, inputs: Inputs) -> Tensor:
        """The loss on what `inputs` made of a batch."""
        sample = inputs["sample"]
        features: Mapping[str, Tensor] = inputs
        if self._texts.features is not None:
            features = self._texts.features(inputs, sample.shape[0])
        prediction = self._unet(
            sample,
            inputs["times"],
            features["encoder_hidden_states"],
            text_embeds=features["text_embeds"],
            time_ids=inputs["time_ids"],
        )
        noised = NoisedLatents(sample, inputs["timesteps"], inputs["target"])
        return self._objective.loss(
            prediction, noised, mask=inputs.get("mask"), weights=inputs.get("weights")
        )

    def validation_loss(self) -> float:
        """The mean loss, every picture with the same noises and timesteps at every call."""
        batches = self._dataset.fixed_batches(self._batch_size)
        repeats = -(-VALIDATION_EXAMPLES // len(self))
        losses, example = [], 0
        for _ in range(repeats):
            for batch in batches:
                examples = list(range(example, example + len(batch)))
                example += len(batch)
                losses.append(self._validation_loss(batch, examples) * len(batch))
        return math.fsum(losses) / example

    @tc.no_grad()
    def _validation_loss(self, batch: Batch, examples: list[int]) -> float:
        latents = self._latents.batch(batch)["mean"] * self._scaling_factor
        noised = self._noising.validation_noise(latents, examples)
        return float(self.loss(self._inputs(batch, noised)).item())

    def _inputs(self, batch: Batch, noised: NoisedLatents) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {
            "sample": noised.sample.to(self._unet.dtype),
            # For the UNet, and to look up what the objective knows of them.
            "times": noised.timesteps.to("f32"),
            "timesteps": noised.timesteps,
            "target": noised.target,
            "time_ids": tc.tensor(batch.time_ids),
            **self._texts.inputs(batch.captions),
        }
        masks = self._dataset.masks(batch, self._factor)
        if masks is not None:
            made["mask"] = tc.tensor(masks[:, None])
        return {name: tensor.to(self._device) for name, tensor in made.items()}
