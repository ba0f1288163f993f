//! Learning-rate schedules: the factor of the learning rate as a pure function of the number of the step.
//!
//! Definitions are those of transformers' `get_*_schedule_with_warmup`: over the first `warmup_steps` steps the factor
//! rises linearly from 0 towards 1; from step `warmup_steps` on it follows the schedule's [`Decay`].
//!
//! Follows <https://github.com/huggingface/transformers/blob/ad1fc9639f2e7b6808a2ca982c0a9b3134d76ee8/src/transformers/optimization.py>.

use std::f64::consts::PI;

use trainable_candle_core::{Error, Result};

/// The factor of the learning rate after the warm-up. In the formulas, progress is the number of completed steps after
/// the warm-up, divided by the number of all steps after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Constant 1.
    Constant,
    /// 1 - progress: falls linearly from 1 to 0 at `total_steps`, then stays at 0.
    Linear {
        /// The number of steps of the training, including the warm-up.
        total_steps: u64,
    },
    /// (1 + cos(2π · `cycles` · progress)) / 2. With half a cycle, the factor falls from 1 to 0 at `total_steps`. The
    /// cosine continues after `total_steps`, so the factor may rise again.
    Cosine {
        /// The number of steps of the training, including the warm-up.
        total_steps: u64,
        /// The number of cycles of the cosine up to `total_steps`, at least 0; transformers' default is 0.5.
        cycles: f64,
    },
    /// `end` + (1 - `end`) · (1 - progress)^`power`: falls from 1 to `end` at `total_steps`, then stays at `end`.
    Polynomial {
        /// The number of steps of the training, including the warm-up.
        total_steps: u64,
        /// The final factor, in [0, 1): `lr_end / lr` in transformers, whose default for `lr_end` is 1e-7.
        end: f64,
        /// The exponent, above 0; 1 gives a straight line.
        power: f64,
    },
}

/// A learning-rate schedule. The learning rate of step `s` (from 0) is the optimizer's initial learning rate
/// times [`factor(s)`](Self::factor).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    warmup_steps: u64,
    decay: Decay,
}

impl Schedule {
    /// A schedule that warms up for `warmup_steps` steps and then follows `decay`.
    ///
    /// # Errors
    /// [`Error::Argument`] if a number of `decay` is outside its range.
    pub fn new(warmup_steps: u64, decay: Decay) -> Result<Self> {
        const OP: &str = "lr_scheduler";
        match decay {
            Decay::Constant | Decay::Linear { .. } => {}
            Decay::Cosine { cycles, .. } => {
                if !(cycles.is_finite() && cycles >= 0.0) {
                    return Err(Error::argument(
                        OP,
                        format!("found {cycles} cosine cycles, expected a finite number of at least 0"),
                    ));
                }
            }
            Decay::Polynomial { end, power, .. } => {
                if !(0.0..1.0).contains(&end) {
                    let message = format!(
                        "found end {end}, a fraction of the initial learning rate, expected at least 0 and less than 1"
                    );
                    return Err(Error::argument(OP, message));
                }
                if !(power.is_finite() && power > 0.0) {
                    return Err(Error::argument(OP, format!("found power {power}, expected a finite number above 0")));
                }
            }
        }
        Ok(Self { warmup_steps, decay })
    }

    /// The factor in step number `step`, which counts from 0.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let progress = |total_steps: u64| {
            // At least 1, because the training may end within the warm-up.
            let decay_steps = total_steps.saturating_sub(self.warmup_steps).max(1);
            (step - self.warmup_steps) as f64 / decay_steps as f64
        };
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear { total_steps } if step >= total_steps => 0.0,
            Decay::Linear { total_steps } => 1.0 - progress(total_steps),
            Decay::Cosine { total_steps, cycles } => {
                (0.5 * (1.0 + (2.0 * PI * cycles * progress(total_steps)).cos())).max(0.0)
            }
            Decay::Polynomial { total_steps, end, .. } if step >= total_steps => end,
            Decay::Polynomial { total_steps, end, power } => {
                (1.0 - end) * (1.0 - progress(total_steps)).powf(power) + end
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_and_polynomial_schedules_reach_their_end_and_stay_there() {
        let linear = Schedule::new(10, Decay::Linear { total_steps: 110 }).unwrap();
        assert_eq!([0, 5, 10, 60, 110, 1000].map(|s| linear.factor(s)), [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]);
        let decay = Decay::Polynomial { total_steps: 100, end: 0.1, power: 2.0 };
        let polynomial = Schedule::new(0, decay).unwrap();
        assert_eq!([0, 100, 101].map(|s| polynomial.factor(s)), [1.0, 0.1, 0.1]);
    }

    #[test]
    fn without_a_warmup_the_factor_of_a_constant_schedule_is_1_from_step_0_on() {
        let constant = Schedule::new(0, Decay::Constant).unwrap();
        assert_eq!([0, 1000].map(|s| constant.factor(s)), [1.0; 2]);
    }

    #[test]
    fn factors_stay_in_range_if_the_warmup_is_longer_than_the_training() {
        for decay in [
            Decay::Linear { total_steps: 5 },
            Decay::Cosine { total_steps: 5, cycles: 0.5 },
            Decay::Polynomial { total_steps: 5, end: 0.0, power: 1.0 },
        ] {
            let schedule = Schedule::new(10, decay).unwrap();
            assert!((0..20).all(|step| (0.0..=1.0).contains(&schedule.factor(step))), "{decay:?}");
        }
    }

    #[test]
    fn numbers_outside_their_range_are_errors_that_name_the_operation() {
        for decay in [
            Decay::Polynomial { total_steps: 10, end: 1.5, power: 1.0 },
            Decay::Polynomial { total_steps: 10, end: 0.0, power: 0.0 },
            Decay::Cosine { total_steps: 10, cycles: f64::NAN },
        ] {
            let message = Schedule::new(0, decay).unwrap_err().to_string();
            assert!(message.starts_with("lr_scheduler: "), "{message}");
        }
    }
}
