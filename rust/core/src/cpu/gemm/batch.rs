//! Matrix products of tensors, with batches.

use candle_core::{DType, Layout, Shape};
use half::{bf16, f16};
use smallvec::SmallVec;

use super::block::Product;
use super::pack::Side;
use crate::cpu::access::{elements, read2, write3};
use crate::cpu::{Dims, Elem, Real, broadcast_dims};
use crate::{Error, Raw, Result, dispatch_float};

/// The matrix product by the rules of numpy: (..., m, k) times (..., k, n) gives (..., m, n), and batch dimensions
/// broadcast. A vector is a row on the left and a column on the right; the result lacks the dimension of size 1.
///
/// Takes f32, f64, f16 or bf16 with any strides and copies no operand; f16 and bf16 are summed in f32. Sums over an
/// empty dimension are zeros.
///
/// # Errors
/// [`Error::Shape`] if the shapes of `a` and `b` do not fit these rules, [`Error::DType`] if their dtypes differ or are
/// not floating-point, [`Error::OutOfMemory`] if the result does not fit into memory.
pub fn matmul(a: &Raw, b: &Raw) -> Result<Raw> {
    product(a, b, 1.0, a.dtype())
}

/// `alpha` times the matrix product of `a` and `b`. `dtype`, the dtype of the result, is that of the operands. For
/// operands in f16 or bf16 it may also be f32; then the f32 sums are not rounded.
///
/// # Errors
/// As [`matmul`], and [`Error::DType`] if `dtype` is any other dtype.
pub fn product(a: &Raw, b: &Raw, alpha: f64, dtype: DType) -> Result<Raw> {
    const OP: &str = "matmul";
    let plan = Plan::of(OP, a, b)?;
    check_result_dtype(OP, a.dtype(), dtype)?;
    match (a.dtype(), dtype) {
        (DType::BF16, DType::F32) => plan.compute::<bf16, f32>(OP, a, b, alpha),
        (DType::F16, DType::F32) => plan.compute::<f16, f32>(OP, a, b, alpha),
        (same, _) => dispatch_float!(same, OP, T => plan.compute::<T, T>(OP, a, b, alpha)),
    }
}

/// Adds `alpha` times the matrix product of `a` and `b` to `dst`, in place.
///
/// `a` and `b` are as in [`matmul`]. `dst` must have the shape of their product. `dst` must be contiguous (it may be
/// part of a larger buffer) or, if `a` and `b` are matrices, a range of the columns of a contiguous matrix. The dtype
/// of `dst` must be that of `a` and `b`. For operands in f16 or bf16 it may also be f32; then the f32 sums are not
/// rounded.
///
/// # Errors
/// [`Error::Shape`] and [`Error::DType`] if `a`, `b` or `dst` break these rules, [`Error::Candle`] if `dst` shares its
/// storage with an operand.
pub fn matmul_accumulate(dst: &Raw, a: &Raw, b: &Raw, alpha: f64) -> Result<()> {
    write_product("matmul_accumulate", dst, a, b, alpha, /* accumulate: */ true)
}

/// For each of `terms` (dst, a, b), writes `alpha` times the matrix product of `a` and `b` to `dst`, or adds it to
/// `dst` if `accumulate`. The operands are as in [`matmul_accumulate`].
///
/// # Errors
/// As [`matmul_accumulate`].
pub fn write_products(terms: &[[&Raw; 3]], alpha: f64, accumulate: bool) -> Result<()> {
    terms.iter().try_for_each(|[dst, a, b]| write_product("write_products", dst, a, b, alpha, accumulate))
}

fn write_product(op: &'static str, dst: &Raw, a: &Raw, b: &Raw, alpha: f64, accumulate: bool) -> Result<()> {
    let plan = Plan::into(op, dst, a, b)?;
    match (a.dtype(), dst.dtype()) {
        (DType::BF16, DType::F32) => plan.write::<bf16, f32>(op, dst, a, b, alpha, accumulate),
        (DType::F16, DType::F32) => plan.write::<f16, f32>(op, dst, a, b, alpha, accumulate),
        (same, _) => dispatch_float!(same, op, T => plan.write::<T, T>(op, dst, a, b, alpha, accumulate)),
    }
}

