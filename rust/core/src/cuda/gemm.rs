//! Matrix products by cuBLAS.
//!
//! cuBLAS takes and writes column-major matrices. A row-major matrix is its own transpose in column-major order, so
//! y = a b is computed as yᵀ = bᵀ aᵀ. An operand is copied only if neither dimension has stride 1, or if its rows or
//! columns overlap, as those of a broadcast matrix do.
//!
//! If the destination shares its storage with an operand, these functions return [`Error::Argument`], where those of
//! the CPU engine return [`Error::Candle`].

use std::ffi::c_void;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t as Compute, cublasGemmAlgo_t as Algorithm, cublasGemmStridedBatchedEx,
    cublasOperation_t as Operation, cudaDataType as Type,
};

use super::copy::contiguous;
use super::error::{check_blas, driver_error};
use super::gemm_lt::{self, alignment};
use super::gemm_tiles::preferred;
use super::gpu::Gpu;
use super::launch::{Address, address, empty, same_device};
use super::product_calls::{Arithmetic, Extras, Key};
use super::profile::measured;
use crate::cpu::gemm::batch::{Plan, check_result_dtype};
use crate::product::{MatmulPrecision, float32_matmul_precision};
use crate::raw::storage_identity;
use crate::{Error, Raw, Result};

/// Returns the matrix product of `a (..., m, k)` and `b (..., k, n)`: does on a CUDA device what
/// [`cpu::matmul`](crate::cpu::matmul) does on the CPU.
pub fn matmul(a: &Raw, b: &Raw) -> Result<Raw> {
    product(a, b, 1.0, a.dtype())
}

/// Returns `alpha` times the matrix product of `a` and `b`, in `dtype`: does on a CUDA device what
/// [`cpu::product`](crate::cpu::product) does on the CPU.
pub fn product(a: &Raw, b: &Raw, alpha: f64, dtype: DType) -> Result<Raw> {
    const OP: &str = "matmul";
    same_device(OP, a, &[b])?;
    let plan = Plan::of(OP, a, b)?;
    check_result_dtype(OP, a.dtype(), dtype)?;
    let y = empty(OP, Gpu::of(OP, a)?, &plan.dims, dtype)?;
    if y.elem_count() > 0 && plan.k == 0 {
        // Sums over an empty dimension are zeros.
        super::copy::fill(&y, 0.0)?;
        return Ok(y);
    }
    // With `beta` = 0, the product replaces the contents of `y`.
    let beta = 0.0;
    run(OP, &y, a, b, alpha, beta)?;
    Ok(y)
}

/// Adds `alpha` times the matrix product of `a` and `b` to `dst`: does on a CUDA device what
/// [`cpu::matmul_accumulate`](crate::cpu::matmul_accumulate) does on the CPU.
pub fn matmul_accumulate(dst: &Raw, a: &Raw, b: &Raw, alpha: f64) -> Result<()> {
    const OP: &str = "matmul_accumulate";
    same_device(OP, dst, &[a, b])?;
    let plan = Plan::into(OP, dst, a, b)?;
    check_apart(OP, dst, a, b)?;
    // With `beta` = 1, the product is added to `dst`.
    let beta = 1.0;
    if plan.k == 0 { Ok(()) } else { run(OP, dst, a, b, alpha, beta) }
}

/// Checks that `dst` shares its storage with neither operand.
fn check_apart(op: &'static str, dst: &Raw, a: &Raw, b: &Raw) -> Result<()> {
    let storage = storage_identity(dst).0;
    if dst.elem_count() > 0 && [a, b].iter().any(|operand| storage_identity(operand).0 == storage) {
        return Err(Error::argument(op, "the destination and an operand share one storage; copy the operand first"));
    }
    Ok(())
}

