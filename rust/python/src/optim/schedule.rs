//! Learning-rate schedules.

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_nn::optim::{self, Decay};

use crate::argument::Argument;
use crate::arguments::Integer;
use crate::error::Result;

const OP: &str = "lr_scheduler";

/// A learning-rate schedule with warm-up, as in transformers: the factor that multiplies the initial learning rate in
/// each step. Over the first `warmup_steps` steps the factor rises linearly from 0 to 1; afterwards
/// `kind` determines it.
///
/// Args:
///     kind: "constant", "linear", "cosine" or "polynomial".
///     warmup_steps: the number of steps of the warm-up.
///     total_steps: the number of steps of the training, warm-up included; "constant" ignores it.
///     num_cycles: for "cosine", the number of periods of the cosine, at least 0. With 0.5, the factor falls from 1 at
///         the end of the warm-up to 0 at the end of the training.
///     end: for "polynomial", the factor at the end of the training and after it, in [0, 1).
///     power: for "polynomial", the exponent, above 0; 1 gives a straight line.
///
/// Raises:
///     ArgumentError: if the kind is unknown or a number is out of range.
#[pyclass(frozen, module = "trainable_candle.optim")]
pub struct Schedule(optim::Schedule);

#[pymethods]
impl Schedule {
    #[new]
    #[pyo3(signature = (kind, warmup_steps=Integer::of(0), total_steps=Integer::of(0), *, num_cycles=Argument::of(0.5), end=Argument::of(0.0), power=Argument::of(1.0)))]
    fn new(
        kind: &str,
        warmup_steps: Integer,
        total_steps: Integer,
        num_cycles: Argument<f64>,
        end: Argument<f64>,
        power: Argument<f64>,
    ) -> Result<Self> {
        let warmup_steps = warmup_steps.as_u64(OP, "warmup_steps")?;
        let total_steps = total_steps.as_u64(OP, "total_steps")?;
        let decay = match kind {
            "constant" => Decay::Constant,
            "linear" => Decay::Linear { total_steps },
            "cosine" => Decay::Cosine { total_steps, cycles: num_cycles.get(OP, "num_cycles")? },
            "polynomial" => Decay::Polynomial { total_steps, end: end.get(OP, "end")?, power: power.get(OP, "power")? },
            other => {
                let message = format!(
                    "unknown schedule \"{other}\"; expected \"constant\", \"linear\", \"cosine\" or \"polynomial\""
                );
                return Err(tc::Error::argument(OP, message).into());
            }
        };
        Ok(Self(optim::Schedule::new(warmup_steps, decay)?))
    }

    /// Return the factor of the learning rate in step `step`, counted from 0.
    ///
    /// Raises:
    ///     ArgumentError: if `step` is negative.
    fn factor(&self, step: Integer) -> Result<f64> {
        Ok(self.0.factor(step.as_u64(OP, "step")?))
    }
}
