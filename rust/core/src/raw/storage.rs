//! The storage of tensors: its identity, its size, its layout, and checks before it is allocated.

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Shape, Storage, WithDType};

use crate::{Error, Result};

/// A candle tensor that carries no candle graph: values, shape, dtype, device.
pub type Raw = candle_core::Tensor;

/// A contiguous CPU tensor that owns `data` (row-major, `data.len()` elements).
pub fn from_vec<T: WithDType>(data: Vec<T>, shape: impl Into<Shape>) -> Raw {
    let is_variable = false;
    Raw::from_storage(Storage::Cpu(T::to_cpu_storage_owned(data)), shape, BackpropOp::none(), is_variable)
}

/// The address and the size in bytes of the storage of `raw`. All views of one storage have the same address. It
/// identifies the storage only while the storage exists.
pub fn storage_identity(raw: &Raw) -> (usize, usize) {
    let (storage, _) = raw.storage_and_layout();
    let address = std::ptr::from_ref::<Storage>(&storage) as usize;
    let elements = match &*storage {
        Storage::Cpu(cpu) => cpu_len(cpu),
        Storage::Cuda(cuda) => crate::cuda::storage_len(cuda),
        // Metal, which this library does not use.
        _ => raw.elem_count(),
    };
    (address, elements * raw.dtype().size_in_bytes())
}

/// The number of elements of the storage.
fn cpu_len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::U8(v) => v.len(),
        CpuStorage::U32(v) => v.len(),
        CpuStorage::I16(v) => v.len(),
        CpuStorage::I32(v) => v.len(),
        CpuStorage::I64(v) => v.len(),
        CpuStorage::BF16(v) => v.len(),
        CpuStorage::F16(v) => v.len(),
        CpuStorage::F32(v) => v.len(),
        CpuStorage::F64(v) => v.len(),
        CpuStorage::F8E4M3(v) => v.len(),
        CpuStorage::F6E2M3(v) | CpuStorage::F6E3M2(v) | CpuStorage::F4(v) | CpuStorage::F8E8M0(v) => v.len(),
    }
}

/// Whether `raw`, of shape `[.., heads, positions, features]`, has the heads of one position next to each other in
/// memory: the stride of heads is smaller than that of positions, and there is more than one position. A contiguous
/// tensor of shape `[.., positions, heads, features]` has this layout after the heads and positions are swapped.
pub fn heads_are_adjacent(raw: &Raw) -> bool {
    let rank = raw.rank();
    rank > 2 && raw.dims()[rank - 2] > 1 && raw.stride()[rank - 3] < raw.stride()[rank - 2]
}

/// Whether gradients can flow through values of `dtype`.
pub fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// The number of elements of the shape `dims`. Call this function before candle allocates a tensor on the CPU, because
/// a failed allocation in candle aborts the process.
///
/// # Errors
/// [`Error::OutOfMemory`] if the tensor's size in bytes overflows, or exceeds the memory that is available.
pub fn check_allocation(op: &'static str, dims: &[usize], dtype: DType) -> Result<usize> {
    /// Tensors of up to this many bytes are not compared with the available memory.
    const UNCHECKED_BYTES: usize = 256 << 20;
    let count = check_size(op, dims, dtype)?;
    let bytes = count * dtype.size_in_bytes();
    // Asking the system costs microseconds, too much for each small tensor.
    let available = if bytes > UNCHECKED_BYTES { crate::memory::available_bytes() } else { None };
    if let Some(available) = available.filter(|&a| bytes > a) {
        return Err(Error::OutOfMemory {
            op,
            message: format!(
                "a {} tensor of shape {dims:?} needs {:.1} GiB, {:.1} GiB are available; use a smaller shape or a smaller dtype",
                dtype.as_str(),
                bytes as f64 / (1u64 << 30) as f64,
                available as f64 / (1u64 << 30) as f64
            ),
        });
    }
    Ok(count)
}

/// [`check_allocation`] on the CPU. On a CUDA device, [`check_size`] alone: the allocation itself reports missing
/// memory.
///
/// # Errors
/// As [`check_allocation`].
pub fn check_allocation_on(device: &Device, op: &'static str, dims: &[usize], dtype: DType) -> Result<usize> {
    if device.is_cpu() { check_allocation(op, dims, dtype) } else { check_size(op, dims, dtype) }
}

/// The number of elements of the shape `dims`.
///
/// # Errors
/// [`Error::OutOfMemory`] if the number of bytes of these elements in `dtype` exceeds `isize::MAX`.
pub fn check_size(op: &'static str, dims: &[usize], dtype: DType) -> Result<usize> {
    let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let fits = |n: &usize| n.checked_mul(dtype.size_in_bytes()).is_some_and(|bytes| bytes <= isize::MAX as usize);
    count.filter(fits).ok_or_else(|| Error::OutOfMemory {
        op,
        message: format!("a {} tensor of shape {dims:?} has more bytes than can be addressed", dtype.as_str()),
    })
}
