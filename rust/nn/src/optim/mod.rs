//! Optimizers.
pub mod adam8bit;
pub mod quant;
