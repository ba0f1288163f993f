//! The CUDA form of W8A8: linear layers that multiply 8-bit codes, those of the weight and those to which the input or
//! the gradient is rounded. Kernels of `kernels/codes.cu` and `kernels/geglu_codes.cu` round matrices to codes. On
//! compute capability 9.0, one call then computes the sums of products and scales them: the kernel of `hopper` for
//! int8, and for e4m3 if its tiles fill the GPU; otherwise cuBLASLt (`scaled`). On other GPUs, and for f32 results,
//! cuBLASLt computes the sums, and a kernel of `kernels/codes.cu` scales them.
//!
//! A weight that was joined from several matrices has several parts: ranges of rows that were quantized together.

mod hopper;
mod scaled;

use candle_core::DType;
use trainable_candle_cuda::kernels::codes::{
    QUANTIZE_GRADIENT, QUANTIZE_ROWS, QuantizeGradient, QuantizeRows, SCALE_SUMS, ScaleSums,
};
use trainable_candle_cuda::kernels::geglu_codes::{
    GEGLU_CODES_BACKWARD, GEGLU_CODES_FORWARD, GegluCodesBackward, GegluCodesForward,
};
use trainable_candle_cuda::kernels::{Const, Mut};
use trainable_candle_cuda::structs::{CodePart, CodeParts};

use super::{Addends, CodeRows, MOST_PARTS, MULTIPLE, Quantized, Transposed};
use crate::cpu::Add;
use crate::cuda::launch::{
    Shape, TEAM, address, count32, element, empty, input, optional_output, output, suffix, wide,
};
use crate::cuda::{Codes, Gpu, product_of_codes};
use crate::quantized::Format;
use crate::{Raw, Result, compute};

const OP: &str = "linear";
/// Number of bytes of sums that are computed and scaled at a time; this many stay in the L2 cache of large GPUs.
const SUMS: usize = 24 << 20;
/// The minimum number of rows that are multiplied at a time; this many keep a GPU busy.
const FEWEST_ROWS: usize = 256;
/// The number of rows, and of columns, of the tile that a thread block transposes.
const TILE: usize = 64;
/// Number of threads of a thread block.
const BLOCK: u32 = 256;
/// A team of threads rounds a row: each thread holds this many packs (16 bytes of neighbouring elements) in registers.
const HELD: usize = 2;

/// A matrix rounded to codes, with a scale for each row.
struct Rounded {
    /// The codes, u8, (rows rounded up to a multiple of 16, columns); rows beyond the matrix are uninitialised.
    codes: Raw,
    /// The scales, f32, (rows).
    scales: Raw,
    rows: usize,
    columns: usize,
}

impl Quantized {
    /// The type of the codes.
    fn kind(&self) -> Codes {
        if self.format() == Format::Int8 { Codes::Int8 } else { Codes::E4m3 }
    }

    /// The kernels' description of the weight's parts.
    fn code_parts(&self) -> Result<CodeParts> {
        let (mut list, mut start) = ([CodePart::default(); MOST_PARTS], 0);
        for (part, entry) in self.parts.iter().zip(&mut list) {
            let scales = part.row_scales();
            *entry = CodePart {
                codes: address(OP, &part.codes)?,
                scales: scales.map_or(Ok(0), |scales| address(OP, scales))?,
                start,
                rows: count32(OP, part.rows)?,
                scale_count: count32(OP, scales.map_or(0, Raw::elem_count))?,
                unused: 0,
            };
            start += entry.rows;
        }
        Ok(CodeParts { list })
    }
}

impl Rounded {
    /// Uninitialised codes and scales.
    fn unset(gpu: &Gpu, rows: usize, columns: usize) -> Result<Self> {
        let codes = empty(OP, gpu, &[rows.next_multiple_of(MULTIPLE), columns], DType::U8)?;
        Ok(Self { codes, scales: empty(OP, gpu, &[rows], DType::F32)?, rows, columns })
    }

