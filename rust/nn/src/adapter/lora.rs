//! LoRA (Hu et al. 2021, arXiv:2106.09685): W + s B A with the scale s and the rank r.
//!
//! On a convolution, A is a convolution with r output channels and the layer's kernel size, stride, padding and
//! dilation, and B is a 1 x 1 convolution to the layer's output channels (LoCon; peft and kohya do the same).

use trainable_candle_core::capture::HostState;
use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::linear_group::LowRank;
use trainable_candle_core::ops::lora::{LoraWeights, lora_backward, lora_linear};
use trainable_candle_core::{DType, Error, Result, Tensor, Var};

use super::kind::{Parameters, SavedByAdapter, Start, StartValues, find};
use super::{Adapter, AdapterKind, AdapterSettings, Layout, training};
use crate::base::{Base, Operation};

/// The parameter A.
pub(super) const DOWN: &str = "lora_A.weight";
/// The parameter B.
pub(super) const UP: &str = "lora_B.weight";

/// LoRA in the registry.
pub static KIND: AdapterKind = AdapterKind {
    name: "lora",
    // On a convolution, A has the kernel's layout in files, and B, which is (out, r) here, is (out, r, 1, 1) there.
    parameters: &[(DOWN, Layout::Kernel), (UP, Layout::Pointwise)],
    // Other kinds, such as DoRA, also have A and B, so no parameter marks an adapter as LoRA.
    mark: &[],
    // The first dimension of A is the rank.
    ranked: &[DOWN],
    saved: SavedByAdapter::low_rank,
    start,
    build: |parameters, base, settings| Ok(Box::new(Lora::over(parameters, base, settings)?)),
};

/// The initial values: A is uniform as in torch's layers of the same shape, and B is zero, so that the layer's results
/// do not change. A has the shape of the base's weight, with the rank in place of the number of outputs.
pub(super) fn start(base: &Base<'_>, settings: &AdapterSettings) -> Parameters<Start> {
    let mut dims = base.weight.dims().to_vec();
    if let Some(first) = dims.first_mut() {
        *first = settings.rank;
    }
    let up = Start::new([base.rows(), settings.rank], StartValues::Zero);
    vec![(DOWN, Start::new(dims, StartValues::Kaiming)), (UP, up)]
}

/// Convert a parameter to `dtype`, the dtype of the input of a fused operation. An f32 parameter is returned unchanged
/// if `dtype` is f16 or bf16, because the operation then converts it itself.
pub(super) fn operand(parameter: &Var, dtype: DType) -> Result<Tensor> {
    match (parameter.dtype(), dtype) {
        (DType::F32, DType::F16 | DType::BF16) => Ok(parameter.as_tensor().clone()),
        _ => parameter.compute_copy(dtype),
    }
}

/// The adapter of one layer.
pub struct Lora {
    /// A, (r, in); on a convolution (r, kernel height, kernel width, in).
    down: Var,
    /// B, (out, r).
    up: Var,
    /// The factor s.
    scale: f64,
    /// The probability of dropping an element of the input of A in training.
    dropout: f64,
    /// Whether the adapter is in training mode; only then is dropout active.
    training: HostState<bool>,
}

