//! The CUDA form of RMS norm and rotary embedding of an attention's queries and keys, which the kernels of
//! `kernels/rms_norm_rope.cu` read from the columns of one projection, x.

use candle_core::DType;
use trainable_candle_cuda::kernels::rms_norm_rope::{
    RMS_NORM_ROPE_HEADS_BACKWARD, RMS_NORM_ROPE_HEADS_FORWARD, RmsNormRopeHeadsBackward, RmsNormRopeHeadsForward,
};

use super::{HeadNorms, HeadStatistics};
use crate::cuda::launch::{
    Const, Shape, accumulator, count32, empty, input, optional_input, optional_output, output, suffix, wide,
};
use crate::cuda::{Gpu, cast, contiguous};
use crate::{Error, Raw, Result};

/// The arguments that the kernels of the forward and the backward pass share, without `x`, gradients and results. The
/// kernels get addresses of `tables` and `weights`; owning the tensors here keeps these addresses valid.
struct HeadArguments {
    /// cos and sin.
    tables: Option<[Raw; 2]>,
    /// The scales of the norms of queries and of keys.
    weights: [Option<Raw>; 2],
    /// Number of rows of cos and sin; 1 if nothing is rotated.
    positions: u32,
    /// The number of query heads, of key heads, and of all heads of a token of y. The last number includes value heads
    /// if y has room for them: their values are copied.
    heads: [u32; 3],
    /// The number of all heads of all tokens of y.
    rows: usize,
    /// Strides of x in elements: from a token to the next, and from a sample to the next.
    x_strides: [u64; 2],
    /// The same strides of y.
    y_strides: [u64; 2],
    /// 1 if the weights are f32 and x is not, else 0.
    weight_f32: u32,
    shape: Shape,
}

impl HeadArguments {
    /// `x (B, S, columns)` must be dense. In `y (B, S, heads, width)`, the last two dimensions must be dense.
    fn new(norms: &HeadNorms<'_>, x: &Raw, y: &Raw) -> Result<Self> {
        let op = norms.op;
        let converted = |table: &Raw| contiguous(&cast(table, accumulator(x.dtype()))?);
        let tables = norms.tables.map(|[cos, sin]| Ok::<_, Error>([converted(cos)?, converted(sin)?])).transpose()?;
        let is_mixed = norms.weights.iter().flatten().any(|weight| weight.dtype() != x.dtype());
        let dtype = if is_mixed { DType::F32 } else { x.dtype() };
        let weight = |weight: Option<&Raw>| weight.map(|weight| contiguous(&cast(weight, dtype)?)).transpose();
        let positions = tables.as_ref().map_or(1, |[cos, _]| cos.dims()[0]);
        let columns = x.dims()[2] as u64;
        Ok(Self {
            positions: count32(op, positions)?,
            tables,
            weights: [weight(norms.weights[0])?, weight(norms.weights[1])?],
            heads: [count32(op, norms.heads[0])?, count32(op, norms.heads[1])?, count32(op, y.dims()[2])?],
            rows: y.dims()[..3].iter().product(),
            x_strides: [columns, columns * x.dims()[1] as u64],
            y_strides: [y.stride()[1] as u64, y.stride()[0] as u64],
            weight_f32: u32::from(is_mixed),
            // Each thread has two packs of 16 bytes (`wide` elements), whose features form pairs.
            shape: Shape::flat(y.elem_count(), 2 * wide(x.dtype())),
        })
    }

    /// The addresses of the weights of queries and of keys, and of cos and sin.
    fn addresses(&self, op: &'static str) -> Result<[Const; 4]> {
        let table = |index: usize| optional_input(op, self.tables.as_ref().map(|tables| &tables[index]));
        let weight = |index: usize| optional_input(op, self.weights[index].as_ref());
        Ok([weight(0)?, weight(1)?, table(0)?, table(1)?])
    }
}

/// Writes the normalised and rotated queries and keys of x to `y`, as [`HeadNorms::forward`] says. Returns `rstd`,
/// 1/√(mean(x²) + eps) of each head of each token, if heads are normalised.
pub(super) fn forward(norms: &HeadNorms<'_>, x: &Raw, y: &Raw) -> Result<HeadStatistics> {
    let (op, gpu) = (norms.op, Gpu::of(norms.op, x)?);
    let arguments = HeadArguments::new(norms, x, y)?;
    let rstd = norms.eps.map(|_| empty(op, gpu, &[arguments.rows], accumulator(x.dtype()))).transpose()?;
    if y.elem_count() > 0 {
        let [q_weight, k_weight, cos, sin] = arguments.addresses(op)?;
        let &HeadArguments { x_strides, y_strides, positions, heads, rows, weight_f32, shape, .. } = &arguments;
        let [heads, key_heads, all_heads] = heads;
        let function = gpu.function(&RMS_NORM_ROPE_HEADS_FORWARD, suffix(op, x.dtype())?)?;
        let arguments = RmsNormRopeHeadsForward {
            x: input(op, x)?,
            q_weight,
            k_weight,
            cos,
            sin,
            y: output(op, y)?,
            rstd: optional_output(op, rstd.as_ref())?,
            rows: rows as u64,
            x_token: x_strides[0],
            x_sample: x_strides[1],
            y_token: y_strides[0],
            y_sample: y_strides[1],
            tokens: count32(op, x.dims()[1])?,
            heads,
            key_heads,
            all_heads,
            positions,
            width: count32(op, norms.width)?,
            eps: norms.eps.unwrap_or(0.0),
            weight_f32,
            interleaved: u32::from(norms.interleaved),
        };
        // SAFETY: the tensors have the sizes in the arguments, and the strides stay inside them.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(rstd.into_iter().collect())
}

/// Writes the gradient of x to `dx`, as [`HeadNorms::backward`] says. `grad` is the gradient of the result y, in the
/// shape of y. `rstd` is what [`forward`] returned; `None` if nothing is normalised.
pub(super) fn backward(norms: &HeadNorms<'_>, [x, grad]: [&Raw; 2], rstd: Option<&Raw>, dx: &Raw) -> Result<()> {
    let (op, gpu) = (norms.op, Gpu::of(norms.op, x)?);
    if grad.elem_count() == 0 {
        return Ok(());
    }
    // The strides of y are here those of its gradient.
    let arguments = HeadArguments::new(norms, x, grad)?;
    let [q_weight, k_weight, cos, sin] = arguments.addresses(op)?;
    let &HeadArguments { x_strides, y_strides, positions, heads, rows, weight_f32, shape, .. } = &arguments;
    let [heads, key_heads, all_heads] = heads;
    let function = gpu.function(&RMS_NORM_ROPE_HEADS_BACKWARD, suffix(op, x.dtype())?)?;
    let arguments = RmsNormRopeHeadsBackward {
        // Only the gradient of the norm depends on x.
        x: optional_input(op, rstd.map(|_| x))?,
        grad: input(op, grad)?,
        q_weight,
        k_weight,
        cos,
        sin,
        rstd: optional_input(op, rstd)?,
        dx: output(op, dx)?,
        rows: rows as u64,
        x_token: x_strides[0],
        x_sample: x_strides[1],
        dx_token: dx.stride()[1] as u64,
        dx_sample: dx.stride()[0] as u64,
        y_token: y_strides[0],
        y_sample: y_strides[1],
        tokens: count32(op, x.dims()[1])?,
        heads,
        key_heads,
        all_heads,
        positions,
        width: count32(op, norms.width)?,
        weight_f32,
        interleaved: u32::from(norms.interleaved),
    };
    // SAFETY: as in `forward`.
    unsafe { function.launch(op, gpu, shape, arguments) }
}
