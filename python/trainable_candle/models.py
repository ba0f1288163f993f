"""Models: load one with `load`, or with its class; fine-tune it through `add_adapter`."""

from trainable_candle._core import (
    AutoencoderKL,
    CLIPTextModel,
    DigitsTransformer,
    Model,
    SDXLUNet,
    TextFeatures,
    save_checkpoint,
)
from trainable_candle._core import load_model as load

__all__ = [
    "AutoencoderKL",
    "CLIPTextModel",
    "DigitsTransformer",
    "Model",
    "SDXLUNet",
    "TextFeatures",
    "load",
    "save_checkpoint",
]
