//! Selection of rows of quantized matrices, and products that dequantize some rows at a time.
//!
//! A matrix that [`Quantized::cat`] has stacked has several parts: the rows of each stacked matrix, with codes and
//! scales of their own.

use super::{Format, Part, Quantized, Scales};
use crate::compute::on_device;
use crate::ops::index::select_raw;
use crate::raw::Raw;
use crate::{DType, Error, Result, compute};

/// Number of elements that a GPU dequantizes at a time, if the matrix is too large to be dequantized as a whole.
const GPU_PANEL: usize = 32 << 20;
/// Number of elements that the CPU dequantizes at a time.
const CPU_PANEL: usize = 4 << 20;

impl Quantized {
    /// The rows whose indices are in `ids`, in the order of `ids`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the format's blocks contain elements of several rows, or the matrix has several parts;
    /// [`Error::Index`] if an index is out of range, [`Error::DType`] if `ids` is not i64 or u32.
    pub(crate) fn select(&self, op: &'static str, ids: &Raw) -> Result<Self> {
        let ids = ids.flatten_all()?;
        let picked = self.with_rows(ids.elem_count(), |rows| select_raw(op, rows, &ids, 0))?;
        picked.ok_or_else(|| {
            let (what, cure) = match &*self.parts {
                [_] => (format!("the {} matrix", self.format().name()), "quantize it as int8 or q8_0"),
                parts => (format!("a matrix of {} parts", parts.len()), "pick rows of the matrices that were joined"),
            };
            Error::argument(op, format!("rows of {what} cannot be picked; {cure}"))
        })
    }

    /// Whether the matrix has so many elements that a product on a GPU dequantizes some rows at a time. False if the
    /// codes cannot be split by rows, or if there are at most four times `GPU_PANEL` elements.
    pub(crate) fn is_large(&self) -> bool {
        self.has_rows() && self.dims.iter().product::<usize>() > 4 * GPU_PANEL
    }

    /// Calls `visit` once for each panel, a group of consecutive rows, with the index of the panel's first row and the
    /// panel's values. The panels cover all rows. The size of a panel is bounded, except on a GPU if the codes cannot
    /// be split by rows: then one panel has all rows.
    pub(crate) fn panels(&self, dtype: DType, mut visit: impl FnMut(usize, &Raw) -> Result<()>) -> Result<()> {
        let [rows, columns] = self.dims;
        let has_one_panel = !self.device().is_cpu() && !self.has_rows();
        let elements = if self.device().is_cpu() { CPU_PANEL } else { GPU_PANEL };
        let panel_rows = if has_one_panel { rows.max(1) } else { (elements / columns.max(1)).max(1) };
        for start in (0..rows).step_by(panel_rows) {
            let count = panel_rows.min(rows - start);
            visit(start, &self.values_of(start, count, dtype)?)?;
        }
        Ok(())
    }

    /// Computes y = x Wᵀ, or y += x Wᵀ if `accumulate`, where W is this matrix, for `y` (rows of x, rows of W) and `x`
    /// (rows of x, columns of W), some rows of W at a time.
    pub(crate) fn product(&self, y: &Raw, x: &Raw, accumulate: bool) -> Result<()> {
        self.panels(x.dtype(), |start, weight| {
            let y = y.narrow(1, start, weight.dims()[0])?;
            // Each entry is [destination, left operand, right operand]; the products are multiplied by 1.0.
            compute::write_products(&[[&y, x, &weight.t()?]], 1.0, accumulate)
        })
    }

    /// Computes dx = g W, where W is this matrix, for `g` (rows of dx, rows of W), some rows of W at a time. The
    /// products of these groups of rows are summed in f32, or in f64 if `dx` is f64.
    pub(crate) fn input_gradient(&self, dx: &Raw, g: &Raw) -> Result<()> {
        let sum_dtype = if dx.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let sums_in_place = dx.dtype() == sum_dtype;
        let sum = if sums_in_place { dx.clone() } else { compute::zeros(dx.dims(), sum_dtype, dx.device())? };
        self.panels(g.dtype(), |start, weight| {
            let g = g.narrow(1, start, weight.dims()[0])?;
            // The first panel overwrites the sum; the others are added to it.
            compute::write_products(&[[&sum, &g, weight]], 1.0, start > 0)
        })?;
        if sums_in_place { Ok(()) } else { compute::copy_into(dx, &sum) }
    }

    /// The values of `count` rows from row `start` on.
    fn values_of(&self, start: usize, count: usize, dtype: DType) -> Result<Raw> {
        if count == self.dims[0] {
            return self.values(dtype);
        }
        on_device!(
            self.device(),
            cuda => {
                let rows = self.with_rows(count, |rows| Ok(rows.narrow(0, start, count)?))?;
                // `rows` is not None: for codes that cannot be split by rows, `panels` asks for all rows at once.
                rows.map_or_else(|| self.values(dtype), |rows| rows.values(dtype))
            },
            cpu => self.rows_on_cpu(start..start + count, dtype),
        )
    }