/// For each of `terms` (dst, a, b), writes `alpha` times the matrix product of `a` and `b` to `dst`, or adds it if
/// `accumulate`: does on a CUDA device what [`cpu::write_products`](crate::cpu::write_products) does on the CPU.
///
/// If products of low rank are added, the kernels of `low_rank` compute them, provided that they support all matrices.
/// Otherwise one call of cuBLAS computes all products, if these have the same shapes, layouts and dtypes: as one larger
/// product if they share an operand and their other matrices are adjacent in memory, or as a batch if all matrices are
/// evenly spaced. Failing that, each product is a call of cuBLAS.
pub fn write_products(terms: &[[&Raw; 3]], alpha: f64, accumulate: bool) -> Result<()> {
    const OP: &str = "write_products";
    let beta = f64::from(u8::from(accumulate));
    let mut products = Vec::with_capacity(terms.len());
    for &[dst, a, b] in terms {
        same_device(OP, dst, &[a, b])?;
        let plan = Plan::into(OP, dst, a, b)?;
        check_apart(OP, dst, a, b)?;
        let addresses = [address(OP, a)?, address(OP, b)?, address(OP, dst)?];
        products.push(Product { plan, addresses, dtypes: [a, b, dst].map(|x| x.dtype()) });
    }
    if accumulate && super::low_rank::add(terms, alpha)? {
        return Ok(());
    }
    let ([first, ..], Some([dst, a, _])) = (products.as_slice(), terms.first()) else { return Ok(()) };
    let Some(joined) = Joined::of(&products).filter(|_| first.plan.k > 0 && dst.elem_count() > 0) else {
        return terms.iter().try_for_each(|[dst, a, b]| match a.dims().last() {
            // The inner dimension is empty, so the product is zeros.
            Some(0) if accumulate => Ok(()),
            Some(0) => super::copy::fill(dst, 0.0),
            _ => run(OP, dst, a, b, alpha, beta),
        });
    };
    let types = [data_type(OP, a.dtype())?, data_type(OP, dst.dtype())?];
    let Joined { plan, left, right, count, strides } = joined;
    let call = Call { op: OP, gpu: Gpu::of(OP, dst)?, plan: &plan, left, right, types };
    call.run(first.addresses, count, strides, alpha, beta)
}

/// One of several products a b.
struct Product {
    plan: Plan,
    /// Addresses of a, b and the result.
    addresses: [Address; 3],
    /// Dtypes of a, b and the result.
    dtypes: [DType; 3],
}

/// Several products as one call of cuBLAS computes them: a batch of products, or a batch of one larger product.
struct Joined {
    /// One product of the batch.
    plan: Plan,
    /// The layout of a in each product.
    left: Matrix,
    /// The layout of b in each product.
    right: Matrix,
    /// The number of products in the batch.
    count: usize,
    /// The distances in elements from the a, the b and the result of one product of the batch to those of the next.
    strides: [usize; 3],
}

impl Joined {
    /// Joins products whose addresses ascend in even steps. `None` if a product is batched itself, the products have
    /// different shapes, layouts or dtypes, the steps differ, results overlap, or cuBLAS cannot read an operand.
    fn of(products: &[Product]) -> Option<Self> {
        let first = products.first()?;
        // `a` and `b` are the strides [row, column] of the operands, `row_stride` is the distance between rows of the
        // result.
        let Plan { m, n, k, row_stride, a, b, ref batch, ref dims } = first.plan;
        let is_alike = |product: &Product| {
            let other = &product.plan;
            (other.m, other.n, other.k, other.row_stride, other.a, other.b) == (m, n, k, row_stride, a, b)
                && other.batch.is_empty()
                && product.dtypes == first.dtypes
        };
        if !batch.is_empty() || !products.iter().all(is_alike) {
            return None;
        }
        let strides = [spacing(products, 0)?, spacing(products, 1)?, spacing(products, 2)?];
        let plan = |m: usize, n: usize| Plan { dims: dims.clone(), m, n, k, row_stride, a, b, batch: batch.clone() };
        let (count, [stride_a, stride_b, stride_y]) = (products.len(), strides);
        let joined = |plan: Plan, count: usize, strides: [usize; 3]| {
            let left = Matrix::transpose_of([plan.m, plan.k], plan.a)?;
            let right = Matrix::transpose_of([plan.k, plan.n], plan.b)?;
            Some(Self { plan, left, right, count, strides })
        };
        if count == 1 {
            return joined(plan(m, n), 1, [0; 3]);
        }
        // One a, and neighbouring columns of one b: the results are neighbouring columns of one matrix.
        if stride_a == 0 && stride_b == n * b[1] && stride_y == n && row_stride >= count * n {
            return joined(plan(m, count * n), 1, [0; 3]);
        }
        // One b, and neighbouring rows of one a: the results are neighbouring rows of one matrix.
        if stride_b == 0 && stride_a == m * a[0] && stride_y == m * row_stride {
            return joined(plan(count * m, n), 1, [0; 3]);
        }
        // A batch, whose results must not overlap: each begins after the last row of the one before it, or they are
        // columns of one matrix.
        let is_apart = stride_y >= m * row_stride || (stride_y >= n && row_stride >= count * stride_y);
        if is_apart { joined(plan(m, n), count, strides) } else { None }
    }
}

