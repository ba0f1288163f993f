//! Copies, conversions and changes in place of tensors on a CUDA device. If the destination shares the source's storage
//! or is a broadcast view, these functions return [`Error::Argument`], where those of the CPU engine return
//! [`Error::Candle`].

use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::result;
use trainable_candle_cuda::kernels::cast::{CAST, Cast};
// `ACCUMULATE` takes the arguments of `COPY`, and `SCALE_IN_PLACE` those of `FILL`.
use trainable_candle_cuda::kernels::copy::{
    ACCUMULATE, COPY, COPY_BYTES, Copy as CopyArguments, FILL, Fill, LERP, Lerp, SCALE_IN_PLACE,
};

use super::error::driver_error;
use super::gpu::Gpu;
use super::launch::{
    Const, Kernel, Mut, address, any_suffixes, byte_suffix, empty, input, same_device, suffix, suffixes,
};
use super::strided::{Member, strided};
use crate::cpu::inplace::check_weight;
use crate::raw::storage_identity;
use crate::{Error, Raw, Result};

/// Does on a CUDA device what [`cpu::contiguous`](crate::cpu::contiguous) does on the CPU.
pub fn contiguous(x: &Raw) -> Result<Raw> {
    if x.is_contiguous() { Ok(x.clone()) } else { copy(x) }
}

/// Copies `x` to a new, contiguous tensor. Takes any dtype that kernels support.
pub fn copy(x: &Raw) -> Result<Raw> {
    const OP: &str = "copy";
    let y = empty(OP, Gpu::of(OP, x)?, x.dims(), x.dtype())?;
    write(OP, &y, x, None)?;
    Ok(y)
}

/// Does on a CUDA device what [`cpu::cast`](crate::cpu::cast) does on the CPU.
pub fn cast(x: &Raw, dtype: DType) -> Result<Raw> {
    const OP: &str = "cast";
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    suffixes(OP, x.dtype(), dtype)?;
    let y = empty(OP, Gpu::of(OP, x)?, x.dims(), dtype)?;
    write(OP, &y, x, None)?;
    Ok(y)
}

/// Converts `x` to `dtype`. Returns `x` itself if it has the dtype already, otherwise a contiguous tensor. For two
/// different floating-point dtypes use [`cast`]: there are kernels only if one of the two is an integer dtype.
///
/// # Errors
/// [`Error::Device`] if `x` is not on a CUDA device, [`Error::DType`] if a dtype is not u8, u32, i64, f16, bf16, f32 or
/// f64, [`Error::Shape`] as [`strided`], [`Error::OutOfMemory`] if the result does not fit into memory.
pub fn convert(x: &Raw, dtype: DType) -> Result<Raw> {
    const OP: &str = "cast";
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let gpu = Gpu::of(OP, x)?;
    let function = gpu.function(&CAST, any_suffixes(OP, x.dtype(), dtype)?)?;
    let y = empty(OP, gpu, x.dims(), dtype)?;
    if y.elem_count() > 0 {
        let (to, from) = (Member::new(OP, &y)?, Member::new(OP, x)?);
        let (tensors, shape) = strided(OP, x.dims(), [to, from])?;
        // SAFETY: the strides stay inside the tensors.
        unsafe { function.launch(OP, gpu, shape, Cast { y: to.output(), x: from.input(), tensors }) }?;
    }
    Ok(y)
}

/// Does on a CUDA device what [`cpu::copy_into`](crate::cpu::copy_into) does on the CPU.
pub fn copy_into(dst: &Raw, src: &Raw) -> Result<()> {
    const OP: &str = "copy_into";
    check_pair(OP, dst, src)?;
    write(OP, dst, src, None)
}

/// Does on a CUDA device what [`cpu::accumulate`](crate::cpu::accumulate) does on the CPU.
pub fn accumulate(dst: &Raw, src: &Raw) -> Result<()> {
    const OP: &str = "accumulate";
    check_pair(OP, dst, src)?;
    write(OP, dst, src, Some(Change::Add))
}

/// Does on a CUDA device what [`cpu::lerp_in_place`](crate::cpu::lerp_in_place) does on the CPU.
pub fn lerp_in_place(dst: &Raw, src: &Raw, weight: &Raw) -> Result<()> {
    const OP: &str = "lerp_in_place";
    check_pair(OP, dst, src)?;
    check_weight(OP, weight)?;
    same_device(OP, dst, &[weight])?;
    write(OP, dst, src, Some(Change::Lerp(input(OP, weight)?)))
}