    /// The rows of several int8 or of several fp8 matrices, stacked in common storage as one part, and a view of each
    /// matrix in this storage. One product of codes then multiplies all. `None` if formats differ or some matrix does
    /// not have a scale for each row.
    ///
    /// # Errors
    /// Those of [`cat`](Self::cat), and [`Error::OutOfMemory`] if the copy does not fit.
    pub fn join(matrices: &[&Self]) -> Result<Option<(Self, Vec<Self>)>> {
        let Self { dims, dtype, parts, .. } = Self::cat(matrices)?;
        let format = parts.first().map(|part| part.scales.format());
        let can_join = |part: &Part| {
            part.row_scales().is_some_and(|scales| scales.elem_count() == part.rows)
                && Some(part.scales.format()) == format
        };
        if !parts.iter().all(can_join) {
            return Ok(None);
        }
        let scales = parts.iter().filter_map(Part::row_scales).map(|scales| Ok(scales.flatten_all()?));
        let scales = compute::cat(&scales.collect::<Result<Vec<_>>>()?.iter().collect::<Vec<_>>(), 0)?;
        let scales = if format == Some(Format::Int8) { Scales::Int8(scales) } else { Scales::Fp8(scales) };
        let codes = parts.iter().map(|part| Ok(part.codes.flatten_all()?)).collect::<Result<Vec<_>>>()?;
        let codes = compute::cat(&codes.iter().collect::<Vec<_>>(), 0)?;
        let all = Self::of_parts(dims, dtype, [Part { rows: dims[0], codes, scales }].into());
        let mut start = 0;
        let mut views = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            let count = matrix.dims[0];
            let Some(view) = all.with_rows(count, |rows| Ok(rows.narrow(0, start, count)?))? else { return Ok(None) };
            views.push(view.with_dtype(matrix.dtype));
            start += count;
        }
        Ok(Some((all, views)))
    }

    /// Whether the codes can be split by rows: there is one part, and its blocks do not cross rows.
    fn has_rows(&self) -> bool {
        matches!(&*self.parts, [Part { scales: Scales::Int8(_) | Scales::Fp8(_) | Scales::Ggml(_), .. }])
    }

    /// A matrix of `count` rows of this one. `pick` selects them: it is called with a tensor that has one row (codes)
    /// or one number (scales) for each row of this matrix, and returns the selected ones. `None` if the codes cannot be
    /// split by rows.
    fn with_rows(&self, count: usize, pick: impl Fn(&Raw) -> Result<Raw>) -> Result<Option<Self>> {
        let [part] = &*self.parts else { return Ok(None) };
        let pick_scales = |scales: &Raw| {
            // A single scale for all rows is kept.
            if scales.elem_count() == 1 { Ok(scales.clone()) } else { pick(&scales.flatten_all()?) }
        };
        let scales = match &part.scales {
            Scales::Int8(scales) => Scales::Int8(pick_scales(scales)?),
            Scales::Fp8(scales) => Scales::Fp8(pick_scales(scales)?),
            Scales::Ggml(format) => Scales::Ggml(*format),
            Scales::Nf4(_) | Scales::Nested { .. } => return Ok(None),
        };
        let row_bytes = part.codes.elem_count() / part.rows.max(1);
        let codes = pick(&part.codes.reshape((part.rows, row_bytes))?)?;
        let dims = [count, self.dims[1]];
        Ok(Some(Self::of_parts(dims, self.dtype, [Part { rows: count, codes, scales }].into())))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::Tensor;

    fn matrix(rows: usize, phase: f32, format: Format) -> Quantized {
        let values: Vec<f32> = (0..rows * 16).map(|i| (i as f32 * 0.7 + phase).sin()).collect();
        Quantized::new(&Tensor::from_vec(values, (rows, 16), &Device::Cpu).unwrap(), format).unwrap()
    }

    #[test]
    fn joined_matrices_have_the_values_of_stacked_ones() {
        for format in [Format::Int8, Format::Fp8] {
            let matrices = [matrix(3, 0.0, format), matrix(5, 1.0, format)];
            let matrices = matrices.each_ref();
            let values = |matrix: &Quantized| -> Vec<Vec<f32>> {
                matrix.dequantize(DType::F32).unwrap().raw().to_vec2().unwrap()
            };
            let (joined, views) = Quantized::join(&matrices).unwrap().unwrap();
            assert_eq!(values(&joined), values(&Quantized::cat(&matrices).unwrap()));
            assert_eq!(joined.parts.len(), 1);
            for (view, matrix) in views.iter().zip(matrices) {
                assert_eq!(values(view), values(matrix));
            }
        }
    }

    #[test]
    fn the_error_says_why_rows_cannot_be_picked() {
        let ids = Tensor::new(&[0i64], &Device::Cpu).unwrap();
        let message = |matrix: &Quantized| matrix.select("embedding", ids.raw()).err().unwrap().to_string();
        assert!(message(&matrix(4, 0.0, Format::Nf4)).contains("the nf4 matrix cannot be picked; quantize it as int8"));
        let joined = Quantized::cat(&[&matrix(3, 0.0, Format::Int8), &matrix(5, 1.0, Format::Int8)]).unwrap();
        assert!(message(&joined).contains("a matrix of 2 parts cannot be picked; pick rows of the matrices"));
    }

    #[test]
    fn matrices_of_mixed_formats_and_nf4_matrices_are_not_joined() {
        let joined = Quantized::join(&[&matrix(3, 0.0, Format::Int8), &matrix(5, 1.0, Format::Fp8)]).unwrap();
        assert!(joined.is_none());
        assert!(Quantized::join(&[&matrix(4, 0.0, Format::Nf4)]).unwrap().is_none());
    }
}