/// Returns the distance in elements between the a (`which` = 0), the b (1) or the results (2) of consecutive products;
/// 0 for a single product. `None` if the distances differ, are negative, or are not a multiple of an element.
fn spacing(products: &[Product], which: usize) -> Option<usize> {
    let at = |product: &Product| product.addresses[which];
    let [first, second, ..] = products else { return Some(0) };
    let distance = at(second).checked_sub(at(first))?;
    let is_even = products.windows(2).all(|pair| at(&pair[1]).checked_sub(at(&pair[0])) == Some(distance));
    let size = first.dtypes[which].size_in_bytes() as Address;
    (is_even && distance.is_multiple_of(size)).then_some((distance / size) as usize)
}

/// The layout of an operand of cuBLAS, a column-major matrix.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    /// Whether cuBLAS transposes the matrix.
    pub(super) operation: Operation,
    /// The distance between neighbouring columns in elements (the leading dimension).
    pub(super) distance: i64,
}

impl Matrix {
    /// Describes the transpose of a (rows, columns) matrix with these strides. `None` if neither dimension has stride
    /// 1, or if rows or columns overlap.
    pub(super) fn transpose_of([rows, columns]: [usize; 2], [row_stride, column_stride]: [usize; 2]) -> Option<Self> {
        // The stride of a dimension of one element does not matter.
        let is_dense = |size: usize, stride: usize| size <= 1 || stride == 1;
        // The distance between `count` vectors of `length` elements, or None if the vectors overlap.
        let distance = |count: usize, stride: usize, length: usize| {
            if count <= 1 { Some(length.max(1)) } else { Some(stride).filter(|&stride| stride >= length.max(1)) }
        };
        let matrix = |operation, step: usize| Self { operation, distance: step as i64 };
        // A row-major matrix is its transpose in column-major order already. A column-major matrix must be transposed.
        if is_dense(columns, column_stride)
            && let Some(step) = distance(rows, row_stride, columns)
        {
            return Some(matrix(Operation::CUBLAS_OP_N, step));
        }
        if is_dense(rows, row_stride)
            && let Some(step) = distance(columns, column_stride, rows)
        {
            return Some(matrix(Operation::CUBLAS_OP_T, step));
        }
        None
    }
}

