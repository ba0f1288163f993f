//! W8A8: linear layers whose weight is stored as 8-bit codes. The other factor of each product is rounded to codes of
//! the same format, so that a GPU multiplies 8-bit numbers.
//!
//! Each row of the other factor (the input or the gradient of the result) gets one scale: its largest magnitude / 127
//! (int8) or / 448 (e4m3), as in torchao's dynamic quantization of activations
//! (`Int8DynamicActivationInt8WeightConfig`, `Float8DynamicActivationFloat8WeightConfig` by rows). Let x be the input
//! (rows, in), w the weight (out, in), b the bias and y the result (rows, out). With codes q and scales s, the result
//! and the gradient of x are:
//!
//! - y = s_x s_w (q_x q_wᵀ) + b,
//! - dx = s_g (q_g q_w), where q_g and s_g are the codes and scales of g = dy s_w. The sum runs over the rows of the
//!   weight, which have different scales, so dy is multiplied by these scales before it is rounded.
//!
//! Products of int8 codes are summed exactly, products of e4m3 codes in f32. In a forward pass with results in bf16,
//! cuBLASLt may sum up to 1280 products of e4m3 codes (`FAST_TERMS`) with fewer bits than f32 has. A result is rounded
//! once to its dtype; if a residual is added to the rounded result, their sum is rounded again. The backward pass
//! ignores that x was rounded: the gradient passes the rounding unchanged (a straight-through estimator).

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::DType;

use super::{Format, Part, Quantized, Scales, floats, rows};
use crate::Result;
use crate::compute::{self, on_device};
use crate::cpu::Add;
use crate::cpu::pool::par_chunks_mut;
use crate::product::uses_w8a8;
use crate::raw::{Raw, from_vec, with_bytes};

/// A matrix's number of columns and each part's number of rows must be multiples of this number, because 8-bit products
/// on tensor cores require it. (A part is a range of rows that were quantized together: a matrix has several if it was
/// joined from several matrices.)
pub(crate) const MULTIPLE: usize = 16;
/// The maximum number of parts of a matrix whose codes are multiplied: the length of the kernels' lists of parts.
const MOST_PARTS: usize = 8;

/// The rows of a matrix as codes: u8, (rows rounded up to a multiple of [`MULTIPLE`], columns), where rows beyond the
/// matrix are uninitialised; and their scales: f32, (rows).
pub(crate) type CodeRows = [Raw; 2];

/// What is added to a product x Wᵀ.
#[derive(Clone, Copy, Default)]
pub(crate) struct Addends<'a> {
    /// A vector that is added to each row.
    pub(crate) bias: Option<&'a Raw>,
    /// A dense matrix with the shape and dtype of the product.
    pub(crate) residual: Option<&'a Raw>,
}

/// The bytes that [`Quantized::with_transposed_codes`] adds to a matrix of int8 or e4m3 codes: the transposed
/// codes, and one f32 for each column. 0 if the sizes do not allow products of codes.
pub const fn transposed_bytes(rows: usize, columns: usize) -> usize {
    if rows.is_multiple_of(MULTIPLE) && columns.is_multiple_of(MULTIPLE) { rows * columns + 4 * columns } else { 0 }
}

/// What the product for an input's gradient reads.
#[derive(Clone)]
pub(super) struct Transposed {
    /// The codes of all parts of a matrix (rows, columns), transposed: u8, (columns, rows).
    pub(super) codes: Raw,
    /// The scales of these codes' rows, f32, (columns): ones, because the gradient is multiplied by the matrix's own
    /// scales.
    pub(super) ones: Raw,
}

impl Quantized {
    /// Whether the product of this matrix and a matrix of `rows` rows and dtype `dtype` multiplies codes. It does if
    /// [`set_w8a8`](compute::set_w8a8) has enabled this, `rows` is not 0, `dtype` is not f64, there are at most 8
    /// parts, all int8 or all fp8, and the numbers of columns and of each part's rows are multiples of 16.
    pub(crate) fn multiplies_codes(&self, dtype: DType, rows: usize) -> bool {
        uses_w8a8()
            && rows > 0
            && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
            && self.has_products_of_codes()
    }

