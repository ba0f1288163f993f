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

_ENCODER_IMAGES: Final = 6
"""The number of feature maps, each with the image's height and width and `vae_width` channels, that
the autoencoder holds at once."""
_OF_STEPS: Final = ("activations", "backward pass")
"""What only steps of training hold."""
_IMAGE_COPIES: Final = 3 * 3
"""The bytes that a drawn image takes for each of its pixels: three copies in RGB."""
_GUIDED: Final = 2
"""The number of predictions that a step with classifier-free guidance makes at once."""
_ENCODE_AREA: Final = 4 * 1024**2
"""The most pixels that a GPU encodes at once."""
_TEXT_PARTS: Final = 16
"""The most rows of tokens that a GPU encodes at once."""


class Sizes(Protocol):
    """The facts about a family that the estimate needs."""

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
        """The most values that the encoders hold while they encode a caption."""

    def predicting_values(self, latents: int) -> int:
        """Return the most values that predicting `latents` latent pixels holds without a tape."""

    def text_adapter(self, part: str, config: TrainConfig) -> LoraConfig:
        """Return the adapters of the text encoder `part`."""


def estimate(
    family: Sizes, config: TrainConfig, data: Split[Dataset], limit: float = math.inf
) -> Estimate:
    """Estimate a run's memory from the denoiser's configuration and the weight files' headers.

    Args:
        family: the facts about the checkpoint, and which layers get adapters.
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
    texts = Item("text encoders", "weights", facts.text_bytes(config.precision, config))
    vae = Item("vae", "weights", facts.bytes("f32", "vae"))
    pictures = len(data.train) + len(data.validation or ())
    area = max(item.fit.bucket.width * item.fit.bucket.height for item in data.train.items)

    latents = 2 * 4 * facts.latent_channels * area // facts.factor**2 * pictures
    text = family.text_values * itemsize * pictures
    kept = 0 if config.cache == "off" else latents + text
    cached = kept if config.cache == "memory" else min(kept, MEMORY_LIMIT)
    # On a GPU the cache is not counted: batches are made in host memory.
    cache = [] if config.on_gpu else [Item("latents and text", "cache", cached)]

    hidden = text_parts(family, config, limit) * family.text_working_values * itemsize
    captions = [texts, Item("text encoders", "activations", hidden), *cache]
    at_once = max(area_at_once(area), min(encode_area(facts, config, limit), area * pictures))
    images = [vae, Item("vae", "activations", _working(facts) * at_once), *cache]
    if _keeps_texts(config):
        images.append(texts)
    if not config.on_gpu:
        images.append(Item("images", "decoded ahead", 3 * area * (min(AHEAD, pictures) + 2)))

    side = int(area**0.5) // facts.factor
    sample = {"height": side, "width": side, "tokens": family.text_tokens}
    adapter = adapter_config(config, family.targets, family.formats)
    model = trained_model(name, facts.parts[name], adapter, config, **sample)
    trained = [*model.items, *cache]
    if config.training_adapter:
        size = config.training_adapter_path.stat().st_size
        trained.append(Item(name, "training adapter", size))
    if _keeps_texts(config):
        trained.append(texts)
    states = 0
    if config.train_text_encoder:
        for part in facts.text_encoders:
            found, adapter = facts.parts[part], family.text_adapter(part, config)
            states += states_on_host(found.layers, adapter, config)
            trained += adapter_items("text encoders", found.layers, adapter, config)
            trained.append(activations("text encoders", found, adapter, config, **sample))
    if config.cache == "off" or config.sample_prompts:
        trained.append(vae)
    phases = {
        "encoding captions": captions,
        "encoding images": images,
        **{phase: [*items, *cache] for phase, items in model.start.items()},
        "training": _together(trained),
    }
    if config.sample_prompts:
        drawn = _largest(config, data.train.options.resolution)
        working = _drawing(family, itemsize, drawn) + _IMAGE_COPIES * drawn
        idle = [item for item in trained if item.what not in _OF_STEPS]
        phases["drawing previews"] = [*_together(idle), Item("previews", "activations", working)]
    stored = any(facts.parts[part].stored_format for part in facts.text_encoders)
    work = replace(model.work, states=model.work.states + states, texts_have_format=stored)
    return Estimate(phases, config.on_gpu, work, model.host + states)


def _keeps_texts(config: TrainConfig) -> bool:
    """Return whether the text encoders stay in memory after the captions have been encoded."""
    return config.train_text_encoder or config.cache == "off" or not config.caption_variants


def _together(items: Sequence[Item]) -> list[Item]:
    """Merge the items that have equal `component` and `what`: their bytes are summed."""
    sums: dict[tuple[str, str], int] = {}
    for item in items:
        sums[item.component, item.what] = sums.get((item.component, item.what), 0) + item.bytes
    return [Item(component, what, count) for (component, what), count in sums.items()]


def encode_area(facts: Facts, config: TrainConfig, limit: float) -> int:
    """Return how many pixels to encode at once; an image of more pixels is encoded alone.

    On a GPU, these are as many pixels as fit in half of the memory that the models leave free, up
    to those of four images of 1024x1024. On the CPU, the result is 0, and images are encoded one by
    one: batches would not be faster, and a cache entry would depend on the other images of its
    batch.

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
    return max(0, int(min(_ENCODE_AREA, room // _working(facts))))


def text_parts(family: Sizes, config: TrainConfig, limit: float) -> int:
    """Return the number of rows of tokens that the text encoders encode at once.

    On a GPU, these are as many as fit in half of the memory that the encoders leave free, from 1 to
    16. On the CPU, it is one row, for the reasons that `encode_area` gives for images.

    Args:
        family: the facts about the checkpoint.
        config: the settings.
        limit: the bytes of memory that are available before anything is loaded.
    """
    if not config.on_gpu:
        return 1
    room = (limit - RUNTIME_BYTES - family.facts.text_bytes(config.precision, config)) / 2
    rows = room // (family.text_working_values * ITEM_BYTES[config.precision])
    return int(max(1, min(_TEXT_PARTS, rows)))


def _working(facts: Facts) -> int:
    """Return the bytes that the autoencoder takes to encode one pixel of an image."""
    return 4 * facts.vae_width * _ENCODER_IMAGES


def sampling_bytes(
    family: Sizes, config: TrainConfig, size: tuple[int, int], count: int, *, loaded: bool
) -> int:
    """Return roughly the bytes that drawing images one by one takes, without `RUNTIME_BYTES`.

    Args:
        family: the facts about the checkpoint.
        config: the settings, which name the format of the denoiser's weights.
        size: (width, height) of an image, in pixels.
        count: the number of images; all of them stay in memory.
        loaded: whether the denoiser is in memory already; its weights then do not count.
    """
    facts, area = family.facts, size[0] * size[1]
    # Without a dtype, weights keep the dtype of their files; f16 is assumed.
    dtype = family.dtype or "f16"
    models = facts.text_bytes(dtype, config) + facts.bytes("f32", "vae")
    if not loaded:
        models += facts.bytes(dtype, family.component, quantize=config.base_format)
    return int(models + _drawing(family, ITEM_BYTES[dtype], area) + _IMAGE_COPIES * area * count)


def _drawing(family: Sizes, itemsize: int, area: int) -> int:
    """Return the bytes that drawing an image of `area` pixels takes besides the weights."""
    facts = family.facts
    predicting = _GUIDED * family.predicting_values(area // facts.factor**2) * itemsize
    tile = _working(facts) * area_at_once(area)
    return max(predicting, tile + 2 * 4 * 3 * area)


def _largest(config: TrainConfig, side: int) -> int:
    """Return the pixels of the largest preview; the default is a square of side `side`."""
    size = parse_size(config.sample_size) if config.sample_size else (side, side)
    drawn = [parse_prompt(text, SampleOptions(size=size)) for text in config.sample_prompts]
    return max(math.prod(prompt.options.size or size) for prompt in drawn)
