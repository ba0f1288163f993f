//! Many products at once. One call of cuBLAS computes up to 160 products that have the same sizes, layouts, dtypes and
//! scalar factor `alpha`. It reads the addresses of their matrices from a table in device memory.

use std::ffi::c_void;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasGemmAlgo_t as Algorithm, cublasGemmBatchedEx, cublasOperation_t as Operation, cudaDataType as Type,
};
use rustc_hash::{FxHashMap, FxHashSet};
use trainable_candle_cuda::kernels::addresses::{WRITE_ADDRESSES, WriteAddresses};
use trainable_candle_cuda::structs::Addresses;

use super::error::{check_blas, driver_error};
use super::gemm::{Matrix, compute_type, data_type, matmul_accumulate, product as product_of};
use super::gpu::Gpu;
use super::launch::{Address, Element, Mut, Shape, address, empty, same_device};
use super::profile::measured;
use crate::cpu::gemm::batch::{Plan, check_destination, check_result_dtype};
use crate::product::{Destination, Product};
use crate::{Error, Raw, Result};

const OP: &str = "matmul";

/// The most addresses that one launch of `write_addresses` takes as arguments: 3840 bytes of the 4096 that the
/// arguments of a launch may have.
const MOST_ADDRESSES: usize = 480;
/// The most products of a call: each has three addresses, of a, b and the result.
const MOST_PRODUCTS: usize = MOST_ADDRESSES / 3;

/// The required alignment of the addresses in a batch, in bytes. It is that of the widest access of a thread.
const ALIGNMENT: Address = 16;

/// The properties that the products of one call share.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    /// The sizes m, n and k of a product of a (m, k) and b (k, n).
    sizes: [i32; 3],
    /// Whether cuBLAS transposes its operand for a, and whether it transposes that for b.
    operations: [Operation; 2],
    /// The distances between neighbouring columns of cuBLAS' operand for a and of that for b, in elements. cuBLAS takes
    /// both as column-major.
    distances: [i32; 2],
    /// The dtype of both operands, then that of the result.
    dtypes: [DType; 2],
    /// Whether the product is added to the result.
    accumulates: bool,
    /// The bits of the f32 by which the product is multiplied.
    alpha: u32,
}

impl Key {
    /// Returns the key of a product; `None` if cuBLAS cannot compute it in a batch without copies, or if its dtype is
    /// f64.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Device`] if the product is invalid.
    fn of(product: &Product) -> Result<Option<Self>> {
        let Product { a, b, alpha, to } = product;
        let plan = Plan::of(OP, a, b)?;
        // cuBLAS chooses its kernel for a batch without reading the addresses. It assumes that the addresses are
        // aligned for the widest access that the sizes allow.
        let is_aligned = |tensor: &Raw| Ok::<_, Error>(address(OP, tensor)?.is_multiple_of(ALIGNMENT));
        let mut can_batch = is_aligned(a)? && is_aligned(b)?;
        let (result, accumulates) = match to {
            Destination::New(dtype) => (*dtype, false),
            Destination::Sum(sum) => {
                check_destination(OP, &plan, sum, a.dtype())?;
                can_batch = can_batch && sum.is_contiguous() && is_aligned(sum)?;
                (sum.dtype(), true)
            }
        };
        check_result_dtype(OP, a.dtype(), result)?;
        // A size above i32::MAX becomes 0: such a product is not batched, and an empty one is not either.
        let sizes = [plan.m, plan.n, plan.k].map(|size| i32::try_from(size).unwrap_or(0));
        // cuBLAS computes yᵀ = bᵀ aᵀ (see `gemm.rs`), so its operands are the transposes of a and b.
        let left = Matrix::transpose_of([plan.m, plan.k], plan.a);
        let right = Matrix::transpose_of([plan.k, plan.n], plan.b);
        let (Some(left), Some(right)) = (left, right) else { return Ok(None) };
        let distances = [left.distance, right.distance].map(i32::try_from);
        let [Ok(left_distance), Ok(right_distance)] = distances else { return Ok(None) };
        // `plan.batch` has the batch dimensions of a and b. One address in the table stands for one matrix, so products
        // with such dimensions are computed alone.
        if !can_batch
            || sizes.contains(&0)
            || !plan.batch.is_empty()
            || a.rank() != 2
            || b.rank() != 2
            || a.dtype() == DType::F64
        {
            return Ok(None);
        }
        Ok(Some(Self {
            sizes,
            operations: [left.operation, right.operation],
            distances: [left_distance, right_distance],
            dtypes: [a.dtype(), result],
            accumulates,
            alpha: (*alpha as f32).to_bits(),
        }))
    }
}

