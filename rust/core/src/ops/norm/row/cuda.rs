//! The CUDA form of the norms of rows (layer norm, RMS norm, modulated layer norm): `kernels/norm.cu` and
//! `kernels/norm_codes.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::norm::{
    LAYER_NORM_AFFINE, LAYER_NORM_BACKWARD, LAYER_NORM_FORWARD, LayerNormAffine, LayerNormBackward, LayerNormForward,
    MODULATED_LAYER_NORM_BACKWARD, MODULATED_LAYER_NORM_FORWARD, RMS_NORM_AFFINE, RMS_NORM_BACKWARD, RMS_NORM_FORWARD,
};
use trainable_candle_cuda::kernels::norm_codes::{ADD_LAYER_NORM_CODES, AddLayerNormCodes};

use super::{Kind, Normalised, RowNorm, RowNormBackward, Size};
use crate::cuda::Gpu;
use crate::cuda::launch::{
    Shape, TEAM, accumulator, address, count32, empty, input, optional_input, optional_output, output, suffix, wide,
};
use crate::ops::norm::cuda::{Gradients, Parameters, Wanted, destination, sum_affine};
use crate::quantized::CodeRows;
use crate::quantized::w8a8::MULTIPLE;
use crate::tape::{Aux, BackwardContext};
use crate::{Error, Raw, Result};

/// The kernels' argument `sharing`: the number of rows that share a scale and a shift. Only the kernels of modulated
/// norms read it; for other norms it is 1.
fn sharing(op: &'static str, kind: Kind, size: Size) -> Result<u32> {
    if kind == Kind::Modulated { count32(op, size.sample_rows) } else { Ok(1) }
}

/// Checks that one launch can compute the gradients of scale and shift for all samples: the third dimension of its grid
/// has an index for each sample. Only modulated norms have several samples.
fn check_samples(op: &'static str, Size { samples, .. }: Size) -> Result<()> {
    /// The maximum number of thread blocks in the third dimension of a grid.
    const MOST: usize = 65_535;
    if samples <= MOST {
        return Ok(());
    }
    let message = format!("the batch has {samples} samples, expected at most {MOST} on a GPU; split the batch");
    Err(Error::argument(op, message))
}

/// About as many threads of a forward kernel as an H100 runs at once.
const FORWARD_THREADS: usize = 1 << 17;
/// The same for a backward kernel, whose threads need more registers.
const BACKWARD_THREADS: usize = 1 << 16;
/// The most packs (16 bytes) of a row that a thread holds in registers.
const HELD: usize = 3;

/// Returns the launch shape of the forward and backward kernels, which have a team of threads for each row. The fewer
/// packs each thread holds, the larger the teams. The number of packs is the smallest from 1 to `HELD` with which all
/// teams together have at most `threads` threads; if no such number exists, it is `HELD`.
fn over_rows(rows: usize, len: usize, dtype: DType, threads: usize) -> Shape {
    let shape = |held| Shape::teams(rows, len, held, dtype);
    let fits = |held: &usize| rows.saturating_mul(shape(*held).block[0] as usize) <= threads;
    shape((1..=HELD).find(fits).unwrap_or(HELD))
}

/// Computes the norm of a dense tensor, and its statistics.
pub(super) fn forward(norm: &RowNorm<'_>, x: &Raw) -> Result<Normalised> {
    run(norm, x, None).map(|(_, normalised)| normalised)
}

/// Computes the sum of two tensors and the norm of the sum in one kernel; `None` if one of the tensors is not dense.
pub(super) fn sum_and_norm(norm: &RowNorm<'_>, [x, residual]: [&Raw; 2]) -> Result<Option<(Raw, Normalised)>> {
    if !(x.is_contiguous() && residual.is_contiguous()) {
        return Ok(None);
    }
    let (sum, normalised) = run(norm, x, Some(residual))?;
    Ok(sum.map(|sum| (sum, normalised)))
}

