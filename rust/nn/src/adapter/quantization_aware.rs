//! Quantization-aware training: a layer computes with its adapted weight after rounding, as a quantized model stores
//! it.
//!
//! Every forward pass, in training or not, computes the whole adapted weight (for LoRA: W + s B A) and rounds it to a
//! [`Grid`], the numbers that a quantized matrix of some format can represent. Gradients pass through the rounding
//! unchanged, except that clipped elements get the gradient 0. When the adapted weight is merged and stored in the
//! grid's format, its rounding errors are the same as in training (Liu et al. 2023, "LLM-QAT", arXiv:2305.17888).
//! Inputs are rounded only if [`QuantizationAware::with_activations`] requests it.

use trainable_candle_core::ops::fake_quantize::{Grid, fake_quantize, fake_quantize_by};
use trainable_candle_core::{Error, Result, Tensor, Var, WeightRef};

use super::{Adapter, AdapterSettings};
use crate::base::{Base, Operation};

/// An adapter that rounds the adapted weight of another adapter to a grid.
pub struct QuantizationAware {
    /// The other adapter.
    inner: Box<dyn Adapter>,
    grid: Grid,
    /// Whether inputs are rounded to the grid too.
    activations: bool,
    /// The logarithms of the learned factors by which the weight's scales are multiplied.
    scales: Option<Var>,
}

impl QuantizationAware {
    /// Make an adapter of the layer `base` that computes the adapted weight of `inner` and rounds it to `grid`.
    ///
    /// # Errors
    /// [`Error::Config`] if the layer is a convolution, if its weight is quantized to another grid or does not divide
    /// into whole groups that share a scale, or if the adapter has dropout, which no single weight can express.
    pub fn over(inner: Box<dyn Adapter>, base: &Base<'_>, settings: &AdapterSettings, grid: Grid) -> Result<Self> {
        let reject = |text: String| Err(Error::Config(format!("qat {}: {text}", grid.name())));
        if base.operation != Operation::Linear {
            return reject(
                "the layer is a convolution, and only linear layers are quantized; leave it out with exclude_modules"
                    .into(),
            );
        }
        if settings.dropout > 0.0 {
            return reject(format!(
                "lora_dropout is {}, expected 0: dropout and rounding of the adapted weight exclude each other",
                settings.dropout
            ));
        }
        if let WeightRef::Quantized(weight) = base.weight
            && Some(weight.format()) != grid.format()
        {
            let found = weight.format().name();
            let or_in_format = if grid.format().is_some() { ", or in the format of qat" } else { "" };
            return reject(format!("the base is {found}; load the base unquantized{or_in_format}"));
        }
        if let Err(Error::Shape { message, .. }) = grid.check(base.weight.dims()) {
            return reject(format!("{message}; leave the layer out with exclude_modules"));
        }
        Ok(Self { inner, grid, activations: false, scales: None })
    }

    /// Check that inputs can be rounded to the grid of the weights.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no grid, or if the grid does not have exactly one scale for each row of a matrix.
    pub fn check_activations(grid: Option<Grid>) -> Result<()> {
        if matches!(grid, Some(Grid::Int8 | Grid::Fp8)) {
            return Ok(());
        }
        let found = grid.map_or_else(|| "but qat is not set".to_owned(), |grid| format!("which is {}", grid.name()));
        Err(Error::Config(format!("qat_activations rounds inputs to the format of qat, {found}; expected int8 or fp8")))
    }

    /// Set whether inputs are rounded too. Each token has one scale, computed from its largest magnitude. torchao does
    /// the same in `Int8DynamicActivationInt8Weight` with symmetric activations, and in
    /// `Float8DynamicActivationFloat8Weight` with a scale per row
    /// (<https://github.com/pytorch/ao/blob/v0.18.0/torchao/quantization/quant_api.py>).
    #[must_use]
    pub fn with_activations(self, activations: bool) -> Self {
        Self { activations, ..self }
    }

    /// Multiply each scale of the weight by a learned factor, whose logarithm is in `scales`; zeros, or None, leave the
    /// scales unchanged. Adam's steps have about the same size for every parameter, so steps of logarithms change each
    /// scale in proportion to its size (Jain et al. 2019, arXiv:1903.08066, section 3.2).
    #[must_use]
    pub fn with_scales(self, scales: Option<Var>) -> Self {
        Self { scales, ..self }
    }

    /// Round the input, with one scale for each token, or return it unchanged if inputs are not rounded.
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

    /// Compute the rounded weight.
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
