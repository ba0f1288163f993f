//! An adapter that replaces the layer's weight by another, for example by the merged weight.

use trainable_candle_core::{Result, Tensor};

use super::Adapter;
use crate::base::Base;

/// Computes with `weight` in place of the layer's weight.
pub(super) struct Merged {
    pub(super) weight: Tensor,
}

impl Adapter for Merged {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        base.operation.apply(x, &self.weight, base.bias)
    }

    fn adapted_weight(&self, _base: &Base<'_>) -> Result<Tensor> {
        Ok(self.weight.clone())
    }

    fn replaces_weight(&self) -> Option<Tensor> {
        Some(self.weight.clone())
    }

    fn scale(&self) -> f64 {
        0.0
    }

    fn set_training(&self, _training: bool) {}
}
