//! Copies the values of tensors on CUDA devices to the host.

use candle_core::WithDType;
use trainable_candle_cuda::download;

use super::copy::contiguous;
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use super::mapped;
use crate::{Error, Raw, Result};

/// Waits for the device, and copies the elements of a tensor to the host, in row-major order. `T` is the type of the
/// elements. Of a view, only the elements that the view shows are copied, not its whole storage.
///
/// # Errors
/// [`Error::Device`] if the tensor is not on a CUDA device or the driver reports an error, [`Error::DType`] if `T` is
/// not the type of the elements, [`Error::Index`] if a kernel has found an id out of range and no earlier call has
/// returned this error. If the tensor is not contiguous, [`Error::OutOfMemory`] if the device has no memory for a
/// contiguous copy, and [`Error::Shape`] if the tensor has too many dimensions for a copy.
pub fn download<T: WithDType>(x: &Raw) -> Result<Vec<T>> {
    const OP: &str = "to_cpu";
    let gpu = Gpu::of(OP, x)?;
    if x.dtype() != T::DTYPE {
        let (found, expected) = (x.dtype().as_str(), T::DTYPE.as_str());
        return Err(Error::dtype(OP, format!("found dtype {found}, expected {expected}")));
    }
    let dense = contiguous(x)?;
    let (count, from) = (dense.elem_count(), address(OP, &dense)?);
    // A tensor of a CUDA device can be in mapped memory of the host. The host reads it without a copy by the device.
    if let Some(values) = mapped::read(OP, gpu, from, count) {
        let values = values?;
        // Returns the error if a kernel has reported an id out of range.
        gpu.board().check()?;
        return Ok(values);
    }
    let mut values: Vec<T> = Vec::with_capacity(count);
    // The storage of an empty tensor has room for one element, which nothing has written: do not read it.
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
