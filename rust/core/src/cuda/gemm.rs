//! Matrix products by cuBLAS.
//!
//! cuBLAS is column-major. The transpose of a row-major result is the product of the transposed operands in the
//! opposite order, so no row-major or column-major operand is copied.

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

/// Does on a CUDA device what [`cpu::matmul`](crate::cpu::matmul) does on the CPU.
pub fn matmul(a: &Raw, b: &Raw) -> Result<Raw> {
    product(a, b, 1.0, a.dtype())
}

/// Does on a CUDA device what [`cpu::product`](crate::cpu::product) does on the CPU.
pub fn product(a: &Raw, b: &Raw, alpha: f64, dtype: DType) -> Result<Raw> {
    const OP: &str = "matmul";
    same_device(OP, a, &[b])?;
    let plan = Plan::of(OP, a, b)?;
    check_result_dtype(OP, a.dtype(), dtype)?;
    let y = empty(OP, Gpu::of(OP, a)?, &plan.dims, dtype)?;
    if y.elem_count() > 0 && plan.k == 0 {
        super::copy::fill(&y, 0.0)?;
        return Ok(y);
    }
    run(OP, &y, a, b, alpha, 0.0)?;
    Ok(y)
}

/// Does on a CUDA device what [`cpu::matmul_accumulate`](crate::cpu::matmul_accumulate) does on the CPU.
pub fn matmul_accumulate(dst: &Raw, a: &Raw, b: &Raw, alpha: f64) -> Result<()> {
    const OP: &str = "matmul_accumulate";
    same_device(OP, dst, &[a, b])?;
    let plan = Plan::into(OP, dst, a, b)?;
    check_apart(OP, dst, a, b)?;
    if plan.k == 0 { Ok(()) } else { run(OP, dst, a, b, alpha, 1.0) }
}

fn check_apart(op: &'static str, dst: &Raw, a: &Raw, b: &Raw) -> Result<()> {
    let storage = storage_identity(dst).0;
    if dst.elem_count() > 0 && [a, b].iter().any(|operand| storage_identity(operand).0 == storage) {
        return Err(Error::argument(op, "the destination and an operand share one storage; copy the operand first"));
    }
    Ok(())
}

