//! [`Guard`]: the norm that decides whether a step is skipped, and the loss scale of the gradients.

use trainable_candle_core::{Error, Result, Tensor};

use super::cuda::LossScale;

/// Says when an optimizer skips a step, and by which loss scale the step divides the gradients. By default, no step is
/// skipped and no gradient is divided.
#[derive(Clone, Copy, Debug, Default)]
pub struct Guard<'a> {
    /// A norm of the gradients. If it is infinite or NaN, the step is skipped.
    pub(super) norm: Option<&'a Tensor>,
    /// The loss scale, by which the step divides the gradients. Only the gradient scaler of this crate sets it.
    pub(super) loss_scale: Option<&'a LossScale>,
}

impl<'a> Guard<'a> {
    /// Makes a guard that skips the step if `norm` (one element) is infinite or NaN.
    ///
    /// # Errors
    /// [`Error::Shape`] if `norm` does not have exactly one element.
    pub fn finite(norm: &'a Tensor) -> Result<Self> {
        if norm.elem_count() != 1 {
            return Err(Error::shape("step", format!("found a norm of shape {:?}, expected one number", norm.dims())));
        }
        Ok(Self { norm: Some(norm), loss_scale: None })
    }

    /// Returns whether the step may be taken. Waits for the device of the norm, if there is a norm.
    ///
    /// # Errors
    /// [`Error::Device`] if that device fails.
    pub fn allows(&self) -> Result<bool> {
        self.norm.map_or(Ok(true), |norm| Ok(norm.item()?.is_finite()))
    }
}
