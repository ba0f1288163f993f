//! Norms of gradients, clipping and loss scaling on a CUDA device. The norm, the clip factor and the loss scale stay on
//! the device.

use candle_core::{DType, Device};
use trainable_candle_cuda::kernels::gradient::{
    GRADIENT_CLIP, GRADIENT_NORM_L2, GRADIENT_NORM_MAX, GRADIENT_SCALE, GradientClip, GradientNormL2, GradientScale,
    LOSS_SCALE_UPDATE, LossScaleUpdate,
};
use trainable_candle_cuda::structs;

use trainable_candle_core::cuda::launch::{Shape, count32, empty, input, optional_input, output, same_device, suffix};
use trainable_candle_core::cuda::{Gpu, contiguous, copy_into};
use trainable_candle_core::raw::to_vec;
use trainable_candle_core::{Error, Raw, Result};

/// The norm of gradients and the factor that clips them: two numbers, f64.
pub struct Clip(Raw);

impl Clip {
    /// Computes the norm of all `vectors` together, divided by `loss_scale` if there is one. The norm is the largest
    /// magnitude if `is_max`, else the root of the sum of squares. The clip factor is the smaller of 1 and
    /// `max_norm / (norm + 1e-6)`.
    ///
    /// # Errors
    /// [`Error::Device`] if a vector is on another device than `device`, [`Error::DType`] if one is not floating point,
    /// [`Error::OutOfMemory`] if the device is full.
    pub fn of(
        op: &'static str,
        device: &Device,
        vectors: &[Raw],
        is_max: bool,
        max_norm: f64,
        loss_scale: Option<&LossScale>,
    ) -> Result<Self> {
        let gpu = Gpu::of_device(op, device)?;
        let clip = empty(op, gpu, &[size_of::<structs::Clip>() / size_of::<f64>()], DType::F64)?;
        let vectors = vectors.iter().filter(|vector| vector.elem_count() > 0).map(contiguous);
        let vectors = vectors.collect::<Result<Vec<_>>>()?;
        // The number of thread blocks that the kernels require for a vector. Each block writes one number to `parts`.
        let blocks = |vector: &Raw| vector.elem_count().div_ceil(4096).min(1024);
        let parts = empty(op, gpu, &[vectors.iter().map(blocks).sum::<usize>()], DType::F64)?;
        let (mut next_part, mut part_count) = (output(op, &parts)?, 0);
        // `GRADIENT_NORM_MAX` takes the arguments of `GRADIENT_NORM_L2` too.
        let kernel = if is_max { &GRADIENT_NORM_MAX } else { &GRADIENT_NORM_L2 };
        for vector in &vectors {
            same_device(op, &clip, &[vector])?;
            let function = gpu.function(kernel, suffix(op, vector.dtype())?)?;
            let grads = input(op, vector)?;
            let arguments = GradientNormL2 { grads, count: vector.elem_count() as u64, parts: next_part };
            let shape = Shape::linear(op, blocks(vector), /* threads: */ 256)?;
            // SAFETY: `parts` has one number for each block of each vector.
            unsafe { function.launch(op, gpu, shape, arguments) }?;
            part_count += blocks(vector);
            next_part = next_part.offset_by(blocks(vector) * size_of::<f64>());
        }
        let function = gpu.function(&GRADIENT_CLIP, &[])?;
        let arguments = GradientClip {
            parts: input(op, &parts)?,
            count: count32(op, part_count)?,
            is_max: u32::from(is_max),
            max_norm,
            loss_scale: optional_input(op, loss_scale.map(|scale| &scale.0))?,
            clip: output(op, &clip)?,
        };
        let one_block = Shape::linear(op, /* blocks: */ 1, /* threads: */ 256)?;
        // SAFETY: `parts` has `part_count` numbers, and `clip` has two.
        unsafe { function.launch(op, gpu, one_block, arguments) }?;
        Ok(Self(clip))
    }

    /// Returns the norm, a scalar f64, without a copy. The norm is non-finite if a gradient is non-finite.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn norm(&self) -> Result<Raw> {
        Ok(self.0.narrow(0, 0, 1)?.reshape(())?)
    }
}

/// Multiplies gradients in place by the factor of `clip` (1 if there is no `clip`), divided by `loss_scale` (1 if there
/// is none). If this quotient is 1, the kernel reads and writes no gradients.
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
    let function = gpu.function(&GRADIENT_SCALE, suffix(op, gradients.dtype())?)?;
    let arguments = GradientScale {
        grads: output(op, gradients)?,
        count: count as u64,
        clip: optional_input(op, clip.map(|clip| &clip.0))?,
        loss_scale: optional_input(op, loss_scale.map(|scale| &scale.0))?,
    };
    // At most 2048 blocks of 256 threads: with few blocks, a launch that has nothing to scale is cheap.
    let per_thread = count.div_ceil(256 * 2048).max(4);
    // SAFETY: `gradients` has `count` elements.
    unsafe { function.launch(op, gpu, Shape::flat(count, per_thread), arguments) }
}

/// The state of dynamic loss scaling: the scale, and the number of steps with finite gradients since the last step with
/// a non-finite gradient or the last growth of the scale.
#[derive(Clone, Debug)]
pub struct LossScale(Raw);

impl LossScale {
    /// Makes a state on `device`. `growth_tracker` is the number of steps with finite gradients.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device is full.
    pub fn new(device: &Device, scale: f64, growth_tracker: u64) -> Result<Self> {
        // The kernels read the bits of the second number as a u64.
        Ok(Self(Raw::from_vec(vec![scale, f64::from_bits(growth_tracker)], 2, device)?))
    }

    /// Returns the scale as a scalar f64, without a copy.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn scale(&self) -> Result<Raw> {
        Ok(self.0.narrow(0, 0, 1)?.reshape(())?)
    }

    /// Returns the scale and the number of steps with finite gradients; waits for the device.
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

    /// Updates the state after a step with gradients of this `norm` (f64). The scale is multiplied by `backoff` if the
    /// norm is non-finite, and by `growth` after `interval` steps in a row with finite gradients, unless the product is
    /// too large for f32.
    ///
    /// # Errors
    /// [`Error::Device`] if `norm` is on another device.
    pub fn update(&self, norm: &Raw, growth: f64, backoff: f64, interval: u64) -> Result<()> {
        const OP: &str = "GradScaler";
        same_device(OP, &self.0, &[norm])?;
        let gpu = Gpu::of(OP, &self.0)?;
        let function = gpu.function(&LOSS_SCALE_UPDATE, &[])?;
        let (loss_scale, norm) = (output(OP, &self.0)?, input(OP, norm)?);
        let arguments = LossScaleUpdate { loss_scale, norm, growth, backoff, interval };
        let one_thread = Shape::linear(OP, /* blocks: */ 1, /* threads: */ 1)?;
        // SAFETY: the state has two numbers and the norm has one.
        unsafe { function.launch(OP, gpu, one_thread, arguments) }
    }

    pub(super) const fn raw(&self) -> &Raw {
        &self.0
    }
}
