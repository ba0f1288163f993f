//! Quantization-aware training: a layer computes with its adapted weight as a quantized model would have it.
//!
//! The adapted weight, with LoRA W + s B A, is computed as a whole and rounded to a [`Grid`] in every forward pass, in
//! training or not; gradients pass through the rounding unchanged. Merging the result and storing it in the grid's
//! format then adds no error that training has not seen (Liu et al. 2023, "LLM-QAT", arXiv:2305.17888, of weights
//! alone).

use trainable_candle_core::ops::fake_quantize::{Grid, fake_quantize, fake_quantize_by};
use trainable_candle_core::{Error, Result, Tensor, Var, WeightRef};

use super::{Adapter, AdapterSettings};
use crate::base::{Base, Operation};

/// An adapter whose weight is rounded to a grid.
pub struct QuantizationAware {
    inner: Box<dyn Adapter>,
    grid: Grid,
    /// Whether inputs are rounded to it too.
    activations: bool,
    /// The logarithms of learned factors on the scales.
    scales: Option<Var>,
}

impl QuantizationAware {
    /// Round the weight of `inner` on `base`.
    ///
    /// # Errors
    /// [`Error::Config`] if the layer is a convolution, its weight is quantized to another grid or is not of whole
    /// groups, or the adapter drops elements of its input, which no single weight can do.
    pub fn over(inner: Box<dyn Adapter>, base: &Base<'_>, settings: &AdapterSettings, grid: Grid) -> Result<Self> {
        let refuse = |text: String| Err(Error::Config(format!("qat {}: {text}", grid.name())));
        if base.operation != Operation::Linear {
            return refuse(
                "it is a convolution, and linear layers alone are quantized; leave it out with exclude_modules".into(),
            );
        }
        if settings.dropout > 0.0 {
            return refuse(format!("lora_dropout is {}, expected 0: one weight is trained", settings.dropout));
        }
        if let WeightRef::Quantized(weight) = base.weight
            && Some(weight.format()) != grid.format()
        {
            let found = weight.format().name();
            return refuse(format!("the base is {found}; load it in its own precision, or in that of qat"));
        }
        if let Err(Error::Shape { message, .. }) = grid.check(base.weight.dims()) {
            return refuse(format!("{message}; leave the layer out with exclude_modules"));
        }
        Ok(Self { inner, grid, activations: false, scales: None })
    }

    /// Round inputs too, with one scale per token, from its largest magnitude, as torchao's
    /// `Int8DynamicActivationInt8Weight` with symmetric activations, and `Float8DynamicActivationFloat8Weight` by rows
    /// (<https://github.com/pytorch/ao/blob/v0.18.0/torchao/quantization/quant_api.py>).
    #[must_use]
    pub fn with_activations(self, activations: bool) -> Self {
        Self { activations, ..self }
    }

    /// Multiply each scale of the weight by a learned factor, whose logarithm is in `scales`: a step of Adam, as large for every parameter,
    /// is in proportion to the scale (Jain et al. 2019, arXiv:1903.08066, section 3.2), and zeros leave the scales as they are.
    #[must_use]
    pub fn with_scales(self, scales: Option<Var>) -> Self {
        Self { scales, ..self }
    }

    /// The input as a server rounds it.
    fn rounded(&self, x: &Tensor) -> Result<Tensor> {
        let Some(&columns) = x.dims().last().filter(|_| self.activations && x.elem_count() > 0) else {
            return Ok(x.clone());
        };
        fake_quantize(&x.reshape((x.elem_count() / columns, columns))?, self.grid)?.reshape(x.dims())
    }
}

impl Adapter for QuantizationAware {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        let weight = self.adapted_weight(base)?.to_dtype(x.dtype())?;
        base.operation.apply(&self.rounded(x)?, &weight, base.bias)
    }

    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        let weight = self.inner.adapted_weight(base)?;
        match &self.scales {
            Some(scales) => fake_quantize_by(&weight, &scales.exp()?, self.grid),
            None => fake_quantize(&weight, self.grid),
        }
    }

    fn scale(&self) -> f64 {
        self.inner.scale()
    }

    fn set_training(&self, training: bool) {
        self.inner.set_training(training);
    }
}
