"""Pictures with captions: reading, checking, batching."""

from trainable_candle.data.batches import ShuffledBatches
from trainable_candle.data.folder import Picture, check_folder, read_pixels, unusable

__all__ = ["Picture", "ShuffledBatches", "check_folder", "read_pixels", "unusable"]
