"""The family SDXL: training its adapters, drawing images with them, and merging them."""

from trainable_candle.families.sdxl.family import SDXL

__all__ = ["SDXL"]
