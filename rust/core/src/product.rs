//! Descriptions of matrix products that are computed in one call, and the settings of their precision.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::DType;

use crate::{Raw, Result};

/// The low-rank product `input` · `down` · `up` of an adapted linear map. The tensor that it is added to is given
/// separately. All fields are matrices.
pub struct LowRankTerm {
    /// The input, (rows, inner).
    pub input: Raw,
    /// The first factor, (inner, rank).
    pub down: Raw,
    /// The second factor, (rank, outer).
    pub up: Raw,
    /// `input` · `down` is written here, (rows, rank).
    pub hidden: Raw,
}

/// `alpha` · `a` · `b`, one of several independent products.
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
    /// The product is added to this tensor, as by [`matmul_accumulate`](crate::compute::matmul_accumulate).
    Sum(Raw),
}

impl Product {
    /// Compute this product alone: `product` returns a new result, `accumulate` adds to a tensor.
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

/// The precision of products of f32 matrices on CUDA devices, with torch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// Products are computed in f32.
    Highest,
    /// Products are computed in TF32: factors have a mantissa of 10 bits, sums are in f32. Tensor cores compute such
    /// products several times as fast as products in f32.
    High,
}

static TF32: AtomicBool = AtomicBool::new(false);

/// Choose how products of f32 matrices are computed on CUDA devices from now on; the default is f32. Captured graphs
/// keep the precision that they were recorded with. Other dtypes and the CPU are not affected.
pub fn set_float32_matmul_precision(precision: MatmulPrecision) {
    TF32.store(precision == MatmulPrecision::High, Ordering::Relaxed);
}

/// How products of f32 matrices are computed on CUDA devices.
pub fn float32_matmul_precision() -> MatmulPrecision {
    if TF32.load(Ordering::Relaxed) { MatmulPrecision::High } else { MatmulPrecision::Highest }
}

static W8A8: AtomicBool = AtomicBool::new(false);

/// Chooses whether linear layers with int8 or fp8 weights multiply 8-bit codes (W8A8, see
/// [`w8a8`](crate::quantized::w8a8)) from now on. By default they multiply the values that the weights' codes
/// represent. Captured graphs keep the choice that they were recorded with.
pub fn set_w8a8(enabled: bool) {
    W8A8.store(enabled, Ordering::Relaxed);
}

/// Whether linear layers with int8 or fp8 weights multiply 8-bit codes; see [`set_w8a8`].
pub fn uses_w8a8() -> bool {
    W8A8.load(Ordering::Relaxed)
}

thread_local! {
    static PAIRS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, and splits each f32 operand of its products into a sum of two bf16 numbers. Tensor cores then multiply
/// 16 significant bits of each factor and sum in f32. This applies to the forward passes of convolutions, linear layers
/// and attention with wide heads that this thread queues on a CUDA device. Other operations compute in f32 as usual.
pub fn with_bf16_pairs<R>(work: impl FnOnce() -> R) -> R {
    // Sets the flag back to the value that it had before, even if `work` panics.
    struct Restored(bool);
    impl Drop for Restored {
        fn drop(&mut self) {
            PAIRS.set(self.0);
        }
    }
    let _restored = Restored(PAIRS.replace(true));
    work()
}

/// Whether this thread splits operands of `dtype` as in [`with_bf16_pairs`].
pub fn uses_pairs(dtype: DType) -> bool {
    dtype == DType::F32 && PAIRS.get()
}
