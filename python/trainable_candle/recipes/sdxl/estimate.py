"""What an SDXL run holds in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.data.features import MEMORY_LIMIT
from trainable_candle.recipes.sdxl import files
from trainable_candle.recipes.sdxl.structure import UNetWalk, layer_facts, saved_values
from trainable_candle.recipes.sdxl.text import unread_layers
from trainable_candle.recipes.sdxl.tiles import area_at_once
from trainable_candle.train.estimate import Estimate, Item, adapted_layers, adapter_items
from trainable_candle.train.headers import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainable_candle.data import Dataset
    from trainable_candle.recipes.base import Split
    from trainable_candle.train.config import TrainConfig

_TOKENS: Final = 77
_ENCODER_IMAGES: Final = 6
"""Full-size images of the first level that the autoencoder holds at once."""
_WIDE_IMAGES: Final = 12
"""Images of the first level that the UNet holds at once without a tape: skips, gates."""
_GUIDED: Final = 2
"""Predictions at once."""


def estimate(
    weights: Path,
    config: TrainConfig,
    data: Split[Dataset],
    unet_targets: Sequence[str],
    text_targets: Sequence[str],
) -> Estimate:
    """From the configuration of the UNet and the headers of the files.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: the checkpoint is no SDXL model.
    """
    itemsize = ITEM_BYTES[config.precision]
    facts = files.facts(weights)
    encoders = ("text_encoder", "text_encoder_2")
    unet = Item("unet", "weights", facts.values("unet") * itemsize)
    texts = Item("text encoders", "weights", facts.values(*encoders) * itemsize)
    vae = Item("vae", "weights", 4 * facts.values("vae"))
    pictures = len(data.train) + len(data.validation or ())
    area = max(item.fit.bucket.width * item.fit.bucket.height for item in data.train.items)

    latents = 2 * 4 * facts.latent_channels * area // facts.factor**2 * pictures
    text = (_TOKENS * facts.context + facts.pooled) * itemsize * pictures
    kept = 0 if config.cache == "off" else latents + text
    cached = kept if config.cache == "memory" else min(kept, MEMORY_LIMIT)
    # Batches are made in host memory.
    cache = [] if config.on_gpu else [Item("latents and text", "cache", cached)]

    working = 4 * facts.vae_widths[0] * area_at_once(area) * _ENCODER_IMAGES
    encoding = [vae, texts, Item("vae", "activations", working), *cache]

    trained = [unet, *cache]
    side = int(area**0.5)
    walk = UNetWalk(facts.config, side // facts.factor, side // facts.factor, _TOKENS)
    wanted, exclude = config.target_modules or list(unet_targets), config.exclude_modules
    adapted = adapted_layers(layer_facts(facts.config), wanted, exclude)
    trained += adapter_items("unet", adapted.values(), config)
    values = saved_values(
        walk.blocks(), adapted.__contains__, config.rank, config.gradient_checkpointing
    )
    trained.append(Item("unet", "activations", values * config.batch_size * itemsize))
    if config.train_text_encoder:
        first, second = (facts.parts[part] for part in encoders)
        unread = unread_layers(first, config.clip_skip or 0)
        layers = [
            *adapted_layers(first, text_targets, [*exclude, *unread]).values(),
            *adapted_layers(second, text_targets, exclude).values(),
        ]
        trained += [texts, *adapter_items("text encoders", layers, config)]
        values = _TOKENS * sum(map(sum, layers))
        trained.append(Item("text encoders", "activations", values * config.batch_size * itemsize))
    elif config.cache == "off" or not config.caption_variants:
        trained.append(texts)
    if config.cache == "off" or config.sample_prompts:
        trained.append(vae)
    return Estimate({"encoding": encoding, "training": trained}, config.on_gpu)


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
    models = facts.values("unet", "text_encoder", "text_encoder_2") * itemsize
    models += 4 * facts.values("vae")
    latents = area // facts.factor**2
    predicting = _GUIDED * _WIDE_IMAGES * facts.config["block_out_channels"][0] * latents * itemsize
    tile = 4 * facts.vae_widths[0] * area_at_once(area) * _ENCODER_IMAGES
    decoding = tile + 2 * 4 * 3 * area
    return int(models + max(predicting, decoding) + 3 * 3 * area * count)
