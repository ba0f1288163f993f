//! The arithmetic behind operations, on the device of their tensors: [`cpu`] or CUDA.

use candle_core::{DType, Device};

use crate::cpu::{self, Binary, Ternary, Unary};
pub use crate::product::{
    Destination, LowRankTerm, MatmulPrecision, Product, float32_matmul_precision, set_float32_matmul_precision,
    set_w8a8, uses_pairs, uses_w8a8, with_bf16_pairs,
};
use crate::raw::is_float;
use crate::{Error, Raw, Result};

/// `on_device!(device, cuda => one, cpu => other)` evaluates `one` on a CUDA device and `other` on the CPU. Operations
/// choose their CPU or CUDA form with this macro; a build without CUDA does not compile `one`.
macro_rules! on_device {
    ($device:expr, cuda => $cuda:expr, cpu => $cpu:expr $(,)?) => {{
        #[cfg(feature = "cuda")]
        let result = if $device.is_cuda() { $cuda } else { $cpu };
        #[cfg(not(feature = "cuda"))]
        let result = $cpu;
        result
    }};
}
pub(crate) use on_device;

/// Computes [`cpu::unary`] on the device of `x`.
pub fn unary<F: Unary + Sync>(x: &Raw, f: F) -> Result<Raw> {
    on_device!(
        x.device(),
        cuda => crate::cuda::unary(x, crate::cuda::Kernel::new(F::KERNEL, Unary::parameters(&f))),
        cpu => cpu::unary(x, f),
    )
}

/// Computes [`cpu::binary`] on the device of the operands.
pub fn binary<F: Binary + Sync>(a: &Raw, b: &Raw, f: F) -> Result<Raw> {
    on_device!(
        a.device(),
        cuda => crate::cuda::binary(a, b, crate::cuda::Kernel::new(F::KERNEL, Binary::parameters(&f))),
        cpu => cpu::binary(a, b, f),
    )
}

/// Computes [`cpu::ternary`] on the device of the operands.
pub fn ternary<F: Ternary + Sync>(a: &Raw, b: &Raw, c: &Raw, f: F) -> Result<Raw> {
    on_device!(
        a.device(),
        cuda => crate::cuda::ternary(a, b, c, crate::cuda::Kernel::new(F::KERNEL, Ternary::parameters(&f))),
        cpu => cpu::ternary(a, b, c, f),
    )
}

