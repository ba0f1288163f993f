"""The base of families that consist of a denoiser, an autoencoder and text encoders."""

from trainable_candle.families.pipeline.family import PipelineFamily

__all__ = ["PipelineFamily"]
