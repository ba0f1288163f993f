//! Adapters: small trainable changes to frozen layers.
//!
//! An adapter kind is one file with an [`AdapterKind`] and one line in [`KINDS`]. Models know nothing of adapters: a set of
//! them is attached to layers found by name ([`AdapterSet::attach`]) and taken off again.

mod config;
mod dora;
mod layer;
mod lora;
mod set;

pub use config::{LoraConfig, scale};
pub use dora::Dora;
pub use layer::{AdaptedLinear, DoRALinear, DoraLayer, LayerKind, LoRALinear, LoraLayer};
pub use lora::{LoRABackwardOps, Lora};
pub use set::AdapterSet;
use trainable_candle_core::{Result, Tensor, Var};

/// An adapter of one linear layer.
pub trait Adapter: Send + Sync {
    /// The layer's result with the adapter: `x (..., in)` → `(..., out)` over the frozen `weight (out, in)` and `bias (out)`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] and its kin if the input does not fit.
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;

    /// The weight that a plain layer would need to compute the same, in the dtype of `weight`.
    ///
    /// # Errors
    /// Those of the arithmetic.
    fn merged_weight(&self, weight: &Tensor) -> Result<Tensor>;

    /// The weight that this adapter computes with in place of the layer's own, if it does nothing else.
    fn replaces_weight(&self) -> Option<Tensor> {
        None
    }

    /// The trainable parameters, in the order of the kind's [`AdapterKind::suffixes`].
    fn vars(&self) -> Vec<Var>;

    /// The factor in front of the low-rank product.
    fn scale(&self) -> f64;

    /// Training (dropout on) or not.
    fn set_training(&self, training: bool);
}

/// Sizes and settings of one adapter, after patterns have been applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterSettings {
    /// Rank r of the low-rank product.
    pub rank: usize,
    /// Factor in front of the low-rank product: alpha / r, or alpha / √r for rsLoRA.
    pub scale: f64,
    /// Probability of dropping an element of the adapter's input while training.
    pub dropout: f64,
}

/// A kind of adapter: how it starts, and how it is built over its parameters.
pub struct AdapterKind {
    /// The name in configurations and files.
    pub name: &'static str,
    /// The names of its parameters in peft's files, after the layer's name.
    pub suffixes: &'static [&'static str],
    /// Initial f32 values of the parameters for a frozen `weight (out, in)`, such that the layer computes what it did before.
    pub init: fn(weight: &Tensor, settings: &AdapterSettings) -> Result<Vec<Tensor>>,
    /// The shapes of the parameters.
    pub shapes: fn(weight: &Tensor, rank: usize) -> Vec<Vec<usize>>,
    /// The adapter over its parameters.
    pub build: Build,
}

/// Makes an adapter of its parameters.
pub type Build = fn(vars: &[Var], settings: &AdapterSettings) -> Result<Box<dyn Adapter>>;

/// Every kind of adapter.
pub static KINDS: &[&AdapterKind] = &[&lora::KIND, &dora::KIND];