    /// Whether the matrix alone allows products of codes; see [`multiplies_codes`](Self::multiplies_codes).
    fn has_products_of_codes(&self) -> bool {
        let format = self.format();
        matches!(format, Format::Int8 | Format::Fp8)
            && self.dims[1].is_multiple_of(MULTIPLE)
            && self.parts.len() <= MOST_PARTS
            && self.parts.iter().all(|part| part.scales.format() == format && part.rows.is_multiple_of(MULTIPLE))
    }

    /// The same matrix, which also keeps its codes transposed. On a GPU, the product of codes for an input's gradient
    /// reads transposed codes; if the matrix does not keep them, each such product transposes the codes first. They
    /// take one byte per element. A matrix whose codes are never multiplied does not change.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the codes do not fit.
    pub fn with_transposed_codes(&self) -> Result<Self> {
        if !self.has_products_of_codes() {
            return Ok(self.clone());
        }
        let transpose = |part: &Part| Ok(part.codes.reshape((part.rows, self.dims[1]))?.t()?);
        let parts = self.parts.iter().map(transpose).collect::<Result<Vec<Raw>>>()?;
        let codes = compute::cat(&parts.iter().collect::<Vec<_>>(), 1)?;
        let ones = from_vec(vec![1f32; self.dims[1]], self.dims[1]).to_device(self.device())?;
        Ok(Self { transposed: Some(Transposed { codes, ones }), ..self.clone() })
    }

    /// Computes x Wᵀ plus `addends` for a matrix x, as a product of codes; returns `None` if the caller must multiply
    /// values instead.
    pub(crate) fn product_of_codes(&self, x: &Raw, addends: Addends<'_>) -> Result<Option<Raw>> {
        if !self.multiplies_codes(x.dtype(), x.dims()[0]) {
            return Ok(None);
        }
        on_device!(x.device(), cuda => cuda::product(self, x, addends), cpu => {
            self.product_on_cpu(x, addends).map(Some)
        })
    }

    /// Computes g W for a matrix g, as a product of codes; returns `None` if the caller must multiply values instead.
    pub(crate) fn input_gradient_of_codes(&self, g: &Raw) -> Result<Option<Raw>> {
        if !self.multiplies_codes(g.dtype(), g.dims()[0]) {
            return Ok(None);
        }
        on_device!(g.device(), cuda => cuda::input_gradient(self, g), cpu => self.input_gradient_on_cpu(g).map(Some))
    }

    /// x Wᵀ + b for a matrix x in this matrix's kind of codes, with a result of dtype `dtype`. `None` if the device has
    /// no 8-bit products; the CPU has none.
    pub(crate) fn product_of_code_rows(&self, x: &CodeRows, bias: Option<&Raw>, dtype: DType) -> Result<Option<Raw>> {
        on_device!(x[0].device(), cuda => cuda::product_of_code_rows(self, x, bias, dtype), cpu => {
            let _ = (x, bias, dtype); // for builds without CUDA
            Ok(None)
        })
    }

    /// Whether the codes are int8; otherwise they are e4m3.
    pub(crate) fn has_int8_codes(&self) -> bool {
        self.format() == Format::Int8
    }

    /// Whether the matrix has [transposed codes](Self::with_transposed_codes).
    pub(crate) const fn keeps_transposed_codes(&self) -> bool {
        self.transposed.is_some()
    }

    /// Computes geglu(y) Wᵀ plus `addends` for a matrix y, as a product of codes that makes no matrix of the GEGLU's
    /// values; returns `None` if the caller must compute the GEGLU by itself, as on the CPU.
    pub(crate) fn product_of_geglu(&self, y: &Raw, addends: Addends<'_>) -> Result<Option<Raw>> {
        if !self.multiplies_codes(y.dtype(), y.dims()[0]) {
            return Ok(None);
        }
        on_device!(y.device(), cuda => cuda::product_of_geglu(self, y, addends), cpu => {
            let _ = addends; // for builds without CUDA
            Ok(None)
        })
    }

