"""Writes adapters of language models for other programs, alone or merged into the model.

In every format of adapters, the factor `up` of each layer (`lora_B`) is already multiplied by the
layer's scale, and all factors are padded with zeros to the largest rank. The alpha equals this
rank, so a program that multiplies by alpha / rank multiplies by 1. A program thus applies the
adapter as it was trained, even if it reads one rank and one alpha for all layers, or none at all.
"""

from trainable_candle.export.adapter import Factors, TextAdapter, read_adapter
from trainable_candle.export.forms import form_of, require_fit, summary
from trainable_candle.export.gguf_model import write_model
from trainable_candle.export.merged import Merged, write_merged
from trainable_candle.export.readers import READERS, require_accepted
from trainable_candle.export.verdicts import outside, settings_of, verdicts
from trainable_candle.export.writers import WRITERS

__all__ = [
    "READERS",
    "WRITERS",
    "Factors",
    "Merged",
    "TextAdapter",
    "form_of",
    "outside",
    "read_adapter",
    "require_accepted",
    "require_fit",
    "settings_of",
    "summary",
    "verdicts",
    "write_merged",
    "write_model",
]
