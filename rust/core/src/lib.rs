//! Tensors, trainable variables and the autograd tape of trainable-candle.
