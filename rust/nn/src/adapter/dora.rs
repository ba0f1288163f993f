//! DoRA, a kind of adapter (Liu et al. 2024, arXiv:2402.09353): replaces a layer's weight W by
//! m (W + s B A) / ‖W + s B A‖, with LoRA's factors A (`down`) and B (`up`), LoRA's scale s, and a trained magnitude m.
//! The backward pass treats the norm as a constant.
//!
//! There is either one magnitude and one norm for each output, as in peft, or one for each input (feature or channel),
//! as in kohya's files and in `ComfyUI`. The norm of an input is taken over the outputs and the kernel positions.
//!
//! The code follows
//! <https://github.com/huggingface/peft/blob/5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40/src/peft/tuners/lora/dora.py#L86>
//! and
//! <https://github.com/comfyanonymous/ComfyUI/blob/9c0cf36cd7964978850fd40f8cf76ac2cf9f9e15/comfy/weight_adapter/base.py>.

use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::ops::lora::{LoraWeights, adapted_row_norm, dora_linear};
use trainable_candle_core::{DType, Error, Result, Tensor, Var, no_grad};

use super::kind::{Parameters, SavedByAdapter, Start, StartValues, find, input_norm};
use super::lora::{self, DOWN, Lora, UP};
use super::{Adapter, AdapterKind, AdapterSettings, Layout};
use crate::base::{Base, Operation};

/// The parameter with one magnitude for each output, (out).
const PER_OUTPUT: &str = "lora_magnitude_vector.weight";
/// The parameter with one magnitude for each input, (1, in).
pub(super) const PER_INPUT: &str = "dora_scale";

/// DoRA in the registry.
pub static KIND: AdapterKind = AdapterKind {
    name: "dora",
    // Each with its layout in files.
    parameters: &[
        (DOWN, Layout::Kernel),
        (UP, Layout::Pointwise),
        (PER_OUTPUT, Layout::Channels),
        (PER_INPUT, Layout::Row),
    ],
    // Readers of files recognize the kind by either of these.
    mark: &[PER_OUTPUT, PER_INPUT],
    // Its first dimension is the rank.
    ranked: &[DOWN],
    saved: SavedByAdapter::low_rank,
    start,
    build,
};

/// The initial values: the factors start as LoRA's do, and the magnitudes start as the norms of the weight, so that the
/// layer's results do not change. `wd_on_output` chooses magnitudes for the outputs, else for the inputs.
fn start(base: &Base<'_>, settings: &AdapterSettings) -> Parameters<Start> {
    let mut parameters = lora::start(base, settings);
    parameters.push(if settings.wd_on_output {
        (PER_OUTPUT, Start::new([base.rows()], StartValues::OutputNorm))
    } else {
        (PER_INPUT, Start::new([1, base.inputs()], StartValues::InputNorm))
    });
    parameters
}

