//! LoRA (Hu et al. 2021, arXiv:2106.09685): W + s B A.

use std::sync::atomic::{AtomicBool, Ordering};

use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::lora::{LoraWeights, lora_backward, lora_linear};
use trainable_candle_core::{DType, Result, Tensor, Var};

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

/// The LoRA backward by itself.
pub struct LoRABackwardOps;

impl LoRABackwardOps {
    /// Gradients of `lora_down (r, in)` and `lora_up (out, r)` in y = scale (x downᵀ) upᵀ, from
    /// `grad_output (..., out)` and `input (..., in)`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] and its kin if the operands do not fit.
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
