//! DoRA (Liu et al. 2024, arXiv:2402.09353): m (W + s B A) / ‖W + s B A‖, the norm taken per output row as in peft.

use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::lora::{LoraWeights, adapted_row_norm, dora_linear};
use trainable_candle_core::{DType, Result, Tensor, Var};

use super::lora::Lora;
use super::{Adapter, AdapterKind, AdapterSettings, lora};

/// DoRA in the registry.
pub static KIND: AdapterKind = AdapterKind {
    name: "dora",
    suffixes: &["lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"],
    init: start,
    shapes,
    build,
};

/// As LoRA, with the rows' norms as magnitude: the layer computes what it did before.
fn start(weight: &Tensor, settings: &AdapterSettings) -> Result<Vec<Tensor>> {
    let mut values = (lora::KIND.init)(weight, settings)?;
    let weight = weight.detach().to_dtype(DType::F32)?;
    values.push(adapted_row_norm(&weight, &values[0], &values[1], settings.scale)?);
    Ok(values)
}

fn shapes(weight: &Tensor, rank: usize) -> Vec<Vec<usize>> {
    let mut shapes = (lora::KIND.shapes)(weight, rank);
    shapes.push(vec![weight.dims()[0]]);
    shapes
}

fn build(vars: &[Var], settings: &AdapterSettings) -> Result<Box<dyn Adapter>> {
    let factors = Lora::new(vars[0].clone(), vars[1].clone(), settings.scale, settings.dropout);
    Ok(Box::new(Dora { factors, magnitude: vars[2].clone() }))
}

/// The adapter of one layer: LoRA's two matrices and a magnitude (out).
pub struct Dora {
    factors: Lora,
    magnitude: Var,
}

impl Adapter for Dora {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (down, up) = self.factors.factors(x.dtype())?;
        let magnitude = self.magnitude.to_dtype(x.dtype())?;
        let scale = self.factors.scale();
        let Some(p) = self.factors.active_dropout() else {
            return dora_linear(x, LoraWeights { weight, bias, down: &down, up: &up, scale }, &magnitude);
        };
        // With dropout peft leaves W x as it is and adds (c - 1) W x' + c s B A x' on the dropped-out x'.
        let dropped = dropout(x, p, true)?;
        let ratio = magnitude.div(&adapted_row_norm(weight, &down.detach(), &up.detach(), scale)?)?;
        let base = linear(&dropped, weight, None)?.mul(&ratio.add_scalar(-1.0)?)?;
        let low_rank = linear(&linear(&dropped, &down, None)?, &up, None)?.mul_scalar(scale)?.mul(&ratio)?;
        linear(x, weight, bias)?.add(&base)?.add(&low_rank)
    }

    fn merged_weight(&self, weight: &Tensor) -> Result<Tensor> {
        let adapted = self.factors.adapted(weight)?;
        let norm = adapted.sqr()?.sum(&[1], true)?.sqrt()?;
        let magnitude = self.magnitude.detach().to_dtype(adapted.dtype())?.unsqueeze(1)?;
        adapted.mul(&magnitude.div(&norm)?)?.to_dtype(weight.dtype())
    }

    fn vars(&self) -> Vec<Var> {
        let mut vars = self.factors.vars();
        vars.push(self.magnitude.clone());
        vars
    }

    fn scale(&self) -> f64 {
        self.factors.scale()
    }

    fn set_training(&self, training: bool) {
        self.factors.set_training(training);
    }
}