/// Checks that `dst` has the product's shape, and is contiguous or a range of the columns of a matrix. The dtype of
/// `dst` must be `operand_dtype`; if `operand_dtype` is f16 or bf16, the dtype may also be f32.
pub(crate) fn check_destination(op: &'static str, plan: &Plan, dst: &Raw, operand_dtype: DType) -> Result<()> {
    if dst.dims() != plan.dims.as_slice() {
        let message = format!("found a destination of shape {:?}, expected {:?}", dst.dims(), plan.dims);
        return Err(Error::shape(op, message));
    }
    // A range of columns needs a result (m, n). The product of a batch of matrices and a vector also has two dimensions,
    // but they are (matrices, rows). The plan then has the batch dimension in `batch`, or has merged it with m, which
    // is then matrices * rows and not the first dimension. (If each matrix has one row, m is the first dimension. Then
    // the result (matrices, 1) is a matrix of one column, so it may be a range of columns.)
    let is_matrix = plan.batch.is_empty() && plan.m == dst.dims().first().copied().unwrap_or(1);
    let is_columns = matches!(*dst.stride(), [row_stride, 1] if row_stride >= plan.n && is_matrix);
    if !dst.is_contiguous() && !is_columns {
        let expected = "expected a contiguous one, or columns of a contiguous matrix";
        let message = format!("found a destination with strides {:?}, {expected}", dst.stride());
        return Err(Error::shape(op, message));
    }
    check_result_dtype(op, operand_dtype, dst.dtype())
}

/// Checks that the dtype of a product is that of the operands, or f32 if the operands are in f16 or bf16.
pub(crate) fn check_result_dtype(op: &'static str, operand_dtype: DType, result_dtype: DType) -> Result<()> {
    match (operand_dtype, result_dtype) {
        (expected, found) if expected == found => Ok(()),
        (DType::BF16 | DType::F16, DType::F32) => Ok(()),
        (expected, found) => {
            let message = format!(
                "found a result of dtype {} for operands of dtype {}, expected the dtype of the operands, or f32 for \
                 operands of dtype f16 or bf16",
                found.as_str(),
                expected.as_str()
            );
            Err(Error::dtype(op, message))
        }
    }
}

/// Checks that both operands have the same dtype.
fn check_dtypes(op: &'static str, a: &Raw, b: &Raw) -> Result<()> {
    if a.dtype() != b.dtype() {
        let (a, b) = (a.dtype().as_str(), b.dtype().as_str());
        let message = format!("found dtypes {a} and {b}, expected the same; convert one with to()");
        return Err(Error::dtype(op, message));
    }
    Ok(())
}

/// A batch dimension: its size, and the strides of `a`, `b` and the result along it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchAxis {
    pub size: usize,
    pub strides: [usize; 3],
}

/// A product of two tensors: sizes, strides, and the batch.
pub(crate) struct Plan {
    /// Shape of the result.
    pub dims: Dims,
    /// Rows of `a` and the result, with the batch dimensions that are merged with them.
    pub m: usize,
    /// Columns of `b` and the result.
    pub n: usize,
    /// Columns of `a` and rows of `b`.
    pub k: usize,
    /// Distance between neighbouring rows of the result, in elements: `n`, or more if the result is written to a range
    /// of columns.
    pub row_stride: usize,
    /// Strides of `a` along m and k.
    pub a: [usize; 2],
    /// Strides of `b` along k and n.
    pub b: [usize; 2],
    /// The batch dimensions that are not merged with `m` and do not have size 1, outermost first.
    pub batch: SmallVec<[BatchAxis; 4]>,
}

