//! A frozen linear layer that owns its adapter, for users who train single layers instead of a whole model.

use std::marker::PhantomData;

use trainable_candle_core::raw::is_float;
use trainable_candle_core::{Device, Error, Result, Tensor, Var, Weight, WeightRef};

use super::{Adapter, AdapterKind, AdapterSettings, dora, lora};
use crate::base::{Base, Operation};

/// A frozen linear layer with an adapter of kind `K`.
pub struct AdaptedLinear<K> {
    weight: Weight,
    bias: Option<Tensor>,
    adapter: Box<dyn Adapter>,
    vars: Vec<Var>,
    kind: PhantomData<K>,
}

/// A frozen linear layer with a LoRA adapter.
pub type LoRALinear = AdaptedLinear<LoraLayer>;

/// A frozen linear layer with a DoRA adapter.
pub type DoRALinear = AdaptedLinear<DoraLayer>;

/// A kind of adapter, as a type parameter of [`AdaptedLinear`].
pub trait LayerKind {
    /// The name of the layer's type in errors.
    const NAME: &'static str;
    /// The kind of adapter.
    const KIND: &'static AdapterKind;
}

/// The type parameter of [`LoRALinear`].
pub struct LoraLayer;

impl LayerKind for LoraLayer {
    const NAME: &'static str = "LoRALinear";
    const KIND: &'static AdapterKind = &lora::KIND;
}

/// The type parameter of [`DoRALinear`].
pub struct DoraLayer;

impl LayerKind for DoraLayer {
    const NAME: &'static str = "DoRALinear";
    const KIND: &'static AdapterKind = &dora::KIND;
}

/// Check that a frozen weight is a floating-point matrix on `device`, that the bias fits it, and that the rank is at
/// least 1.
fn check_base(
    op: &'static str,
    weight: WeightRef<'_>,
    bias: Option<&Tensor>,
    rank: usize,
    device: &Device,
) -> Result<()> {
    if weight.rank() != 2 {
        return Err(Error::shape(
            op,
            format!("the base weight has shape {:?}, expected (out_features, in_features)", weight.dims()),
        ));
    }
    if let Some(bias) = bias.filter(|b| b.dims() != [weight.dims()[0]]) {
        return Err(Error::shape(
            op,
            format!("the bias has shape {:?}, expected ({},)", bias.dims(), weight.dims()[0]),
        ));
    }
    if !is_float(weight.dtype()) {
        return Err(Error::dtype(
            op,
            format!("the base weight is {}, expected floating point", weight.dtype().as_str()),
        ));
    }
    if rank == 0 {
        return Err(Error::argument(op, "the rank is 0, expected at least 1"));
    }
    if !weight.device().same_device(device) {
        return Err(Error::device(op, "the base weight is not on the layer's device; move it with to_device()"));
    }
    Ok(())
}

impl<K: LayerKind> AdaptedLinear<K> {
    /// Make a layer over a frozen `base_weight (out, in)` with scale alpha / rank. Until the layer is trained, it
    /// computes the same results as the base. The adapter's parameters are f32: A (rank, in) starts with uniform values
    /// like the weight of a linear layer of torch, B (out, rank) starts at zero, and DoRA's magnitudes (out) start as
    /// the norms of the weight's rows.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight is not a matrix, [`Error::DType`] if it is not floating-point,
    /// [`Error::Argument`] if the rank is 0, [`Error::Device`] if the weight is not on `device`, [`Error::OutOfMemory`]
    /// if the parameters do not fit into memory.
    pub fn new(base_weight: impl Into<Weight>, rank: usize, alpha: f64, device: &Device) -> Result<Self> {
        // A rank of 0 must not divide; `with_settings` rejects it.
        let settings = AdapterSettings { rank, scale: alpha / rank.max(1) as f64, ..AdapterSettings::default() };
        Self::with_settings(base_weight, None, settings, device)
    }

    /// As [`new`](Self::new), with a frozen bias (out) and all settings of the adapter. If
    /// `settings.wd_on_output` is false, DoRA's magnitudes (1, in) start as the norms of the weight's columns.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Shape`] if the bias does not fit the weight.
    pub fn with_settings(
        base_weight: impl Into<Weight>,
        bias: Option<Tensor>,
        settings: AdapterSettings,
        device: &Device,
    ) -> Result<Self> {
        let (weight, bias) = (base_weight.into(), bias.map(|b| b.detach()));
        check_base(K::NAME, (&weight).into(), bias.as_ref(), settings.rank, device)?;
        // The layer is frozen, so a weight that is a tensor is detached from the tape. Other weights are never on it.
        let weight = weight.tensor().map_or_else(|| weight.clone(), |tensor| tensor.detach().into());
        let base = Base { weight: (&weight).into(), bias: bias.as_ref(), operation: Operation::Linear };
        let parameters = K::KIND
            .init(&base, &settings)?
            .into_iter()
            .map(|(name, value)| Ok((name, Var::from_tensor(&value)?)))
            .collect::<Result<Vec<_>>>()?;
        let adapter = (K::KIND.build)(&parameters, &base, &settings)?;
        let vars = parameters.into_iter().map(|(_, var)| var).collect();
        Ok(Self { weight, bias, adapter, vars, kind: PhantomData })
    }

    fn base(&self) -> Base<'_> {
        Base { weight: (&self.weight).into(), bias: self.bias.as_ref(), operation: Operation::Linear }
    }

    /// Compute the layer's result with the adapter: `x (..., in)` → `(..., out)`.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.adapter.forward(x, &self.base())
    }

    /// The trainable parameters: down (A), up (B), and for DoRA the magnitudes.
    pub fn get_vars(&self) -> Vec<Var> {
        self.vars.clone()
    }

    /// The factor in front of the low-rank product.
    pub fn scale(&self) -> f64 {
        self.adapter.scale()
    }

    /// Compute the merged weight: W + scale · up · down; DoRA then scales each row (each column, if `wd_on_output` is
    /// false) until its norm is its magnitude.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    pub fn merge(&self) -> Result<Tensor> {
        self.adapter.merged_weight(&self.base())
    }

    /// Set whether the adapter is in training mode, in which dropout is active.
    pub fn set_training(&self, training: bool) {
        self.adapter.set_training(training);
    }
}
