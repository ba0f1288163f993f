"""Families whose transformers follow a flow from noise to latents: SD3.5, Flux."""

from trainable_candle.families.flow.family import FlowFamily

__all__ = ["FlowFamily"]
