//! Cross-entropy of logits and class ids, fused: for the backward pass only the logits and one log-sum-exp per row are
//! kept, neither log-probabilities nor probabilities.
//!
//! With label smoothing ε (Szegedy et al. 2016, arXiv:1512.00567), C classes and target t, the loss of a row x is
//! log Σ exp(x) - (1 - ε) x_t - ε/C Σ x. The gradient of x is softmax(x) - (1 - ε) 1_t - ε/C, where 1_t is the one-hot
//! vector of t.

pub(super) mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;

use super::Reduction;
use crate::compute::on_device;
use crate::raw::is_float;
use crate::tape::OpInfo;
use crate::{Error, Result, Tensor};

pub(super) static CROSS_ENTROPY: OpInfo = OpInfo::cheap("cross_entropy");
const OP: &str = "cross_entropy";

/// The target that torch's `cross_entropy` ignores by default.
pub const IGNORE_INDEX: i64 = -100;

/// The cross-entropy of `logits (..., classes)` and the class ids `targets (...)`, i64 or u32. It is torch's
/// `cross_entropy`, but the classes are always the last dimension.
///
/// Rows whose target is `ignore_index` (usually [`IGNORE_INDEX`]) have loss 0 and no gradient. The mean is over the
/// other rows; it is NaN if there are none. `label_smoothing`, from 0 to 1, is the share of each target that is spread
/// evenly over all classes. With [`Reduction::None`] the result has the shape of `targets`, otherwise it is a scalar.
///
/// # Errors
/// [`Error::Shape`] if `logits` is a scalar, or if the shape of `targets` is not that of `logits` without the last
/// dimension, [`Error::Index`] if a target is out of range, [`Error::DType`] if the logits are not floating point or
/// the targets neither i64 nor u32, [`Error::Device`] if logits and targets are on different devices,
/// [`Error::Argument`] if `label_smoothing` is out of range. On CUDA a target out of range makes the loss of its row
/// NaN, and the next function that reads a value or waits for the device returns the error.
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: i64,
    label_smoothing: f64,
    reduction: Reduction,
) -> Result<Tensor> {
    let Some((_, leading)) = logits.dims().split_last() else {
        return Err(Error::shape(OP, "the logits are a scalar, expected (..., classes)"));
    };
    if targets.dims() != leading {
        return Err(Error::shape(
            OP,
            format!(
                "the logits have shape {:?} and the targets {:?}, expected targets of shape {leading:?}: classes \
                 are the last dimension of the logits",
                logits.dims(),
                targets.dims()
            ),
        ));
    }
    if !is_float(logits.dtype()) {
        return Err(Error::dtype(
            OP,
            format!("expected floating point logits, found {}; convert them with to()", logits.dtype().as_str()),
        ));
    }
    if !logits.device().same_device(targets.device()) {
        return Err(Error::device(OP, "the targets are on another device than the logits; move one with to()"));
    }
    if !(0.0..=1.0).contains(&label_smoothing) {
        return Err(Error::argument(
            OP,
            format!("label_smoothing is {label_smoothing}, expected a number from 0 to 1"),
        ));
    }
    on_device!(
        logits.device(),
        cuda => cuda::cross_entropy(logits, targets, ignore_index, label_smoothing, reduction),
        cpu => cpu::cross_entropy(logits, targets, ignore_index, label_smoothing, reduction),
    )
}