    /// Rounds each row of `x` (rows, columns).
    fn new(gpu: &Gpu, kind: Codes, x: &Raw) -> Result<Self> {
        let x = aligned(x)?;
        let rounded = Self::unset(gpu, x.dims()[0], x.dims()[1])?;
        let arguments = QuantizeRows {
            x: input(OP, &x)?,
            rows: count32(OP, rounded.rows)?,
            columns: count32(OP, rounded.columns)?,
            is_int8: u32::from(kind == Codes::Int8),
            codes: output(OP, &rounded.codes)?,
            scales: output(OP, &rounded.scales)?,
        };
        let shape = Shape::teams(rounded.rows, rounded.columns, HELD, x.dtype());
        // SAFETY: x is dense, and codes and scales have its rows.
        unsafe { gpu.function(&QUANTIZE_ROWS, suffix(OP, x.dtype())?)?.launch(OP, gpu, shape, arguments) }?;
        Ok(rounded)
    }

    /// Rounds each row of the GEGLU of `y` (rows, 2 · columns); `None` if its rows are too long for the kernel.
    fn geglu(gpu: &Gpu, kind: Codes, y: &Raw) -> Result<Option<Self>> {
        if y.dims()[1] / 2 > longest(y.dtype()) {
            return Ok(None);
        }
        let y = aligned(y)?;
        let rounded = Self::unset(gpu, y.dims()[0], y.dims()[1] / 2)?;
        let arguments = GegluCodesForward {
            x: input(OP, &y)?,
            rows: count32(OP, rounded.rows)?,
            width: count32(OP, rounded.columns)?,
            is_int8: u32::from(kind == Codes::Int8),
            codes: output(OP, &rounded.codes)?,
            scales: output(OP, &rounded.scales)?,
        };
        let shape = Shape::teams(rounded.rows, rounded.columns, HELD, y.dtype());
        // SAFETY: y is dense, and codes and scales have its rows.
        unsafe { gpu.function(&GEGLU_CODES_FORWARD, suffix(OP, y.dtype())?)?.launch(OP, gpu, shape, arguments) }?;
        Ok(Some(rounded))
    }

    /// Rounds each row of the gradient of `y` (rows, columns), whose columns are first multiplied by the scales of the
    /// rows of `w` (columns, inner), as in [`gradient`](Self::gradient). `grad` is the gradient of the GEGLU of `y`.
    /// `None` if rows are too long for the kernel, or `w` has several parts.
    fn geglu_gradient(gpu: &Gpu, w: &Quantized, y: &Raw, grad: &Raw) -> Result<Option<Self>> {
        let Some(column_scales) = (if let [part] = &w.parts[..] { part.row_scales() } else { None }) else {
            return Ok(None);
        };
        if y.dims()[1] / 2 > longest(y.dtype()) {
            return Ok(None);
        }
        let (y, grad, column_scales) = (aligned(y)?, aligned(grad)?, aligned(column_scales)?);
        let rounded = Self::unset(gpu, y.dims()[0], y.dims()[1])?;
        let width = rounded.columns / 2;
        let arguments = GegluCodesBackward {
            x: input(OP, &y)?,
            grad: input(OP, &grad)?,
            column_scales: input(OP, &column_scales)?,
            is_one_scale: u32::from(column_scales.elem_count() == 1),
            rows: count32(OP, rounded.rows)?,
            width: count32(OP, width)?,
            is_int8: u32::from(w.kind() == Codes::Int8),
            codes: output(OP, &rounded.codes)?,
            scales: output(OP, &rounded.scales)?,
        };
        let shape = Shape::teams(rounded.rows, width, HELD, y.dtype());
        // SAFETY: y and the gradient of its GEGLU are dense, and codes and scales have their rows. For each column of
        // y, w has a row, and a scale of this row or one scale for all rows.
        unsafe { gpu.function(&GEGLU_CODES_BACKWARD, suffix(OP, y.dtype())?)?.launch(OP, gpu, shape, arguments) }?;
        Ok(Some(rounded))
    }

