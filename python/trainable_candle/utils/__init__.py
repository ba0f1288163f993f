"""What torch has under `torch.utils`."""

from trainable_candle._core import checkpoint
from trainable_candle.utils import data

__all__ = ["checkpoint", "data"]
