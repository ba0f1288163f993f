//! Matrix products that cuBLASLt computes: the calls for them, which a device caches, one for each [`Key`].

use std::sync::Mutex;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use rustc_hash::FxHashMap;

use super::launch::Address;
use crate::product::{MatmulPrecision, float32_matmul_precision};

pub(super) type DataType = sys::cudaDataType;
type Compute = sys::cublasComputeType_t;

/// The calls found so far, each with its algorithm. `None` stands for a product that cuBLASLt does not compute, because
/// it does not support the product or cuBLAS is to compute it.
#[derive(Default)]
pub(super) struct ProductCalls(pub(super) Mutex<FxHashMap<Key, Option<Call>>>);

/// The types of the numbers that are multiplied, and of their sums.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Arithmetic {
    /// Operands and result of one half-precision dtype, with sums in f32 and without a bias.
    Half { dtype: DType },
    /// Operands and result of one floating-point dtype, with a bias that is added as the result is written.
    Bias { dtype: DType, is_tf32: bool },
    /// 8-bit integers, with 32-bit sums.
    Int8,
    /// e4m3 numbers (floats of 8 bits), with sums in f32, which are the result.
    E4m3,
    /// e4m3 numbers, with sums that are multiplied by a scale for each row and for each column. `dtype` is that of the
    /// results and of the bias, if there is one: f16 or bf16. `is_fast`: sums have about 14 significant bits instead of
    /// the 24 of f32.
    ScaledE4m3 { dtype: DType, has_bias: bool, is_fast: bool },
}

impl Arithmetic {
    /// The arithmetic of a layer with a bias, whose operands and bias have this dtype.
    pub(super) fn with_bias(dtype: DType) -> Self {
        let is_tf32 = dtype == DType::F32 && float32_matmul_precision() == MatmulPrecision::High;
        Self::Bias { dtype, is_tf32 }
    }

    pub(super) const fn has_bias(self) -> bool {
        matches!(self, Self::Bias { .. } | Self::ScaledE4m3 { has_bias: true, .. })
    }

    /// Whether the results are multiplied by a scale for each row and for each column.
    pub(super) const fn has_scales(self) -> bool {
        matches!(self, Self::ScaledE4m3 { .. })
    }

    /// Whether the operands are f16 or bf16.
    pub(super) const fn is_half(self) -> bool {
        matches!(self, Self::Half { .. } | Self::Bias { dtype: DType::F16 | DType::BF16, .. })
    }

    /// Whether sums have fewer bits than those of f32.
    pub(super) const fn is_fast(self) -> bool {
        matches!(self, Self::ScaledE4m3 { is_fast: true, .. })
    }

    /// The types of the operands and of the result.
    pub(super) const fn types(self) -> [DataType; 2] {
        match self {
            Self::Half { dtype } | Self::Bias { dtype, .. } => [data_type(dtype); 2],
            Self::Int8 => [DataType::CUDA_R_8I, DataType::CUDA_R_32I],
            Self::E4m3 => [DataType::CUDA_R_8F_E4M3, DataType::CUDA_R_32F],
            Self::ScaledE4m3 { dtype, .. } => [DataType::CUDA_R_8F_E4M3, data_type(dtype)],
        }
    }

    /// The arithmetic of sums, and the type of the number by which a whole product is multiplied (cuBLAS' alpha).
    pub(super) const fn sums(self) -> (Compute, DataType) {
        match self {
            Self::Bias { is_tf32: true, .. } => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, DataType::CUDA_R_32F),
            Self::Int8 => (Compute::CUBLAS_COMPUTE_32I, DataType::CUDA_R_32I),
            Self::Half { .. } | Self::Bias { .. } | Self::E4m3 | Self::ScaledE4m3 { .. } => {
                (Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F)
            }
        }
    }
}

/// The type of f16, bf16 or f32 numbers.
const fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::F16 => DataType::CUDA_R_16F,
        DType::BF16 => DataType::CUDA_R_16BF,
        _ => DataType::CUDA_R_32F,
    }
}

/// The properties of a product of column-major matrices on which the choice of an algorithm depends.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) arithmetic: Arithmetic,
    /// The rows m and the columns n of the result, and the length k of its sums.
    pub(super) sizes: [usize; 3],
    /// For each operand, A and then B: whether it is transposed, and the distance in elements between its columns as
    /// they are stored (the leading dimension).
    pub(super) operands: [(bool, i64); 2],
    /// The distance in elements between the columns of the result.
    pub(super) distance: i64,
    /// For each operand, the largest power of two up to 256 that divides its address; then the largest such power that
    /// divides the addresses of the result, the bias and the addend.
    pub(super) alignments: [u32; 3],
}

/// The addresses of what a product reads besides its operands.
#[derive(Clone, Copy, Default)]
pub(super) struct Extras {
    /// A matrix with the type and the layout of the result; the product is added to it.
    pub(super) addend: Option<Address>,
    /// A vector with a number for each row of the result; the number is added to the elements of the row.
    pub(super) bias: Option<Address>,
    /// Two f32 vectors: the numbers by which the rows of the result are multiplied, and those by which its columns are.
    pub(super) scales: Option<[Address; 2]>,
}

/// A description that cuBLASLt has allocated, and the function that frees it.
pub(super) struct Owned<T: Copy>(pub(super) T, pub(super) unsafe fn(T) -> Result<(), result::CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the cuBLASLt function that belongs to `self.1` has made the description, which is not used any more.
        // Freeing a valid description cannot fail.
        let _ = unsafe { self.1(self.0) };
    }
}

pub(super) type Layout = Owned<sys::cublasLtMatrixLayout_t>;

/// A product that cuBLASLt can compute: its descriptions, and the algorithm.
pub(super) struct Call {
    pub(super) arithmetic: Arithmetic,
    pub(super) description: Owned<sys::cublasLtMatmulDesc_t>,
    /// The layouts of the operands and of the result.
    pub(super) layouts: [Layout; 3],
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions are memory of the host, which any thread may use. A thread that uses a call holds the lock of
// `ProductCalls`.
unsafe impl Send for Call {}
