"""Pictures with captions: reading, checking, buckets, batches, caches.

What a recipe does with a folder::

    options = DatasetOptions(parse_sources(config.dataset, config.caption), resolution=1024)
    dataset = load_dataset(options, CaptionOptions(dropout=0.05), seed=config.seed)  # all checked
    report(dataset.summary())               # a table of buckets; what was skipped, and why

    latents = LatentCache(dataset, encode, cache, identity={"vae": file_identity(path)}, output=...)
    texts = TextCache(encode_text, cache, identity={"text_encoder": ...}, folder=...)
    latents.fill()                          # from here on the VAE is not needed
    texts.fill(dataset.possible_captions()) # nor the text encoders
    batches = dataset.batches(batch_size, seed)     # a `BatchSource` for `Trainer`

    def loss(batch: Batch) -> Tensor:
        latents.batch(batch)                # {name: Tensor (B, ...)} of what `encode` returned
        texts.batch(batch.captions)         # {name: Tensor (B, ...)} of what `encode_text` returned
        batch.time_ids                      # SDXL's size and crop, (B, 6) f32
        batch.loss_weights                  # (B,) f32
        dataset.masks(batch, factor=8)      # (B, h / 8, w / 8) f32 from 0 to 1, or None

`encode` takes pixels, uint8 (n, h, w, 3), and returns tensors of n rows by name; `encode_text`
takes captions and returns the same. What is in a batch depends on the seed and its number alone,
so that a resumed run repeats it.
"""

from trainable_candle.data.batches import ShuffledBatches
from trainable_candle.data.folder import Picture, check_folder, read_pixels, unusable
from trainable_candle.data.options import (
    CacheOptions,
    CaptionOptions,
    DatasetOptions,
    Source,
    parse_sources,
)

__all__ = [
    "CacheOptions",
    "CaptionOptions",
    "DatasetOptions",
    "Picture",
    "ShuffledBatches",
    "Source",
    "check_folder",
    "parse_sources",
    "read_pixels",
    "unusable",
]
