//! An adapter that replaces the layer's weight by the merged weight: the layer's weight, changed as another adapter
//! changes it.

use trainable_candle_core::{Result, Tensor};

use super::Adapter;
use crate::base::Base;

/// Computes with `weight` in place of the layer's weight.
pub(super) struct Merged {
    /// The merged weight, in the dtype and layout of the layer's weight.
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

    /// 0, which means that no factor stands in front of this adapter's change: the merged weight contains the other
    /// adapter's change, already multiplied by the other adapter's factor.
    fn scale(&self) -> f64 {
        0.0
    }

    /// Does nothing: a merged weight has no dropout.
    fn set_training(&self, _training: bool) {}
}
