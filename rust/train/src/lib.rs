//! Objectives and samplers of trainable-candle.

pub mod objective;
pub mod sampler;
