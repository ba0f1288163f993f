"""Fine-tune large models with LoRA and DoRA, without PyTorch."""

from trainable_candle._core import __version__

__all__ = ["__version__"]