/// Computes the sum of two tensors, the codes of its layer norm (int8 or fp8), and the norm's statistics in one kernel;
/// `None` if the kernel does not support the tensors.
pub(super) fn sum_and_codes(
    &RowNorm { op, size, ref affine, eps, .. }: &RowNorm<'_>,
    [x, residual]: [&Raw; 2],
    is_int8: bool,
) -> Result<Option<(Raw, CodeRows, Aux)>> {
    let (dtype, rows, len) = (x.dtype(), size.rows(), size.len);
    let parameters = Parameters::new(dtype, affine.parameters())?;
    let tensors = [Some(x), Some(residual), parameters.weight.as_ref(), parameters.bias.as_ref()];
    for tensor in tensors.into_iter().flatten() {
        if !tensor.is_contiguous() || !address(op, tensor)?.is_multiple_of(16) {
            return Ok(None);
        }
    }
    // The kernel has a team of at most `TEAM` threads for each row, which holds the whole row in registers: at most
    // `HELD` packs of `wide` elements per thread. Products of codes need rows whose number and length are multiples of
    // `MULTIPLE`, so the codes get further rows if necessary, which stay uninitialised.
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        || rows == 0
        || !len.is_multiple_of(MULTIPLE)
        || len > TEAM * HELD * wide(dtype)
    {
        return Ok(None);
    }
    let gpu = Gpu::of(op, x)?;
    let sum = empty(op, gpu, x.dims(), dtype)?;
    let codes = empty(op, gpu, &[rows.next_multiple_of(MULTIPLE), len], DType::U8)?;
    let [scales, mean, rstd] = [(); 3].map(|()| empty(op, gpu, &[rows], DType::F32));
    let (scales, mean, rstd) = (scales?, mean?, rstd?);
    let arguments = AddLayerNormCodes {
        x: input(op, x)?,
        residual: input(op, residual)?,
        sum: output(op, &sum)?,
        weight: optional_input(op, parameters.weight.as_ref())?,
        bias: optional_input(op, parameters.bias.as_ref())?,
        mean: output(op, &mean)?,
        rstd: output(op, &rstd)?,
        rows: rows as u64,
        len: count32(op, len)?,
        eps,
        affine_f32: parameters.is_f32(),
        is_int8: u32::from(is_int8),
        codes: output(op, &codes)?,
        scales: output(op, &scales)?,
    };
    let shape = over_rows(rows, len, dtype, FORWARD_THREADS);
    // SAFETY: the tensors are dense and have the sizes in the arguments.
    unsafe { gpu.function(&ADD_LAYER_NORM_CODES, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
    Ok(Some((sum, [codes, scales], [rstd, mean].into_iter().collect())))
}

/// Computes the norm of a dense `x`; with a dense residual, the sum of `x` and the residual, and the norm of this sum.
fn run(
    &RowNorm { op, kind, size, ref affine, eps }: &RowNorm<'_>,
    x: &Raw,
    residual: Option<&Raw>,
) -> Result<(Option<Raw>, Normalised)> {
    let gpu = Gpu::of(op, x)?;
    // Only the backward pass has this limit, but a batch over the limit should fail before the forward pass runs.
    check_samples(op, size)?;
    let parameters = Parameters::new(x.dtype(), affine.parameters())?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    let rstd = empty(op, gpu, &[size.rows()], accumulator(x.dtype()))?;
    let mean = kind.centers().then(|| empty(op, gpu, &[size.rows()], accumulator(x.dtype()))).transpose()?;
    let sum = residual.map(|_| empty(op, gpu, x.dims(), x.dtype())).transpose()?;
    if y.elem_count() > 0 {
        let kernel = match kind {
            Kind::Layer => &LAYER_NORM_FORWARD,
            Kind::Rms => &RMS_NORM_FORWARD,
            Kind::Modulated => &MODULATED_LAYER_NORM_FORWARD,
        };
        let function = gpu.function(kernel, suffix(op, x.dtype())?)?;
        let shape = over_rows(size.rows(), size.len, x.dtype(), FORWARD_THREADS);
        // The kernels of all kinds have the arguments of `LayerNormForward`.
        let arguments = LayerNormForward {
            x: input(op, x)?,
            residual: optional_input(op, residual)?,
            sum: optional_output(op, sum.as_ref())?,
            weight: optional_input(op, parameters.weight.as_ref())?,
            bias: optional_input(op, parameters.bias.as_ref())?,
            y: output(op, &y)?,
            mean: optional_output(op, mean.as_ref())?,
            rstd: output(op, &rstd)?,
            rows: size.rows() as u64,
            len: count32(op, size.len)?,
            sharing: sharing(op, kind, size)?,
            eps,
            affine_f32: parameters.is_f32(),
        };
        // SAFETY: the tensors are dense and have the sizes in the arguments.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok((sum, (y, std::iter::once(rstd).chain(mean).collect())))
}

/// Adds those gradients of `x`, scale and shift that are needed. `grad` is the gradient of the result, and `rstd` is
/// 1/√(var + eps) of each row; the tensors are dense.
pub(super) fn backward(
    norm: &RowNormBackward,
    context: &mut BackwardContext<'_>,
    [x, grad, rstd]: [&Raw; 3],
    mean: Option<&Raw>,
) -> Result<()> {
    let [weight, _] = norm.affine.parameters()?;
    // The gradient that `x`, input 0, already has. The kernel adds the new gradient to it.
    let before = context.take_pending(0, x.dtype());
    let wanted = Wanted { before, ..norm.affine.wanted(context) };
    let grads = gradients(norm, [x, grad, rstd], mean, weight.as_ref(), &wanted)?;
    norm.affine.add_gradients(context, grads)
}

/// Computes the gradients that are `wanted`, from the tensors that [`backward`] gets and the norm's scale `weight`.
fn gradients(
    norm: &RowNormBackward,
    [x, grad, rstd]: [&Raw; 3],
    mean: Option<&Raw>,
    weight: Option<&Raw>,
    wanted: &Wanted,
) -> Result<Gradients> {
    let &RowNormBackward { op, kind, size, .. } = norm;
    let len = size.len;
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, [weight, None])?;
    let (x_address, g, rstd, mean) = (input(op, x)?, input(op, grad)?, input(op, rstd)?, optional_input(op, mean)?);
    let len32 = count32(op, len)?;
    let mut grad_x = None;
    if wanted.input {
        // The tensor of `before`, if nothing else uses it; otherwise a new tensor.
        let dx = destination(op, gpu, x, wanted.before.as_ref())?;
        if dx.elem_count() > 0 {
            let kernel = match kind {
                Kind::Layer => &LAYER_NORM_BACKWARD,
                Kind::Rms => &RMS_NORM_BACKWARD,
                Kind::Modulated => &MODULATED_LAYER_NORM_BACKWARD,
            };
            let function = gpu.function(kernel, suffix(op, dtype)?)?;
            // The kernels of all kinds have the arguments of `LayerNormBackward`.
            let arguments = LayerNormBackward {
                x: x_address,
                grad: g,
                before: optional_input(op, wanted.before.as_ref().map(|pending| &pending.sum))?,
                weight: optional_input(op, parameters.weight.as_ref())?,
                mean,
                rstd,
                dx: output(op, &dx)?,
                rows: size.rows() as u64,
                len: len32,
                sharing: sharing(op, kind, size)?,
                affine_f32: parameters.is_f32(),
            };
            // SAFETY: the tensors are dense and have the sizes in the arguments.
            unsafe { function.launch(op, gpu, over_rows(size.rows(), len, dtype, BACKWARD_THREADS), arguments) }?;
        }
        grad_x = Some(dx);
    }
    if !(wanted.weight || wanted.bias) {
        return Ok(Gradients { input: grad_x, weight: None, bias: None });
    }
    let Size { samples, sample_rows, .. } = size;
    // The rows of each sample are divided into pieces of about 64 rows, or more if there would be over 128 pieces. Each
    // piece has partial sums, which `sum_affine` adds.
    let pieces = sample_rows.div_ceil(64).clamp(1, 128);
    let partials = empty(op, gpu, &[samples, pieces, 2, len], accumulator(dtype))?;
    if partials.elem_count() > 0 {
        let kernel = if kind.centers() { &LAYER_NORM_AFFINE } else { &RMS_NORM_AFFINE };
        let function = gpu.function(kernel, suffix(op, dtype)?)?;
        // A block has 8 warps, which share the rows of a piece. Each of the 32 lanes of a warp has one pack of `wide`
        // columns.
        let tiles = len.div_ceil(32 * wide(dtype)) as u32;
        let shape = Shape { grid: [tiles, pieces as u32, samples as u32], block: [32, 8, 1], shared: 0 };
        // The kernel's argument `rows` is the number of rows of one sample.
        let (partials, rows) = (output(op, &partials)?, sample_rows as u64);
        let arguments = LayerNormAffine { x: x_address, grad: g, mean, rstd, partials, rows, len: len32 };
        // SAFETY: as above; `partials` has `len` numbers for the scale and `len` for the shift, for each piece (the
        // grid's second dimension) of each sample (the third).
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    let [weight, bias] = sum_affine(op, gpu, &partials, dtype, [wanted.weight, wanted.bias])?;
    Ok(Gradients { input: grad_x, weight, bias })
}
