//! Objectives, samplers and the training step of trainable-candle.
