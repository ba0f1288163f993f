"""Images with captions: reading, checking, buckets, batches, caches.

How a folder becomes batches::

    options = DatasetOptions(parse_sources(config.dataset, config.caption), resolution=1024)
    dataset = load_dataset(options, CaptionOptions(dropout=0.05), config.seed)  # checks everything
    report(dataset.summary())  # a table of buckets; which images are left out, and why

    cache = CacheOptions("disk")
    folder, note = cache_folder(cache, options, output)
    latents = LatentCache(dataset, encode, cache, {"vae": file_identity(path)}, folder=folder)
    texts = TextCache(encode_text, cache, {"encoders": file_identity(path)}, folder=folder)
    latents.fill(progress=True)  # from here on the VAE is not needed
    texts.fill(dataset.possible_captions())  # from here on the text encoders are not needed
    batches = dataset.batches(config.batch_size)  # a `BatchSource` for `Trainer`

    def loss(batch: Batch) -> Tensor:
        latents.batch(batch)  # {name: Tensor (B, ...)} of what `encode` returned
        texts.batch(batch.captions)  # {name: Tensor (B, ...)} of what `encode_text` returned
        batch.frames  # for each example, the `Frame` of its crop
        batch.loss_weights  # (B,) f32
        dataset.masks(batch)  # (B, h / 8, w / 8) f32 from 0 to 1, or None

`output` is the run's folder, and `note` a message for the user, or None. `path` is the file or
folder of the encoder: the cache's entries depend on its contents.

B is the number of examples in a batch; h and w are the height and width of its images, px.
`encode` takes the pixels of n images, uint8 of shape (n, h, w, 3); `encode_text` takes n captions.
Both return a dict of tensors, whose first dimension is n. A batch depends only on the data set, the
seed and the number of the batch, so a resumed run gets the same batches. For validation,
`dataset.fixed()` returns a data set without random crops, mirroring and changes of colour. Its
`fixed_batches(size)` gives every image once, with its whole caption and the tags in order.
"""

from trainable_candle.data.batches import ShuffledBatches
from trainable_candle.data.buckets import Bucket, Buckets, Fit, Frame
from trainable_candle.data.cache import FeatureStore, cache_folder, fingerprint
from trainable_candle.data.captions import CaptionMaker
from trainable_candle.data.dataset import Batch, Dataset, DatasetBatches, View
from trainable_candle.data.features import LatentCache, TextCache
from trainable_candle.data.filling import Filled
from trainable_candle.data.folder import Folder, ImageFile, check_folder, read_folder, unusable
from trainable_candle.data.identity import file_identity
from trainable_candle.data.item import Item
from trainable_candle.data.load import load_dataset
from trainable_candle.data.options import (
    CacheOptions,
    CaptionOptions,
    ColorOptions,
    DatasetOptions,
    Source,
)
from trainable_candle.data.pixels import read_pixels
from trainable_candle.data.sources import parse_sources

__all__ = [
    "Batch",
    "Bucket",
    "Buckets",
    "CacheOptions",
    "CaptionMaker",
    "CaptionOptions",
    "ColorOptions",
    "Dataset",
    "DatasetBatches",
    "DatasetOptions",
    "FeatureStore",
    "Filled",
    "Fit",
    "Folder",
    "Frame",
    "ImageFile",
    "Item",
    "LatentCache",
    "ShuffledBatches",
    "Source",
    "TextCache",
    "View",
    "cache_folder",
    "check_folder",
    "file_identity",
    "fingerprint",
    "load_dataset",
    "parse_sources",
    "read_folder",
    "read_pixels",
    "unusable",
]
