//! Matrix products by cuBLASLt: chooses an algorithm for each product, and queues the calls.

use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::PoisonError;

use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};

use super::error::driver_error;
use super::gemm_tiles;
use super::gpu::Gpu;
use super::launch::Address;
use super::product_calls::{Arithmetic, Call, DataType, Extras, Key, Layout, Owned};
use super::profile::measured;
use crate::{Error, Result};

/// The name of the operation in error messages about cuBLASLt.
const OP: &str = "linear";

/// The most recommendations to request from cuBLASLt if one tile (the part of the result that a thread block computes)
/// is preferred: the algorithm with this tile need not be the first. cuBLASLt has about eight for a product.
const ALGORITHMS: usize = 8;

/// Return the largest power of two up to 256 that divides an address.
pub(super) const fn alignment(address: Address) -> u32 {
    let zeros = address.trailing_zeros();
    1 << if zeros < 8 { zeros } else { 8 }
}

/// Queue a product y = a b of column-major matrices. `addresses` are those of a, b and y. `extras` has the addresses of
/// the bias, the scales and the addend, if the product has them. Returns false, and queues nothing, if cuBLASLt does
/// not support the product. For [`Arithmetic::Half`], also returns false if no tile is preferred, or if cuBLASLt
/// recommends no algorithm with the preferred tile: the caller then uses cuBLAS, which chooses an algorithm by itself.
///
/// # Safety
/// `addresses` are those of matrices that `key` describes, and those in `extras` are of matrices and vectors of the
/// sizes and types that [`Extras`] describes.
///
/// # Errors
/// [`Error::Device`] if cuBLASLt or the driver reports an error.
pub(super) unsafe fn run(
    op: &'static str,
    gpu: &Gpu,
    key: Key,
    addresses: [Address; 3],
    extras: Extras,
) -> Result<bool> {
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(op, error))?;
    let mut calls = gpu.product_calls().0.lock().unwrap_or_else(PoisonError::into_inner);
    let call = match calls.entry(key) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => entry.insert(find(gpu, &key, extras)?),
    };
    let Some(call) = call else { return Ok(false) };
    // The name has the sizes of the row-major product yᵀ = bᵀ aᵀ, as layers see it.
    let [n, m, k] = key.sizes;
    let name = || format!("linear {m}x{k}x{n} {:?}", key.arithmetic.types()[0]);
    measured(gpu, name, || queue(call, gpu, addresses, extras))?;
    Ok(true)
}

fn check(outcome: std::result::Result<(), result::CublasError>) -> Result<()> {
    outcome.map_err(failed)
}

#[cold]
fn failed(error: result::CublasError) -> Error {
    Error::device(OP, format!("cuBLASLt reports {:?}", error.0))
}

/// Choose the call for a product: with an algorithm that has the preferred tile, or else with the algorithm that
/// cuBLASLt recommends first. None if [`run`] returns false for the product.
fn find(gpu: &Gpu, key: &Key, extras: Extras) -> Result<Option<Call>> {
    let tile = gemm_tiles::preferred(gpu, key);
    // The caller can use cuBLAS instead.
    let is_optional = matches!(key.arithmetic, Arithmetic::Half { .. });
    if is_optional && tile.is_none() {
        return Ok(None);
    }
    let [operand_type, result_type] = key.arithmetic.types();
    let [m, n, k] = key.sizes.map(|size| size as u64);
    // `distance` is that of neighbouring columns, in elements.
    let layout = |kind: DataType, [rows, columns]: [u64; 2], distance: i64| -> Result<Layout> {
        let layout = result::create_matrix_layout(kind, rows, columns, distance).map_err(failed)?;
        Ok(Owned(layout, result::destroy_matrix_layout))
    };
    let [(a_transposed, a_distance), (b_transposed, b_distance)] = key.operands;
    let layouts = [
        layout(operand_type, if a_transposed { [k, m] } else { [m, k] }, a_distance)?,
        layout(operand_type, if b_transposed { [n, k] } else { [k, n] }, b_distance)?,
        layout(result_type, [m, n], key.distance)?,
    ];
    let (compute, factor_type) = key.arithmetic.sums();
    let description = result::create_matmul_desc(compute, factor_type).map_err(failed)?;
    let description = Owned(description, result::destroy_matmul_desc);
    let operation = |is_transposed: bool| if is_transposed { CUBLAS_OP_T } else { CUBLAS_OP_N };
    type Attribute = sys::cublasLtMatmulDescAttributes_t;
    set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(a_transposed))?;
    set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(b_transposed))?;
    if key.arithmetic.has_bias() {
        let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
    }
    if key.arithmetic.has_scales() {
        let mode = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
        // `queue` sets the addresses of the vectors for each call. With scales, the search below needs addresses, too,
        // so the description gets those of this call. A bias without scales needs no address before `queue`.
        set_vectors(&description, extras)?;
    }
    if key.arithmetic.is_fast() {
        // Sums have fewer bits than f32 has.
        set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
    }
    let preference = Owned(result::create_matmul_pref().map_err(failed)?, result::destroy_matmul_pref);
    type Preference = sys::cublasLtMatmulPreferenceAttributes_t;
    let (_, workspace) = gpu.workspace();
    set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
    // If cuBLASLt splits a sum over k, it adds up the parts of the sum in f32 for f16 and bf16, too.
    let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
    let [a, b, y] = key.alignments;
    set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a)?;
    set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b)?;
    set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &y)?;
    set_preference(&preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &y)?;
    let [a, b, y] = layouts.each_ref().map(|layout| layout.0);
    let mut recommended = Vec::<sys::cublasLtMatmulHeuristicResult_t>::with_capacity(ALGORITHMS);
    let (wanted, mut count) = (if tile.is_some() { ALGORITHMS } else { 1 }, 0);
    // `y` stands twice: the addend (cuBLASLt's C) has the layout of the result (D).
    // SAFETY: all descriptions are alive; there is room for the results, of which the first `count` are written.
    let status = unsafe {
        let (handle, to) = (handle(gpu), recommended.as_mut_ptr());
        let (wanted, count) = (wanted as i32, &raw mut count);
        sys::cublasLtMatmulAlgoGetHeuristic(handle, description.0, a, b, y, y, preference.0, wanted, to, count)
    };
    match status {
        // SAFETY: cuBLASLt has written `count` results.
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => unsafe { recommended.set_len(count as usize) },
        sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => return Ok(None),
        status => return Err(failed(result::CublasError(status))),
    }
    let preferred = tile.and_then(|tile| recommended.iter().find(|result| has_tile(&result.algo, tile)));
    let chosen = preferred.or_else(|| recommended.first().filter(|_| !is_optional));
    let algorithm = chosen.map(|result| result.algo);
    Ok(algorithm.map(|algorithm| Call { arithmetic: key.arithmetic, description, layouts, algorithm }))
}

