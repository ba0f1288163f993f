//! The CUDA form of convolution plus another tensor. Some kernels add the other tensor as they write the result.

use candle_core::DType;

use super::{Operands, Sizes, forward, hopper};
use crate::cpu::Add;
use crate::cuda::launch::{Const, empty, input, optional_input};
use crate::cuda::{Gpu, contiguous};
use crate::ops::conv::CONV2D;
use crate::ops::conv::geometry::Geometry;
use crate::{Raw, Result, compute};

/// What a kernel adds to its result (pixels, channels) after it has rounded the result.
#[derive(Clone, Copy)]
pub(super) struct Addend {
    /// A dense matrix (pixels / `sharing`, channels); null if nothing is added.
    pub rows: Const,
    /// Number of consecutive pixels that get the same row.
    pub sharing: u32,
}

impl Addend {
    /// Adds nothing.
    pub const NONE: Self = Self { rows: Const::NULL, sharing: 1 };
}

/// Computes [`forward`] plus `addend`, which has the shape of the result, or one row of channels for each image:
/// (batch, 1, 1, out channels). The kernels for compute capability 9.0 add `addend` as they write the result; after
/// other kernels, a separate kernel adds it.
pub(in crate::ops::conv) fn forward_add(
    geometry: &Geometry,
    x: &Raw,
    weight: &Raw,
    bias: Option<&Raw>,
    addend: &Raw,
) -> Result<Raw> {
    let (x, weight, addend) = (contiguous(x)?, contiguous(weight)?, contiguous(addend)?);
    let bias = bias.map(contiguous).transpose()?;
    let (op, dims) = (CONV2D.name, geometry.result_dims());
    // `forward` computes a pointwise convolution as a matrix product, whose kernels add nothing but the bias.
    if !geometry.is_pointwise() && matches!(x.dtype(), DType::F16 | DType::BF16) && geometry.pixels() > 0 {
        let (gpu, sizes) = (Gpu::of(op, &x)?, Sizes::of(geometry)?);
        let y = empty(op, gpu, &dims, x.dtype())?;
        let (from, weights, bias) = (input(op, &x)?, input(op, &weight)?, optional_input(op, bias.as_ref())?);
        // An addend with one row for each image has the same row for all pixels (height · width) of the image.
        let sharing = if addend.dims() == dims { 1 } else { sizes.output[0] * sizes.output[1] };
        let addend_rows = Addend { rows: input(op, &addend)?, sharing };
        // `hopper::forward` returns false, without writing to `y`, where its kernels do not run or are slower than the
        // others.
        if hopper::forward(op, gpu, &sizes, &y, Operands { dtype: x.dtype(), from, weights, bias }, addend_rows)? {
            return Ok(y);
        }
    }
    compute::binary(&forward(geometry, &x, &weight, bias.as_ref())?, &addend, Add)
}
