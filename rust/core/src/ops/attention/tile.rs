//! Matrices of the heads: where they lie, products of their blocks, rows of results.

use std::mem::MaybeUninit;

use candle_core::{DType, Layout};
use smallvec::SmallVec;

use crate::cpu::pool::SharedMut;
use crate::cpu::{self, Elem, Real};
use crate::raw::{Raw, from_vec};
use crate::Result;

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, R> {
    /// From the first element on.
    pub data: &'a [R],
    /// Distance of the elements of a column.
    pub row_stride: usize,
    /// Distance of the elements of a row.
    pub column_stride: usize,
}

impl<'a, R> Matrix<'a, R> {
    /// Rows of `width` elements one after another.
    pub fn dense(data: &'a [R], width: usize) -> Self {
        Self { data, row_stride: width, column_stride: 1 }
    }

    pub fn transposed(self) -> Self {
        Self { data: self.data, row_stride: self.column_stride, column_stride: self.row_stride }
    }

    /// Whether all elements of the first `rows` rows and `columns` columns are there.
    fn covers(&self, rows: usize, columns: usize) -> bool {
        rows == 0
            || columns == 0
            || (rows - 1) * self.row_stride + (columns - 1) * self.column_stride < self.data.len()
    }
}

/// The last two dimensions of a tensor, for each index of the others.
pub(super) struct Matrices<'a, R> {
    data: &'a [R],
    offsets: Vec<usize>,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, R> Matrices<'a, R> {
    /// `data` starts at the first element of `layout`, which has two dimensions at least.
    pub fn new(data: &'a [R], layout: &Layout) -> Self {
        let rank = layout.dims().len();
        let mut offsets = vec![0];
        for (&size, &stride) in layout.dims()[..rank - 2].iter().zip(layout.stride()) {
            offsets = offsets.iter().flat_map(|o| (0..size).map(move |i| o + i * stride)).collect();
        }
        Self { data, offsets, row_stride: layout.stride()[rank - 2], column_stride: layout.stride()[rank - 1] }
    }

    /// The matrix of one head from row `first_row` on.
    pub fn from_row(&self, head: usize, first_row: usize) -> Matrix<'a, R> {
        Matrix {
            data: &self.data[self.offsets[head] + first_row * self.row_stride..],
            row_stride: self.row_stride,
            column_stride: self.column_stride,
        }
    }
}

/// `out = scale a b`, or `out += scale a b` if `add`, on this thread: `a (m, k)`, `b (k, n)`, `out` of rows of `n` elements.
pub(super) fn multiply<R: Real>(
    [m, n, k]: [usize; 3],
    a: Matrix<'_, R>,
    b: Matrix<'_, R>,
    scale: f64,
    out: &mut [R],
    add: bool,
) {
    assert!(a.covers(m, k) && b.covers(k, n) && m * n <= out.len());
    // SAFETY: by the assertion every element that the product touches lies within its slice; `out` overlaps no operand, as
    // it is borrowed mutably. Strides fit in isize as they are distances in slices.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            add,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            R::ONE,
            R::from_f64(scale),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// A new tensor `(batch..., heads, rows, width)` that is written row by row. It lies in memory as another tensor does:
/// either head after head, or with the heads of a position next to one another.
pub(super) struct Output<T> {
    buffer: Vec<T>,
    dims: SmallVec<[usize; 4]>,
    /// Heads that lie side by side: all, or 1.
    side_by_side: usize,
}

impl<T: Elem> Output<T> {
    /// A tensor with the dimensions of `like` but for the last, in its order.
    pub fn like(like: &Raw, width: usize) -> Self {
        let mut dims: SmallVec<[usize; 4]> = like.dims().into();
        let rank = dims.len();
        dims[rank - 1] = width;
        let side_by_side = if heads_lie_inside(like) { dims[rank - 3] } else { 1 };
        Self { buffer: Vec::with_capacity(dims.iter().product()), dims, side_by_side }
    }

    /// The rows, to be written.
    pub fn rows(&mut self) -> Rows<'_, T> {
        let (rows, width) = (self.dims[self.dims.len() - 2], self.dims[self.dims.len() - 1]);
        let total = self.dims.iter().product();
        let elements = SharedMut::new(&mut self.buffer.spare_capacity_mut()[..total]);
        Rows { elements, rows, width, side_by_side: self.side_by_side }
    }

    /// The tensor.
    ///
    /// # Safety
    /// All rows must have been written.
    pub unsafe fn finish(mut self) -> Result<Raw> {
        // SAFETY: within the capacity, and the caller has initialised all of it.
        unsafe { self.buffer.set_len(self.dims.iter().product()) };
        if self.side_by_side == 1 {
            return Ok(from_vec(self.buffer, self.dims.as_slice()));
        }
        let rank = self.dims.len();
        self.dims.swap(rank - 3, rank - 2);
        Ok(from_vec(self.buffer, self.dims.as_slice()).transpose(rank - 3, rank - 2)?)
    }
}

/// Whether the heads of a position lie next to one another, as after splitting the last dimension.
pub(in crate::ops) fn heads_lie_inside(raw: &Raw) -> bool {
    let rank = raw.rank();
    rank > 2 && raw.dims()[rank - 2] > 1 && raw.stride()[rank - 3] < raw.stride()[rank - 2]
}

/// The rows of an [`Output`].
pub(super) struct Rows<'a, T> {
    elements: SharedMut<'a, MaybeUninit<T>>,
    rows: usize,
    width: usize,
    side_by_side: usize,
}

impl<T: Elem> Rows<'_, T> {
    /// Write rows of `head` from `first_row` on.
    ///
    /// # Safety
    /// No row may be written by two threads at a time.
    pub unsafe fn write(&self, head: usize, first_row: usize, values: &[T::Acc]) {
        let (outer, inner) = (head / self.side_by_side, head % self.side_by_side);
        for (row, values) in values.chunks_exact(self.width.max(1)).enumerate() {
            let start = ((outer * self.rows + first_row + row) * self.side_by_side + inner) * self.width;
            // SAFETY: by the caller's promise.
            let out = unsafe { self.elements.slice(start..start + self.width) };
            cpu::dispatch(
                #[inline(always)]
                || {
                    for (o, x) in out.iter_mut().zip(values) {
                        o.write(T::from_acc(*x));
                    }
                },
            );
        }
    }
}

/// The tensor in the dtype that scores are computed in, as it lies in memory.
pub(super) fn to_compute(raw: &Raw, dtype: DType) -> Result<Raw> {
    if raw.dtype() == dtype {
        return Ok(raw.clone());
    }
    if !heads_lie_inside(raw) {
        return cpu::cast(raw, dtype);
    }
    let rank = raw.rank();
    Ok(cpu::cast(&raw.transpose(rank - 3, rank - 2)?, dtype)?.transpose(rank - 3, rank - 2)?)
}
