//! The types of an operation's test cases: inputs of given shapes, a call, and the plain form to compare with.

use std::sync::Arc;

use crate::tape::OpInfo;
use crate::{Result, Tensor};

/// A function of tensors.
pub type TensorFn = Arc<dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync>;

/// An operation in the registry.
pub struct Entry {
    /// Name and cost: whether the result is cheap to recompute.
    pub info: &'static OpInfo,
    /// The cases that the tests run, each with at least one input. At least one case has an odd size. If the operation
    /// accepts empty inputs, one case has an empty input.
    pub cases: fn() -> Vec<Case>,
}

/// The distribution of an input's values.
#[derive(Clone, Copy, Debug)]
pub enum Domain {
    /// The usual one, which is not a normal distribution: spread evenly from -2 to 2.
    Normal,
    /// Spread evenly from 0.5 to 2.
    Positive,
    /// For functions with kinks, maxima or divisions, so that finite differences cross no kink: values of both signs,
    /// with absolute values of at least 0.25. A value of one input differs by at least 0.125 from all values of another
    /// input of the case.
    Distinct,
}

/// Shape and domain of an input.
#[derive(Clone, Debug)]
pub struct Input {
    /// The shape.
    pub dims: Vec<usize>,
    /// The distribution of its values.
    pub domain: Domain,
}

/// A call of an operation, with inputs whose values the tests choose.
pub struct Case {
    /// What is special about the case; may be empty.
    pub label: &'static str,
    /// The differentiable inputs.
    pub inputs: Vec<Input>,
    /// Calls the operation.
    pub run: TensorFn,
    /// For fused operations, computes the same function in basic operations: the plain form.
    pub plain: Option<TensorFn>,
}

impl Case {
    /// Makes a case without a plain form. The inputs have the given shapes and values from [`Domain::Normal`].
    pub fn new(
        label: &'static str,
        shapes: &[&[usize]],
        run: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let inputs = shapes.iter().map(|dims| Input { dims: dims.to_vec(), domain: Domain::Normal }).collect();
        Self { label, inputs, run: Arc::new(run), plain: None }
    }

    /// Sets the domain of all inputs.
    #[must_use]
    pub fn domain(mut self, domain: Domain) -> Self {
        for input in &mut self.inputs {
            input.domain = domain;
        }
        self
    }

    /// Sets the plain form.
    #[must_use]
    pub fn plain(mut self, plain: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.plain = Some(Arc::new(plain));
        self
    }
}
