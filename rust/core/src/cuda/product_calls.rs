//! Products by cuBLASLt: how it computes them, and what a device keeps of that.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use rustc_hash::FxHashMap;

use super::error::driver_error;
use super::gpu::Gpu;
use super::launch::Address;
use super::profile::measured;
use crate::product::{MatmulPrecision, float32_matmul_precision};
use crate::{Error, Result};

const OP: &str = "linear";

type DataType = sys::cudaDataType;
type Compute = sys::cublasComputeType_t;

/// The calls found so far, each with the algorithm that cuBLASLt recommends for it. None for what it does not do.
#[derive(Default)]
pub(super) struct ProductCalls(Mutex<FxHashMap<Key, Option<Call>>>);

/// Which numbers are multiplied, and how.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Arithmetic {
    /// Of one floating-point dtype, with a bias that is added where the result is written.
    Bias { dtype: DType, is_tf32: bool },
    /// Two's complement numbers of 8 bits, with sums of 32.
    Int8,
    /// e4m3 numbers, with sums in f32.
    E4m3,
}

impl Arithmetic {
    /// Of the layer whose dtype this is.
    pub(super) fn with_bias(dtype: DType) -> Self {
        let is_tf32 = dtype == DType::F32 && float32_matmul_precision() == MatmulPrecision::High;
        Self::Bias { dtype, is_tf32 }
    }

    const fn has_bias(self) -> bool {
        matches!(self, Self::Bias { .. })
    }

    /// The types of the operands and of the result.
    const fn types(self) -> [DataType; 2] {
        match self {
            Self::Bias { dtype: DType::F16, .. } => [DataType::CUDA_R_16F; 2],
            Self::Bias { dtype: DType::BF16, .. } => [DataType::CUDA_R_16BF; 2],
            Self::Bias { .. } => [DataType::CUDA_R_32F; 2],
            Self::Int8 => [DataType::CUDA_R_8I, DataType::CUDA_R_32I],
            Self::E4m3 => [DataType::CUDA_R_8F_E4M3, DataType::CUDA_R_32F],
        }
    }

    /// How sums are made, and the type of the factor of a product.
    const fn sums(self) -> (Compute, DataType) {
        match self {
            Self::Bias { is_tf32: true, .. } => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, DataType::CUDA_R_32F),
            Self::Int8 => (Compute::CUBLAS_COMPUTE_32I, DataType::CUDA_R_32I),
            Self::Bias { .. } | Self::E4m3 => (Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F),
        }
    }
}

/// What an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) arithmetic: Arithmetic,
    /// m, n, k.
    pub(super) sizes: [usize; 3],
    /// For each operand, in cuBLAS' order: whether it is transposed, and the distance of its columns.
    pub(super) operands: [(bool, i64); 2],
    /// Largest powers of two up to 256 that divide the addresses of the operands, and of result and bias: by [`alignment`].
    pub(super) alignments: [u32; 3],
}

/// A description that cuBLASLt has allocated, and how it is freed.
struct Owned<T: Copy>(T, unsafe fn(T) -> std::result::Result<(), result::CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made by the function that goes with this one, and not used any more. It cannot fail for a valid one.
        let _ = unsafe { self.1(self.0) };
    }
}

type Layout = Owned<sys::cublasLtMatrixLayout_t>;

/// A product that cuBLASLt knows how to compute.
pub(super) struct Call {
    arithmetic: Arithmetic,
    description: Owned<sys::cublasLtMatmulDesc_t>,
    /// Of each operand and of the result.
    layouts: [Layout; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions are memory of the host; a lock is held while they are used.
unsafe impl Send for Call {}

/// The largest power of two up to 256 that divides an address.
pub(super) const fn alignment(address: Address) -> u32 {
    let zeros = address.trailing_zeros();
    1 << if zeros < 8 { zeros } else { 8 }
}

impl ProductCalls {
    /// Queue a product in cuBLAS' order, columns of y = a b: of the addresses of the operands and the result, and of the bias where the
    /// arithmetic has one. False if cuBLASLt does not compute it.
    ///
    /// # Safety
    /// The addresses are those of matrices that `key` describes.
    pub(super) unsafe fn run(
        &self,
        op: &'static str,
        gpu: &Gpu,
        key: Key,
        addresses: [Address; 3],
        bias: Option<Address>,
    ) -> Result<bool> {
        gpu.stream().context().bind_to_thread().map_err(|error| driver_error(op, error))?;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let call = match known.entry(key) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Call::find(gpu, &key)?),
        };
        let Some(call) = call else { return Ok(false) };
        let [n, m, k] = key.sizes;
        let name = || format!("linear {m}x{k}x{n} {:?}", key.arithmetic.types()[0]);
        measured(gpu, name, || call.run(gpu, addresses, bias))?;
        Ok(true)
    }
}

