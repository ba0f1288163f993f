"""Estimates the memory of a training run, and of drawing, with a pipeline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from trainable_candle.data.kept import MEMORY_LIMIT
from trainable_candle.data.pixels import AHEAD
from trainable_candle.tasks.estimate import (
    ITEM_BYTES,
    RUNTIME_BYTES,
    Estimate,
    Item,
    activations,
    adapter_items,
    trained_model,
)
from trainable_candle.tasks.latent.drawing import SampleOptions, parse_size
from trainable_candle.tasks.latent.prompts import parse_prompt
from trainable_candle.tasks.latent.tiles import area_at_once
from trainable_candle.tasks.speed import states_on_host
from trainable_candle.train.adapters import adapter_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle import LoraConfig
    from trainable_candle.data import Dataset
    from trainable_candle.families.pipeline.facts import Facts
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.task import Split

_FEATURE_MAPS: Final = 6
"""The number of feature maps that the autoencoder holds at once for an image. Each has the image's
height and width, and `vae_width` channels."""
_OF_STEPS: Final = ("activations", "backward pass")
"""The purposes of the memory that is in use only while a training step runs."""
_DRAWN_BYTES: Final = 3 * 3
"""The bytes that a drawn image takes for each of its pixels: three copies in RGB."""
_GUIDED: Final = 2
"""The number of predictions that a step with classifier-free guidance makes at once."""
_ENCODE_AREA: Final = 4 * 1024**2
"""The most pixels that the autoencoder encodes at once on a GPU."""
_MOST_TEXT_ROWS: Final = 16
"""The most rows of tokens that the text encoders encode at once on a GPU. A caption has one or more
rows."""


class Sizes(Protocol):
    """What the estimate needs to know about a family; see `PipelineFamily`."""

    # The name of the denoiser, and the layers and file formats of its adapter.
    component: ClassVar[str]
    targets: ClassVar[tuple[str, ...]]
    formats: ClassVar[tuple[str, ...]]
    text_tokens: ClassVar[int]
    dtype: str | None

    @property
    def facts(self) -> Facts:
        """What the configurations and the weight files' headers say about the checkpoint."""

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features."""

    @property
    def text_working_values(self) -> int:
        """The most values that the encoders hold while they encode one row of tokens."""

    def predicting_values(self, latents: int) -> int:
        """Return the most values that predicting `latents` latent pixels holds without a tape."""

    def text_adapter(self, part: str, config: TrainConfig) -> LoraConfig:
        """Return the adapters of the text encoder `part`."""


def estimate(
    family: Sizes, config: TrainConfig, data: Split[Dataset], limit: float = math.inf
) -> Estimate:
    """Estimate a run's memory from the denoiser's configuration and the weight files' headers.

    Args:
        family: the family with the checkpoint.
        config: the settings of the run, which may differ from the family's own.
        data: the images of training and validation.
        limit: the bytes of memory that are available before anything is loaded.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: the checkpoint is missing, damaged, or of
            another model; or a prompt of the previews has a wrong option.
    """
    itemsize = ITEM_BYTES[config.precision]
    facts = family.facts
    name = family.component
    text_weights = Item("text encoders", "weights", facts.text_bytes(config.precision, config))
    vae_weights = Item("vae", "weights", facts.bytes("f32", "vae"))
    count = len(data.train) + len(data.validation or ())
    area = max(item.fit.bucket.width * item.fit.bucket.height for item in data.train.items)

    # Latents are kept as mean and logarithm of the variance, both in f32.
    latents = 2 * 4 * facts.latent_channels * area // facts.factor**2 * count
    features = family.text_values * itemsize * count
    # With a cache on disk, at most MEMORY_LIMIT bytes of the entries are also in memory.
    entries = 0 if config.cache == "off" else latents + features
    cached = entries if config.cache == "memory" else min(entries, MEMORY_LIMIT)
    # On a GPU the cache is not counted: batches are made in host memory.
    cache = [] if config.on_gpu else [Item("latents and text", "cache", cached)]

    encoding = text_rows_at_once(family, config, limit) * family.text_working_values * itemsize
    captions = [text_weights, Item("text encoders", "activations", encoding), *cache]
    # The encoder gets either one image, a large one in tiles, or a batch of images. Count the
    # pixels of whichever has more at once.
    at_once = max(area_at_once(area), min(encode_area(facts, config, limit), area * count))
    images = [vae_weights, Item("vae", "activations", _coding(facts) * at_once), *cache]
    if _keeps_texts(config):
        images.append(text_weights)
    if not config.on_gpu:
        # Threads decode up to AHEAD images, 3 bytes for each pixel, before they are encoded. There
        # are two more: the image that is being encoded and its copy in a batch.
        images.append(Item("images", "decoded ahead", 3 * area * (min(AHEAD, count) + 2)))

    # Activations are estimated for a square image with the area of the largest one.
    side = int(area**0.5) // facts.factor
    sample = {"height": side, "width": side, "tokens": family.text_tokens}
    adapter = adapter_config(config, family.targets, family.formats)
    model = trained_model(name, facts.parts[name], adapter, config, **sample)
    training = [*model.items, *cache]
    if config.training_adapter:
        size = config.training_adapter_path.stat().st_size
        training.append(Item(name, "training adapter", size))
    if _keeps_texts(config):
        training.append(text_weights)
    # The bytes in host memory for the states of the text encoders' optimizer.
    text_states = 0
    if config.train_text_encoder:
        for part in facts.text_encoders:
            encoder, text_adapter = facts.parts[part], family.text_adapter(part, config)
            text_states += states_on_host(encoder.layers, text_adapter, config)
            training += adapter_items("text encoders", encoder.layers, text_adapter, config)
            training.append(activations("text encoders", encoder, text_adapter, config, **sample))
    if config.cache == "off" or config.sample_prompts:
        training.append(vae_weights)
    # `early_phases` are the phases between encoding and training.
    phases = {
        "encoding captions": captions,
        "encoding images": images,
        **{phase: [*items, *cache] for phase, items in model.early_phases.items()},
        "training": _together(training),
    }
    if config.sample_prompts:
        preview_area = _largest(config, data.train.options.resolution)
        drawing = _drawing(family, itemsize, preview_area) + _DRAWN_BYTES * preview_area
        # No step runs while previews are drawn.
        idle = [item for item in training if item.what not in _OF_STEPS]
        phases["drawing previews"] = [*_together(idle), Item("previews", "activations", drawing)]
    # Whether the file of a text encoder stores its layers in a quantized format.
    texts_have_format = any(facts.parts[part].stored_format for part in facts.text_encoders)
    work = replace(
        model.work,
        states=model.work.states + text_states,
        texts_have_format=texts_have_format,
    )
    return Estimate(phases, config.on_gpu, work, model.host + text_states)


def _keeps_texts(config: TrainConfig) -> bool:
    """Return whether the text encoders stay in memory after the captions have been encoded.

    They do if captions are also encoded during training: with trained encoders, without a cache, or
    with `caption_variants` 0, which makes a new version of a caption for each use.
    """
    return config.train_text_encoder or config.cache == "off" or not config.caption_variants


def _together(items: Sequence[Item]) -> list[Item]:
    """Merge the items with equal `component` and equal `what` by adding their bytes."""
    sums: dict[tuple[str, str], int] = {}
    for item in items:
        sums[item.component, item.what] = sums.get((item.component, item.what), 0) + item.bytes
    return [Item(component, what, count) for (component, what), count in sums.items()]


def encode_area(facts: Facts, config: TrainConfig, limit: float) -> int:
    """Return how many pixels to encode at once; an image of more pixels is encoded alone.

    On a GPU, the result is the number of pixels that fit in half of the memory that the models
    leave free, but at most that of four images of 1024x1024. On the CPU, the result is 0, and
    images are encoded one by one. A batch makes each cache entry depend on the other images of the
    batch, and only on a GPU are batches faster.

    Args:
        facts: the facts about the checkpoint.
        config: the settings.
        limit: the bytes of memory that are available before anything is loaded.
    """
    if not config.on_gpu:
        return 0
    texts = facts.text_bytes(config.precision, config) if _keeps_texts(config) else 0
    models = facts.bytes("f32", "vae") + texts
    room = (limit - RUNTIME_BYTES - models) / 2
    return max(0, int(min(_ENCODE_AREA, room // _coding(facts))))


def text_rows_at_once(family: Sizes, config: TrainConfig, limit: float) -> int:
    """Return the number of rows of tokens that the text encoders encode at once.

    On a GPU, the result is the number of rows that fit in half of the memory that the encoders
    leave free, but at least 1 and at most 16. On the CPU, it is 1, for the reasons that
    `encode_area` gives for images.

    Args:
        family: the family with the checkpoint.
        config: the settings.
        limit: the bytes of memory that are available before anything is loaded.
    """
    if not config.on_gpu:
        return 1
    room = (limit - RUNTIME_BYTES - family.facts.text_bytes(config.precision, config)) / 2
    rows = room // (family.text_working_values * ITEM_BYTES[config.precision])
    return int(max(1, min(_MOST_TEXT_ROWS, rows)))


def _coding(facts: Facts) -> int:
    """Return the bytes that the autoencoder (in f32) takes per pixel to encode or decode."""
    return 4 * facts.vae_width * _FEATURE_MAPS


def sampling_bytes(
    family: Sizes, config: TrainConfig, size: tuple[int, int], count: int, *, loaded: bool
) -> int:
    """Return roughly the bytes that drawing images one by one takes, without `RUNTIME_BYTES`.

    Args:
        family: the family with the checkpoint.
        config: the settings, which name the format of the denoiser's weights.
        size: (width, height) of an image, in pixels.
        count: the number of images, all of which stay in memory.
        loaded: whether the denoiser is in memory already; if so, its weights do not count.
    """
    facts, area = family.facts, size[0] * size[1]
    # Without a dtype, weights keep the dtype of their files; f16 is assumed.
    dtype = family.dtype or "f16"
    models = facts.text_bytes(dtype, config) + facts.bytes("f32", "vae")
    if not loaded:
        models += facts.bytes(dtype, family.component, quantize=config.base_format)
    return int(models + _drawing(family, ITEM_BYTES[dtype], area) + _DRAWN_BYTES * area * count)


def _drawing(family: Sizes, itemsize: int, area: int) -> int:
    """Return the bytes in addition to the weights that drawing an image of `area` pixels takes."""
    facts = family.facts
    predicting = _GUIDED * family.predicting_values(area // facts.factor**2) * itemsize
    tile = _coding(facts) * area_at_once(area)
    # Predicting and decoding do not overlap. Decoding holds two copies of the image, RGB in f32.
    return max(predicting, tile + 2 * 4 * 3 * area)


def _largest(config: TrainConfig, side: int) -> int:
    """Return the number of pixels of the largest preview.

    A preview has the size in its prompt, or else `--sample-size`, or else is a square of `side`.
    """
    size = parse_size(config.sample_size) if config.sample_size else (side, side)
    prompts = [parse_prompt(text, SampleOptions(size=size)) for text in config.sample_prompts]
    return max(math.prod(prompt.options.size or size) for prompt in prompts)