/// Does on a CUDA device what [`cpu::fill`](crate::cpu::fill) does on the CPU.
pub fn fill(dst: &Raw, value: f64) -> Result<()> {
    fill_or_scale("fill", &FILL, dst, value)
}

/// Makes a tensor filled with `value`.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, [`Error::OutOfMemory`] if the tensor does not fit into memory,
/// [`Error::DType`] if the dtype is not a floating-point one.
pub fn filled(device: &candle_core::Device, value: f64, dims: &[usize], dtype: DType) -> Result<Raw> {
    const OP: &str = "full";
    let y = empty(OP, Gpu::of_device(OP, device)?, dims, dtype)?;
    fill_or_scale(OP, &FILL, &y, value)?;
    Ok(y)
}

/// Concatenates tensors along `dim`. They must have the same dtype, any that kernels support, and the same sizes along
/// the other dimensions.
pub fn cat(parts: &[&Raw], dim: usize) -> Result<Raw> {
    const OP: &str = "cat";
    let (first, others) =
        parts.split_first().ok_or_else(|| Error::argument(OP, "found no tensors, expected at least one"))?;
    same_device(OP, first, others)?;
    let mut dims = first.dims().to_vec();
    dims[dim] = parts.iter().map(|part| part.dims()[dim]).sum();
    let y = empty(OP, Gpu::of(OP, first)?, &dims, first.dtype())?;
    let mut start = 0;
    for part in parts {
        let length = part.dims()[dim];
        write(OP, &y.narrow(dim, start, length)?, part, None)?;
        start += length;
    }
    Ok(y)
}

/// Makes a tensor of zeros, of any dtype that kernels support.
pub fn zeros(device: &candle_core::Device, dims: &[usize], dtype: DType) -> Result<Raw> {
    const OP: &str = "zeros";
    let gpu = Gpu::of_device(OP, device)?;
    let y = empty(OP, gpu, dims, dtype)?;
    let bytes = y.elem_count() * dtype.size_in_bytes();
    if bytes > 0 {
        let to = address(OP, &y)?;
        let queue = || {
            gpu.stream().context().bind_to_thread()?;
            // SAFETY: the tensor has this many bytes, and bytes of zeros are a value of every dtype.
            unsafe { result::memset_d8_async(to, 0, bytes, gpu.stream().cu_stream()) }
        };
        queue().map_err(|error| driver_error(OP, error))?;
    }
    Ok(y)
}

/// Does on a CUDA device what [`cpu::scale_in_place`](crate::cpu::scale_in_place) does on the CPU.
pub fn scale_in_place(dst: &Raw, factor: f64) -> Result<()> {
    fill_or_scale("scale_in_place", &SCALE_IN_PLACE, dst, factor)
}

/// Copies `src` to `dst`, by the driver's copy function if `src` is contiguous, otherwise by a kernel. `dst` must be
/// contiguous, and have the shape, the dtype and the device of `src`.
pub(super) fn transfer(op: &'static str, dst: &Raw, src: &Raw) -> Result<()> {
    if !src.is_contiguous() {
        return copy_into(dst, src);
    }
    let bytes = dst.elem_count() * dst.dtype().size_in_bytes();
    if bytes == 0 {
        return Ok(());
    }
    let gpu = Gpu::of(op, dst)?;
    let (to, from) = (address(op, dst)?, address(op, src)?);
    let queue = || {
        gpu.stream().context().bind_to_thread()?;
        // SAFETY: both tensors are contiguous and have this many bytes.
        unsafe { result::memcpy_dtod_async(to, from, bytes, gpu.stream().cu_stream()) }
    };
    queue().map_err(|error| driver_error(op, error))
}

/// Copies `x` to a new, contiguous tensor, by [`transfer`].
pub(super) fn duplicate(op: &'static str, x: &Raw) -> Result<Raw> {
    let y = empty(op, Gpu::of(op, x)?, x.dims(), x.dtype())?;
    transfer(op, &y, x)?;
    Ok(y)
}

/// How an element of the destination changes, if it is not just replaced.
#[derive(Clone, Copy)]
enum Change {
    /// The element of the source is added.
    Add,
    /// The element moves towards the element of the source by a share of their difference. The share, one f64, is at
    /// this address.
    Lerp(Const),
}

