//! Copies of tensors' values to the host.

use candle_core::WithDType;
use trainable_candle_cuda::download;

use super::copy::contiguous;
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use super::mapped;
use crate::{Error, Raw, Result};

/// The elements of a tensor in row-major order, on the host. Only these elements are copied, not the whole storage. `T`
/// is the type of the elements. Waits for the device.
///
/// # Errors
/// [`Error::Device`] if the tensor is not on a CUDA device or the driver reports an error, [`Error::DType`] if `T` is
/// not the type of the elements, [`Error::Index`] if a kernel has found an id out of range.
pub fn download<T: WithDType>(x: &Raw) -> Result<Vec<T>> {
    const OP: &str = "to_cpu";
    let gpu = Gpu::of(OP, x)?;
    if x.dtype() != T::DTYPE {
        let (found, expected) = (x.dtype().as_str(), T::DTYPE.as_str());
        return Err(Error::dtype(OP, format!("found dtype {found}, expected {expected}")));
    }
    let dense = contiguous(x)?;
    let (count, from) = (dense.elem_count(), address(OP, &dense)?);
    if let Some(values) = mapped::read(OP, gpu, from, count) {
        let values = values?;
        gpu.board().check()?;
        return Ok(values);
    }
    let mut values: Vec<T> = Vec::with_capacity(count);
    // Copy nothing of an empty tensor: its storage has memory that nothing has written.
    if count > 0 {
        gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        // SAFETY: `dense` and the capacity of `values` have `count` elements of the number type `T`, and the copy
        // writes all elements of `values`.
        unsafe {
            let to = values.as_mut_ptr().cast();
            download::download(to, from, count * size_of::<T>(), gpu.stream().cu_stream().cast())
                .map_err(|status| status_error(OP, status))?;
            values.set_len(count);
        }
    }
    gpu.board().check()?;
    Ok(values)
}
