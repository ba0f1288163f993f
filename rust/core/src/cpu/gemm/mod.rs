//! Matrix products on the CPU.
//!
//! Operands are given with their strides, so a transpose is never copied. Elements are converted to the accumulator's
//! type (f32 for f16 and bf16) when operands are packed, or in registers if an f16 or bf16 operand is read in place.
//! Sums stay in the accumulator's type until they are written to the result.
//!
//! The result is split into blocks, which are computed on several threads. For each block, a thread packs the operands
//! and computes tiles of the result in registers by [`kernel`] (Goto and van de Geijn, "Anatomy of high-performance
//! matrix multiplication", 2008). If the result has few columns or rows, the thread reads the large operand in place
//! ([`thin`], [`narrow`]). The indices at which a sum over k is split depend only on the sizes, strides and dtypes of
//! the product, and an element is computed in the same way in any block. So the result does not depend on the number of
//! threads.

pub(crate) mod batch;
mod block;
mod kernel;
mod narrow;
mod pack;
mod thin;

pub use batch::{matmul, matmul_accumulate, product, write_products};

pub(crate) use block::with_scratch;
pub(crate) use kernel::{Broadcast, Run, Target, Tile, TileShape};
pub(crate) use pack::{Along, Side, pack, packed_len};

use block::Product;

use super::{Elem, Real};

/// A matrix in a slice: element (i, j) is `data[i * row_stride + j * col_stride]`. With a row stride of 0 all rows are
/// the same, with a column stride of 0 all columns.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> MatRef<'a, T> {
    /// Creates a matrix with `rows` rows and `cols` columns; strides are in elements.
    ///
    /// # Panics
    /// If an element is beyond the end of `data`.
    pub fn new(data: &'a [T], [rows, cols]: [usize; 2], [row_stride, col_stride]: [usize; 2]) -> Self {
        check_bounds(data.len(), [rows, cols], [row_stride, col_stride]);
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// Creates a row-major matrix without gaps between its rows.
    ///
    /// # Panics
    /// If `data` has fewer than `rows * cols` elements.
    pub fn row_major(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::new(data, [rows, cols], [cols, 1])
    }

    /// Returns the transpose; nothing is copied.
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// A matrix in a mutable slice, with strides as in [`MatRef`]. No two elements of the matrix have the same index in the
/// slice.
#[derive(Debug)]
pub struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> MatMut<'a, T> {
    /// Creates a matrix with `rows` rows and `cols` columns; strides are in elements.
    ///
    /// # Panics
    /// If an element is beyond the end of `data`, or if the strides may give two elements the same index in `data`.
    pub fn new(data: &'a mut [T], [rows, cols]: [usize; 2], [row_stride, col_stride]: [usize; 2]) -> Self {
        check_bounds(data.len(), [rows, cols], [row_stride, col_stride]);
        // True if each row (or column) ends before the next one starts.
        let distinct = |inner_stride: usize, inner_count: usize, outer_stride: usize, outer_count: usize| {
            (inner_count < 2 || inner_stride > 0)
                && (outer_count < 2 || outer_stride > inner_count.saturating_sub(1) * inner_stride)
        };
        assert!(
            rows == 0
                || cols == 0
                || distinct(col_stride, cols, row_stride, rows)
                || distinct(row_stride, rows, col_stride, cols),
            "elements of a {rows} x {cols} destination with strides {row_stride} and {col_stride} may overlap"
        );
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// Creates a row-major matrix without gaps between its rows.
    ///
    /// # Panics
    /// If `data` has fewer than `rows * cols` elements.
    pub fn row_major(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::new(data, [rows, cols], [cols, 1])
    }

    /// Returns the transpose; nothing is copied.
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// Panics if an element of the matrix is beyond the end of a slice of `len` elements.
fn check_bounds(len: usize, [rows, cols]: [usize; 2], [row_stride, col_stride]: [usize; 2]) {
    if rows == 0 || cols == 0 {
        return;
    }
    let last = (rows - 1)
        .checked_mul(row_stride)
        .zip((cols - 1).checked_mul(col_stride))
        .and_then(|(last_row, last_col)| last_row.checked_add(last_col));
    assert!(
        last.is_some_and(|last| last < len),
        "a {rows} x {cols} matrix with strides {row_stride} and {col_stride} does not fit in {len} elements"
    );
}

/// Computes `c = alpha * a * b`, or `c += alpha * a * b` with `accumulate`. Without `accumulate`, `c` is not read.
///
/// `a`, `b` and `c` may have different dtypes with the same type of accumulator. For example, the product of two bf16
/// matrices, or of a bf16 and an f32 matrix, can be added to an f32 matrix. An f16 or bf16 result is rounded once, at
/// the end.
///
/// # Panics
/// If the shapes are not (m, k) for `a`, (k, n) for `b` and (m, n) for `c`.
pub fn gemm<A, B, C>(c: MatMut<'_, C>, a: MatRef<'_, A>, b: MatRef<'_, B>, alpha: f64, accumulate: bool)
where
    A: Elem,
    B: Elem<Acc = A::Acc>,
    C: Elem<Acc = A::Acc>,
{
    assert!(
        a.cols == b.rows && c.rows == a.rows && c.cols == b.cols,
        "gemm: {} x {} times {} x {} does not give {} x {}",
        a.rows,
        a.cols,
        b.rows,
        b.cols,
        c.rows,
        c.cols,
    );
    // Of `a` and `b`, `inner` is the stride along k, over which the product sums; `outer` is the other stride.
    let product = Product {
        m: c.rows,
        n: c.cols,
        k: a.cols,
        a: Side { ptr: a.data.as_ptr(), outer: a.row_stride, inner: a.col_stride },
        b: Side { ptr: b.data.as_ptr(), outer: b.col_stride, inner: b.row_stride },
        c: c.data.as_mut_ptr(),
        c_strides: [c.row_stride, c.col_stride],
        alpha: Real::from_f64(alpha),
        accumulate,
    };
    // A batch of one product, which begins at the first elements of `a`, `b` and `c`.
    // SAFETY: `MatRef::new` and `MatMut::new` have checked that all elements are in their slices and that no two
    // elements of `c` have the same index.
    unsafe { product.run(1, |_| [0; 3]) }
}

#[cfg(test)]
mod tests;