    /// Computes g W as a product of codes, where g is the gradient of the matrix y and follows from `grad`, the
    /// gradient of geglu(y). The values of g exist only as codes. Returns `None` as
    /// [`product_of_geglu`](Self::product_of_geglu) does.
    pub(crate) fn input_gradient_of_geglu(&self, y: &Raw, grad: &Raw) -> Result<Option<Raw>> {
        if !self.multiplies_codes(y.dtype(), y.dims()[0]) {
            return Ok(None);
        }
        on_device!(y.device(), cuda => cuda::input_gradient_of_geglu(self, y, grad), cpu => {
            let _ = grad; // for builds without CUDA
            Ok(None)
        })
    }

    /// [`product_of_codes`](Self::product_of_codes) on the CPU, which multiplies f32 values that codes represent.
    fn product_on_cpu(&self, x: &Raw, Addends { bias, residual }: Addends<'_>) -> Result<Raw> {
        let x_rounded = self.rounded(x, None)?;
        let y = compute::unset("linear", &x_rounded, &[x.dims()[0], self.dims[0]])?;
        let accumulate = false;
        self.product(&y, &x_rounded, accumulate)?;
        let y = match bias {
            Some(bias) => compute::binary(&y, &compute::cast(bias, DType::F32)?, Add)?,
            None => y,
        };
        let y = compute::cast(&y, x.dtype())?;
        residual.map_or_else(|| Ok(y.clone()), |residual| compute::binary(&y, residual, Add))
    }

    /// [`input_gradient_of_codes`](Self::input_gradient_of_codes) on the CPU, which multiplies f32 values that codes
    /// represent.
    fn input_gradient_on_cpu(&self, g: &Raw) -> Result<Raw> {
        // The scales of the rows of W, by which the columns of g are multiplied.
        let mut scales = Vec::with_capacity(self.dims[0]);
        for part in self.parts.iter() {
            let part_scales =
                part.row_scales().map_or(Ok(Vec::new()), |raw| with_bytes(raw, |bytes| floats(bytes).to_vec()))?;
            // A single scale is for all rows of the part.
            scales.extend((0..part.rows).map(|row| if let [only] = part_scales[..] { only } else { part_scales[row] }));
        }
        let g_rounded = self.rounded(g, Some(&scales))?;
        // g_rounded already has the scales of W as factors, so W takes part with its codes alone.
        compute::cast(&compute::matmul(&g_rounded, &self.numbers().values(DType::F32)?)?, g.dtype())
    }

    /// `matrix` in f32: each column is multiplied by its scale in `column_scales`, if given; then each row is rounded
    /// to values that 8-bit codes with one scale represent.
    fn rounded(&self, matrix: &Raw, column_scales: Option<&[f32]>) -> Result<Raw> {
        let dims = [matrix.dims()[0], matrix.dims()[1]];
        let values = compute::contiguous(&compute::cast(matrix, DType::F32)?)?;
        let mut values = with_bytes(&values, |bytes| floats(bytes).to_vec())?;
        let format = self.format();
        par_chunks_mut(&mut values, dims[1], |_, row| {
            if let Some(scales) = column_scales {
                row.iter_mut().zip(scales).for_each(|(x, scale)| *x *= scale);
            }
            rows::round(row, format);
        });
        Ok(from_vec(values, &dims[..]))
    }

    /// The same codes with scales of 1: a matrix whose values are the codes' numbers.
    fn numbers(&self) -> Self {
        let one = || from_vec(vec![1f32], 1);
        let of = |part: &Part| {
            let scales = if matches!(part.scales, Scales::Int8(_)) { Scales::Int8(one()) } else { Scales::Fp8(one()) };
            Part { rows: part.rows, codes: part.codes.clone(), scales }
        };
        Self::of_parts(self.dims, self.dtype, self.parts.iter().map(of).collect())
    }
}

impl Part {
    /// The scales of 8-bit codes: one for each row, or one for all.
    pub(super) const fn row_scales(&self) -> Option<&Raw> {
        match &self.scales {
            Scales::Int8(scales) | Scales::Fp8(scales) => Some(scales),
            Scales::Nf4(_) | Scales::Nested { .. } | Scales::Ggml(_) => None,
        }
    }
}
