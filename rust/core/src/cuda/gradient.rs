//! Norms of gradients, clipping and loss scaling. Norm, clip factor and scale stay on the device.

use candle_core::{DType, Device};
use trainable_candle_cuda::modules::GRADIENT;

use super::copy::{contiguous, copy_into};
use super::gpu::Gpu;
use super::launch::{Shape, address, count32, empty, launch, optional, same_device, suffix};
use crate::raw::to_vec;
use crate::{Error, Raw, Result};

/// The norm of gradients and the factor that clips them.
pub struct Clip(Raw);

impl Clip {
    /// The norm of all `vectors` together, the largest magnitude if `is_max`, else the root of the sum of squares, after division by
    /// `loss_scale`; and `max_norm / (norm + 1e-6)`, if that is less than 1, as the factor.
    ///
    /// # Errors
    /// [`Error::Device`] if a vector is on another device, [`Error::DType`] if one is not floating point.
    pub fn of(
        op: &'static str,
        device: &Device,
        vectors: &[Raw],
        is_max: bool,
        max_norm: f64,
        loss_scale: Option<&LossScale>,
    ) -> Result<Self> {
        let gpu = Gpu::of_device(op, device)?;
        let clip = empty(op, gpu, &[2], DType::F64)?;
        let vectors = vectors.iter().filter(|vector| vector.elem_count() > 0).map(contiguous);
        let vectors = vectors.collect::<Result<Vec<_>>>()?;
        let blocks = |vector: &Raw| vector.elem_count().div_ceil(4096).min(1024);
        let parts = empty(op, gpu, &[vectors.iter().map(blocks).sum::<usize>()], DType::F64)?;
        let first = address(op, &parts)?;
        let mut count = 0;
        let name = if is_max { "gradient_norm_max" } else { "gradient_norm_l2" };
        for vector in &vectors {
            same_device(op, &clip, &[vector])?;
            let function = gpu.function(&GRADIENT, name, suffix(op, vector.dtype())?)?;
            let (from, len, to) = (address(op, vector)?, vector.elem_count() as u64, first + 8 * count as u64);
            let shape = Shape::linear(op, blocks(vector), 256)?;
            // SAFETY: the kernel takes the gradients, their number, and room for a number of each block.
            unsafe { launch!(op, gpu, function, shape, from, len, to) }?;
            count += blocks(vector);
        }
        let function = gpu.function(&GRADIENT, "gradient_clip", &[])?;
        let (count, is_max) = (count32(op, count)?, u32::from(is_max));
        let (scale, to) = (optional(op, loss_scale.map(|scale| &scale.0))?, address(op, &clip)?);
        let shape = Shape::linear(op, 1, 256)?;
        // SAFETY: the kernel takes the parts, numbers, the loss scale or null, and the two numbers of the result.
        unsafe { launch!(op, gpu, function, shape, first, count, is_max, max_norm, scale, to) }?;
        Ok(Self(clip))
    }

    /// The norm, f64 of no dimension; not finite if a gradient is not.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn norm(&self) -> Result<Raw> {
        Ok(self.0.narrow(0, 0, 1)?.reshape(())?)
    }
}

/// gradients *= factor of `clip` / `loss_scale`, in place; nothing is read or written if that is 1.
///
/// # Errors
/// [`Error::Argument`] if the gradients are not contiguous, [`Error::DType`] if they are not floating point.
pub fn scale_gradients(
    op: &'static str,
    gradients: &Raw,
    clip: Option<&Clip>,
    loss_scale: Option<&LossScale>,
) -> Result<()> {
    if !gradients.is_contiguous() {
        return Err(Error::argument(op, "the gradients are not contiguous"));
    }
    let count = gradients.elem_count();
    if count == 0 {
        return Ok(());
    }
    let gpu = Gpu::of(op, gradients)?;
    let function = gpu.function(&GRADIENT, "gradient_scale", suffix(op, gradients.dtype())?)?;
    let (to, len) = (address(op, gradients)?, count as u64);
    let clip = optional(op, clip.map(|clip| &clip.0))?;
    let scale = optional(op, loss_scale.map(|scale| &scale.0))?;
    // Few blocks, which have little to do where there is nothing to scale.
    let each = count.div_ceil(256 * 2048).max(4);
    // SAFETY: the kernel takes the gradients, their number, and the factors or null.
    unsafe { launch!(op, gpu, function, Shape::flat(count, each), to, len, clip, scale) }
}

/// The state of dynamic loss scaling: the scale and the good steps in a row.
#[derive(Clone, Debug)]
pub struct LossScale(Raw);

impl LossScale {
    /// A state on `device`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device is full.
    pub fn new(device: &Device, scale: f64, growth_tracker: u64) -> Result<Self> {
        Ok(Self(Raw::from_vec(vec![scale, f64::from_bits(growth_tracker)], 2, device)?))
    }

    /// The scale, f64 of no dimension, where it lies.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn scale(&self) -> Result<Raw> {
        Ok(self.0.narrow(0, 0, 1)?.reshape(())?)
    }

    /// The scale and the good steps in a row; waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn read(&self) -> Result<(f64, u64)> {
        let state = to_vec::<f64>(&self.0)?;
        Ok((state[0], state[1].to_bits()))
    }

    /// Replaces the state in place.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn set(&self, scale: f64, growth_tracker: u64) -> Result<()> {
        copy_into(&self.0, &Self::new(self.0.device(), scale, growth_tracker)?.0)
    }

    /// The state after a step with gradients of this `norm` (f64): times `backoff` if it is not finite, times `growth` after
    /// `interval` good steps in a row unless f32 cannot hold that.
    ///
    /// # Errors
    /// [`Error::Device`] if `norm` is on another device.
    pub fn update(&self, norm: &Raw, growth: f64, backoff: f64, interval: u64) -> Result<()> {
        const OP: &str = "GradScaler";
        same_device(OP, &self.0, &[norm])?;
        let gpu = Gpu::of(OP, &self.0)?;
        let function = gpu.function(&GRADIENT, "loss_scale_update", &[])?;
        let (state, norm) = (address(OP, &self.0)?, address(OP, norm)?);
        let shape = Shape::linear(OP, 1, 1)?;
        // SAFETY: the kernel takes the state, the norm and numbers.
        unsafe { launch!(OP, gpu, function, shape, state, norm, growth, backoff, interval) }
    }

    pub(super) const fn raw(&self) -> &Raw {
        &self.0
    }
}