    /// Rounds each row of the gradient `g` (rows, columns), whose columns are first multiplied by the scales of the
    /// rows of `w` (columns, inner): the product g W sums over these rows, so it is too late for their scales after the
    /// product. Fills `transposed`, if given, with the transposed codes of `w` and, as their scales, with ones.
    fn gradient(gpu: &Gpu, w: &Quantized, g: &Raw, transposed: Option<&Transposed>) -> Result<Self> {
        let g = aligned(g)?;
        let rounded = Self::unset(gpu, g.dims()[0], g.dims()[1])?;
        let tiles_along = |size: usize| size.div_ceil(TILE);
        let tiles = match transposed {
            Some(_) => tiles_along(w.dims[1]) * w.parts.iter().map(|part| tiles_along(part.rows)).sum::<usize>(),
            None => 0,
        };
        let arguments = QuantizeGradient {
            x: input(OP, &g)?,
            parts: w.code_parts()?,
            count: count32(OP, w.parts.len())?,
            rows: count32(OP, rounded.rows)?,
            columns: count32(OP, rounded.columns)?,
            inner: count32(OP, w.dims[1])?,
            tiles: count32(OP, tiles)?,
            is_int8: u32::from(w.kind() == Codes::Int8),
            codes: output(OP, &rounded.codes)?,
            scales: output(OP, &rounded.scales)?,
            transposed: optional_output(OP, transposed.map(|transposed| &transposed.codes))?,
            ones: optional_output(OP, transposed.map(|transposed| &transposed.ones))?,
        };
        let mut shape = Shape::teams(rounded.rows, rounded.columns, HELD, g.dtype());
        // The blocks of these tiles transpose, the others round.
        shape.grid[0] += count32(OP, tiles)?;
        // SAFETY: g is dense, codes and scales have its rows, the parts of w have a row for each of its columns, and
        // the results have room for all codes of w.
        unsafe { gpu.function(&QUANTIZE_GRADIENT, suffix(OP, g.dtype())?)?.launch(OP, gpu, shape, arguments) }?;
        Ok(rounded)
    }

    /// Computes X Wᵀ, where X are these codes and W are the codes (n, columns) at the address `w`. Multiplies the sums
    /// by the scales of X and of `to`, adds the bias, and writes the result to n columns of `to.y`. Returns false if
    /// the device has no 8-bit products.
    fn product(&self, gpu: &Gpu, kind: Codes, (w, n): (u64, usize), to: &Columns<'_>) -> Result<bool> {
        // A sum has four bytes: an i32 for int8 codes, an f32 for e4m3. `DType::U32` stands for both.
        let rows_at_once = (SUMS / (4 * n)).max(FEWEST_ROWS) / MULTIPLE * MULTIPLE;
        let sums = empty(OP, gpu, &[rows_at_once.min(self.codes.dims()[0]), n], DType::U32)?;
        let (dtype, stride) = (to.y.dtype(), to.y.dims()[1]);
        let size = dtype.size_in_bytes();
        let codes = address(OP, &self.codes)?;
        for first in (0..self.rows).step_by(rows_at_once) {
            let rows = rows_at_once.min(self.rows - first);
            let x = codes + (first * self.columns) as u64;
            let sizes = [rows.next_multiple_of(MULTIPLE), n, self.columns];
            // SAFETY: the codes have these rows (rows beyond `self.rows` are uninitialised, and their sums are not
            // read), and `sums` has room for the sums of all these products.
            if !unsafe { product_of_codes(OP, gpu, kind, [x, w, address(OP, &sums)?], sizes) }? {
                return Ok(false);
            }
            let address_of = |raw: &Raw, index: usize| -> Result<u64> {
                Ok(address(OP, raw)? + (index * raw.dtype().size_in_bytes()) as u64)
            };
            let arguments = ScaleSums {
                sums: input(OP, &sums)?,
                row_scales: Const::new(address_of(&self.scales, first)?, element(DType::F32)),
                column_scales: to.scales.map_or(Const::NULL, |(at, _)| Const::new(at, element(DType::F32))),
                bias: match to.bias {
                    Some(bias) => Const::new(address_of(bias, to.start)?, element(dtype)),
                    None => Const::NULL,
                },
                rows: count32(OP, rows)?,
                columns: count32(OP, n)?,
                scale_count: to.scales.map_or(0, |(_, count)| count),
                stride: count32(OP, stride)?,
                is_integer: u32::from(kind == Codes::Int8),
                out: Mut::new(address(OP, to.y)? + ((first * stride + to.start) * size) as u64, element(dtype)),
            };
            // A thread scales eight sums in each iteration of its loop. 16 blocks for each multiprocessor fill the GPU;
            // larger products get more iterations instead of more blocks.
            let blocks = (rows * n / 8).div_ceil(BLOCK as usize).min(16 * gpu.multiprocessors());
            let shape = Shape { grid: [count32(OP, blocks)?, 1, 1], block: [BLOCK, 1, 1], shared: 0 };
            // SAFETY: the rows are within y, scales and sums; the columns in y, the bias and the column scales.
            unsafe { gpu.function(&SCALE_SUMS, suffix(OP, dtype)?)?.launch(OP, gpu, shape, arguments) }?;
        }
        Ok(true)
    }
}

