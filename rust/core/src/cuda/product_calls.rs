//! How cuBLASLt computes products with a bias: what a device keeps of them.

use std::sync::Mutex;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use rustc_hash::FxHashMap;

/// The calls found so far, each with the algorithm that cuBLASLt recommends for it. None for what it does not do.
#[derive(Default)]
pub(super) struct ProductCalls(pub(super) Mutex<FxHashMap<Key, Option<Call>>>);

/// What an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) dtype: DType,
    pub(super) is_tf32: bool,
    /// m, n, k.
    pub(super) sizes: [usize; 3],
    /// Of the operands in cuBLAS' order: whether they lie transposed, and the distance of their columns.
    pub(super) operands: [(bool, i64); 2],
    /// Largest powers of two up to 256 that divide the addresses of the operands, and of result and bias.
    pub(super) alignments: [u32; 3],
}

/// A description that cuBLASLt has allocated, and how it is freed.
pub(super) struct Owned<T: Copy>(pub(super) T, pub(super) unsafe fn(T) -> Result<(), result::CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made by the function that goes with this one, and not used any more. It cannot fail for a valid one.
        let _ = unsafe { self.1(self.0) };
    }
}

pub(super) type Layout = Owned<sys::cublasLtMatrixLayout_t>;

/// A product that cuBLASLt knows how to compute.
pub(super) struct Call {
    pub(super) description: Owned<sys::cublasLtMatmulDesc_t>,
    /// Of the operands and of the result.
    pub(super) layouts: [Layout; 3],
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions are memory of the host; a lock is held while they are used.
unsafe impl Send for Call {}