/// Defines functions that call the function of the same name in [`cpu`] or in `cuda`, depending on the device of the
/// first argument, a tensor.
macro_rules! functions {
    ($($name:ident($x:ident $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {$(
        #[doc = concat!("As [`cpu::", stringify!($name), "`].")]
        pub fn $name($x: &Raw $(, $argument: $type)*) -> Result<$result> {
            on_device!(
                $x.device(),
                cuda => crate::cuda::$name($x $(, $argument)*),
                cpu => cpu::$name($x $(, $argument)*),
            )
        }
    )*};
}

functions! {
    cast(x, dtype: DType) -> Raw;
    contiguous(x) -> Raw;
    sum(x, dims: &[usize], keepdim: bool) -> Raw;
    mean(x, dims: &[usize], keepdim: bool) -> Raw;
    max(x, dims: &[usize], keepdim: bool) -> Raw;
    min(x, dims: &[usize], keepdim: bool) -> Raw;
    argmax(x, dim: usize, keepdim: bool) -> Raw;
    cumsum(x, dim: usize) -> Raw;
    matmul(a, b: &Raw) -> Raw;
    product(a, b: &Raw, alpha: f64, dtype: DType) -> Raw;
    matmul_accumulate(dst, a: &Raw, b: &Raw, alpha: f64) -> ();
    accumulate(dst, src: &Raw) -> ();
    copy_into(dst, src: &Raw) -> ();
    fill(dst, value: f64) -> ();
    scale_in_place(dst, factor: f64) -> ();
    lerp_in_place(dst, src: &Raw, weight: &Raw) -> ();
}

/// The device of an operation on `tensors`: the device of the first tensor that is on a CUDA device, or the CPU if none
/// is.
#[cfg(feature = "cuda")]
fn device_of<'a>(mut tensors: impl Iterator<Item = &'a Raw>) -> &'a Device {
    tensors.find(|tensor| tensor.device().is_cuda()).map_or(&Device::Cpu, |tensor| tensor.device())
}

/// Computes [`cpu::write_products`] on the device of the operands: for each of `terms`, [dst, a, b], writes the product
/// `alpha` · a · b to dst, or adds it to dst if `accumulate`.
pub fn write_products(terms: &[[&Raw; 3]], alpha: f64, accumulate: bool) -> Result<()> {
    on_device!(
        device_of(terms.iter().map(|&[dst, ..]| dst)),
        cuda => crate::cuda::write_products(terms, alpha, accumulate),
        cpu => cpu::write_products(terms, alpha, accumulate),
    )
}

/// Computes hidden = scale_hidden · input · down and dst += scale_dst · hidden · up for each pair of a term and its
/// dst, which has the shape of hidden · up. On CUDA one launch computes all terms if a kernel supports them.
///
/// # Errors
/// As [`write_products`].
pub fn low_rank(terms: &[(LowRankTerm, Raw)], [scale_hidden, scale_dst]: [f64; 2]) -> Result<()> {
    let is_done = on_device!(
        device_of(terms.iter().map(|(_, dst)| dst)),
        cuda => crate::cuda::low_rank(terms, [scale_hidden, scale_dst])?,
        cpu => false,
    );
    if is_done {
        return Ok(());
    }
    // Terms of `write_products`: [dst, a, b]. The first call writes the products to hidden, the second adds them to dst.
    let hidden: Vec<_> = terms.iter().map(|(term, _)| [&term.hidden, &term.input, &term.down]).collect();
    let sums: Vec<_> = terms.iter().map(|(term, dst)| [dst, &term.hidden, &term.up]).collect();
    write_products(&hidden, scale_hidden, false)?;
    write_products(&sums, scale_dst, true)
}

/// A contiguous tensor of shape `dims` with the dtype and device of `like`. Its values are arbitrary and must be
/// written before they are read.
///
/// # Errors
/// [`Error::OutOfMemory`], with the name `op`, if the tensor does not fit.
pub fn unset(op: &'static str, like: &Raw, dims: &[usize]) -> Result<Raw> {
    on_device!(
        like.device(),
        cuda => crate::cuda::empty(op, crate::cuda::Gpu::of(op, like)?, dims, like.dtype()),
        cpu => {
            crate::raw::check_allocation(op, dims, like.dtype())?;
            Ok(Raw::zeros(dims, like.dtype(), like.device())?)
        }
    )
}

/// Computes the products `work`. Returns for each product, in the order of `work`, its result or the tensor to which
/// the result was added. On CUDA, many products run together, in any order.
///
/// # Errors
/// As [`product`] and [`matmul_accumulate`].
pub fn products(work: &[Product]) -> Result<Vec<Raw>> {
    on_device!(
        device_of(work.iter().map(|product| &product.a)),
        cuda => crate::cuda::products(work),
        cpu => work.iter().map(|product| product.run(cpu::product, cpu::matmul_accumulate)).collect(),
    )
}

/// The same values in another dtype, which may be an integer one; contiguous if the dtype changes. Conversions to
/// integers are those of Rust's `as`.
///
/// # Errors
/// [`Error::DType`] or an error of candle if the dtypes cannot be converted.
pub fn convert(x: &Raw, dtype: DType) -> Result<Raw> {
    if is_float(x.dtype()) && is_float(dtype) {
        return cast(x, dtype);
    }
    on_device!(x.device(), cuda => crate::cuda::convert(x, dtype), cpu => Ok(x.to_dtype(dtype)?))
}

/// A contiguous copy of a tensor of any dtype. The copy has its own storage and is detached from any candle graph.
///
/// # Errors
/// [`Error::OutOfMemory`] if it does not fit.
pub fn copy(x: &Raw) -> Result<Raw> {
    on_device!(x.device(), cuda => crate::cuda::copy(x), cpu => Ok(x.detach().force_contiguous()?))
}

/// Concatenates tensors along `dim`; their other sizes are equal. The result has its own storage.
///
/// # Errors
/// [`Error::Device`] if the tensors are on different devices, [`Error::OutOfMemory`] if the result does not fit.
pub fn cat(parts: &[&Raw], dim: usize) -> Result<Raw> {
    on_device!(
        device_of(parts.iter().copied()),
        cuda => crate::cuda::cat(parts, dim),
        cpu => {
            // For a single tensor candle returns the tensor itself, but the result must have its own storage.
            if let [part] = parts {
                return copy(part);
            }
            let parts: Vec<Raw> = parts.iter().map(|part| contiguous(part)).collect::<Result<_>>()?;
            Ok(Raw::cat(&parts, dim)?)
        }
    )
}

/// A tensor of zeros.
///
/// # Errors
/// [`Error::OutOfMemory`] if they do not fit.
pub fn zeros(dims: &[usize], dtype: DType, device: &Device) -> Result<Raw> {
    on_device!(device, cuda => crate::cuda::zeros(device, dims, dtype), cpu => Ok(Raw::zeros(dims, dtype, device)?))
}

/// A tensor filled with `value`.
///
/// # Errors
/// [`Error::OutOfMemory`] if it does not fit.
pub fn full(value: f64, dims: &[usize], dtype: DType, device: &Device) -> Result<Raw> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() && is_float(dtype) {
        return crate::cuda::filled(device, value, dims, dtype);
    }
    // On CUDA, `filled` makes floating-point tensors only, so an integer is converted from f64.
    let scalar = on_device!(
        device,
        cuda => crate::cuda::convert(&crate::cuda::filled(device, value, &[], DType::F64)?, dtype)?,
        cpu => Raw::new(value, device)?.to_dtype(dtype)?,
    );
    contiguous(&scalar.broadcast_as(dims)?)
}