/// The largest number of elements in a row of a GEGLU that the kernels can round: each thread of the largest team holds
/// [`HELD`] packs of `wide` elements.
fn longest(dtype: DType) -> usize {
    TEAM * HELD * wide(dtype)
}

/// `x` as a dense matrix whose address is a multiple of 16.
fn aligned(x: &Raw) -> Result<Raw> {
    let x = compute::contiguous(x)?;
    if address(OP, &x)?.is_multiple_of(16) { Ok(x) } else { crate::raw::own_copy(&x) }
}

/// The destination of a product.
struct Columns<'a> {
    /// The result, dense.
    y: &'a Raw,
    /// The first column of y that the product is written to.
    start: usize,
    /// Address and number of the scales of these columns. A single scale is for all columns. `None`: the columns have
    /// no scales.
    scales: Option<(u64, u32)>,
    /// The bias of all columns of y, dense.
    bias: Option<&'a Raw>,
}

/// Computes x Wᵀ plus `addends`; returns `None` if the device has no 8-bit products.
pub(super) fn product(w: &Quantized, x: &Raw, addends: Addends<'_>) -> Result<Option<Raw>> {
    let gpu = Gpu::of(OP, x)?;
    product_of_rounded(gpu, w, &Rounded::new(gpu, w.kind(), x)?, addends, x.dtype())
}

/// Computes x Wᵀ + b for codes `x`; returns `None` as [`product`] does.
pub(super) fn product_of_code_rows(
    w: &Quantized,
    x: &CodeRows,
    bias: Option<&Raw>,
    dtype: DType,
) -> Result<Option<Raw>> {
    let [codes, scales] = x.clone();
    let (rows, columns) = (scales.elem_count(), codes.dims()[1]);
    let gpu = Gpu::of(OP, &codes)?;
    product_of_rounded(gpu, w, &Rounded { codes, scales, rows, columns }, Addends { bias, residual: None }, dtype)
}

/// Computes geglu(y) Wᵀ plus `addends`; returns `None` as [`product`] does, or if the rows of y are too long to round.
pub(super) fn product_of_geglu(w: &Quantized, y: &Raw, addends: Addends<'_>) -> Result<Option<Raw>> {
    let gpu = Gpu::of(OP, y)?;
    let Some(x) = Rounded::geglu(gpu, w.kind(), y)? else { return Ok(None) };
    product_of_rounded(gpu, w, &x, addends, y.dtype())
}