fn check(outcome: std::result::Result<(), result::CublasError>) -> Result<()> {
    outcome.map_err(failed)
}

#[cold]
fn failed(error: result::CublasError) -> Error {
    Error::device(OP, format!("cuBLASLt reports {:?}", error.0))
}

impl Call {
    /// None if cuBLASLt has no algorithm.
    fn find(gpu: &Gpu, key: &Key) -> Result<Option<Self>> {
        let [operand, outcome] = key.arithmetic.types();
        let [m, n, k] = key.sizes.map(|size| size as u64);
        let layout = |kind: DataType, [rows, columns]: [u64; 2], distance: i64| -> Result<Layout> {
            let layout = result::create_matrix_layout(kind, rows, columns, distance).map_err(failed)?;
            Ok(Owned(layout, result::destroy_matrix_layout))
        };
        let [(a_turned, a_distance), (b_turned, b_distance)] = key.operands;
        let layouts = [
            layout(operand, if a_turned { [k, m] } else { [m, k] }, a_distance)?,
            layout(operand, if b_turned { [n, k] } else { [k, n] }, b_distance)?,
            layout(outcome, [m, n], m as i64)?,
        ];
        let (compute, factor) = key.arithmetic.sums();
        let description = result::create_matmul_desc(compute, factor).map_err(failed)?;
        let description = Owned(description, result::destroy_matmul_desc);
        let operation = |turned: bool| if turned { CUBLAS_OP_T } else { CUBLAS_OP_N };
        type Attribute = sys::cublasLtMatmulDescAttributes_t;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(a_turned))?;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(b_turned))?;
        if key.arithmetic.has_bias() {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let preference = Owned(result::create_matmul_pref().map_err(failed)?, result::destroy_matmul_pref);
        type Preference = sys::cublasLtMatmulPreferenceAttributes_t;
        let (_, workspace) = gpu.workspace();
        set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
        // Sums of products in f16 and bf16 stay in f32 also where they are cut in parts.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        let [a, b, y] = key.alignments;
        set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a)?;
        set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b)?;
        set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &y)?;
        set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &y)?;
        let [a, b, y] = layouts.each_ref().map(|layout| layout.0);
        // SAFETY: all descriptions are alive.
        let found = unsafe { result::get_matmul_algo_heuristic(handle(gpu), description.0, a, b, y, y, preference.0) };
        match found {
            Ok(found) => Ok(Some(Self { arithmetic: key.arithmetic, description, layouts, algorithm: found.algo })),
            Err(error) if error.0 == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Queue it for the addresses of the operands and the result, and of the bias where there is one.
    fn run(&self, gpu: &Gpu, [a, b, y]: [Address; 3], bias: Option<Address>) -> Result<()> {
        if let Some(bias) = bias {
            let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            set_description(&self.description, pointer, &bias)?;
        }
        let [a_layout, b_layout, y_layout] = self.layouts.each_ref().map(|layout| layout.0);
        let (workspace, workspace_size) = gpu.workspace();
        let is_integer = self.arithmetic == Arithmetic::Int8;
        // One and zero.
        let (floats, integers) = ([1f32, 0.0], [1i32, 0]);
        let scalar = |i: usize| -> *const c_void {
            if is_integer { std::ptr::from_ref(&integers[i]).cast() } else { std::ptr::from_ref(&floats[i]).cast() }
        };
        // SAFETY: the layouts describe the operands and the result, whose addresses have the alignment that the algorithm was found
        // for; the work goes to the device's stream, as all that uses the workspace.
        check(unsafe {
            result::matmul(
                handle(gpu),
                self.description.0,
                scalar(0),
                scalar(1),
                a as *const c_void,
                a_layout,
                b as *const c_void,
                b_layout,
                y as *const c_void,
                y_layout,
                y as *mut c_void,
                y_layout,
                &raw const self.algorithm,
                workspace as *mut c_void,
                workspace_size,
                gpu.stream().cu_stream().cast(),
            )
        })
    }
}

/// cuBLAS' handle, which cuBLASLt takes as its own.
fn handle(gpu: &Gpu) -> sys::cublasLtHandle_t {
    (*gpu.blas().handle()).cast()
}

fn set_description<T>(
    description: &Owned<sys::cublasLtMatmulDesc_t>,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<()> {
    // SAFETY: the description is alive, and the value of the attribute's type.
    check(unsafe {
        result::set_matmul_desc_attribute(description.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    })
}

fn set_preference<T>(
    preference: &Owned<sys::cublasLtMatmulPreference_t>,
    attribute: sys::cublasLtMatmulPreferenceAttributes_t,
    value: &T,
) -> Result<()> {
    // SAFETY: the preference is alive, and the value of the attribute's type.
    check(unsafe {
        result::set_matmul_pref_attribute(preference.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    })
}