impl Plan {
    /// The product of two tensors by the rules of [`matmul`].
    pub fn of(op: &'static str, a: &Raw, b: &Raw) -> Result<Self> {
        check_dtypes(op, a, b)?;
        Self::new(op, a.layout(), b.layout())
    }

    /// The product of two tensors that is written to `dst`.
    pub fn into(op: &'static str, dst: &Raw, a: &Raw, b: &Raw) -> Result<Self> {
        let mut plan = Self::of(op, a, b)?;
        check_destination(op, &plan, dst, a.dtype())?;
        if !dst.is_contiguous() {
            plan.row_stride = dst.stride()[0];
        }
        Ok(plan)
    }

    fn new(op: &'static str, a: &Layout, b: &Layout) -> Result<Self> {
        let mismatch = || {
            let message = format!(
                "found shapes {:?} and {:?}, expected (..., m, k) and (..., k, n) with batch dimensions that broadcast",
                a.dims(),
                b.dims()
            );
            Error::shape(op, message)
        };
        let (a_batch, [m, k], a_strides) = split(a, Position::Left).ok_or_else(mismatch)?;
        let (b_batch, [b_k, n], b_strides) = split(b, Position::Right).ok_or_else(mismatch)?;
        let mut dims = broadcast_dims(a_batch, b_batch).ok_or_else(mismatch)?;
        if k != b_k {
            return Err(mismatch());
        }
        let mut plan =
            Self { dims: Dims::new(), m, n, k, row_stride: n, a: a_strides, b: b_strides, batch: SmallVec::new() };
        // An operand's stride along batch dimension `i` of the result; 0 if the operand is broadcast along it. The last
        // batch dimensions of operand and result correspond, so an operand may lack the first ones.
        let stride = |layout: &Layout, batch: &[usize], i: usize| match (i + batch.len()).checked_sub(dims.len()) {
            Some(own_index) if batch[own_index] != 1 => layout.stride()[own_index],
            _ => 0,
        };
        // From the innermost batch dimension to the outermost.
        let mut result_stride = m.saturating_mul(n);
        for (i, &size) in dims.iter().enumerate().rev() {
            let strides = [stride(a, a_batch, i), stride(b, b_batch, i), result_stride];
            result_stride = result_stride.saturating_mul(size);
            plan.push_outer(BatchAxis { size, strides });
        }
        plan.batch.reverse();
        if a.dims().len() > 1 {
            dims.push(m);
        }
        if b.dims().len() > 1 {
            dims.push(n);
        }
        plan.dims = dims;
        Ok(plan)
    }

    /// Adds the next outer batch dimension. The dimension is merged with m, the rows of the result, if all inner batch
    /// dimensions are merged, all its indices use the same matrix of `b`, and the rows of `a` at all its indices are
    /// evenly spaced in memory. So a batch of inputs times one weight is a single product.
    fn push_outer(&mut self, axis: BatchAxis) {
        if axis.size == 1 {
            return;
        }
        if self.m == 1 && self.batch.is_empty() && axis.strides[1] == 0 {
            // Each index has one row, so the rows are evenly spaced by the stride of the batch dimension.
            self.m = axis.size;
            self.a[0] = axis.strides[0];
        } else if self.batch.is_empty() && axis.strides[1] == 0 && axis.strides[0] == self.m * self.a[0] {
            self.m *= axis.size;
        } else {
            self.batch.push(axis);
        }
    }