/// Computes y = alpha a b + beta y, in place.
fn run(op: &'static str, y: &Raw, a: &Raw, b: &Raw, alpha: f64, beta: f64) -> Result<()> {
    if y.elem_count() == 0 {
        return Ok(());
    }
    let plan = Plan::into(op, y, a, b)?;
    let (Some(left), Some(right)) =
        (Matrix::transpose_of([plan.m, plan.k], plan.a), Matrix::transpose_of([plan.k, plan.n], plan.b))
    else {
        // cuBLAS cannot read a matrix without a dimension of stride 1, such as a view of every other column of a
        // matrix, nor a matrix whose rows or columns overlap.
        let (a, b) = (readable(a, [plan.m, plan.k], plan.a)?, readable(b, [plan.k, plan.n], plan.b)?);
        return run(op, y, &a, &b, alpha, beta);
    };
    let gpu = Gpu::of(op, y)?;
    let (to, from) = (address(op, y)?, [address(op, a)?, address(op, b)?]);
    let call =
        Call { op, gpu, plan: &plan, left, right, types: [data_type(op, a.dtype())?, data_type(op, y.dtype())?] };
    let sizes = [a.dtype().size_in_bytes(), b.dtype().size_in_bytes(), y.dtype().size_in_bytes()];
    // One call computes all products along the innermost batch dimension. Each combination of positions along the other
    // (outer) batch dimensions needs a call.
    let (inner, outer) = match plan.batch.split_last() {
        Some((inner, outer)) => (Some(inner), outer),
        None => (None, plan.batch.as_slice()),
    };
    let (count, strides) = inner.map_or((1, [0; 3]), |axis| (axis.size, axis.strides));
    let calls: usize = outer.iter().map(|axis| axis.size).product();
    for index in 0..calls {
        // `index` numbers the combinations in row-major order.
        let (mut rest, mut addresses) = (index, [from[0], from[1], to]);
        for axis in outer.iter().rev() {
            let position = rest % axis.size;
            rest /= axis.size;
            for (i, address) in addresses.iter_mut().enumerate() {
                *address += (position * axis.strides[i] * sizes[i]) as Address;
            }
        }
        call.run(addresses, count, strides, alpha, beta)?;
    }
    Ok(())
}

/// Returns the operand if cuBLAS can read its matrices, which have these sizes and strides, otherwise a contiguous
/// copy.
fn readable(operand: &Raw, sizes: [usize; 2], strides: [usize; 2]) -> Result<Raw> {
    if Matrix::transpose_of(sizes, strides).is_some() { Ok(operand.clone()) } else { contiguous(operand) }
}

/// What calls of cuBLAS for the products a b of one plan have in common.
struct Call<'a> {
    op: &'static str,
    gpu: &'a Gpu,
    plan: &'a Plan,
    /// The layout of a.
    left: Matrix,
    /// The layout of b.
    right: Matrix,
    /// The type of the elements of both operands, then that of the elements of the result.
    types: [Type; 2],
}

