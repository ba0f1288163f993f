//! Frozen matrices, quantized to four to eight bits per element: the base weights under adapters where memory is short.
//!
//! A [`Quantized`] is not a [`Tensor`]: it has codes and scales, and only operations that take a [`WeightRef`] accept
//! it. If W8A8 is enabled ([`w8a8`]), linear layers multiply int8 and fp8 codes. All other products dequantize the
//! matrix first, into memory that is freed after the product.

mod dequantize;
mod dynamic_map;
mod format;
mod ggml;
mod nf4;
mod rows;
mod rows_of;
pub mod w8a8;
pub mod weight;

#[cfg(feature = "cuda")]
mod cuda;

use std::sync::Arc;

use candle_core::{DType, Device};

pub use dynamic_map::create_dynamic_map;
pub use format::Format;
pub use ggml::Ggml;
pub use nf4::values as nf4_values;
pub use weight::{Weight, WeightRef};

use self::w8a8::Transposed;
pub(crate) use self::w8a8::{Addends, CodeRows};
use crate::raw::{Raw, is_float, with_bytes};
use crate::{Error, Result, Tensor};

const OP: &str = "quantize";

/// A frozen matrix (rows, columns) of codes and scales. Cloning is cheap.
///
/// Its rows are the rows of its parts, stacked. Each part was quantized by itself, so that layers can be joined
/// into one matrix without rounding again.
#[derive(Clone)]
pub struct Quantized {
    /// Number of rows of all parts together, and number of columns.
    dims: [usize; 2],
    /// The dtype of the values that the codes represent.
    dtype: DType,
    /// At least one part, so [`device`](Self::device) and [`format`](Self::format) never return their defaults.
    parts: Arc<[Part]>,
    /// The codes transposed, for the product that computes an input's gradient. This product needs a scale for each of
    /// their rows. It is 1 (`ones`), because the matrix's own scales multiply the product's other factor; see
    /// [`with_transposed_codes`](Self::with_transposed_codes).
    transposed: Option<Transposed>,
}

/// Rows that were quantized together.
#[derive(Clone)]
struct Part {
    rows: usize,
    /// The codes, u8: one per element, row by row; NF4 has two codes per byte, the first in the upper four bits. For
    /// ggml's formats, the blocks.
    codes: Raw,
    scales: Scales,
}

/// The scales that codes are multiplied by, f32.
#[derive(Clone)]
enum Scales {
    /// For int8 codes, which are in two's complement: one scale per row.
    Int8(Raw),
    /// For e4m3 codes: one scale per row, or one for all rows.
    Fp8(Raw),
    /// For NF4: one scale per block of [`nf4::BLOCK`] elements.
    Nf4(Raw),
    /// For NF4 whose scales are quantized: the code of each block's scale in the dynamic map ([`create_dynamic_map`]),
    /// one f32 scale per [`nf4::NESTED`] of these codes, and the offset that is added to every block's scale.
    Nested { codes: Raw, scales: Raw, offset: f32 },
    /// For ggml's formats, whose blocks contain the scales.
    Ggml(Ggml),
}

impl Scales {
    const fn format(&self) -> Format {
        match self {
            Self::Int8(_) => Format::Int8,
            Self::Fp8(_) => Format::Fp8,
            Self::Nf4(_) | Self::Nested { .. } => Format::Nf4,
            Self::Ggml(format) => Format::Ggml(*format),
        }
    }

