//! Layers, losses, adapters and optimizers of trainable-candle.