impl Call<'_> {
    /// Queues `count` products y = alpha a b + beta y. The first is at the given addresses; `strides` are the distances
    /// from each a, b and y to the next, in elements.
    fn run(&self, [a, b, y]: [Address; 3], count: usize, strides: [usize; 3], alpha: f64, beta: f64) -> Result<()> {
        let [m, n, k, count] = [self.plan.m, self.plan.n, self.plan.k, count].map(i32::try_from);
        // The leading dimensions of a, b and y. cuBLAS rejects 0.
        let distances =
            [self.left.distance, self.right.distance, self.plan.row_stride.max(1) as i64].map(i32::try_from);
        let (Ok(m), Ok(n), Ok(k), Ok(count), [Ok(leading_a), Ok(leading_b), Ok(leading_y)]) =
            (m, n, k, count, distances)
        else {
            let Plan { m, n, k, .. } = self.plan;
            let expected = "expected sizes, strides and batches of at most 2^31 - 1";
            let message = format!("found a product of shapes ({m}, {k}) and ({k}, {n}), {expected}");
            return Err(Error::shape(self.op, message));
        };
        let [operands, result] = self.types;
        let [stride_a, stride_b, stride_y] = strides.map(|stride| stride as i64);
        // alpha (index 0) and beta (index 1). cuBLAS reads them in the type of the sums: f64 for f64 operands, else
        // f32.
        let narrow = [alpha as f32, beta as f32];
        let wide = [alpha, beta];
        let is_f64 = operands == Type::CUDA_R_64F;
        let factor = |i: usize| -> *const c_void {
            if is_f64 { std::ptr::from_ref(&wide[i]).cast() } else { std::ptr::from_ref(&narrow[i]).cast() }
        };
        // Only a single product y = a b may go to cuBLASLt, and only if a tile is known (`preferred`) with which
        // cuBLASLt is faster than cuBLAS. `gemm_lt::run` returns false if it has queued nothing. The default `Extras`
        // are none: no addend, bias or scales.
        let is_plain = count == 1 && narrow == [1.0, 0.0];
        if is_plain && let Some(key) = self.key([a, b, y]).filter(|key| preferred(self.gpu, key).is_some()) {
            // SAFETY: the plan stays within its operands and the result; the key describes the same product in cuBLAS'
            // order.
            if unsafe { gemm_lt::run(self.op, self.gpu, key, [b, a, y], Extras::default()) }? {
                return Ok(());
            }
        }
        let compute = compute_type(operands);
        self.gpu.stream().context().bind_to_thread().map_err(|error| driver_error(self.op, error))?;
        let name = || format!("gemm {count} x {m}x{k}x{n} {operands:?}");
        let queue = || {
            // SAFETY: the plan stays within its operands and the result, whose elements are of `self.types`; cuBLAS
            // queues the product on the device's stream.
            check_blas(unsafe {
                cublasGemmStridedBatchedEx(
                    *self.gpu.blas().handle(),
                    self.right.operation,
                    self.left.operation,
                    n,
                    m,
                    k,
                    factor(0),
                    b as *const c_void,
                    operands,
                    leading_b,
                    stride_b,
                    a as *const c_void,
                    operands,
                    leading_a,
                    stride_a,
                    factor(1),
                    y as *mut c_void,
                    result,
                    leading_y,
                    stride_y,
                    count,
                    compute,
                    Algorithm::CUBLAS_GEMM_DEFAULT,
                )
            })
        };
        measured(self.gpu, name, queue)
    }

    /// Describes one product to cuBLASLt as yᵀ = bᵀ aᵀ, given the addresses of the operands and the result. `None`
    /// unless all three are f16, or all are bf16.
    fn key(&self, [a, b, y]: [Address; 3]) -> Option<Key> {
        let dtype = match self.types {
            [Type::CUDA_R_16F, Type::CUDA_R_16F] => DType::F16,
            [Type::CUDA_R_16BF, Type::CUDA_R_16BF] => DType::BF16,
            _ => return None,
        };
        let operand = |matrix: Matrix| (matrix.operation == Operation::CUBLAS_OP_T, matrix.distance);
        Some(Key {
            arithmetic: Arithmetic::Half { dtype },
            sizes: [self.plan.n, self.plan.m, self.plan.k],
            operands: [operand(self.right), operand(self.left)],
            distance: self.plan.row_stride.max(1) as i64,
            alignments: [b, a, y].map(alignment),
        })
    }
}

/// Returns the type in which cuBLAS computes products of operands of this type.
pub(super) fn compute_type(operands: Type) -> Compute {
    match operands {
        Type::CUDA_R_64F => Compute::CUBLAS_COMPUTE_64F,
        Type::CUDA_R_32F if float32_matmul_precision() == MatmulPrecision::High => {
            Compute::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => Compute::CUBLAS_COMPUTE_32F,
    }
}

/// Returns cuBLAS' name for a floating-point dtype.
///
/// # Errors
/// [`Error::DType`] if `dtype` is not f32, f64, f16 or bf16.
pub(super) fn data_type(op: &'static str, dtype: DType) -> Result<Type> {
    Ok(match dtype {
        DType::F32 => Type::CUDA_R_32F,
        DType::F64 => Type::CUDA_R_64F,
        DType::F16 => Type::CUDA_R_16F,
        DType::BF16 => Type::CUDA_R_16BF,
        other => return Err(crate::cpu::elem::unsupported_dtype(op, other)),
    })
}
