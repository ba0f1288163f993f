//! Models of trainable-candle.
