"""What families have in common whose weights are a pipeline: a denoiser, an autoencoder, texts."""

from trainable_candle.families.pipeline.family import PipelineFamily

__all__ = ["PipelineFamily"]
