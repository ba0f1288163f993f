"""What an SDXL run holds in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from trainable_candle.data.kept import MEMORY_LIMIT
from trainable_candle.data.pixels import AHEAD
from trainable_candle.families.sdxl.files import TEXT_ENCODERS
from trainable_candle.tasks.estimate import (
    ITEM_BYTES,
    RUNTIME_BYTES,
    Estimate,
    Item,
    adapter_items,
)
from trainable_candle.tasks.latent.tiles import area_at_once
from trainable_candle.train.adapters import adapter_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle import LoraConfig
    from trainable_candle.data import Dataset
    from trainable_candle.families.sdxl import files
    from trainable_candle.families.sdxl.family import SDXL
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.task import Split

_TOKENS: Final = 77
_ENCODER_IMAGES: Final = 6
"""Full-size images of the first level that the autoencoder holds at once."""
_WIDE_IMAGES: Final = 12
"""Images of the first level that the UNet holds at once without a tape: skips, gates."""
_GUIDED: Final = 2
"""Predictions at once."""
_ENCODE_AREA: Final = 4 * 1024**2
"""Pixels that a GPU encodes at once, at most."""
_TEXT_PARTS: Final = 16
"""Rows of tokens that a GPU encodes at once."""


def estimate(
    family: SDXL, config: TrainConfig, data: Split[Dataset], limit: float = math.inf
) -> Estimate:
    """From the configuration of the UNet and the headers of the files.

    Args:
        family: the checkpoint, and which layers get adapters.
        config: the settings, which may be others than those of the family.
        data: the images.
        limit: bytes that there are.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: the checkpoint is no SDXL model.
    """
    itemsize = ITEM_BYTES[config.precision]
    facts = family.facts
    unet = Item("unet", "weights", facts.values("unet") * itemsize)
    texts = Item("text encoders", "weights", facts.values(*TEXT_ENCODERS) * itemsize)
    vae = Item("vae", "weights", 4 * facts.values("vae"))
    pictures = len(data.train) + len(data.validation or ())
    area = max(item.fit.bucket.width * item.fit.bucket.height for item in data.train.items)

    latents = 2 * 4 * facts.latent_channels * area // facts.factor**2 * pictures
    text = (_TOKENS * facts.context + facts.pooled) * itemsize * pictures
    kept = 0 if config.cache == "off" else latents + text
    cached = kept if config.cache == "memory" else min(kept, MEMORY_LIMIT)
    # Batches are made in host memory.
    cache = [] if config.on_gpu else [Item("latents and text", "cache", cached)]

    at_once = max(area_at_once(area), min(encode_area(facts, config, limit), area * pictures))
    encoders = [facts.parts[part].config for part in TEXT_ENCODERS]
    # The states of every layer are kept.
    width = sum(encoder["num_hidden_layers"] * encoder["hidden_size"] for encoder in encoders)
    states = text_parts(config) * _TOKENS * width * itemsize
    encoding = [
        vae,
        texts,
        Item("vae", "activations", _working(facts) * at_once),
        Item("text encoders", "activations", states),
        *cache,
    ]
    if not config.on_gpu:
        encoding.append(Item("pictures", "decoded ahead", 3 * area * (min(AHEAD, pictures) + 2)))

    trained = [unet, *cache]
    side = int(area**0.5) // facts.factor

    def adapted(name: str, part: str, adapter: LoraConfig) -> None:
        found = facts.parts[part]
        trained.extend(adapter_items(name, found.layers, adapter, config))
        values = found.saved_values(
            adapter, config.gradient_checkpointing, height=side, width=side, tokens=_TOKENS
        )
        trained.append(Item(name, "activations", values * config.batch_size * itemsize))

    adapted("unet", "unet", adapter_config(config, family.targets))
    if config.train_text_encoder:
        trained.append(texts)
        for part in TEXT_ENCODERS:
            adapted("text encoders", part, family.text_adapter(part, config))
    elif config.cache == "off" or not config.caption_variants:
        trained.append(texts)
    if config.cache == "off" or config.sample_prompts:
        trained.append(vae)
    return Estimate({"encoding": encoding, "training": _together(trained)}, config.on_gpu)


def _together(items: Sequence[Item]) -> list[Item]:
    """The items, those of one name as one."""
    sums: dict[tuple[str, str], int] = {}
    for item in items:
        sums[item.component, item.what] = sums.get((item.component, item.what), 0) + item.bytes
    return [Item(component, what, count) for (component, what), count in sums.items()]


def encode_area(facts: files.Facts, config: TrainConfig, limit: float) -> int:
    """Pixels of the pictures that are encoded at once, at least one picture's.

    On a GPU as many as take half of what the models leave free, up to four of 1024x1024; on the
    CPU, where nothing is gained by more, pictures are encoded one by one, so that what an entry
    holds does not depend on its company.

    Args:
        facts: of the checkpoint.
        config: the settings.
        limit: bytes that there are before anything is loaded.
    """
    if not config.on_gpu:
        return 0
    models = 4 * facts.values("vae") + ITEM_BYTES[config.precision] * facts.values(*TEXT_ENCODERS)
    room = (limit - RUNTIME_BYTES - models) / 2
    return max(0, int(min(_ENCODE_AREA, room // _working(facts))))


def text_parts(config: TrainConfig) -> int:
    """Rows of tokens that are encoded at once: one on the CPU, as with pictures."""
    return _TEXT_PARTS if config.on_gpu else 1


def _working(facts: files.Facts) -> int:
    """Bytes that encoding takes for each pixel."""
    return 4 * facts.vae_width * _ENCODER_IMAGES


def sampling_bytes(facts: files.Facts, size: tuple[int, int], count: int, dtype: str | None) -> int:
    """About what drawing pictures one after the other takes besides the runtime.

    Args:
        facts: of the checkpoint.
        size: width and height, px.
        count: how many there are in the end.
        dtype: of the UNet and the text encoders; as stored if None, here taken for f16.
    """
    area = size[0] * size[1]
    itemsize = ITEM_BYTES.get(dtype or "f16", 4)
    models = facts.values("unet", *TEXT_ENCODERS) * itemsize
    models += 4 * facts.values("vae")
    latents = area // facts.factor**2
    predicting = _GUIDED * _WIDE_IMAGES * facts.config["block_out_channels"][0] * latents * itemsize
    tile = 4 * facts.vae_width * area_at_once(area) * _ENCODER_IMAGES
    decoding = tile + 2 * 4 * 3 * area
    return int(models + max(predicting, decoding) + 3 * 3 * area * count)