/// Copies `src` to `dst` with conversion to the dtype of `dst`, or changes `dst` as `change` says. Both must have the
/// same shape and device.
fn write(op: &'static str, dst: &Raw, src: &Raw, change: Option<Change>) -> Result<()> {
    if dst.elem_count() == 0 {
        return Ok(());
    }
    let gpu = Gpu::of(op, dst)?;
    let (to, from) = (Member::new(op, dst)?, Member::new(op, src)?);
    if change.is_none() && dst.dtype() == src.dtype() {
        // SAFETY: the strides stay inside the tensors.
        return unsafe { copy_bytes(op, gpu, dst.dims(), to, from) };
    }
    let (tensors, shape) = strided(op, dst.dims(), [to, from])?;
    let (y, x, dtypes) = (to.output(), from.input(), suffixes(op, src.dtype(), dst.dtype())?);
    // SAFETY: the strides stay inside the tensors.
    unsafe {
        match change {
            None => gpu.function(&COPY, dtypes)?.launch(op, gpu, shape, CopyArguments { y, x, tensors }),
            Some(Change::Add) => {
                gpu.function(&ACCUMULATE, dtypes)?.launch(op, gpu, shape, CopyArguments { y, x, tensors })
            }
            Some(Change::Lerp(weight)) => {
                gpu.function(&LERP, dtypes)?.launch(op, gpu, shape, Lerp { y, x, tensors, weight })
            }
        }
    }
}

/// Copies `from` to `to` without conversion. Their elements must have the same size in bytes.
///
/// # Safety
/// The strides of `from` stay inside memory that may be read, and those of `to` inside memory that may be written.
pub(super) unsafe fn copy_bytes(
    op: &'static str,
    gpu: &Gpu,
    dims: &[usize],
    to: Member<'_>,
    from: Member<'_>,
) -> Result<()> {
    let (tensors, shape) = strided(op, dims, [to, from])?;
    let (y, x) = (Mut::new(to.address, to.unsigned_element()), Const::new(from.address, from.unsigned_element()));
    let function = gpu.function(&COPY_BYTES, byte_suffix(to.dtype))?;
    // SAFETY: the caller's promise.
    unsafe { function.launch(op, gpu, shape, CopyArguments { y, x, tensors }) }
}

/// Runs `kernel`, which fills `dst` with `number` or multiplies it by `number`.
fn fill_or_scale(op: &'static str, kernel: &Kernel<Fill>, dst: &Raw, number: f64) -> Result<()> {
    let gpu = Gpu::of(op, dst)?;
    let function = gpu.function(kernel, suffix(op, dst.dtype())?)?;
    check_distinct(op, dst)?;
    if dst.elem_count() == 0 {
        return Ok(());
    }
    let to = Member::new(op, dst)?;
    let (tensors, shape) = strided(op, dst.dims(), [to])?;
    // SAFETY: the strides stay inside the tensor.
    unsafe { function.launch(op, gpu, shape, Fill { y: to.output(), tensors, number }) }
}

/// Checks that `dst` can be changed by `src`: the shapes and the devices are equal, `dst` is no broadcast view, and the
/// storages differ.
fn check_pair(op: &'static str, dst: &Raw, src: &Raw) -> Result<()> {
    if dst.dims() != src.dims() {
        return Err(Error::shape(op, format!("found a source of shape {:?}, expected {:?}", src.dims(), dst.dims())));
    }
    same_device(op, dst, &[src])?;
    check_distinct(op, dst)?;
    let storage_address = |raw: &Raw| storage_identity(raw).0;
    if dst.elem_count() > 0 && storage_address(dst) == storage_address(src) {
        return Err(Error::argument(op, "the destination and the source share one storage; copy the source first"));
    }
    Ok(())
}

/// Checks that no two elements of `dst` share memory, as elements of a broadcast view do.
fn check_distinct(op: &'static str, dst: &Raw) -> Result<()> {
    let is_broadcast = dst.dims().iter().zip(dst.stride()).any(|(&size, &stride)| size > 1 && stride == 0);
    if is_broadcast && dst.elem_count() > 0 {
        return Err(Error::argument(
            op,
            format!(
                "found a destination with strides {:?} (a broadcast view), expected one whose elements share no memory",
                dst.stride()
            ),
        ));
    }
    Ok(())
}
