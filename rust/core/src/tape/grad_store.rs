//! Which variables a backward pass reached.

use rustc_hash::FxHashSet;

use crate::{Tensor, Var};

/// The variables that a backward pass reached. The variables keep their gradients; this object only reads them.
#[derive(Debug)]
pub struct GradStore {
    /// The ids of their nodes.
    pub(super) reached: FxHashSet<u64>,
}

impl GradStore {
    /// [`Var::grad`] of `var` (the sum over all passes since it was cleared), if this pass reached `var`.
    ///
    /// # Panics
    /// As [`Var::grad`].
    pub fn get(&self, var: &Var) -> Option<Tensor> {
        if self.contains(var) { var.grad() } else { None }
    }

    /// Whether this pass computed a gradient for `var`.
    pub fn contains(&self, var: &Var) -> bool {
        self.reached.contains(&var.id())
    }

    /// How many variables this pass reached.
    pub fn len(&self) -> usize {
        self.reached.len()
    }

    /// Whether this pass reached no variable.
    pub fn is_empty(&self) -> bool {
        self.reached.is_empty()
    }
}
