//! [`AdapterKind`]: the description of a kind of adapter.

use trainable_candle_core::{DType, Result, Tensor, Var};

use super::{Adapter, AdapterSettings, Layout};
use crate::base::Base;
use crate::init::kaiming_uniform;

/// A kind of adapter: how it starts, and how it is built over its parameters.
pub struct AdapterKind {
    /// The name in configurations and files.
    pub name: &'static str,
    /// The name and the layout in files of each parameter. The name follows the layer's name, and is peft's if peft has
    /// the parameter.
    pub parameters: &'static [(&'static str, Layout)],
    /// Names of parameters that no other kind has, by which readers of files recognize the kind. Each adapter of the
    /// kind has exactly one of these parameters. The list is empty if other kinds have all parameters of this kind.
    pub mark: &'static [&'static str],
    /// Names of parameters whose first dimension is the rank. The first of these parameters that an adapter
    /// has determines the adapter's rank. An adapter that has none of them has no rank.
    pub ranked: &'static [&'static str],
    /// What the tape keeps of a layer with this kind of adapter.
    pub saved: fn(base: &Base<'_>, settings: &AdapterSettings) -> SavedByAdapter,
    /// The shapes and initial values of an adapter's parameters. With these values, a layer computes the same as
    /// without the adapter.
    pub start: fn(base: &Base<'_>, settings: &AdapterSettings) -> Parameters<Start>,
    /// Makes an adapter of this kind from its parameters.
    pub build: Build,
}

/// What the tape keeps of an adapter's layer, in addition to what it keeps of the layer without an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedByAdapter {
    /// Whether the tape keeps the layer's input.
    pub input: bool,
    /// Whether the tape keeps the input even if the backward pass could compute it again ([`Tensor::recomputed`]).
    pub even_if_recomputable: bool,
    /// The number of further values that the tape keeps for each output position (a token or a pixel).
    pub values: usize,
    /// The number of values for each output position that the tape keeps only under selective checkpointing: results of
    /// matrix products.
    pub products: usize,
}

impl SavedByAdapter {
    /// What the tape keeps of a low-rank product: the input, and the input times the first factor, which has as many
    /// values for each position as the rank.
    pub(super) fn low_rank(_base: &Base<'_>, settings: &AdapterSettings) -> Self {
        Self { input: true, even_if_recomputable: false, values: settings.rank, products: 0 }
    }
}

/// Parameters with their names, in the order of [`AdapterKind::parameters`].
pub type Parameters<T> = Vec<(&'static str, T)>;

/// How a parameter starts. (What a frozen LoRA subtracts with PiSSA is also called a start, but is another thing.)
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// Its shape.
    pub dims: Vec<usize>,
    /// Its values.
    pub values: StartValues,
}

/// The values that a parameter starts with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StartValues {
    /// Random values as torch draws them for the weight of a linear layer of this shape.
    Kaiming,
    /// Normal values with mean 0 and this standard deviation.
    Normal(f64),
    /// Zeros.
    Zero,
    /// The norm of the base's weight for each output.
    OutputNorm,
    /// The norm of the base's weight for each input.
    InputNorm,
}

impl Start {
    /// The start of a parameter of this shape.
    pub(super) fn new(dims: impl Into<Vec<usize>>, values: StartValues) -> Self {
        Self { dims: dims.into(), values }
    }

    /// Compute the values in f32. Random values come from the library's generator.
    fn draw(&self, base: &Base<'_>) -> Result<Tensor> {
        let (dims, device) = (self.dims.clone(), base.weight.device());
        match self.values {
            StartValues::Kaiming => kaiming_uniform(dims, DType::F32, device),
            StartValues::Normal(deviation) => Tensor::randn(0.0, deviation, dims, DType::F32, device),
            StartValues::Zero => Tensor::zeros(dims, DType::F32, device),
            StartValues::OutputNorm => output_norm(&base.weight.values(DType::F32)?),
            StartValues::InputNorm => input_norm(&base.weight.values(DType::F32)?),
        }
    }
}

/// Compute the norm of the weight's elements of each output, (out). The weight is (out, in), or for a convolution
/// (out, height, width, in).
pub(super) fn output_norm(weight: &Tensor) -> Result<Tensor> {
    let all_but_first: Vec<usize> = (1..weight.rank()).collect();
    weight.sqr()?.sum(&all_but_first, false)?.sqrt()
}

/// Compute the norm of the weight's elements of each input, (1, in). The weight is as for [`output_norm`].
pub(super) fn input_norm(weight: &Tensor) -> Result<Tensor> {
    let all_but_last: Vec<usize> = (0..weight.rank() - 1).collect();
    weight.sqr()?.sum(&all_but_last, false)?.sqrt()?.unsqueeze(0)
}

/// Makes an adapter from its parameters, and checks that they fit the base.
pub type Build =
    fn(parameters: &[(&'static str, Var)], base: &Base<'_>, settings: &AdapterSettings) -> Result<Box<dyn Adapter>>;

impl AdapterKind {
    /// Compute the initial values of the parameters in f32. With these values, a layer over `base` computes the same as
    /// without the adapter.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](trainable_candle_core::Error::OutOfMemory) if the values do not fit into memory.
    pub fn init(&self, base: &Base<'_>, settings: &AdapterSettings) -> Result<Parameters<Tensor>> {
        (self.start)(base, settings).into_iter().map(|(name, start)| Ok((name, start.draw(base)?))).collect()
    }

    /// Return the name, as a `'static` string, and the layout of the parameter `name`. None if the kind has no such
    /// parameter.
    pub fn parameter(&self, name: &str) -> Option<(&'static str, Layout)> {
        self.parameters.iter().find(|(known, _)| *known == name).copied()
    }
}

/// Return the parameter `name`, if there is one.
pub(super) fn find(parameters: &[(&'static str, Var)], name: &str) -> Option<Var> {
    parameters.iter().find(|(known, _)| *known == name).map(|(_, var)| var.clone())
}
