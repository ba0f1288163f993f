//! Products of matrices that are asked for together, and how exact they are to be.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::DType;

use crate::{Raw, Result};

/// A low-rank product of an adapted linear map, without what it is added to; all matrices.
pub struct LowRankTerm {
    /// (rows, inner).
    pub input: Raw,
    /// (inner, rank).
    pub down: Raw,
    /// (rank, outer).
    pub up: Raw,
    /// (rows, rank), written.
    pub hidden: Raw,
}

/// One of many products that are independent of one another.
pub struct Product {
    /// The left operand.
    pub a: Raw,
    /// The right operand.
    pub b: Raw,
    /// The factor of the product.
    pub alpha: f64,
    /// The destination of the result.
    pub to: Destination,
}

/// The destination of a product.
pub enum Destination {
    /// A new tensor of this dtype, as by [`product`](crate::compute::product).
    New(DType),
    /// It is added to this tensor, as by [`matmul_accumulate`](crate::compute::matmul_accumulate).
    Sum(Raw),
}

impl Product {
    /// This one by itself: `product` gives a new result, `accumulate` adds to one.
    pub(crate) fn run(
        &self,
        product: impl FnOnce(&Raw, &Raw, f64, DType) -> Result<Raw>,
        accumulate: impl FnOnce(&Raw, &Raw, &Raw, f64) -> Result<()>,
    ) -> Result<Raw> {
        match &self.to {
            Destination::New(dtype) => product(&self.a, &self.b, self.alpha, *dtype),
            Destination::Sum(sum) => {
                accumulate(sum, &self.a, &self.b, self.alpha)?;
                Ok(sum.clone())
            }
        }
    }
}

/// How products of f32 matrices are computed on CUDA devices; torch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// In f32.
    Highest,
    /// In TF32, whose factors have a mantissa of 10 bits, with sums in f32: several times as fast on tensor cores.
    High,
}

static TF32: AtomicBool = AtomicBool::new(false);

/// Choose how products of f32 matrices are computed on CUDA devices from now on; in f32 unless this is called. Graphs
/// that are captured keep their choice. It affects neither other dtypes nor the CPU.
pub fn set_float32_matmul_precision(precision: MatmulPrecision) {
    TF32.store(precision == MatmulPrecision::High, Ordering::Relaxed);
}

/// How products of f32 matrices are computed on CUDA devices.
pub fn float32_matmul_precision() -> MatmulPrecision {
    if TF32.load(Ordering::Relaxed) { MatmulPrecision::High } else { MatmulPrecision::Highest }
}

thread_local! {
    static PAIRS: Cell<bool> = const { Cell::new(false) };
}

/// Do the work of a function with f32 as sums of two bf16 numbers where this thread queues forward passes of convolutions, linear
/// layers and attention of wide heads on a CUDA device: on tensor cores, with 16 bits of each factor and sums in f32. Elsewhere f32
/// stays what it is.
pub fn with_bf16_pairs<R>(work: impl FnOnce() -> R) -> R {
    struct Restored(bool);
    impl Drop for Restored {
        fn drop(&mut self) {
            PAIRS.set(self.0);
        }
    }
    let _restored = Restored(PAIRS.replace(true));
    work()
}

/// Whether this thread multiplies tensors of `dtype` as [`with_bf16_pairs`] says.
pub fn uses_pairs(dtype: DType) -> bool {
    dtype == DType::F32 && PAIRS.get()
}
