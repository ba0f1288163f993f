"""SDXL: from a checkpoint and a folder of images to an adapter."""

from trainable_candle.families.sdxl.family import SDXL

__all__ = ["SDXL"]
