//! Convolutions whose kernels add another tensor as they write the result.

use candle_core::DType;

use super::{Operands, Sizes, forward, hopper};
use crate::cpu::Add;
use crate::cuda::launch::{Const, empty, input, optional_input};
use crate::cuda::{Gpu, contiguous};
use crate::ops::conv::CONV2D;
use crate::ops::conv::geometry::Geometry;
use crate::{Raw, Result, compute};

/// What is added to a result (pixels, channels) after it was rounded: `sharing` consecutive pixels get the same row of
/// the dense matrix `rows`.
#[derive(Clone, Copy)]
pub(super) struct Addend {
    pub rows: Const,
    pub sharing: u32,
}

impl Addend {
    pub const NONE: Self = Self { rows: Const::NULL, sharing: 1 };
}

/// [`forward`] plus `addend`, which has a row of channels for each pixel or for each image. The kernels for compute
/// capability 9.0 add `addend` as they write the result; after other kernels, a separate kernel adds it.
pub(in crate::ops::conv) fn forward_add(
    geometry: &Geometry,
    x: &Raw,
    weight: &Raw,
    bias: Option<&Raw>,
    addend: &Raw,
) -> Result<Raw> {
    let (x, weight, addend) = (contiguous(x)?, contiguous(weight)?, contiguous(addend)?);
    let bias = bias.map(contiguous).transpose()?;
    let (op, dims, is_whole) = (CONV2D.name, geometry.result_dims(), addend.dims() == geometry.result_dims());
    if !geometry.is_pointwise() && matches!(x.dtype(), DType::F16 | DType::BF16) && geometry.pixels() > 0 {
        let (gpu, sizes) = (Gpu::of(op, &x)?, Sizes::of(geometry)?);
        let y = empty(op, gpu, &dims, x.dtype())?;
        let (from, weights, bias) = (input(op, &x)?, input(op, &weight)?, optional_input(op, bias.as_ref())?);
        let sharing = if is_whole { 1 } else { sizes.output[0] * sizes.output[1] };
        let added = Addend { rows: input(op, &addend)?, sharing };
        if hopper::forward(op, gpu, &sizes, &y, Operands { dtype: x.dtype(), from, weights, bias }, added)? {
            return Ok(y);
        }
    }
    compute::binary(&forward(geometry, &x, &weight, bias.as_ref())?, &addend, Add)
}
