//! Python bindings of trainable-candle.
