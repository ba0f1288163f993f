//! Optimizers.
pub mod adam;
pub mod adam8bit;
pub mod lion;
pub mod lion8bit;
pub mod quant;
pub mod sgd;
