//! For attention on the CPU, the matrices of the heads in memory: [`Matrices`] reads operands, and [`Output`] takes
//! results. `head` is always the index of a head among the heads of all samples of the batch.

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{CpuStorage, Layout};
use smallvec::SmallVec;

use crate::Result;
use crate::cpu::pool::SharedMut;
use crate::cpu::{self, Elem, MatRef, elements};
use crate::raw::{Raw, from_vec, heads_are_adjacent};

/// The matrices of a tensor's last two dimensions, one for each index of its other dimensions.
pub(super) struct Matrices<'a, T> {
    /// The elements from the first element of the tensor on.
    data: &'a [T],
    /// The position in `data` of each matrix's first element.
    offsets: Vec<usize>,
    columns: usize,
    /// Distances between neighbouring rows and between neighbouring columns, in elements.
    strides: [usize; 2],
}

impl<'a, T: Elem> Matrices<'a, T> {
    /// The matrices of an operand of two dimensions or more.
    pub fn new(operand: &(&'a CpuStorage, &'a Layout)) -> candle_core::Result<Self> {
        let layout = operand.1;
        let rank = layout.dims().len();
        let mut offsets = vec![0];
        for (&size, &stride) in layout.dims()[..rank - 2].iter().zip(layout.stride()) {
            offsets = offsets.iter().flat_map(|o| (0..size).map(move |i| o + i * stride)).collect();
        }
        let strides = [layout.stride()[rank - 2], layout.stride()[rank - 1]];
        Ok(Self { data: elements(*operand)?, offsets, columns: layout.dims()[rank - 1], strides })
    }

    /// The rows `rows` of the matrix of a head.
    pub fn rows(&self, head: usize, rows: &Range<usize>) -> MatRef<'a, T> {
        let start = self.offsets[head] + rows.start * self.strides[0];
        MatRef::new(&self.data[start..], [rows.len(), self.columns], self.strides)
    }

    /// The elements of a row, which must be adjacent in memory. If the row repeats one element (stride 0), returns a
    /// slice of this one element.
    pub fn row(&self, head: usize, row: usize) -> &'a [T] {
        let start = self.offsets[head] + row * self.strides[0];
        let len = if self.strides[1] == 0 { 1 } else { self.columns };
        debug_assert!(len < 2 || self.strides[1] == 1);
        &self.data[start..start + len]
    }
}

/// A new tensor `(batch..., heads, rows, width)` that is written row by row. In memory, its order is either
/// `(batch..., heads, rows, width)` or `(batch..., rows, heads, width)`.
pub(super) struct Output<T> {
    buffer: Vec<T>,
    dims: SmallVec<[usize; 4]>,
    /// How many heads are adjacent in memory at each row: all heads of a sample in the order
    /// `(batch..., rows, heads, width)`, otherwise 1.
    side_by_side: usize,
}

impl<T: Elem> Output<T> {
    /// A tensor with the dimensions of `like` except for the last, in the memory order of `like`.
    pub fn like(like: &Raw, width: usize) -> Self {
        let mut dims: SmallVec<[usize; 4]> = like.dims().into();
        let rank = dims.len();
        dims[rank - 1] = width;
        let side_by_side = if heads_are_adjacent(like) { dims[rank - 3] } else { 1 };
        Self { buffer: Vec::with_capacity(dims.iter().product()), dims, side_by_side }
    }

    /// Access to the rows, for writing them.
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
        // SAFETY: the length is within the capacity, and the caller has initialised all elements.
        unsafe { self.buffer.set_len(self.dims.iter().product()) };
        if self.side_by_side == 1 {
            return Ok(from_vec(self.buffer, self.dims.as_slice()));
        }
        let rank = self.dims.len();
        self.dims.swap(rank - 3, rank - 2);
        Ok(from_vec(self.buffer, self.dims.as_slice()).transpose(rank - 3, rank - 2)?)
    }
}

/// The rows of an [`Output`].
pub(super) struct Rows<'a, T> {
    elements: SharedMut<'a, MaybeUninit<T>>,
    rows: usize,
    width: usize,
    side_by_side: usize,
}

impl<T: Elem> Rows<'_, T> {
    /// Writes `values`, one row after another, to the rows of `head` from `first_row` on.
    ///
    /// # Safety
    /// Two threads must not write the same row at the same time.
    pub unsafe fn write(&self, head: usize, first_row: usize, values: &[T::Acc]) {
        // The sample, and the head of this sample, if heads are adjacent; otherwise the head and 0.
        let (outer, inner) = (head / self.side_by_side, head % self.side_by_side);
        // With a width of 0, `values` is empty. `max(1)` is there because `chunks_exact` panics at 0.
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
