//! [`Linear`]: y = x Wᵀ + b over frozen or trainable parameters, with a slot for an adapter.

use trainable_candle_core::ops::gated::{geglu, geglu_feed_forward};
use trainable_candle_core::ops::linear::linear_add;
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var, Weight, WeightRef};

use crate::base::{Base, Operation};
use crate::init;
use crate::norm::LayerNorm;
use crate::slot::AdapterSlot;

/// The type of a layer's parameters: [`Tensor`] for frozen parameters, [`Var`] for trainable ones.
pub trait Parameter: AsRef<Tensor> + Sized {
    /// The type of a linear layer's weight.
    type Weight: From<Self>;

    /// Borrow the weight as the type that operations take.
    fn weight(weight: &Self::Weight) -> WeightRef<'_>;
}

impl Parameter for Tensor {
    /// A frozen weight may be quantized or streamed.
    type Weight = Weight;

    fn weight(weight: &Weight) -> WeightRef<'_> {
        weight.into()
    }
}

impl Parameter for Var {
    type Weight = Self;

    fn weight(weight: &Self) -> WeightRef<'_> {
        weight.into()
    }
}

/// A linear layer. `Linear<Tensor>` is frozen, and its weight may be quantized or streamed; `Linear<Var>` is trainable.
///
/// An adapter can be attached or removed through a shared reference to the layer, because the slot for the adapter is
/// mutable inside.
pub struct Linear<T: Parameter> {
    /// The weight, (out_features, in_features).
    pub weight: T::Weight,
    /// The bias, (out_features).
    pub bias: Option<T>,
    adapter: AdapterSlot,
}

impl Linear<Var> {
    /// Make a trainable f32 layer with torch's initial values: weight and bias uniform in ±1/√in_features.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the weight does not fit in the device's memory.
    pub fn new(in_features: usize, out_features: usize, device: &Device) -> Result<Self> {
        let weight = init::kaiming_uniform((out_features, in_features), DType::F32, device)?;
        let bias = init::uniform_by_fan(in_features, out_features, DType::F32, device)?;
        Self::from_parameters(Var::from_tensor(&weight)?, Some(Var::from_tensor(&bias)?))
    }

    /// List the trainable parameters: the weight, then the bias if there is one.
    pub fn vars(&self) -> Vec<Var> {
        std::iter::once(self.weight.clone()).chain(self.bias.clone()).collect()
    }
}

impl Linear<Tensor> {
    /// Make a frozen layer over a weight `(out_features, in_features)` and a bias `(out_features)`. Their shapes are
    /// not checked before [`forward`](Self::forward).
    pub fn from_weight(weight: impl Into<Weight>, bias: Option<Tensor>) -> Self {
        Self { weight: weight.into(), bias, adapter: AdapterSlot::default() }
    }
}

impl<T: Parameter> Linear<T> {
    /// Make a layer over a weight `(out_features, in_features)` and a bias `(out_features)`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight is not a matrix or the bias does not fit it.
    pub fn from_parameters(weight: T, bias: Option<T>) -> Result<Self> {
        let dims = weight.as_ref().dims();
        if dims.len() != 2 {
            return Err(Error::shape(
                "Linear",
                format!("the weight has shape {dims:?}, expected (out_features, in_features)"),
            ));
        }
        if let Some(bias) = bias.as_ref().map(AsRef::as_ref).filter(|b| b.dims() != [dims[0]]) {
            return Err(Error::shape(
                "Linear",
                format!("the bias has shape {:?}, expected ({},)", bias.dims(), dims[0]),
            ));
        }
        Ok(Self { weight: weight.into(), bias, adapter: AdapterSlot::default() })
    }

    /// Return the layer's result, with the adapter if one is attached: `x (..., in_features)` → `(..., out_features)`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the input does not fit; the errors of the adapter.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.adapter.forward(x, &self.base())
    }

    /// Return the size of the input's last dimension.
    pub fn in_features(&self) -> usize {
        // 0 if the weight is no matrix, which `from_weight` does not check.
        T::weight(&self.weight).dims().get(1).copied().unwrap_or(0)
    }

    /// Return the size of the result's last dimension.
    pub fn out_features(&self) -> usize {
        T::weight(&self.weight).dims().first().copied().unwrap_or(0)
    }

    /// Return the weight that the layer computes with: its own weight, or the merged weight while an adapter is merged.
    pub fn effective_weight(&self) -> Weight {
        self.adapter.effective_weight(T::weight(&self.weight))
    }

    /// Return the layer's own parameters and its operation, for adapters.
    pub fn base(&self) -> Base<'_> {
        Base {
            weight: T::weight(&self.weight),
            bias: self.bias.as_ref().map(AsRef::as_ref),
            operation: Operation::Linear,
        }
    }

    /// Return [`forward`](Self::forward) of `x (..., in_features)`, plus `residual (..., out_features)`. Without an
    /// adapter, one operation may compute both steps; [`linear_add`] says when.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and if the residual does not fit.
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        if self.slot().get().is_some() {
            return self.forward(x)?.add(residual);
        }
        let base = self.base();
        linear_add(x, base.weight, base.bias, residual)
    }

    /// Return s + last(geglu(self(norm(s)))), where s = x + residual, with the operation [`geglu`]. `x`, `residual` and
    /// the result are (..., in_features). Without adapters, one operation may compute all of this;
    /// [`geglu_feed_forward`] says when.
    ///
    /// # Errors
    /// As [`forward_add`](Self::forward_add) and [`LayerNorm::add_forward`].
    pub fn geglu_feed_forward(&self, norm: &LayerNorm, x: &Tensor, residual: &Tensor, last: &Self) -> Result<Tensor> {
        if self.slot().get().is_some() || last.slot().get().is_some() {
            let (sum, normed) = norm.add_forward(x, residual)?;
            return last.forward_add(&geglu(&self.forward(&normed)?)?, &sum);
        }
        let (inner, outer) = (self.base(), last.base());
        let norm_parameters = ([norm.weight.as_ref(), norm.bias.as_ref()], norm.eps);
        geglu_feed_forward(x, residual, norm_parameters, (inner.weight, inner.bias), (outer.weight, outer.bias))
    }

    pub(crate) const fn slot(&self) -> &AdapterSlot {
        &self.adapter
    }
}