    /// The tensors of the scales.
    fn tensors(&self) -> impl Iterator<Item = &Raw> {
        let (first, second) = match self {
            Self::Int8(scales) | Self::Fp8(scales) | Self::Nf4(scales) => (Some(scales), None),
            Self::Nested { codes, scales, .. } => (Some(codes), Some(scales)),
            Self::Ggml(_) => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// These scales with `replace(tensor)` in place of each tensor.
    fn map(&self, replace: &mut impl FnMut(&Raw) -> Result<Raw>) -> Result<Self> {
        Ok(match self {
            Self::Int8(scales) => Self::Int8(replace(scales)?),
            Self::Fp8(scales) => Self::Fp8(replace(scales)?),
            Self::Nf4(scales) => Self::Nf4(replace(scales)?),
            Self::Nested { codes, scales, offset } => {
                Self::Nested { codes: replace(codes)?, scales: replace(scales)?, offset: *offset }
            }
            Self::Ggml(format) => Self::Ggml(*format),
        })
    }
}

impl Quantized {
    const fn of_parts(dims: [usize; 2], dtype: DType, parts: Arc<[Part]>) -> Self {
        Self { dims, dtype, parts, transposed: None }
    }

    /// Quantize a matrix. The CPU computes the codes; the result is on the tensor's device.
    ///
    /// - `Int8`: a scale per row, the largest magnitude / 127; ties are rounded to even codes (torchao's symmetric int8
    ///   weights).
    /// - `Fp8`: e4m3 with a scale per row, the largest magnitude / 448 (torchao's float8 weights by rows).
    /// - `Nf4`: blocks of 64 elements, whose scales are quantized again in blocks of 256 (Dettmers et al. 2023,
    ///   arXiv:2305.14314); codes, their order and rounding are those of bitsandbytes' `quantize_4bit`.
    /// - `Ggml`: `Q8_0` and `Q4_0`, a scale (f16) for each 32 elements of a row; rounded as in ggml's reference code.
    ///
    /// # Errors
    /// [`Error::Shape`] if `matrix` does not have two dimensions, or a row does not divide into blocks of the format,
    /// [`Error::DType`] if `matrix` is not floating point, [`Error::Argument`] if the format can only be read, if
    /// `matrix` needs a gradient, or if it has values that are non-finite or too large for the format.
    pub fn new(matrix: &Tensor, format: Format) -> Result<Self> {
        Self::of_values(matrix, format, /* nested */ true)
    }

    /// Quantize a matrix to `Nf4` whose scales are f32: bitsandbytes' `quantize_4bit` without `compress_statistics`,
    /// and the rounding of [`Grid::Nf4`](crate::ops::fake_quantize::Grid::Nf4).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn nf4_with_plain_scales(matrix: &Tensor) -> Result<Self> {
        Self::of_values(matrix, Format::Nf4, /* nested */ false)
    }

    /// [`new`](Self::new), in which `nested` says whether the scales of NF4 are quantized.
    fn of_values(matrix: &Tensor, format: Format, nested: bool) -> Result<Self> {
        let &[rows, columns] = matrix.dims() else {
            return Err(Error::shape(
                OP,
                format!("found shape {:?}, expected a matrix (out_features, in_features)", matrix.dims()),
            ));
        };
        if !is_float(matrix.dtype()) {
            return Err(Error::dtype(OP, format!("found {}, expected floating point", matrix.dtype().as_str())));
        }
        if matrix.requires_grad() {
            return Err(Error::argument(OP, "the tensor needs a gradient, which codes cannot have; detach() it"));
        }
        if let Format::Ggml(format) = format {
            if !format.can_encode() {
                let text = format!("{} can only be read from GGUF files; quantize to q8_0", format.name());
                return Err(Error::argument(OP, text));
            }
            // Returns an error if a row does not divide into blocks.
            row_bytes(format, columns)?;
        }
        let values = crate::compute::cast(&crate::raw::to_cpu(&matrix.raw)?, DType::F32)?;
        let quantized = with_bytes(&values, |bytes| {
            let values = floats(bytes);
            match format {
                Format::Int8 | Format::Fp8 => rows::quantize(values, rows, columns, format),
                Format::Nf4 => nf4::quantize(values, nested),
                Format::Ggml(format) => Some((format.encode(values)?, Scales::Ggml(format))),
            }
        })?;
        let Some((codes, scales)) = quantized else {
            return Err(Error::argument(
                OP,
                "the tensor has values that are non-finite, or too large; is the file damaged?",
            ));
        };
        let part = Part { rows, codes, scales };
        Self::of_parts([rows, columns], matrix.dtype(), Arc::new([part])).to_device(matrix.device())
    }

    /// A matrix from its 8-bit codes, u8 (rows, columns), and their scales, f32, as files contain them. `Int8` has a
    /// scale for each row, `Fp8` one for each row or one for all rows. The matrix represents values of `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `codes` is not a matrix or the number of scales is wrong, [`Error::DType`] if `codes` is not
    /// u8, `scales` is not f32 or `dtype` is not floating point, [`Error::Argument`] for another format or if a code is
    /// NaN.
    pub fn from_eight_bits(format: Format, codes: &Tensor, scales: &Tensor, dtype: DType) -> Result<Self> {
        let (codes, scales) = (&codes.raw, &scales.raw);
        let &[rows, columns] = codes.dims() else {
            return Err(Error::shape(OP, format!("the codes have shape {:?}, expected a matrix", codes.dims())));
        };
        if codes.dtype() != DType::U8 || scales.dtype() != DType::F32 || !is_float(dtype) {
            let found = [codes.dtype(), scales.dtype(), dtype].map(|dtype| dtype.as_str());
            return Err(Error::dtype(OP, format!("found {found:?}, expected u8 codes, f32 scales and a float dtype")));
        }
        if scales.elem_count() != rows && (format == Format::Int8 || scales.elem_count() != 1) {
            let (found, one_or) = (scales.dims(), if format == Format::Int8 { "" } else { "1 or " });
            return Err(Error::shape(OP, format!("the scales have shape {found:?}, expected {one_or}{rows} of them")));
        }
        let scales = crate::compute::contiguous(&scales.flatten_all()?)?;
        let scales = match format {
            Format::Int8 => Scales::Int8(scales),
            // The NaNs of e4m3 have all bits set except the sign, which may be either.
            Format::Fp8 if with_bytes(codes, |codes| codes.iter().any(|code| code & 0x7f == 0x7f))? => {
                return Err(Error::argument(OP, "some codes are NaN; is the file damaged?"));
            }
            Format::Fp8 => Scales::Fp8(scales),
            other => {
                return Err(Error::argument(OP, format!("found the format {}, expected int8 or fp8", other.name())));
            }
        };
        let part = Part { rows, codes: crate::compute::contiguous(codes)?, scales };
        Ok(Self::of_parts([rows, columns], dtype, Arc::new([part])))
    }

    /// The NF4 matrix (rows, columns) of a file of bitsandbytes: two codes per byte (u8), and a scale for each block of
    /// 64 elements. Without `nested`, `scales` holds the blocks' scales (f32). With `nested`, `scales` holds the codes
    /// (u8) of the blocks' scales in the dynamic map, and `nested` holds one scale (f32) for each 256 of these codes
    /// and the offset that is added to every block's scale. The matrix represents values of `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`] if a tensor does not have the number of elements that such a matrix needs, [`Error::DType`] if
    /// a tensor does not have the dtype given above.
    pub fn from_nf4(
        [rows, columns]: [usize; 2],
        codes: &Tensor,
        scales: &Tensor,
        nested: Option<(&Tensor, f32)>,
        dtype: DType,
    ) -> Result<Self> {
        let blocks = (rows * columns).div_ceil(nf4::BLOCK);
        let flat = |name: &str, tensor: &Tensor, count: usize, dtype: DType| -> Result<Raw> {
            if tensor.elem_count() != count {
                let found = tensor.dims();
                return Err(Error::shape(
                    OP,
                    format!("{name} have shape {found:?}, expected {count} for a matrix of {rows} x {columns}"),
                ));
            }
            if tensor.dtype() != dtype {
                let found = tensor.dtype().as_str();
                return Err(Error::dtype(OP, format!("{name} are {found}, expected {}", dtype.as_str())));
            }
            crate::compute::contiguous(&tensor.raw.flatten_all()?)
        };
        let codes = flat("the codes", codes, (rows * columns).div_ceil(2), DType::U8)?;
        let scales = match nested {
            None => Scales::Nf4(flat("the scales", scales, blocks, DType::F32)?),
            Some((outer, offset)) => Scales::Nested {
                codes: flat("the codes of the scales", scales, blocks, DType::U8)?,
                scales: flat("the scales of the scales", outer, blocks.div_ceil(nf4::NESTED), DType::F32)?,
                offset,
            },
        };
        Ok(Self::of_parts([rows, columns], dtype, Arc::new([Part { rows, codes, scales }])))
    }

    /// The `count` rows from row `start` on, with the codes and scales of this matrix. `None` if the matrix is not in
    /// NF4 or has several parts, or if elements of other rows share a scale with elements of these rows.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the copy does not fit.
    pub fn rows_of_nf4(&self, start: usize, count: usize) -> Result<Option<Self>> {
        let ([rows, columns], [part]) = (self.dims, &*self.parts) else { return Ok(None) };
        // The number of neighbouring elements that depend on the same f32 scale: that of their block or, if the blocks'
        // scales are quantized, that of these scales.
        let shared = match part.scales {
            Scales::Nf4(_) => nf4::BLOCK,
            Scales::Nested { .. } => nf4::BLOCK * nf4::NESTED,
            _ => return Ok(None),
        };
        // The index of the first element of these rows, and the number of their elements.
        let [first, length] = [start, count].map(|rows| rows * columns);
        if !first.is_multiple_of(shared) || !(length.is_multiple_of(shared) || start + count == rows) {
            return Ok(None);
        }
        // A copy of these rows' range of `raw`, which has one number for every `each` elements of the matrix. A view
        // would keep the memory of the whole matrix allocated.
        let narrowed = |raw: &Raw, each: usize| raw.narrow(0, first / each, length.div_ceil(each))?.force_contiguous();
        let scales = match &part.scales {
            Scales::Nested { codes, scales, offset } => {
                let (codes, scales) = (narrowed(codes, nf4::BLOCK)?, narrowed(scales, shared)?);
                Scales::Nested { codes, scales, offset: *offset }
            }
            Scales::Nf4(scales) => Scales::Nf4(narrowed(scales, nf4::BLOCK)?),
            _ => return Ok(None),
        };
        let part = Part { rows: count, codes: narrowed(&part.codes, 2)?, scales };
        Ok(Some(Self::of_parts([count, columns], self.dtype, Arc::new([part]))))
    }

    /// A matrix whose rows consist of blocks of a format of ggml: `blocks` (rows, bytes of a row), u8. The matrix
    /// represents values of `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`] if a row does not divide into blocks, [`Error::DType`] if `blocks` is not u8 or `dtype` is not
    /// floating point.
    pub fn from_ggml(format: Ggml, blocks: &Tensor, dtype: DType) -> Result<Self> {
        let &[rows, bytes] = blocks.dims() else {
            return Err(Error::shape(OP, format!("the blocks have shape {:?}, expected (rows, bytes)", blocks.dims())));
        };
        if !bytes.is_multiple_of(format.block_bytes()) {
            let (name, each) = (format.name(), format.block_bytes());
            let text =
                format!("found rows of {bytes} bytes, expected a multiple of {each}, the bytes of a block of {name}");
            return Err(Error::shape(OP, text));
        }
        let columns = bytes / format.block_bytes() * format.block();
        if blocks.dtype() != DType::U8 || !is_float(dtype) {
            let found = [blocks.dtype(), dtype].map(|dtype| dtype.as_str());
            return Err(Error::dtype(OP, format!("found {found:?}, expected u8 blocks and a float dtype")));
        }
        let codes = crate::compute::contiguous(&blocks.raw)?;
        let part = Part { rows, codes, scales: Scales::Ggml(format) };
        Ok(Self::of_parts([rows, columns], dtype, Arc::new([part])))
    }

    /// The rows of several matrices, stacked. The result shares storage with them, and has the dtype of the first one.
    ///
    /// # Errors
    /// [`Error::Shape`] if `matrices` is empty or the numbers of columns differ, [`Error::Device`] if the matrices are
    /// on different devices.
    pub fn cat(matrices: &[&Self]) -> Result<Self> {
        let Some(first) = matrices.first() else { return Err(Error::shape(OP, "there are no matrices to join")) };
        let columns = first.dims[1];
        if let Some(other) = matrices.iter().find(|other| other.dims[1] != columns) {
            let found = [columns, other.dims[1]];
            return Err(Error::shape(OP, format!("found matrices of {found:?} columns, expected the same number")));
        }
        if matrices.iter().any(|other| !other.device().same_device(first.device())) {
            return Err(Error::device(OP, "the matrices are on different devices; move one with to()"));
        }
        let parts = matrices.iter().flat_map(|matrix| matrix.parts.iter().cloned()).collect();
        let rows = matrices.iter().map(|matrix| matrix.dims[0]).sum();
        Ok(Self::of_parts([rows, columns], first.dtype, parts))
    }

    /// The same matrix, representing values of `dtype`.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Self { dtype, ..self.clone() }
    }

