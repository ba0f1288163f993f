"""Models: load one with `load`, or with its class; fine-tune it through `add_adapter`."""

from trainable_candle._core import DigitsTransformer, Model
from trainable_candle._core import load_model as load

__all__ = ["DigitsTransformer", "Model", "load"]
