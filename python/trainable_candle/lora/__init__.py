"""Tools for finished LoRAs: reduce ranks, combine files, extract from a fine-tuned checkpoint."""

from trainable_candle.lora.extract import extract
from trainable_candle.lora.factors import Factors, approximate, truncate
from trainable_candle.lora.files import LoraFile, combine, resize
from trainable_candle.lora.loftq import loftq, start_from_rounding

__all__ = [
    "Factors",
    "LoraFile",
    "approximate",
    "combine",
    "extract",
    "loftq",
    "resize",
    "start_from_rounding",
    "truncate",
]
