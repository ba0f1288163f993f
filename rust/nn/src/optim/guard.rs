//! [`Guard`]: the norm that decides whether a step is skipped, and the loss scale of the gradients.

use trainable_candle_core::{Error, Result, Tensor};

use super::cuda::LossScale;

/// When to skip a step of an optimizer, and by which loss scale to divide the gradients. By default, every step is taken,
/// and nothing is divided.
#[derive(Clone, Copy, Debug, Default)]
pub struct Guard<'a> {
    /// A norm of the gradients. If it is infinite or NaN, the step is skipped.
    pub(super) norm: Option<&'a Tensor>,
    /// The loss scale, by which the step divides the gradients.
    pub(super) loss_scale: Option<&'a LossScale>,
}

impl<'a> Guard<'a> {
    /// Skip the step if `norm` (one element) is infinite or NaN.
    ///
    /// # Errors
    /// [`Error::Shape`] if `norm` does not have exactly one element.
    pub fn finite(norm: &'a Tensor) -> Result<Self> {
        if norm.elem_count() != 1 {
            return Err(Error::shape("step", format!("found a norm of shape {:?}, expected one number", norm.dims())));
        }
        Ok(Self { norm: Some(norm), loss_scale: None })
    }

    /// Whether the step may be taken. Waits for the device of the norm.
    ///
    /// # Errors
    /// [`Error::Device`] if that device fails.
    pub fn allows(&self) -> Result<bool> {
        self.norm.map_or(Ok(true), |norm| Ok(norm.item()?.is_finite()))
    }
}
