//! [`AdapterKind`]: the description of a kind of adapter.

use trainable_candle_core::{Result, Tensor, Var};

use super::{Adapter, AdapterSettings, Layout};
use crate::base::Base;

/// A kind of adapter: how it starts, and how it is built over its parameters.
pub struct AdapterKind {
    /// The name in configurations and files.
    pub name: &'static str,
    /// The names that its parameters have in peft's files after the layer's name, and how files lay them out.
    pub parameters: &'static [(&'static str, Layout)],
    /// The parameter that no other kind has.
    pub mark: &'static [&'static str],
    /// The parameters whose first size is the rank; the first that there is counts.
    pub ranked: &'static [&'static str],
    /// How it starts.
    pub init: Init,
    /// The adapter over its parameters.
    pub build: Build,
}

/// Parameters with their names, in the order of [`AdapterKind::parameters`].
pub type Parameters<T> = Vec<(&'static str, T)>;

/// Initial f32 values of the parameters for a frozen base, such that the layer computes what it did before.
pub type Init = fn(base: &Base<'_>, settings: &AdapterSettings) -> Result<Parameters<Tensor>>;

/// Makes an adapter of its parameters, whose shapes it checks.
pub type Build =
    fn(parameters: &[(&'static str, Var)], base: &Base<'_>, settings: &AdapterSettings) -> Result<Box<dyn Adapter>>;

impl AdapterKind {
    /// The layout of the parameter `name`, and the name with the lifetime of the program.
    pub fn parameter(&self, name: &str) -> Option<(&'static str, Layout)> {
        self.parameters.iter().find(|(known, _)| *known == name).copied()
    }
}

/// The parameter `name`.
pub(super) fn find(parameters: &[(&'static str, Var)], name: &str) -> Option<Var> {
    parameters.iter().find(|(known, _)| *known == name).map(|(_, var)| var.clone())
}
