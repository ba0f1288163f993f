//! Products with a bias by cuBLASLt, which adds it where it writes the result.

use std::ffi::c_void;
use std::sync::PoisonError;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};

use super::copy::contiguous;
use super::error::driver_error;
use super::gemm::Matrix;
use super::gpu::Gpu;
use super::launch::{Address, address, empty, same_device};
use super::product_calls::{Call, Key, Layout, Owned};
use super::profile::measured;
use crate::cpu::gemm::batch::Plan;
use crate::product::{MatmulPrecision, float32_matmul_precision};
use crate::{Error, Raw, Result};

const OP: &str = "linear";

/// y (m, n) = x (m, k) times w (k, n) plus `bias` (n) in each row; nothing if cuBLASLt does not take the operands.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`] and [`Error::Device`] if the operands do not fit.
pub fn product_with_bias(op: &'static str, x: &Raw, w: &Raw, bias: &Raw) -> Result<Option<Raw>> {
    same_device(op, x, &[w, bias])?;
    let plan = Plan::of(op, x, w)?;
    let matrices = (Matrix::transpose_of([plan.m, plan.k], plan.a), Matrix::transpose_of([plan.k, plan.n], plan.b));
    let (Some(left), Some(right)) = matrices else { return Ok(None) };
    if !matches!(x.dtype(), DType::F16 | DType::BF16 | DType::F32) || plan.m * plan.n * plan.k == 0 {
        return Ok(None);
    }
    let gpu = Gpu::of(op, x)?;
    let bias = contiguous(bias)?;
    let y = empty(op, gpu, &plan.dims, x.dtype())?;
    let [a, b, to, bias_at] = [address(op, w)?, address(op, x)?, address(op, &y)?, address(op, &bias)?];
    let operand = |matrix: Matrix| (matrix.operation == CUBLAS_OP_T, matrix.distance);
    let key = Key {
        dtype: x.dtype(),
        is_tf32: x.dtype() == DType::F32 && float32_matmul_precision() == MatmulPrecision::High,
        sizes: [plan.n, plan.m, plan.k],
        operands: [operand(right), operand(left)],
        alignments: [a, b, to | bias_at].map(|address| 1 << address.trailing_zeros().min(8)),
    };
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(op, error))?;
    let mut known = gpu.product_calls().0.lock().unwrap_or_else(PoisonError::into_inner);
    let call = match known.entry(key) {
        std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Call::find(gpu, &key)?),
    };
    let Some(call) = call else { return Ok(None) };
    let name = || format!("linear {}x{}x{} {}", plan.m, plan.k, plan.n, x.dtype().as_str());
    measured(gpu, name, || call.run(gpu, [a, b, to, bias_at]))?;
    Ok(Some(y))
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
        let dtype = match key.dtype {
            DType::F16 => sys::cudaDataType::CUDA_R_16F,
            DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
            _ => sys::cudaDataType::CUDA_R_32F,
        };
        let [m, n, k] = key.sizes.map(|size| size as u64);
        let layout = |[rows, columns]: [u64; 2], distance: i64| -> Result<Layout> {
            let layout = result::create_matrix_layout(dtype, rows, columns, distance).map_err(failed)?;
            Ok(Owned(layout, result::destroy_matrix_layout))
        };
        let [(a_turned, a_distance), (b_turned, b_distance)] = key.operands;
        let layouts = [
            layout(if a_turned { [k, m] } else { [m, k] }, a_distance)?,
            layout(if b_turned { [n, k] } else { [k, n] }, b_distance)?,
            layout([m, n], m as i64)?,
        ];
        type Compute = sys::cublasComputeType_t;
        let compute = if key.is_tf32 { Compute::CUBLAS_COMPUTE_32F_FAST_TF32 } else { Compute::CUBLAS_COMPUTE_32F };
        let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(failed)?;
        let description = Owned(description, result::destroy_matmul_desc);
        let operation = |turned: bool| if turned { CUBLAS_OP_T } else { CUBLAS_OP_N };
        type Attribute = sys::cublasLtMatmulDescAttributes_t;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(a_turned))?;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(b_turned))?;
        let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
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
            Ok(found) => Ok(Some(Self { description, layouts, algorithm: found.algo })),
            Err(error) if error.0 == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Queue it for the addresses of the operands, the result and the bias.
    fn run(&self, gpu: &Gpu, [a, b, y, bias]: [Address; 4]) -> Result<()> {
        let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        set_description(&self.description, pointer, &bias)?;
        let [a_layout, b_layout, y_layout] = self.layouts.each_ref().map(|layout| layout.0);
        let (workspace, workspace_size) = gpu.workspace();
        let scalar = |number: &f32| -> *const c_void { std::ptr::from_ref(number).cast() };
        // SAFETY: the layouts describe the operands and the result, whose addresses have the alignment that the algorithm was found
        // for; the work goes to the device's stream, as all that uses the workspace.
        check(unsafe {
            result::matmul(
                handle(gpu),
                self.description.0,
                scalar(&1.0),
                scalar(&0.0),
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