/// Return whether an algorithm has the given tile and does not split the sums over k. A split changes the order of the
/// additions, so the result's bits would differ from those of the algorithm that is used if no tile is preferred.
fn has_tile(algorithm: &sys::cublasLtMatmulAlgo_t, tile: u32) -> bool {
    type Attribute = sys::cublasLtMatmulAlgoConfigAttributes_t;
    let equals = |attribute: Attribute, expected: u32| {
        let (mut value, mut written) = (0u32, 0);
        let to = (&raw mut value).cast();
        // SAFETY: the attributes that are read below have four bytes.
        let status = unsafe {
            sys::cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, to, size_of::<u32>(), &raw mut written)
        };
        status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && value == expected
    };
    let splits = Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM;
    // Both 0 and 1 mean that nothing is split.
    equals(Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID, tile) && (equals(splits, 0) || equals(splits, 1))
}

/// Queue a call with the addresses of the operands, the result and the extras.
fn queue(call: &Call, gpu: &Gpu, [a, b, y]: [Address; 3], extras: Extras) -> Result<()> {
    set_vectors(&call.description, extras)?;
    let [a_layout, b_layout, y_layout] = call.layouts.each_ref().map(|layout| layout.0);
    let (workspace, workspace_size) = gpu.workspace();
    let is_integer = call.arithmetic == Arithmetic::Int8;
    // The factors are alpha = 1 and beta = 0; with an addend, beta is 1, too. Without one, the addend's address is that
    // of y, which is not read.
    let (floats, integers) = ([0f32, 1.0], [0i32, 1]);
    let factor = |is_one: bool| -> *const c_void {
        let i = usize::from(is_one);
        if is_integer { std::ptr::from_ref(&integers[i]).cast() } else { std::ptr::from_ref(&floats[i]).cast() }
    };
    // SAFETY: the layouts describe the operands and the result, whose addresses have the alignment that the algorithm
    // assumes; the work goes to the device's stream, like all work that uses the workspace.
    check(unsafe {
        result::matmul(
            handle(gpu),
            call.description.0,
            factor(true),
            factor(extras.addend.is_some()),
            a as *const c_void,
            a_layout,
            b as *const c_void,
            b_layout,
            extras.addend.unwrap_or(y) as *const c_void,
            y_layout,
            y as *mut c_void,
            y_layout,
            &raw const call.algorithm,
            workspace as *mut c_void,
            workspace_size,
            gpu.stream().cu_stream().cast(),
        )
    })
}

/// Return cuBLAS' handle, which is also valid for cuBLASLt.
fn handle(gpu: &Gpu) -> sys::cublasLtHandle_t {
    (*gpu.blas().handle()).cast()
}

/// Set the addresses of the bias and of the scales, if there are any.
fn set_vectors(description: &Owned<sys::cublasLtMatmulDesc_t>, extras: Extras) -> Result<()> {
    type Attribute = sys::cublasLtMatmulDescAttributes_t;
    if let Some(bias) = extras.bias {
        set_description(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
    }
    if let Some([rows, columns]) = extras.scales {
        set_description(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &rows)?;
        set_description(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &columns)?;
    }
    Ok(())
}

fn set_description<T>(
    description: &Owned<sys::cublasLtMatmulDesc_t>,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<()> {
    // SAFETY: the description is alive, and `value` has the type of the attribute.
    check(unsafe {
        result::set_matmul_desc_attribute(description.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    })
}

fn set_preference<T>(
    preference: &Owned<sys::cublasLtMatmulPreference_t>,
    attribute: sys::cublasLtMatmulPreferenceAttributes_t,
    value: &T,
) -> Result<()> {
    // SAFETY: the preference is alive, and `value` has the type of the attribute.
    check(unsafe {
        result::set_matmul_pref_attribute(preference.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    })
}