/// As [`cpu::write_products`](crate::cpu::write_products). Low-rank products that are added to `dst` are computed by
/// the kernels of `low_rank` if these support the matrices. Other products, if they have the same shape, are computed
/// by one call of cuBLAS: as a single product if their matrices are adjacent in memory, or as a batch if their matrices
/// are evenly spaced.
pub fn write_products(terms: &[[&Raw; 3]], alpha: f64, accumulate: bool) -> Result<()> {
    const OP: &str = "write_products";
    let beta = f64::from(u8::from(accumulate));
    let mut products = Vec::with_capacity(terms.len());
    for &[dst, a, b] in terms {
        same_device(OP, dst, &[a, b])?;
        let plan = Plan::into(OP, dst, a, b)?;
        check_apart(OP, dst, a, b)?;
        let addresses = [address(OP, a)?, address(OP, b)?, address(OP, dst)?];
        products.push(Product { plan, addresses, sizes: [a, b, dst].map(|x| x.dtype().size_in_bytes()) });
    }
    if accumulate && super::low_rank::add(terms, alpha)? {
        return Ok(());
    }
    let ([first, ..], Some([dst, a, _])) = (products.as_slice(), terms.first()) else { return Ok(()) };
    let Some(joined) = Joined::of(&products).filter(|_| first.plan.k > 0 && dst.elem_count() > 0) else {
        return terms.iter().try_for_each(|[dst, a, b]| match a.dims().last() {
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

/// One of several products of matrices.
struct Product {
    plan: Plan,
    /// Addresses of the operands and of the result.
    addresses: [Address; 3],
    /// Bytes of an element of each operand and of the result.
    sizes: [usize; 3],
}

/// Several products that one call of cuBLAS computes.
struct Joined {
    /// One product of the batch.
    plan: Plan,
    /// The layout of `a` in each product.
    left: Matrix,
    /// The layout of `b` in each product.
    right: Matrix,
    /// Number of products in the batch.
    count: usize,
    /// The distance from the `a` of one product to that of the next, in elements; then the same for `b` and for the
    /// result.
    strides: [usize; 3],
}

impl Joined {
    /// `None` if the products have different shapes or are at uneven distances.
    fn of(products: &[Product]) -> Option<Self> {
        let first = products.first()?;
        let Plan { m, n, k, row, a, b, ref batch, ref dims } = first.plan;
        let alike = |product: &Product| {
            let other = &product.plan;
            (other.m, other.n, other.k, other.row, other.a, other.b) == (m, n, k, row, a, b)
                && other.batch.is_empty()
                && product.sizes == first.sizes
        };
        if !batch.is_empty() || !products.iter().all(alike) {
            return None;
        }
        let strides = [spacing(products, 0)?, spacing(products, 1)?, spacing(products, 2)?];
        let plan = |m: usize, n: usize| Plan { dims: dims.clone(), m, n, k, row, a, b, batch: batch.clone() };
        let (count, [stride_a, stride_b, stride_y]) = (products.len(), strides);
        let joined = |plan: Plan, count: usize, strides: [usize; 3]| {
            let left = Matrix::transpose_of([plan.m, plan.k], plan.a)?;
            let right = Matrix::transpose_of([plan.k, plan.n], plan.b)?;
            Some(Self { plan, left, right, count, strides })
        };
        if count == 1 {
            return joined(plan(m, n), 1, [0; 3]);
        }
        // Three cases: the results are neighbouring columns of one matrix, neighbouring rows of one matrix, or a batch
        // of matrices that do not overlap.
        if stride_a == 0 && stride_b == n * b[1] && stride_y == n && row >= count * n {
            return joined(plan(m, count * n), 1, [0; 3]);
        }
        if stride_b == 0 && stride_a == m * a[0] && stride_y == m * row {
            return joined(plan(count * m, n), 1, [0; 3]);
        }
        let is_apart = stride_y >= m * row || (stride_y >= n && row >= count * stride_y);
        if is_apart { joined(plan(m, n), count, strides) } else { None }
    }
}

/// The distance in memory between the `a` (`which` = 0), the `b` (1) or the results (2) of consecutive products, in
/// elements; 0 for a single product. `None` if the distances differ, are negative, or are not a whole number of
/// elements.
fn spacing(products: &[Product], which: usize) -> Option<usize> {
    let place = |product: &Product| product.addresses[which];
    let [first, second, ..] = products else { return Some(0) };
    let distance = place(second).checked_sub(place(first))?;
    let even = products.windows(2).all(|pair| place(&pair[1]).checked_sub(place(&pair[0])) == Some(distance));
    let size = first.sizes[which] as Address;
    (even && distance.is_multiple_of(size)).then_some((distance / size) as usize)
}

/// A column-major matrix for cuBLAS: whether it is transposed, and the distance between its columns.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) operation: Operation,
    pub(super) distance: i64,
}

impl Matrix {
    /// The layout of the transpose of a (rows, columns) matrix with these strides. `None` if neither dimension has
    /// stride 1, or if rows or columns overlap.
    pub(super) fn transpose_of([rows, columns]: [usize; 2], [row_stride, column_stride]: [usize; 2]) -> Option<Self> {
        // The stride of a dimension of one element does not matter.
        let dense = |size: usize, stride: usize| size <= 1 || stride == 1;
        let distance = |count: usize, stride: usize, length: usize| {
            if count <= 1 { Some(length.max(1)) } else { Some(stride).filter(|&stride| stride >= length.max(1)) }
        };
        let matrix = |operation, distance: usize| Self { operation, distance: distance as i64 };
        if dense(columns, column_stride)
            && let Some(found) = distance(rows, row_stride, columns)
        {
            return Some(matrix(Operation::CUBLAS_OP_N, found));
        }
        if dense(rows, row_stride)
            && let Some(found) = distance(columns, column_stride, rows)
        {
            return Some(matrix(Operation::CUBLAS_OP_T, found));
        }
        None
    }
}

/// Computes y = alpha a b + beta y in place.
fn run(op: &'static str, y: &Raw, a: &Raw, b: &Raw, alpha: f64, beta: f64) -> Result<()> {
    if y.elem_count() == 0 {
        return Ok(());
    }
    let plan = Plan::into(op, y, a, b)?;
    let (Some(left), Some(right)) =
        (Matrix::transpose_of([plan.m, plan.k], plan.a), Matrix::transpose_of([plan.k, plan.n], plan.b))
    else {
        // cuBLAS cannot read a matrix without a dimension of stride 1, such as a view of every other column of a
        // matrix.
        let (a, b) = (dense(a, [plan.m, plan.k], plan.a)?, dense(b, [plan.k, plan.n], plan.b)?);
        return run(op, y, &a, &b, alpha, beta);
    };
    let gpu = Gpu::of(op, y)?;
    let (to, from) = (address(op, y)?, [address(op, a)?, address(op, b)?]);
    let call =
        Call { op, gpu, plan: &plan, left, right, types: [data_type(op, a.dtype())?, data_type(op, y.dtype())?] };
    let sizes = [a.dtype().size_in_bytes(), b.dtype().size_in_bytes(), y.dtype().size_in_bytes()];
    // One call computes the innermost batch dimension; make a call for each index of the other batch dimensions.
    let (inner, outer) = match plan.batch.split_last() {
        Some((inner, outer)) => (Some(inner), outer),
        None => (None, plan.batch.as_slice()),
    };
    let (count, strides) = inner.map_or((1, [0; 3]), |axis| (axis.size, axis.strides));
    let calls: usize = outer.iter().map(|axis| axis.size).product();
    for place in 0..calls {
        let (mut rest, mut addresses) = (place, [from[0], from[1], to]);
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

/// The operand if cuBLAS can read it, a copy otherwise.
fn dense(operand: &Raw, sizes: [usize; 2], strides: [usize; 2]) -> Result<Raw> {
    if Matrix::transpose_of(sizes, strides).is_some() { Ok(operand.clone()) } else { contiguous(operand) }
}

/// A call of cuBLAS, without the addresses and the size of the batch.
struct Call<'a> {
    op: &'static str,
    gpu: &'a Gpu,
    plan: &'a Plan,
    left: Matrix,
    right: Matrix,
    /// The type of the elements of both operands, then that of the elements of the result.
    types: [Type; 2],
}

impl Call<'_> {
    fn run(&self, [a, b, y]: [Address; 3], count: usize, strides: [usize; 3], alpha: f64, beta: f64) -> Result<()> {
        let [m, n, k, count] = [self.plan.m, self.plan.n, self.plan.k, count].map(i32::try_from);
        let distances = [self.left.distance, self.right.distance, self.plan.row.max(1) as i64].map(i32::try_from);
        let (Ok(m), Ok(n), Ok(k), Ok(count), [Ok(left), Ok(right), Ok(row)]) = (m, n, k, count, distances) else {
            let message = format!("a product of shape {:?} has a size or stride above 2^31 - 1", self.plan.dims);
            return Err(Error::shape(self.op, message));
        };
        let [operands, result] = self.types;
        let [stride_a, stride_b, stride_y] = strides.map(|stride| stride as i64);
        let narrow = [alpha as f32, beta as f32];
        let wide = [alpha, beta];
        let is_f64 = operands == Type::CUDA_R_64F;
        let scale = |i: usize| -> *const c_void {
            if is_f64 { std::ptr::from_ref(&wide[i]).cast() } else { std::ptr::from_ref(&narrow[i]).cast() }
        };
        let is_one = count == 1 && narrow == [1.0, 0.0];
        if is_one && let Some(key) = self.key([a, b, y]).filter(|key| preferred(self.gpu, key).is_some()) {
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
                    scale(0),
                    b as *const c_void,
                    operands,
                    right,
                    stride_b,
                    a as *const c_void,
                    operands,
                    left,
                    stride_a,
                    scale(1),
                    y as *mut c_void,
                    result,
                    row,
                    stride_y,
                    count,
                    compute,
                    Algorithm::CUBLAS_GEMM_DEFAULT,
                )
            })
        };
        measured(self.gpu, name, queue)
    }

    /// A product of half-precision matrices as cuBLASLt takes it; `None` for other dtypes. The addresses are those of
    /// the operands and the result.
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
            distance: self.plan.row.max(1) as i64,
            alignments: [b, a, y].map(alignment),
        })
    }
}

/// The type of the arithmetic for operands of this type.
pub(super) fn compute_type(operands: Type) -> Compute {
    match operands {
        Type::CUDA_R_64F => Compute::CUBLAS_COMPUTE_64F,
        Type::CUDA_R_32F if float32_matmul_precision() == MatmulPrecision::High => {
            Compute::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => Compute::CUBLAS_COMPUTE_32F,
    }
}

pub(super) fn data_type(op: &'static str, dtype: DType) -> Result<Type> {
    Ok(match dtype {
        DType::F32 => Type::CUDA_R_32F,
        DType::F64 => Type::CUDA_R_64F,
        DType::F16 => Type::CUDA_R_16F,
        DType::BF16 => Type::CUDA_R_16BF,
        other => return Err(crate::cpu::elem::unsupported_dtype(op, other)),
    })
}
