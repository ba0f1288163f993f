//! The loss of a prediction as a weighted mean over the elements of a batch.

use trainable_candle_core::ops::loss::{Reduction, huber_loss, l1_loss, mse_loss, smooth_l1_loss};
use trainable_candle_core::{DType, Error, Result, Tensor};

/// The loss of one element, where d is the difference between prediction and target and δ is given by [`Delta`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossFunction {
    /// d².
    #[default]
    Mse,
    /// |d|.
    L1,
    /// d²/2 for |d| ≤ δ, δ (|d| - δ/2) for |d| > δ (Huber 1964).
    Huber,
    /// The Huber loss divided by δ: d²/(2δ) for |d| ≤ δ, |d| - δ/2 for |d| > δ.
    SmoothL1,
}

impl std::str::FromStr for LossFunction {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "mse" => Ok(Self::Mse),
            "l1" => Ok(Self::L1),
            "huber" => Ok(Self::Huber),
            "smooth_l1" => Ok(Self::SmoothL1),
            other => Err(Error::argument(
                "loss",
                format!("unknown loss \"{other}\"; expected \"mse\", \"l1\", \"huber\" or \"smooth_l1\""),
            )),
        }
    }
}

/// δ of the Huber losses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Delta<'a> {
    /// The same δ for all examples.
    Constant(f64),
    /// One δ for each example, (B,).
    PerExample(&'a Tensor),
}

/// Weights of the elements of a batch (B, C, ...). The tensors are f32 on the batch's device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weights<'a> {
    /// A weight for each example, (B,).
    pub(crate) examples: Option<&'a Tensor>,
    /// A weight for each spatial position of each example, (B, 1, ...). [`weighted_loss`] divides an example's weights
    /// by their mean.
    pub(crate) positions: Option<&'a Tensor>,
}

/// The mean of the examples' losses, one element in f32. The loss of an example is the mean over its elements of
/// (position weight · loss of the element), times the weight of the example.
pub(crate) fn weighted_loss(
    function: LossFunction,
    delta: Delta<'_>,
    prediction: &Tensor,
    target: &Tensor,
    weights: Weights<'_>,
) -> Result<Tensor> {
    let (mut prediction, mut target) = (prediction.to_dtype(DType::F32)?, target.to_dtype(DType::F32)?);
    let mut examples = weights.examples.cloned();
    let mut fixed_delta = 1.0;
    match (function, delta) {
        (_, Delta::Constant(delta)) => fixed_delta = delta,
        (LossFunction::Huber | LossFunction::SmoothL1, Delta::PerExample(delta)) => {
            // huber(d, δ) = δ² · huber(d / δ, 1), and smooth_l1(d, δ) = δ · smooth_l1(d / δ, 1).
            let inverse = delta.recip()?.reshape(per_example(&prediction))?;
            (prediction, target) = (prediction.mul(&inverse)?, target.mul(&inverse)?);
            let factor = if function == LossFunction::Huber { delta.sqr()? } else { delta.clone() };
            examples = Some(examples.map_or(Ok(factor.clone()), |examples| examples.mul(&factor))?);
        }
        // These losses have no δ.
        (LossFunction::Mse | LossFunction::L1, Delta::PerExample(_)) => {}
    }
    let loss = |reduction| match function {
        LossFunction::Mse => mse_loss(&prediction, &target, reduction),
        LossFunction::L1 => l1_loss(&prediction, &target, reduction),
        LossFunction::Huber => huber_loss(&prediction, &target, fixed_delta, reduction),
        LossFunction::SmoothL1 => smooth_l1_loss(&prediction, &target, fixed_delta, reduction),
    };
    let Some(weight) = element_weights(&prediction, examples.as_ref(), weights.positions)? else {
        return loss(Reduction::Mean);
    };
    // The mean as a sum: each element counts by its share, 1 / number of elements.
    let share = 1.0 / prediction.elem_count() as f64;
    loss(Reduction::None)?.mul(&weight.mul_scalar(share)?)?.sum_all()
}

/// The shape (B, 1, 1, ...) with the batch size and the rank of `x`.
pub(crate) fn per_example(x: &Tensor) -> Vec<usize> {
    let mut dims = vec![1; x.rank()];
    dims[0] = x.dims()[0];
    dims
}

/// The product of the example weights and the position weights, which are divided by their mean over each example. The
/// product's shape broadcasts to the shape of `x`. `None` without weights.
fn element_weights(x: &Tensor, examples: Option<&Tensor>, positions: Option<&Tensor>) -> Result<Option<Tensor>> {
    /// A lower bound for the mean of an example's position weights, so that weights of 0 everywhere give a loss of 0,
    /// not NaN. Other weights have larger means.
    const MIN_MEAN: f64 = 1e-12;
    let examples = examples.map(|weights| weights.reshape(per_example(x))).transpose()?;
    let Some(positions) = positions else { return Ok(examples) };
    let dims: Vec<usize> = (1..positions.rank()).collect();
    let keepdim = true;
    let mean = positions.mean(&dims, keepdim)?.clamp(Some(MIN_MEAN), None)?;
    let positions = positions.div(&mean)?;
    Ok(Some(match examples {
        Some(examples) => positions.mul(&examples)?,
        None => positions,
    }))
}