    /// Writes the product to `c`, or adds it to `c` if `accumulate`. `T` is the dtype of the operands, `C` that of the
    /// result.
    ///
    /// # Safety
    /// `a` and `b` start at the first elements of the operands and hold all their elements. `c` is valid for writes of
    /// the whole result, and nothing else reads or writes that memory during the call.
    unsafe fn run<T, C>(&self, a: &[T], b: &[T], c: *mut C, alpha: f64, accumulate: bool)
    where
        T: Elem,
        C: Elem<Acc = T::Acc>,
    {
        let product = Product {
            m: self.m,
            n: self.n,
            k: self.k,
            // `inner` is the stride along k, `outer` the stride along m or n.
            a: Side { ptr: a.as_ptr(), outer: self.a[0], inner: self.a[1] },
            b: Side { ptr: b.as_ptr(), outer: self.b[1], inner: self.b[0] },
            c,
            c_strides: [self.row_stride, 1],
            alpha: Real::from_f64(alpha),
            accumulate,
        };
        let count = self.batch.iter().map(|axis| axis.size).product();
        // SAFETY: the caller guarantees that `c` is writable; candle's layouts guarantee that the offsets and strides
        // of `a` and `b` stay within their storages.
        unsafe {
            // For each product of the batch, the distances of its `a`, `b` and `c` from those of the first.
            product.run(count, |mut index| {
                let mut offsets = [0; 3];
                for axis in self.batch.iter().rev() {
                    let position = index % axis.size;
                    index /= axis.size;
                    for (offset, stride) in offsets.iter_mut().zip(axis.strides) {
                        *offset += position * stride;
                    }
                }
                offsets
            });
        }
    }

    /// Returns the product as a new tensor of `C`.
    fn compute<T, C>(&self, op: &'static str, a: &Raw, b: &Raw, alpha: f64) -> Result<Raw>
    where
        T: Elem,
        C: Elem<Acc = T::Acc>,
    {
        let len = crate::raw::check_allocation(op, &self.dims, C::DTYPE)?;
        read2(op, a, b, |[a, b]| {
            let mut data = Vec::<C>::with_capacity(len);
            // SAFETY: the plan stays within its operands, and writes each of the `len` elements, all within the
            // capacity.
            unsafe {
                self.run::<T, C>(elements(a)?, elements(b)?, data.as_mut_ptr(), alpha, /* accumulate: */ false);
                data.set_len(len);
            }
            Ok((C::to_cpu_storage_owned(data), Shape::from(self.dims.as_slice())))
        })
    }

    /// Writes the product to `dst`, or adds it to `dst` if `accumulate`.
    fn write<T, C>(&self, op: &'static str, dst: &Raw, a: &Raw, b: &Raw, alpha: f64, accumulate: bool) -> Result<()>
    where
        T: Elem,
        C: Elem<Acc = T::Acc>,
    {
        write3(op, dst, a, b, |storage, layout, [a, b]| {
            let start = layout.start_offset();
            // If `dst` is a range of columns: the elements of the larger matrix between the rows of `dst`.
            let skipped = (self.row_stride - self.n) * self.m.saturating_sub(1);
            let len = if layout.shape().elem_count() == 0 { 0 } else { layout.shape().elem_count() + skipped };
            let c = &mut C::slice_mut(storage)?[start..start + len];
            // SAFETY: `c` reaches from the first to the last element of the result, and the plan writes nothing else.
            unsafe { self.run::<T, C>(elements(a)?, elements(b)?, c.as_mut_ptr(), alpha, accumulate) };
            Ok(())
        })
    }
}

/// The position of an operand in a product.
enum Position {
    Left,
    Right,
}

/// The batch dimensions of an operand, then the sizes and the strides of its matrix. A vector is one row on the left,
/// and one column on the right. None for a scalar.
fn split(layout: &Layout, position: Position) -> Option<(&[usize], [usize; 2], [usize; 2])> {
    let (dims, strides) = (layout.dims(), layout.stride());
    match (dims.len(), position) {
        (0, _) => None,
        (1, Position::Left) => Some((&[], [1, dims[0]], [0, strides[0]])),
        (1, Position::Right) => Some((&[], [dims[0], 1], [strides[0], 0])),
        (rank, _) => {
            let (batch, matrix) = dims.split_at(rank - 2);
            Some((batch, [matrix[0], matrix[1]], [strides[rank - 2], strides[rank - 1]]))
        }
    }
}

#[cfg(test)]
mod tests;
