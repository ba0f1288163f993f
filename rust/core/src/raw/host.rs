//! Copies of tensors, and access to their values on the host.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, DType, Storage, WithDType};

use super::storage::{Raw, from_vec};
use crate::cpu::pool::par_chunks_mut;
use crate::{Error, Result, compute};

/// A contiguous copy of `raw` with storage of its own, detached from any candle graph.
pub fn own_copy(raw: &Raw) -> Result<Raw> {
    compute::copy(raw)
}

/// A tensor on the CPU with the values of `raw`: `raw` itself (its storage is shared) if it is on the CPU, a copy
/// otherwise. Of a view, only the elements that the view shows are copied, not its whole storage.
///
/// # Errors
/// For a tensor on a GPU: [`Error::Index`] if an operation on the GPU has found an id out of range since values were
/// last read from that GPU, [`Error::Device`] inside a captured function or if the driver reports an error,
/// [`Error::DType`] for floats of 8 bits or fewer.
pub fn to_cpu(raw: &Raw) -> Result<Raw> {
    if raw.device().is_cpu() {
        return Ok(raw.clone());
    }
    fn downloaded<T: WithDType>(raw: &Raw) -> Result<Raw> {
        Ok(from_vec(download::<T>(raw)?, raw.shape()))
    }
    match raw.dtype() {
        DType::U8 => downloaded::<u8>(raw),
        DType::U32 => downloaded::<u32>(raw),
        DType::I16 => downloaded::<i16>(raw),
        DType::I32 => downloaded::<i32>(raw),
        DType::I64 => downloaded::<i64>(raw),
        DType::BF16 => downloaded::<half::bf16>(raw),
        DType::F16 => downloaded::<half::f16>(raw),
        DType::F32 => downloaded::<f32>(raw),
        DType::F64 => downloaded::<f64>(raw),
        other => Err(Error::dtype("to_cpu", format!("dtype {} is not supported", other.as_str()))),
    }
}

/// The elements of `raw`, a tensor on a GPU with elements of type `T`, in row-major order.
fn download<T: WithDType>(raw: &Raw) -> Result<Vec<T>> {
    // An error while a function is captured.
    crate::capture::refuse("to_cpu")?;
    crate::cuda::download(raw)
}

/// A copy of `raw` on the CPU with storage of its own: later changes of `raw` do not change the copy.
///
/// # Errors
/// As [`to_cpu`].
pub fn host_copy(raw: &Raw) -> Result<Raw> {
    if raw.device().is_cpu() { own_copy(raw) } else { to_cpu(raw) }
}

/// All elements in row-major order.
///
/// # Errors
/// As [`to_cpu`]; candle's error if `T` is not the element type of `raw`'s dtype.
pub fn to_vec<T: WithDType>(raw: &Raw) -> Result<Vec<T>> {
    if raw.elem_count() == 0 {
        // A view without elements may start beyond the end of its storage, which candle does not expect.
        return Ok(Vec::new());
    }
    if !raw.device().is_cpu() && raw.dtype() == T::DTYPE {
        return download(raw);
    }
    Ok(to_cpu(raw)?.flatten_all()?.to_vec1::<T>()?)
}

/// Calls `visit` with the bytes of all elements in row-major order, in the byte order of this machine. A contiguous
/// tensor on the CPU is not copied; its storage is locked against writes until `visit` returns.
///
/// # Errors
/// As [`to_cpu`]; [`Error::DType`] for floats of 8 bits or fewer on the CPU too.
pub fn with_bytes<R>(raw: &Raw, visit: impl FnOnce(&[u8]) -> R) -> Result<R> {
    fn bytes<T: WithDType>(values: &[T]) -> &[u8] {
        // SAFETY: the elements are plain numbers without padding, and bytes need no alignment.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }
    if raw.elem_count() == 0 {
        return Ok(visit(&[]));
    }
    let dense = compute::contiguous(&to_cpu(raw)?)?;
    let (storage, layout) = dense.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + dense.elem_count();
    let unsupported = || Error::dtype("bytes", format!("dtype {} is not supported", raw.dtype().as_str()));
    let Storage::Cpu(storage) = &*storage else { return Err(unsupported()) };
    let bytes = match storage {
        CpuStorage::U8(v) => bytes(&v[range]),
        CpuStorage::U32(v) => bytes(&v[range]),
        CpuStorage::I16(v) => bytes(&v[range]),
        CpuStorage::I32(v) => bytes(&v[range]),
        CpuStorage::I64(v) => bytes(&v[range]),
        CpuStorage::BF16(v) => bytes(&v[range]),
        CpuStorage::F16(v) => bytes(&v[range]),
        CpuStorage::F32(v) => bytes(&v[range]),
        CpuStorage::F64(v) => bytes(&v[range]),
        _ => return Err(unsupported()),
    };
    Ok(visit(bytes))
}

/// A contiguous CPU tensor whose elements `fill` writes in the byte order of this machine. The tensor's bytes are split
/// into slices of `part` bytes (the last may be shorter). Several threads call `fill` in parallel, once for each slice;
/// its arguments are the slice's byte offset in the tensor and the slice. `part` must be a multiple of the element
/// size.
///
/// # Errors
/// [`Error::DType`] if `dtype` is not u8, u32, i64, bf16, f16, f32 or f64; the first error of `fill`.
pub fn filled_in_parts(
    dims: &[usize],
    dtype: DType,
    part: usize,
    fill: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
) -> Result<Raw> {
    fn filled<T: WithDType>(
        dims: &[usize],
        part: usize,
        fill: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<Raw> {
        let count = dims.iter().product();
        let mut values = Vec::<T>::with_capacity(count);
        let room = &mut values.spare_capacity_mut()[..count];
        let failure = Mutex::new(None);
        par_chunks_mut(room, part / size_of::<T>(), |number, chunk| {
            // SAFETY: the chunk is filled with zero bytes before it is read, and zero bytes are a number of every
            // dtype.
            let bytes = unsafe {
                chunk.as_mut_ptr().write_bytes(0, chunk.len());
                std::slice::from_raw_parts_mut(chunk.as_mut_ptr().cast::<u8>(), size_of_val(chunk))
            };
            if let Err(error) = fill(number * part, bytes) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        // SAFETY: every element has been written, as zero or by `fill`; every bit pattern is a number of type `T`.
        unsafe { values.set_len(count) };
        Ok(from_vec(values, dims))
    }
    match dtype {
        DType::U8 => filled::<u8>(dims, part, fill),
        DType::U32 => filled::<u32>(dims, part, fill),
        DType::I64 => filled::<i64>(dims, part, fill),
        DType::BF16 => filled::<half::bf16>(dims, part, fill),
        DType::F16 => filled::<half::f16>(dims, part, fill),
        DType::F32 => filled::<f32>(dims, part, fill),
        DType::F64 => filled::<f64>(dims, part, fill),
        other => Err(Error::dtype("load", format!("dtype {} is not supported", other.as_str()))),
    }
}

/// All elements as f64 in row-major order, for tests and scalars.
pub fn to_f64_vec(raw: &Raw) -> Result<Vec<f64>> {
    if raw.elem_count() == 0 {
        return Ok(Vec::new());
    }
    to_vec(&to_cpu(raw)?.to_dtype(DType::F64)?)
}
