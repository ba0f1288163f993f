"""Trains adapters of SDXL, draws with them, and merges them."""

from trainable_candle.families.sdxl.family import SDXL

__all__ = ["SDXL"]
