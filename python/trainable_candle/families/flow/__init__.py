"""The base of families that are trained by flow matching, such as SD3.5 and Flux."""

from trainable_candle.families.flow.family import Features, FlowFamily

__all__ = ["Features", "FlowFamily"]
