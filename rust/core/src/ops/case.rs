//! Test cases of an operation.

use std::sync::Arc;

use crate::tape::OpInfo;
use crate::{Result, Tensor};

/// A function of tensors.
pub type TensorFn = Arc<dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync>;

/// An operation in the registry.
pub struct Entry {
    /// Name and cost class.
    pub info: &'static OpInfo,
    /// Cases that the tests run, each with at least one input. An operation has at least one case with an odd size. If
    /// the operation accepts empty inputs, it also has a case with an empty input.
    pub cases: fn() -> Vec<Case>,
}

/// The distribution of an input's values.
#[derive(Clone, Copy, Debug)]
pub enum Domain {
    /// Spread evenly from -2 to 2.
    Normal,
    /// Spread evenly from 0.5 to 2.
    Positive,
    /// For functions with kinks, maxima or divisions: values of both signs, with absolute values of at least 0.25. The
    /// values of two inputs of a case differ by at least 0.125.
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

/// An operation applied to inputs that tests draw.
pub struct Case {
    /// What is special about the case.
    pub label: &'static str,
    /// The differentiable inputs.
    pub inputs: Vec<Input>,
    /// The operation (its fused form, where there is one).
    pub run: TensorFn,
    /// The plain form, for fused operations.
    pub plain: Option<TensorFn>,
}

impl Case {
    /// A case without a plain form. The inputs have the given shapes and values from [`Domain::Normal`].
    pub fn new(
        label: &'static str,
        shapes: &[&[usize]],
        run: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let inputs = shapes.iter().map(|d| Input { dims: d.to_vec(), domain: Domain::Normal }).collect();
        Self { label, inputs, run: Arc::new(run), plain: None }
    }

    /// Draws all inputs from `domain`.
    #[must_use]
    pub fn domain(mut self, domain: Domain) -> Self {
        for input in &mut self.inputs {
            input.domain = domain;
        }
        self
    }

    /// Sets the plain form: the same function in basic operations.
    #[must_use]
    pub fn plain(mut self, plain: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.plain = Some(Arc::new(plain));
        self
    }
}