fn build(parameters: &[(&'static str, Var)], base: &Base<'_>, settings: &AdapterSettings) -> Result<Box<dyn Adapter>> {
    let factors = Lora::over(parameters, base, settings)?;
    let (magnitude, expected) = match (find(parameters, PER_OUTPUT), find(parameters, PER_INPUT)) {
        (Some(magnitude), None) => (Magnitude::PerOutput(magnitude), vec![base.rows()]),
        (None, Some(magnitude)) => (Magnitude::PerInput(magnitude), vec![1, base.inputs()]),
        _ => {
            return Err(Error::Config(format!(
                "DoRA: found both or none of the parameters {PER_OUTPUT} and {PER_INPUT}, expected exactly one"
            )));
        }
    };
    if magnitude.var().dims() != expected {
        return Err(Error::shape(
            "DoRA",
            format!("the magnitudes have shape {:?}, expected {expected:?}", magnitude.var().dims()),
        ));
    }
    Ok(Box::new(Dora { factors, magnitude }))
}

/// The norms that the rows or columns of the adapted weight are scaled to.
enum Magnitude {
    /// One magnitude for each output, (out).
    PerOutput(Var),
    /// One magnitude for each input, (1, in).
    PerInput(Var),
}

impl Magnitude {
    const fn var(&self) -> &Var {
        match self {
            Self::PerOutput(var) | Self::PerInput(var) => var,
        }
    }
}

/// The adapter of one layer: LoRA's two factors and the magnitudes.
pub struct Dora {
    factors: Lora,
    magnitude: Magnitude,
}

impl Dora {
    /// Compute y = m / ‖W + s B A‖ (W x + s B A x) + b, with one norm for each output.
    fn per_output(&self, magnitude: &Var, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        let scale = self.factors.scale();
        let dropout_probability = self.factors.active_dropout();
        if let (None, Operation::Linear) = (dropout_probability, base.operation) {
            // One fused operation. It takes f32 parameters with f16 or bf16 inputs, so `operands` and `operand` do not
            // convert f32 parameters to the dtype of such an input.
            let (down, up) = self.factors.operands(x.dtype())?;
            let magnitude = lora::operand(magnitude, x.dtype())?;
            let (weight, bias) = (base.weight, base.bias);
            return dora_linear(x, LoraWeights { weight, bias, down: &down, up: &up, scale }, &magnitude);
        }
        let (down, up) = self.factors.factors(x.dtype())?;
        // For the norms, a convolution's weight and A are matrices, with one column for each kernel position and input.
        let norm_dtype = if base.weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let matrix = base.weight.values(norm_dtype)?.reshape((base.rows(), base.columns()))?;
        let down = down.detach().reshape((down.dims()[0], base.columns()))?;
        let norm = adapted_row_norm(&matrix, &down, &up.detach(), scale)?;
        let ratio = magnitude.to_dtype(norm.dtype())?.div(&norm)?.to_dtype(x.dtype())?;
        let without_bias = Base { bias: None, ..*base };
        let Some(p) = dropout_probability else {
            let y = without_bias.forward(x)?.add(&self.factors.low_rank(x, base)?)?.mul(&ratio)?;
            return base.bias.map_or_else(|| Ok(y.clone()), |bias| y.add(bias));
        };
        // With dropout, peft adds (c - 1) W x' + c s B A x' to W x + b, where x' is x after dropout and
        // c = m / ‖W + s B A‖. `true` means training.
        let dropped = dropout(x, p, true)?;
        let change = without_bias.forward(&dropped)?.mul(&ratio.add_scalar(-1.0)?)?;
        let low_rank = self.factors.low_rank(&dropped, base)?.mul(&ratio)?;
        base.forward(x)?.add(&change)?.add(&low_rank)
    }

    /// Compute y = (W + s B A) (m / ‖W + s B A‖ x) + b, with one norm for each input.
    fn per_input(&self, magnitude: &Var, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        let norm = {
            let _constant = no_grad();
            input_norm(&self.factors.adapted_weight(base)?)?.squeeze(0)?
        };
        let ratio = magnitude.squeeze(0)?.to_dtype(norm.dtype())?.div(&norm)?.to_dtype(x.dtype())?;
        self.factors.forward(&x.mul(&ratio)?, base)
    }
}

impl Adapter for Dora {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        match &self.magnitude {
            Magnitude::PerOutput(magnitude) => self.per_output(magnitude, x, base),
            Magnitude::PerInput(magnitude) => self.per_input(magnitude, x, base),
        }
    }

    /// Compute m (W + s B A) / ‖W + s B A‖; no gradient flows through the norm.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        let adapted = self.factors.adapted_weight(base)?;
        let constant = adapted.detach();
        let ratio = match &self.magnitude {
            Magnitude::PerOutput(magnitude) => {
                let dims: Vec<usize> = (1..constant.rank()).collect();
                let norm = constant.sqr()?.sum(&dims, true)?.sqrt()?;
                magnitude.to_dtype(constant.dtype())?.reshape(norm.shape().clone())?.div(&norm)?
            }
            Magnitude::PerInput(magnitude) => {
                // (in): the inputs are the last dimension of the weight.
                magnitude.to_dtype(constant.dtype())?.div(&input_norm(&constant)?)?.squeeze(0)?
            }
        };
        adapted.mul(&ratio)
    }

    fn scale(&self) -> f64 {
        self.factors.scale()
    }

    fn set_training(&self, training: bool) {
        self.factors.set_training(training);
    }
}