impl Lora {
    /// Make an adapter over given parameters.
    ///
    /// # Errors
    /// [`Error::Config`] if a parameter is missing or the base is a convolution with groups; [`Error::Shape`] if the
    /// parameters do not fit the base.
    pub(super) fn over(
        parameters: &[(&'static str, Var)],
        base: &Base<'_>,
        settings: &AdapterSettings,
    ) -> Result<Self> {
        let (Some(down), Some(up)) = (find(parameters, DOWN), find(parameters, UP)) else {
            let names: Vec<&str> = parameters.iter().map(|(name, _)| *name).collect();
            return Err(Error::Config(format!(
                "LoRA: found the parameters [{}], expected {DOWN} and {UP}",
                names.join(", ")
            )));
        };
        if base.groups() != 1 {
            return Err(Error::Config(format!(
                "LoRA: a convolution with {} groups cannot have this adapter; leave the layer out with exclude_modules",
                base.groups()
            )));
        }
        let rank = down.dims().first().copied().unwrap_or(0);
        if rank == 0 || down.dims()[1..] != base.weight.dims()[1..] || up.dims() != [base.rows(), rank] {
            return Err(Error::shape(
                "LoRA",
                format!(
                    "down {:?} and up {:?} do not fit the layer's weight {:?} (shapes are channels last)",
                    down.dims(),
                    up.dims(),
                    base.weight.dims()
                ),
            ));
        }
        // `training()` makes the state with its initial value true: in training mode.
        Ok(Self { down, up, scale: settings.scale, dropout: settings.dropout, training: training() })
    }

    /// Convert the factors A and B to `dtype`.
    pub(super) fn factors(&self, dtype: DType) -> Result<(Tensor, Tensor)> {
        Ok((self.down.compute_copy(dtype)?, self.up.compute_copy(dtype)?))
    }

    /// Convert the factors A and B with [`operand`], for a fused operation on an input of `dtype`.
    pub(super) fn operands(&self, dtype: DType) -> Result<(Tensor, Tensor)> {
        Ok((operand(&self.down, dtype)?, operand(&self.up, dtype)?))
    }

    /// Compute s B A x, which the adapter adds to the layer's result.
    pub(super) fn low_rank(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        let (down, up) = self.factors(x.dtype())?;
        linear(&base.operation.apply(x, &down, None)?, &up, None)?.mul_scalar(self.scale)
    }

    /// Return the dropout probability if dropout is active now. The input of the adapter then differs from the input of
    /// the layer, so fused operations, which compute both from one input, cannot be used.
    pub(super) fn active_dropout(&self) -> Option<f64> {
        (self.dropout > 0.0 && self.training.read()).then_some(self.dropout)
    }
}

impl Adapter for Lora {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        match (self.active_dropout(), base.operation) {
            (None, Operation::Linear) => {
                let (down, up) = self.operands(x.dtype())?;
                let (weight, bias) = (base.weight, base.bias);
                lora_linear(x, LoraWeights { weight, bias, down: &down, up: &up, scale: self.scale })
            }
            (None, Operation::Conv2d(_)) => base.forward(x)?.add(&self.low_rank(x, base)?),
            (Some(p), _) => {
                let is_training = true; // outside of training, `active_dropout` is None
                base.forward(x)?.add(&self.low_rank(&dropout(x, p, is_training)?, base)?)
            }
        }
    }

    fn as_low_rank(&self, dtype: DType) -> Result<Option<LowRank>> {
        if self.active_dropout().is_some() {
            return Ok(None);
        }
        let (down, up) = self.operands(dtype)?;
        Ok(Some(LowRank { down, up, scale: self.scale }))
    }

    /// Compute W + s B A.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        let dtype = if base.weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let (down, up) = self.factors(dtype)?;
        let down = down.reshape((down.dims()[0], base.columns()))?;
        let delta = up.matmul(&down)?.mul_scalar(self.scale)?;
        base.weight.values(dtype)?.add(&delta.reshape(base.weight.dims())?)
    }

    fn scale(&self) -> f64 {
        self.scale
    }

    fn set_training(&self, training: bool) {
        self.training.change(|value| *value = training);
    }
}

/// Computes the gradients of LoRA's factors without a tape.
pub struct LoRABackwardOps;

impl LoRABackwardOps {
    /// Compute the gradients of `lora_down (r, in)` and `lora_up (out, r)`, in this order. They are the factors in
    /// y = scale (x downᵀ) upᵀ. `input (..., in)` is x, and `grad_output (..., out)` is the gradient of y.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`], `DType` or `Device` if the operands do not fit, `Argument` if `scale`
    /// is not finite.
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
