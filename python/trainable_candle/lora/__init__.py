"""Tools for LoRAs: reducing ranks, combining files, extracting a LoRA from a fine-tuned model.

`loftq` and `start_from_rounding` compute initial factors of a LoRA that reduce the error of
quantizing the base; `pissa` computes initial factors that are the principal part of a weight.
"""

from trainable_candle.lora.extract import extract
from trainable_candle.lora.factors import Factors, approximate, truncate
from trainable_candle.lora.files import LoraFile, combine, resize
from trainable_candle.lora.loftq import loftq, start_from_rounding
from trainable_candle.lora.pissa import pissa

__all__ = [
    "Factors",
    "LoraFile",
    "approximate",
    "combine",
    "extract",
    "loftq",
    "pissa",
    "resize",
    "start_from_rounding",
    "truncate",
]
