"""What a model is asked to predict."""

from trainable_candle._core import FlowMatching

__all__ = ["FlowMatching"]
