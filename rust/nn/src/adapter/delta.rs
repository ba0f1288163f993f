//! Adapters that add a scaled matrix of the weight's shape to the weight: W + s Δ.

use trainable_candle_core::capture::HostState;
use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::{DType, Result, Tensor};

use super::{Adapter, AdapterSettings, training};
use crate::base::Base;

/// The parameters of an adapter, from which the adapter computes the matrix Δ.
pub(super) trait Delta: Send + Sync {
    /// Δ of the shape of the base's weight, from parameters converted to `dtype`.
    fn delta(&self, base: &Base<'_>, dtype: DType) -> Result<Tensor>;
}

/// The adapter of one layer. Merging returns the weight W + s Δ. The forward pass computes with the same single weight,
/// except while dropout is active: dropout changes the input of s Δ, but not the input of W.
pub(super) struct Added<D> {
    delta: D,
    scale: f64,
    dropout: f64,
    training: HostState<bool>,
}

impl<D: Delta> Added<D> {
    pub(super) fn new(delta: D, settings: &AdapterSettings) -> Self {
        Self { delta, scale: settings.scale, dropout: settings.dropout, training: training() }
    }

    /// The matrix s Δ that is added to the weight, in f32 (f64 for an f64 weight).
    fn scaled(&self, base: &Base<'_>) -> Result<Tensor> {
        let dtype = if base.weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        self.delta.delta(base, dtype)?.mul_scalar(self.scale)
    }
}

impl<D: Delta> Adapter for Added<D> {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        if self.dropout > 0.0 && self.training.read() {
            let change = self.scaled(base)?.to_dtype(x.dtype())?;
            return base.forward(x)?.add(&base.operation.apply(&dropout(x, self.dropout, true)?, &change, None)?);
        }
        base.operation.apply(x, &self.adapted_weight(base)?.to_dtype(base.weight.dtype())?, base.bias)
    }

    /// W + s Δ.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        let change = self.scaled(base)?;
        base.weight.values(change.dtype())?.add(&change)
    }

    fn scale(&self) -> f64 {
        self.scale
    }

    fn set_training(&self, training: bool) {
        self.training.change(|known| *known = training);
    }
}