/// The reverse of broadcasting a tensor of shape `dims` to the shape of `x`: sums `x` over the dimensions that
/// broadcasting adds or widens. The result has shape `dims`; it is `x` itself if `x` has this shape already.
///
/// # Errors
/// [`Error::Shape`] if `dims` does not broadcast to the shape of `x`, [`Error::DType`] as [`sum`].
pub fn sum_to_shape(x: &Raw, dims: &[usize]) -> Result<Raw> {
    if x.dims() == dims {
        return Ok(x.clone());
    }
    let added = x.rank().checked_sub(dims.len());
    let fits = added.is_some_and(|added| x.dims()[added..].iter().zip(dims).all(|(&size, &d)| d == size || d == 1));
    let Some(added) = added.filter(|_| fits) else {
        return Err(Error::shape("sum_to_shape", format!("shape {dims:?} does not broadcast to {:?}", x.dims())));
    };
    let reduced: cpu::Dims = (0..x.rank()).filter(|&i| i < added || dims[i - added] != x.dims()[i]).collect();
    Ok(sum(x, &reduced, true)?.reshape(dims)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::from_vec;

    /// Small whole numbers, whose sums are exact.
    fn integers(dims: &[usize], dtype: DType) -> Raw {
        let n: usize = dims.iter().product();
        let data: Vec<f64> = (0..n).map(|i| ((i * 7) % 11) as f64 - 5.0).collect();
        from_vec(data, dims).to_dtype(dtype).unwrap()
    }

    fn to_f64(x: &Raw) -> Raw {
        x.to_dtype(DType::F64).unwrap()
    }

    #[test]
    fn sum_to_shape_undoes_broadcasting() {
        let x = integers(&[4, 3, 5], DType::F32);
        for dims in [&[3, 5][..], &[1, 5], &[4, 1, 5], &[5], &[1, 1, 1], &[], &[4, 3, 5]] {
            let result = sum_to_shape(&x, dims).unwrap();
            assert_eq!(result.dims(), dims);
            // The dot product of `x` with the broadcast weights equals that of the result with the weights.
            let weights = integers(dims, DType::F64);
            let of_x = (to_f64(&x).broadcast_mul(&weights).unwrap()).sum_all().unwrap().to_scalar::<f64>().unwrap();
            let of_result = (to_f64(&result) * weights).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
            assert_eq!(of_x, of_result, "{dims:?}");
        }
        assert!(matches!(sum_to_shape(&x, &[4, 3]), Err(Error::Shape { .. })));
        assert!(matches!(sum_to_shape(&x, &[1, 4, 3, 5]), Err(Error::Shape { .. })));
    }
}
