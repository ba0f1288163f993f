//! Losses as single operations.
//!
//! Sums over elements are in at least f32. The result of a loss has the dtype of the input, as in torch, but the losses
//! of a language model's head ([`linear_cross_entropy`], [`linear_log_probs`]) are in f32 (f64 for f64). A bf16 result
//! has fewer than three decimal digits; for more digits, convert the input to f32 first.

#[cfg(feature = "testing")]
mod cases;
mod cross_entropy;
mod linear_cross_entropy;
mod regression;

use crate::{Error, Result};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;
pub use cross_entropy::{IGNORE_INDEX, cross_entropy};
pub use linear_cross_entropy::{linear_cross_entropy, linear_log_probs};
pub use regression::{huber_loss, l1_loss, mse_loss, smooth_l1_loss};

/// How the losses of the elements (for [`cross_entropy`], of the rows whose target is not ignored) are reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean of the losses; NaN if there are none.
    #[default]
    Mean,
    /// The sum of the losses; 0 if there are none.
    Sum,
    /// No reduction: the result has all losses; those of ignored targets are 0.
    None,
}

impl Reduction {
    /// Parses torch's names of reductions: `"mean"`, `"sum"`, `"none"`. `op` is the loss that an error names.
    ///
    /// # Errors
    /// [`Error::Argument`] for another name.
    pub fn parse(op: &'static str, text: &str) -> Result<Self> {
        match text {
            "mean" => Ok(Self::Mean),
            "sum" => Ok(Self::Sum),
            "none" => Ok(Self::None),
            other => {
                Err(Error::argument(op, format!("reduction is \"{other}\"; expected \"mean\", \"sum\" or \"none\"")))
            }
        }
    }
}

#[cfg(test)]
mod tests;
