"""The base of families whose weights are a pipeline: denoiser, autoencoder, text encoders."""

from trainable_candle.families.pipeline.family import PipelineFamily

__all__ = ["PipelineFamily"]