    /// Number of rows and number of columns.
    pub const fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The dtype of the values that the codes represent.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of codes and scales.
    pub fn device(&self) -> &Device {
        self.parts.first().map_or(&Device::Cpu, |part| part.codes.device())
    }

    /// The format of the first part; the parts of joined layers may have different formats.
    pub fn format(&self) -> Format {
        self.parts.first().map_or(Format::Int8, |part| part.scales.format())
    }

    /// Number of bytes of codes and scales.
    pub fn bytes(&self) -> usize {
        let size = |raw: &Raw| raw.elem_count() * raw.dtype().size_in_bytes();
        let of_parts = self.parts.iter().map(|part| size(&part.codes) + part.scales.tensors().map(size).sum::<usize>());
        let of_transposed = self.transposed.as_ref().map_or(0, |extra| size(&extra.codes) + size(&extra.ones));
        of_parts.sum::<usize>() + of_transposed
    }

    /// The tensors of the matrix, part by part: `codes` and `scales`. A part in NF4 with quantized scales also has
    /// `scale_codes` and `offset`; a part in a format of ggml has `codes` alone.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the offset does not fit on the device.
    pub fn tensors(&self) -> Result<Vec<Vec<(&'static str, Tensor)>>> {
        let of = |part: &Part| -> Result<Vec<(&'static str, Tensor)>> {
            let mut found = vec![("codes", Tensor::from_raw(&part.codes))];
            match &part.scales {
                Scales::Int8(scales) | Scales::Fp8(scales) | Scales::Nf4(scales) => {
                    found.push(("scales", Tensor::from_raw(scales)));
                }
                Scales::Ggml(_) => {}
                Scales::Nested { codes, scales, offset } => {
                    found.push(("scale_codes", Tensor::from_raw(codes)));
                    found.push(("scales", Tensor::from_raw(scales)));
                    found.push(("offset", Tensor::new(*offset, part.codes.device())?));
                }
            }
            Ok(found)
        };
        self.parts.iter().map(of).collect()
    }

