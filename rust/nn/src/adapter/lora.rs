//! LoRA (Hu et al. 2021, arXiv:2106.09685): W + s B A.

use std::sync::atomic::{AtomicBool, Ordering};

use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::lora::{LoraWeights, lora_backward, lora_linear};
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var};

use super::{Adapter, AdapterKind, AdapterSettings};
use crate::init;

/// LoRA in the registry.
pub static KIND: AdapterKind =
    AdapterKind { name: "lora", suffixes: &["lora_A.weight", "lora_B.weight"], init: start, shapes, build };

/// A uniform as torch starts a linear layer, B zero: the layer computes what it did before.
fn start(weight: &Tensor, settings: &AdapterSettings) -> Result<Vec<Tensor>> {
    let (out, inner) = (weight.dims()[0], weight.dims()[1]);
    let down = init::kaiming_uniform((settings.rank, inner), DType::F32, weight.device())?;
    let up = Tensor::zeros((out, settings.rank), DType::F32, weight.device())?;
    Ok(vec![down, up])
}

fn shapes(weight: &Tensor, rank: usize) -> Vec<Vec<usize>> {
    vec![vec![rank, weight.dims()[1]], vec![weight.dims()[0], rank]]
}

fn build(vars: &[Var], settings: &AdapterSettings) -> Result<Box<dyn Adapter>> {
    Ok(Box::new(Lora::new(vars[0].clone(), vars[1].clone(), settings.scale, settings.dropout)))
}

/// The adapter of one layer: A = `down (r, in)`, B = `up (out, r)`.
pub struct Lora {
    down: Var,
    up: Var,
    scale: f64,
    dropout: f64,
    training: AtomicBool,
}

impl Lora {
    /// Over given parameters.
    pub const fn new(down: Var, up: Var, scale: f64, dropout: f64) -> Self {
        Self { down, up, scale, dropout, training: AtomicBool::new(true) }
    }

    /// The two matrices in the dtype that the layer computes in (the masters are f32).
    pub(super) fn factors(&self, dtype: DType) -> Result<(Tensor, Tensor)> {
        Ok((self.down.to_dtype(dtype)?, self.up.to_dtype(dtype)?))
    }

    /// The dropout probability, if the adapter's input differs from the layer's at present.
    pub(super) fn active_dropout(&self) -> Option<f64> {
        (self.dropout > 0.0 && self.training.load(Ordering::Relaxed)).then_some(self.dropout)
    }

    pub(super) fn set_training(&self, training: bool) {
        self.training.store(training, Ordering::Relaxed);
    }

    pub(super) fn vars(&self) -> Vec<Var> {
        vec![self.down.clone(), self.up.clone()]
    }

    pub(super) const fn scale(&self) -> f64 {
        self.scale
    }

    /// W + s B A in f32 (f64 for an f64 weight).
    pub(super) fn adapted(&self, weight: &Tensor) -> Result<Tensor> {
        let dtype = if weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let (down, up) = self.factors(dtype)?;
        let delta = up.detach().matmul(&down.detach())?.mul_scalar(self.scale)?;
        weight.detach().to_dtype(dtype)?.add(&delta)
    }
}

impl Adapter for Lora {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (down, up) = self.factors(x.dtype())?;
        match self.active_dropout() {
            None => lora_linear(x, LoraWeights { weight, bias, down: &down, up: &up, scale: self.scale }),
            Some(p) => {
                let hidden = linear(&dropout(x, p, true)?, &down, None)?;
                linear(x, weight, bias)?.add(&linear(&hidden, &up, None)?.mul_scalar(self.scale)?)
            }
        }
    }

    fn merged_weight(&self, weight: &Tensor) -> Result<Tensor> {
        self.adapted(weight)?.to_dtype(weight.dtype())
    }

    fn vars(&self) -> Vec<Var> {
        self.vars()
    }

    fn scale(&self) -> f64 {
        self.scale
    }

    fn set_training(&self, training: bool) {
        self.set_training(training);
    }
}

/// A frozen linear layer with a LoRA adapter, for loops that need no model.
pub struct LoRALinear {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Lora,
}

/// A frozen base must be a matrix on the device that was asked for; the rank at least 1.
pub(super) fn check_base(
    op: &'static str,
    weight: &Tensor,
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
    if rank == 0 {
        return Err(Error::argument(op, "the rank is 0, expected at least 1"));
    }
    if !weight.device().same_device(device) {
        return Err(Error::device(op, "the base weight is on another device; move it with to_device()"));
    }
    Ok(())
}

impl LoRALinear {
    /// A layer over a frozen `base_weight (out, in)`: A (rank, in) uniform as torch starts a linear layer, B (out, rank) zero,
    /// scale alpha / rank. The adapter's parameters are f32.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight is no matrix, [`Error::Argument`] if the rank is 0, [`Error::Device`] if the weight is elsewhere.
    pub fn new(base_weight: Tensor, rank: usize, alpha: f64, device: &Device) -> Result<Self> {
        let settings = AdapterSettings { rank, scale: alpha / rank.max(1) as f64, dropout: 0.0 };
        Self::with_settings(base_weight, None, settings, device)
    }

    /// [`new`](Self::new) with a frozen bias (out) and every setting.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_settings(
        base_weight: Tensor,
        bias: Option<Tensor>,
        settings: AdapterSettings,
        device: &Device,
    ) -> Result<Self> {
        check_base("LoRALinear", &base_weight, bias.as_ref(), settings.rank, device)?;
        let vars = start(&base_weight, &settings)?.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
        let adapter = Lora::new(vars[0].clone(), vars[1].clone(), settings.scale, settings.dropout);
        Ok(Self { weight: base_weight.detach(), bias: bias.map(|b| b.detach()), adapter })
    }

    /// `x (..., in)` → `(..., out)`.
    ///
    /// # Errors
    /// [`Error::Shape`] and its kin if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.adapter.forward(x, &self.weight, self.bias.as_ref())
    }

    /// The trainable parameters: down, up.
    pub fn get_vars(&self) -> Vec<Var> {
        self.adapter.vars()
    }

    /// alpha / rank.
    pub const fn scale(&self) -> f64 {
        self.adapter.scale()
    }

    /// W + scale · up · down.
    ///
    /// # Errors
    /// Those of the arithmetic.
    pub fn merge(&self) -> Result<Tensor> {
        self.adapter.merged_weight(&self.weight)
    }

    /// Training (dropout on) or not.
    pub fn set_training(&self, training: bool) {
        self.adapter.set_training(training);
    }
}

/// The LoRA backward by itself.
pub struct LoRABackwardOps;

impl LoRABackwardOps {
    /// Gradients of `lora_down (r, in)` and `lora_up (out, r)` in y = scale (x downᵀ) upᵀ, from
    /// `grad_output (..., out)` and `input (..., in)`.
    ///
    /// # Errors
    /// [`Error::Shape`] and its kin if the operands do not fit.
    pub fn backward(
        grad_output: &Tensor,
        input: &Tensor,
        lora_down: &Tensor,
        lora_up: &Tensor,
        scale: f64,
    ) -> Result<(Tensor, Tensor)> {
        lora_backward(grad_output, input, lora_down, lora_up, scale)
    }
}
