//! Adapters that add a scaled matrix of the weight's shape to the weight: W + s Δ. `LoHa` and `LoKr` compute Δ in
//! different ways and share the rest.

use trainable_candle_core::capture::HostState;
use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::{DType, Result, Tensor};

use super::{Adapter, AdapterSettings, training};
use crate::base::Base;

/// The parameters of an adapter, from which Δ is computed.
pub(super) trait Delta: Send + Sync {
    /// Convert the parameters to `dtype` and compute Δ, in the shape of the base's weight.
    fn delta(&self, base: &Base<'_>, dtype: DType) -> Result<Tensor>;
}

/// The adapter of one layer. The forward pass multiplies its input by the sum W + s Δ, except while dropout is active:
/// dropout changes the input of s Δ, but not the input of W, so the two are then multiplied separately.
pub(super) struct Added<D> {
    delta: D,
    /// The factor s.
    scale: f64,
    /// The probability of dropping an element of the input of s Δ in training.
    dropout: f64,
    /// Whether the layer is in training; only then is dropout active.
    training: HostState<bool>,
}

impl<D: Delta> Added<D> {
    pub(super) fn new(delta: D, settings: &AdapterSettings) -> Self {
        Self { delta, scale: settings.scale, dropout: settings.dropout, training: training() }
    }

    /// Compute s Δ in f32 (for an f64 weight: in f64).
    fn scaled(&self, base: &Base<'_>) -> Result<Tensor> {
        let dtype = if base.weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        self.delta.delta(base, dtype)?.mul_scalar(self.scale)
    }
}

impl<D: Delta> Adapter for Added<D> {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        if self.dropout > 0.0 && self.training.read() {
            let change = self.scaled(base)?.to_dtype(x.dtype())?;
            let is_training = true;
            let dropped = dropout(x, self.dropout, is_training)?;
            let no_bias = None;
            return base.forward(x)?.add(&base.operation.apply(&dropped, &change, no_bias)?);
        }
        base.operation.apply(x, &self.adapted_weight(base)?.to_dtype(base.weight.dtype())?, base.bias)
    }

    /// Compute W + s Δ.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        let change = self.scaled(base)?;
        base.weight.values(change.dtype())?.add(&change)
    }

    fn scale(&self) -> f64 {
        self.scale
    }

    fn set_training(&self, training: bool) {
        self.training.change(|value| *value = training);
    }
}