    /// A copy on another device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if it does not fit.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if device.same_device(self.device()) {
            return Ok(self.clone());
        }
        self.map(|raw| Ok(raw.to_device(device)?))
    }

    /// This matrix with `replace(tensor)` in place of each tensor; the calls are always in the same order.
    pub(crate) fn map(&self, mut replace: impl FnMut(&Raw) -> Result<Raw>) -> Result<Self> {
        let mut part = |part: &Part| -> Result<Part> {
            let codes = replace(&part.codes)?;
            Ok(Part { rows: part.rows, codes, scales: part.scales.map(&mut replace)? })
        };
        let parts = self.parts.iter().map(&mut part).collect::<Result<_>>()?;
        let transposed = match &self.transposed {
            Some(Transposed { codes, ones }) => Some(Transposed { codes: replace(codes)?, ones: replace(ones)? }),
            None => None,
        };
        Ok(Self { dims: self.dims, dtype: self.dtype, parts, transposed })
    }

    /// The values that the codes represent, computed in f32 and rounded once to `dtype`.
    ///
    /// # Errors
    /// [`Error::DType`] if `dtype` is not floating point, [`Error::OutOfMemory`] if the values do not fit.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        if !is_float(dtype) {
            return Err(Error::dtype("dequantize", format!("found {}, expected floating point", dtype.as_str())));
        }
        Ok(Tensor::constant(self.values(dtype)?))
    }
}