/// Does on a CUDA device what [`compute::products`](crate::compute::products) describes.
pub fn products(work: &[Product]) -> Result<Vec<Raw>> {
    let mut results: Vec<Option<Raw>> = vec![None; work.len()];
    // Sets the results of those products for which there is a faster kernel than cuBLAS'.
    super::low_rank_gradient::run(work, &mut results)?;
    // The indices of the products with each key; `order` has the keys in the order of their first products.
    let mut groups: FxHashMap<Key, Vec<usize>> = FxHashMap::default();
    let mut order = Vec::new();
    for (index, product) in work.iter().enumerate().filter(|&(index, _)| results[index].is_none()).collect::<Vec<_>>() {
        match Key::of(product)? {
            Some(key) => {
                let group = groups.entry(key).or_default();
                if group.is_empty() {
                    order.push(key);
                }
                group.push(index);
            }
            // A product alone: `product_of` makes a new result, `matmul_accumulate` adds to a tensor.
            None => results[index] = Some(product.run(product_of, matmul_accumulate)?),
        }
    }
    for key in order {
        let mut group = groups.remove(&key).unwrap_or_default();
        while !group.is_empty() {
            let (batch, rest) = split(work, &group)?;
            if let [index] = batch[..] {
                results[index] = Some(work[index].run(product_of, matmul_accumulate)?);
            } else {
                let of_batch = run(&key, &batch.iter().map(|&index| &work[index]).collect::<Vec<_>>())?;
                batch.iter().zip(of_batch).for_each(|(&index, result)| results[index] = Some(result));
            }
            group = rest;
        }
    }
    Ok(results.into_iter().flatten().collect())
}

/// Splits a group of products with one key into the batch of the next call, and the rest. The batch has at most
/// [`MOST_PRODUCTS`] products, and no two of them add to the same tensor.
fn split(work: &[Product], group: &[usize]) -> Result<(Vec<usize>, Vec<usize>)> {
    let (mut batch, mut rest) = (Vec::new(), Vec::new());
    let mut sums: FxHashSet<Address> = FxHashSet::default();
    for &index in group {
        let can_join = match &work[index].to {
            Destination::New(_) => true,
            Destination::Sum(sum) => sums.insert(address(OP, sum)?),
        };
        if can_join && batch.len() < MOST_PRODUCTS { batch.push(index) } else { rest.push(index) }
    }
    Ok((batch, rest))
}

/// Computes products that have the key `key` by one call of cuBLAS. Returns their results.
fn run(key: &Key, batch: &[&Product]) -> Result<Vec<Raw>> {
    let gpu = Gpu::of(OP, &batch[0].a)?;
    let count = batch.len();
    let mut results = Vec::with_capacity(count);
    let mut addresses = Addresses { values: [0; MOST_ADDRESSES] };
    for (i, product) in batch.iter().enumerate() {
        same_device(OP, &batch[0].a, &[&product.a, &product.b])?;
        let result = match &product.to {
            Destination::New(dtype) => empty(OP, gpu, &[product.a.dims()[0], product.b.dims()[1]], *dtype)?,
            Destination::Sum(sum) => {
                same_device(OP, &batch[0].a, &[sum])?;
                sum.clone()
            }
        };
        addresses.values[i] = address(OP, &product.a)?;
        addresses.values[count + i] = address(OP, &product.b)?;
        addresses.values[2 * count + i] = address(OP, &result)?;
        results.push(result);
    }
    let table = empty(OP, gpu, &[3 * count], DType::I64)?;
    let to = address(OP, &table)?;
    let function = gpu.function(&WRITE_ADDRESSES, &[])?;
    // One block, with a thread for each address.
    let shape = Shape::linear(OP, 1, MOST_ADDRESSES as u32)?;
    let arguments = WriteAddresses { table: Mut::new(to, Element::U64), count: 3 * count as u32, addresses };
    // SAFETY: the table has room for `3 * count` addresses.
    unsafe { function.launch(OP, gpu, shape, arguments) }?;
    // The table has the addresses of all a (column 0), then of all b (1), then of all results (2).
    let column = |i: usize| to + (i * count * size_of::<Address>()) as Address;
    let [m, n, k] = key.sizes;
    let types: [Type; 2] = [data_type(OP, key.dtypes[0])?, data_type(OP, key.dtypes[1])?];
    let (alpha, beta) = (f32::from_bits(key.alpha), if key.accumulates { 1f32 } else { 0.0 });
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
    let name = || format!("gemm batch {count} x {m}x{k}x{n} {:?}", types[0]);
    let queue = || {
        // SAFETY: the table holds the addresses of `count` matrices a, of as many b, and of their results, whose sizes
        // and types are those of the key. cuBLAS queues the products in the device's stream, and the table is freed in
        // the order of this stream. yᵀ = bᵀ aᵀ, so b is cuBLAS' first operand (see `gemm.rs`), and the columns of yᵀ
        // are n elements apart.
        check_blas(unsafe {
            cublasGemmBatchedEx(
                *gpu.blas().handle(),
                key.operations[1],
                key.operations[0],
                n,
                m,
                k,
                std::ptr::from_ref(&alpha).cast(),
                column(1) as *const *const c_void,
                types[0],
                key.distances[1],
                column(0) as *const *const c_void,
                types[0],
                key.distances[0],
                std::ptr::from_ref(&beta).cast(),
                column(2) as *const *mut c_void,
                types[1],
                n,
                count as i32,
                compute_type(types[0]),
                Algorithm::CUBLAS_GEMM_DEFAULT,
            )
        })
    };
    measured(gpu, name, queue)?;
    Ok(results)
}
