//! Weight, adapter and training-state files of trainable-candle.