/// A quantized matrix of fixed values for test cases, on the device of `like`. It has two parts; the second part has
/// half of the rows (rounded down).
#[cfg(feature = "testing")]
pub(crate) fn example(like: &Tensor, [rows, columns]: [usize; 2], format: Format) -> Result<Quantized> {
    let part = |rows: usize, phase: f64| {
        let values: Vec<f32> = (0..rows * columns).map(|i| (i as f64 * 0.7 + phase).sin() as f32).collect();
        Quantized::new(&Tensor::from_vec(values, (rows, columns), &Device::Cpu)?, format)
    };
    let second = rows / 2;
    Quantized::cat(&[&part(rows - second, 0.0)?, &part(second, 1.0)?])?.to_device(like.device())
}

impl std::fmt::Debug for Quantized {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [rows, columns] = self.dims;
        write!(f, "Quantized({}, [{rows}, {columns}], {})", self.format().name(), self.dtype.as_str())
    }
}

/// Number of bytes of a row of `columns` elements.
///
/// # Errors
/// [`Error::Shape`] if the row does not divide into blocks.
fn row_bytes(format: Ggml, columns: usize) -> Result<usize> {
    format.row_bytes(columns).ok_or_else(|| {
        let (name, block) = (format.name(), format.block());
        Error::shape(
            OP,
            format!("found rows of {columns} elements, expected a multiple of {block}, the block size of {name}"),
        )
    })
}

/// The f32 numbers in the bytes of an f32 tensor.
fn floats(bytes: &[u8]) -> &[f32] {
    // SAFETY: every bit pattern is an f32. An f32 tensor is aligned, so `align_to` splits nothing off.
    unsafe { bytes.align_to::<f32>() }.1
}
