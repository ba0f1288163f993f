"""Tools for LoRAs: reduce ranks, combine files, extract a LoRA from a fine-tuned checkpoint.

`loftq` and `start_from_rounding` compute initial factors that reduce the error of quantization.
"""

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