/// Computes x Wᵀ plus `addends` from the rounded x; returns `None` as [`product`] does.
fn product_of_rounded(
    gpu: &Gpu,
    w: &Quantized,
    x: &Rounded,
    Addends { bias, residual }: Addends<'_>,
    dtype: DType,
) -> Result<Option<Raw>> {
    let kind = w.kind();
    let bias = bias.map(compute::contiguous).transpose()?;
    let residual = residual.map(aligned).transpose()?;
    let addends = Addends { bias: bias.as_ref(), residual: residual.as_ref() };
    let y = empty(OP, gpu, &[x.rows, w.dims[0]], dtype)?;
    let parts = w.code_parts()?;
    if hopper::product(gpu, kind, x, (parts, w.parts.len()), &y, addends)?
        || scaled::product(gpu, kind, x, w, &y, addends)?
    {
        return Ok(Some(y));
    }
    for part in parts.list.iter().take(w.parts.len()).filter(|part| part.rows > 0) {
        let scales = Some((part.scales, part.scale_count));
        let to = Columns { y: &y, start: part.start as usize, scales, bias: bias.as_ref() };
        if !x.product(gpu, kind, (part.codes, part.rows as usize), &to)? {
            return Ok(None);
        }
    }
    residual.map_or_else(|| Ok(y.clone()), |residual| compute::binary(&y, &residual, Add)).map(Some)
}

/// Computes g W; returns `None` if the device has no 8-bit products.
pub(super) fn input_gradient(w: &Quantized, g: &Raw) -> Result<Option<Raw>> {
    let (gpu, dtype) = (Gpu::of(OP, g)?, g.dtype());
    // If W keeps its transposed codes, only g is rounded; otherwise the same launch also transposes the codes of W.
    if let Some(transposed) = &w.transposed {
        return gradient_of_rounded(gpu, w, &Rounded::gradient(gpu, w, g, None)?, transposed, dtype);
    }
    let [rows, columns] = w.dims;
    let codes = empty(OP, gpu, &[columns, rows], DType::U8)?;
    let transposed = Transposed { codes, ones: empty(OP, gpu, &[columns], DType::F32)? };
    gradient_of_rounded(gpu, w, &Rounded::gradient(gpu, w, g, Some(&transposed))?, &transposed, dtype)
}

/// Computes g W, where g is the gradient of y and `grad` the gradient of geglu(y); returns `None` if the device has no
/// 8-bit products, if W does not keep transposed codes, or if [`Rounded::geglu_gradient`] returns `None`.
pub(super) fn input_gradient_of_geglu(w: &Quantized, y: &Raw, grad: &Raw) -> Result<Option<Raw>> {
    let Some(transposed) = &w.transposed else { return Ok(None) };
    let gpu = Gpu::of(OP, y)?;
    let Some(g) = Rounded::geglu_gradient(gpu, w, y, grad)? else { return Ok(None) };
    gradient_of_rounded(gpu, w, &g, transposed, y.dtype())
}

/// Computes g W from the rounded g. Tensor cores sum 8-bit products along the rows of both matrices, so the product
/// reads `transposed`, the transposed codes of W.
fn gradient_of_rounded(
    gpu: &Gpu,
    w: &Quantized,
    g: &Rounded,
    transposed: &Transposed,
    dtype: DType,
) -> Result<Option<Raw>> {
    let (kind, columns) = (w.kind(), w.dims[1]);
    let dx = empty(OP, gpu, &[g.rows, columns], dtype)?;
    let (codes, mut whole) = (address(OP, &transposed.codes)?, CodeParts::default());
    // The transposed codes are one part. It has no scales, because g was multiplied by those of W before the rounding.
    whole.list[0] = CodePart { codes, rows: count32(OP, columns)?, ..CodePart::default() };
    if hopper::product(gpu, kind, g, (whole, 1), &dx, Addends::default())? {
        return Ok(Some(dx));
    }
    // The product fills dx from its first column on. Fast accumulation rounds the sums to fewer bits, so gradients do
    // without it.
    let (start, is_fast) = (0, false);
    let factor = (&transposed.codes, &transposed.ones);
    if scaled::is_possible(gpu, kind, dtype)
        && scaled::write_product(gpu, g, factor, (&dx, start), Addends::default(), is_fast)?
    {
        return Ok(Some(dx));
    }
    let to = Columns { y: &dx, start, scales: None, bias: None };
    Ok(g.product(gpu, kind, (codes, columns), &to)?.then_some(dx))
}
