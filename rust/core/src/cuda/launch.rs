//! Launching kernels: addresses of tensors, arguments, new results.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::zeroed;
use std::ptr::null_mut;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum as Attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig,
    CUstream, cuLaunchKernelEx,
};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, DriverError, result};
use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{DType, Layout, Storage};
pub use trainable_candle_cuda::kernels::{Arguments, Const, Element, Kernel, Mut};
pub use trainable_candle_cuda::structs::Address;

use super::error::driver_error;
use super::gpu::Gpu;
use super::loader::Loaded;
use super::memory::allocate;
use super::profile::measured;
use super::recorder;
use crate::{Error, Raw, Result};

/// The bytes of dynamic shared memory that a kernel may use without a request to the driver.
const COMMON_SHARED_MEMORY: u32 = 48 << 10;

/// A loaded kernel for some dtypes, with arguments of type `A`.
pub struct Function<A> {
    loaded: Loaded,
    takes: PhantomData<fn(A)>,
}

/// The launch configuration of a kernel: the number of blocks, the threads of each block, and the dynamic shared memory
/// of each block.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

/// The number of threads of the largest team (`include/rows.cuh`).
pub const TEAM: usize = 512;

impl Shape {
    /// `blocks` blocks of `threads` threads in one dimension.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are too many blocks.
    pub fn linear(op: &'static str, blocks: usize, threads: u32) -> Result<Self> {
        let grid = u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32);
        let grid =
            grid.ok_or_else(|| Error::argument(op, format!("{blocks} blocks of work are more than a GPU takes")))?;
        Ok(Self { grid: [grid, 1, 1], block: [threads, 1, 1], shared: 0 })
    }

    /// Blocks of 256 threads for kernels whose threads loop until all `count` elements are done. Each thread gets about
    /// `each` elements.
    pub fn flat(count: usize, each: usize) -> Self {
        let blocks = count.div_ceil(256 * each.max(1)).clamp(1, i32::MAX as usize);
        Self { grid: [blocks as u32, 1, 1], block: [256, 1, 1], shared: 0 }
    }

    /// A team of threads for each row of `len` elements, as `cuda/include/rows.cuh` requires. The threads of a team
    /// hold their row in registers, unless the row is too long.
    pub fn rows(rows: usize, len: usize, dtype: DType) -> Self {
        Self::teams(rows, len, 4, dtype)
    }

    /// As [`rows`](Self::rows), for a kernel whose threads each hold up to `held` packs of a row in registers. A pack
    /// is 16 bytes of neighbouring elements.
    pub fn teams(rows: usize, len: usize, held: usize, dtype: DType) -> Self {
        let threads = (32 * len.div_ceil(32 * held * wide(dtype))).clamp(32, TEAM);
        let teams = if threads == 32 { 4 } else { 1 };
        let blocks = rows.div_ceil(teams).clamp(1, i32::MAX as usize);
        Self { grid: [blocks as u32, 1, 1], block: [threads as u32, teams as u32, 1], shared: 0 }
    }

    /// A thread for each of `count` items, in blocks of 256.
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    pub fn threads(op: &'static str, count: usize) -> Result<Self> {
        const THREADS: usize = 256;
        Self::linear(op, count.div_ceil(THREADS), THREADS as u32)
    }
}

impl Gpu {
    /// The variant of `kernel` for `dtypes`: the function `<name>_<dtype>_...` in the kernel's module. The loader looks
    /// up each function only once.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no kernel for these dtypes or the driver cannot load it.
    pub fn function<A: Arguments>(&self, kernel: &Kernel<A>, dtypes: &'static [&'static str]) -> Result<Function<A>> {
        Ok(Function { loaded: self.loader().find(kernel, dtypes)?, takes: PhantomData })
    }

    /// As [`function`](Self::function), for the kernel `<name><end>` that takes the arguments `A`.
    ///
    /// # Errors
    /// As [`function`](Self::function).
    pub fn named<A: Arguments>(&self, name: &str, end: &str, dtypes: &'static [&'static str]) -> Result<Function<A>> {
        let kernel = A::KERNELS.iter().find(|kernel| kernel.name.strip_suffix(end) == Some(name));
        let missing =
            || Error::device("cuda", format!("no kernel {name}{end} takes these arguments; please report this"));
        self.function(kernel.ok_or_else(missing)?, dtypes)
    }
}

impl<A: Arguments> Function<A> {
    /// Queue the kernel.
    ///
    /// # Safety
    /// The memory to which the arguments point is valid for the kernel's accesses.
    ///
    /// # Errors
    /// [`Error::DType`] if an argument points to elements of another type than the kernel reads or writes there,
    /// [`Error::Device`] if the driver reports an error.
    pub unsafe fn launch(&self, op: &'static str, gpu: &Gpu, shape: Shape, arguments: A) -> Result<()> {
        arguments.lend(|places, elements| {
            check(op, &self.loaded.name, self.loaded.pointers, elements)?;
            // SAFETY: the arguments are the kernel's; the rest is the caller's promise.
            unsafe { self.loaded.launch(op, gpu, shape, places) }
        })
    }
}

impl Loaded {
    /// # Safety
    /// `arguments` point to the values of the kernel's parameters, in order and of the right types. The memory to which
    /// these values point is valid for the kernel's accesses.
    unsafe fn launch(&self, op: &'static str, gpu: &Gpu, shape: Shape, arguments: &mut [*mut c_void]) -> Result<()> {
        let mut run = || {
            gpu.stream().context().bind_to_thread()?;
            if shape.shared > COMMON_SHARED_MEMORY {
                let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                self.function.set_attribute(attribute, shape.shared as i32)?;
            }
            let (function, stream) = (self.function.cu_function(), gpu.stream().cu_stream());
            if self.overlaps {
                // SAFETY: the caller's promise; every kernel waits for the kernel before it
                // (`cuda/include/follow.cuh`).
                return unsafe { launch_early(function, shape, stream, arguments) };
            }
            let (grid, block) = (shape.grid.into(), shape.block.into());
            // SAFETY: the caller's promise.
            unsafe { result::launch_kernel(function, grid, block, shape.shared, stream, arguments) }
        };
        measured(gpu, || self.name.as_ref().to_owned(), || run().map_err(|error| driver_error(op, error)))
    }
}

/// Queue a kernel that may start while the kernel before it still runs.
///
/// # Safety
/// As [`result::launch_kernel`]. The code of the kernel must wait for the end of the kernel before it.
unsafe fn launch_early(
    function: CUfunction,
    shape: Shape,
    stream: CUstream,
    arguments: &mut [*mut c_void],
) -> std::result::Result<(), DriverError> {
    // SAFETY: all-zero bytes are a value of these structures of numbers and pointers.
    let (mut attribute, mut config): (CUlaunchAttribute, CUlaunchConfig) = unsafe { (zeroed(), zeroed()) };
    attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    [config.gridDimX, config.gridDimY, config.gridDimZ] = shape.grid;
    [config.blockDimX, config.blockDimY, config.blockDimZ] = shape.block;
    (config.sharedMemBytes, config.hStream) = (shape.shared, stream);
    (config.attrs, config.numAttrs) = (&raw mut attribute, 1);
    // SAFETY: the caller's promise; the attribute outlives the call.
    unsafe { cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), null_mut()) }.result()
}

/// Checks that the pointers among a kernel's arguments point to elements of the types that the kernel expects.
fn check(op: &'static str, kernel: &str, pointers: &[(&'static str, Element)], elements: &[Element]) -> Result<()> {
    match pointers.iter().zip(elements).find(|((_, expected), found)| !found.fits(*expected)) {
        None => Ok(()),
        Some(((argument, expected), found)) => Err(Error::dtype(
            op,
            format!(
                "the kernel {kernel} got {found:?} for its argument {argument}, expected {expected:?}; please report this"
            ),
        )),
    }
}

/// The address of the first element of a tensor. The address is valid while the tensor lives, and for all work that is
/// queued while the tensor lives. If a graph is being captured, the graph keeps the tensor alive.
///
/// # Errors
/// [`Error::Device`] if the tensor is not on a CUDA device, [`Error::DType`] if kernels do not support its dtype.
pub fn address(op: &'static str, tensor: &Raw) -> Result<Address> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(Error::device(op, "found a tensor on the CPU, expected one on a CUDA device; move it with to()"));
    };
    fn start<T: DeviceRepr>(slice: &CudaSlice<T>, layout: &Layout) -> Address {
        slice.device_ptr(slice.stream()).0 + (layout.start_offset() * size_of::<T>()) as Address
    }
    let address = match &storage.slice {
        CudaStorageSlice::U8(slice) => start(slice, layout),
        CudaStorageSlice::U32(slice) => start(slice, layout),
        CudaStorageSlice::I16(slice) => start(slice, layout),
        CudaStorageSlice::I32(slice) => start(slice, layout),
        CudaStorageSlice::I64(slice) => start(slice, layout),
        CudaStorageSlice::BF16(slice) => start(slice, layout),
        CudaStorageSlice::F16(slice) => start(slice, layout),
        CudaStorageSlice::F32(slice) => start(slice, layout),
        CudaStorageSlice::F64(slice) => start(slice, layout),
        _ => return Err(Error::dtype(op, format!("dtype {} is not supported on CUDA", tensor.dtype().as_str()))),
    };
    recorder::hold(tensor, address);
    Ok(address)
}

/// The [`Element`] that stands for a dtype in the signatures of kernels.
pub const fn element(dtype: DType) -> Element {
    match dtype {
        DType::U8 => Element::U8,
        DType::U32 => Element::U32,
        DType::I16 => Element::I16,
        DType::I32 => Element::I32,
        DType::I64 => Element::I64,
        DType::BF16 => Element::BF16,
        DType::F16 => Element::F16,
        DType::F32 => Element::F32,
        DType::F64 => Element::F64,
        _ => Element::Any,
    }
}

/// A tensor that a kernel reads.
///
/// # Errors
/// As [`address`].
pub fn input(op: &'static str, tensor: &Raw) -> Result<Const> {
    Ok(Const::new(address(op, tensor)?, element(tensor.dtype())))
}

/// A tensor that a kernel reads, or null if there is none.
///
/// # Errors
/// As [`address`].
pub fn optional_input(op: &'static str, tensor: Option<&Raw>) -> Result<Const> {
    tensor.map_or(Ok(Const::NULL), |tensor| input(op, tensor))
}

/// A tensor that a kernel writes.
///
/// # Errors
/// As [`address`].
pub fn output(op: &'static str, tensor: &Raw) -> Result<Mut> {
    Ok(Mut::new(address(op, tensor)?, element(tensor.dtype())))
}

/// A tensor that a kernel writes, or null if there is none.
///
/// # Errors
/// As [`address`].
pub fn optional_output(op: &'static str, tensor: Option<&Raw>) -> Result<Mut> {
    tensor.map_or(Ok(Mut::NULL), |tensor| output(op, tensor))
}

/// The number of rows of a tensor, and the length of a row, which is the size of the last dimension (1 for a scalar).
pub fn rows_of(x: &Raw) -> (usize, usize) {
    let len = x.dims().last().copied().unwrap_or(1);
    (x.elem_count() / len.max(1), len)
}

/// The number of elements in 16 bytes, the widest access of a thread.
pub fn wide(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

/// The dtype in which kernels compute with tensors of `dtype`, and in which they store statistics.
pub const fn accumulator(dtype: DType) -> DType {
    if matches!(dtype, DType::F64) { DType::F64 } else { DType::F32 }
}

/// `size` as an argument of a kernel that counts in 32 bits.
///
/// # Errors
/// [`Error::Shape`] if `size` is 2^32 or more.
pub fn count32(op: &'static str, size: usize) -> Result<u32> {
    u32::try_from(size)
        .map_err(|_| Error::shape(op, format!("a dimension of {size} elements is more than CUDA kernels take")))
}

/// A new tensor whose values are not set yet.
///
/// # Errors
/// [`Error::OutOfMemory`] if the tensor does not fit into memory, [`Error::DType`] if kernels do not support the dtype.
pub fn empty(op: &'static str, gpu: &Gpu, dims: &[usize], dtype: DType) -> Result<Raw> {
    made(op, gpu, dims, dtype, &InDeviceMemory { op, gpu, dims })
}

/// Allocates the memory of a tensor.
pub(super) trait Allocate {
    /// Memory for `count` elements.
    fn allocate<T: DeviceRepr>(&self, count: usize) -> Result<CudaSlice<T>>;
}

struct InDeviceMemory<'a> {
    op: &'static str,
    gpu: &'a Gpu,
    dims: &'a [usize],
}

impl Allocate for InDeviceMemory<'_> {
    fn allocate<T: DeviceRepr>(&self, count: usize) -> Result<CudaSlice<T>> {
        allocate(self.op, self.gpu, count, self.dims)
    }
}

/// A new tensor on the device `gpu`, in memory that `memory` allocates.
pub(super) fn made(op: &'static str, gpu: &Gpu, dims: &[usize], dtype: DType, memory: &impl Allocate) -> Result<Raw> {
    // One element at least, so that there is an address.
    let count = crate::raw::check_size(op, dims, dtype)?.max(1);
    macro_rules! storage {
        ($($variant:ident $t:ty;)*) => {
            match dtype {
                $(DType::$variant => CudaStorageSlice::$variant(memory.allocate::<$t>(count)?),)*
                other => return Err(Error::dtype(op, format!("dtype {} is not supported on CUDA", other.as_str()))),
            }
        };
    }
    let slice = storage! {
        U8 u8; U32 u32; I16 i16; I32 i32; I64 i64; BF16 half::bf16; F16 half::f16; F32 f32; F64 f64;
    };
    let storage = Storage::Cuda(CudaStorage { slice, device: gpu.device().clone() });
    Ok(Raw::from_storage(storage, dims, BackpropOp::none(), false))
}

/// The suffix of a kernel's name for a floating-point dtype.
///
/// # Errors
/// [`Error::DType`] if `dtype` is not a floating-point one.
pub fn suffix(op: &'static str, dtype: DType) -> Result<&'static [&'static str]> {
    Ok(match dtype {
        DType::F32 => &["f32"],
        DType::F64 => &["f64"],
        DType::F16 => &["f16"],
        DType::BF16 => &["bf16"],
        other => return Err(crate::cpu::elem::unsupported_dtype(op, other)),
    })
}

/// The suffix of a kernel's name for a floating-point dtype, u8, u32 or i64.
///
/// # Errors
/// [`Error::DType`] if `dtype` is another dtype.
pub fn any_suffix(op: &'static str, dtype: DType) -> Result<&'static [&'static str]> {
    match dtype {
        DType::U8 => Ok(&["u8"]),
        DType::U32 => Ok(&["u32"]),
        DType::I64 => Ok(&["i64"]),
        other => suffix(op, other),
    }
}

/// The suffix of the name of a kernel that only moves elements: the bytes of an element.
pub fn byte_suffix(dtype: DType) -> &'static [&'static str] {
    match dtype.size_in_bytes() {
        1 => &["1"],
        2 => &["2"],
        4 => &["4"],
        _ => &["8"],
    }
}

/// The suffixes of a kernel's name for two floating-point dtypes.
///
/// # Errors
/// [`Error::DType`] if `from` or `to` is not a floating-point dtype.
pub fn suffixes(op: &'static str, from: DType, to: DType) -> Result<&'static [&'static str]> {
    suffix(op, from).and(suffix(op, to))?;
    any_suffixes(op, from, to)
}

/// The suffixes of a kernel's name for two dtypes, each as for [`any_suffix`].
///
/// # Errors
/// [`Error::DType`] if `from` or `to` is not among these dtypes.
pub fn any_suffixes(op: &'static str, from: DType, to: DType) -> Result<&'static [&'static str]> {
    macro_rules! pairs {
        ($($from:ident $f:literal)*; $to:tt) => {
            match from {
                $(DType::$from => pairs!(@to $f $to),)*
                other => return Err(crate::cpu::elem::unsupported_dtype(op, other)),
            }
        };
        (@to $f:literal [$($to:ident $t:literal)*]) => {
            match to {
                $(DType::$to => &[$f, $t],)*
                other => return Err(crate::cpu::elem::unsupported_dtype(op, other)),
            }
        };
    }
    Ok(pairs! {
        F32 "f32" F64 "f64" F16 "f16" BF16 "bf16" U8 "u8" U32 "u32" I64 "i64";
        [F32 "f32" F64 "f64" F16 "f16" BF16 "bf16" U8 "u8" U32 "u32" I64 "i64"]
    })
}

/// Checks that the tensors of one kernel are on one device.
///
/// # Errors
/// [`Error::Device`] if they are not.
pub fn same_device(op: &'static str, first: &Raw, others: &[&Raw]) -> Result<()> {
    if others.iter().all(|other| first.device().same_device(other.device())) {
        return Ok(());
    }
    Err(Error::device(op, "tensors are on different devices; move one with to()"))
}

#[cfg(test)]
mod tests {
    use trainable_candle_cuda::kernels::softmax::SOFTMAX_FORWARD;

    use super::*;

    #[test]
    fn memory_of_another_dtype_is_rejected() {
        let f16 = SOFTMAX_FORWARD.variants.iter().find(|variant| variant.dtypes == ["f16"]).expect("a variant for f16");
        let check = |elements: [Element; 2]| check("softmax", "softmax_forward_f16", f16.pointers, &elements);
        assert!(check([Element::F16, Element::F16]).is_ok());
        assert!(check([Const::NULL.element, element(DType::F16)]).is_ok());
        let error = check([element(DType::F16), element(DType::F32)]).expect_err("f32 for f16").to_string();
        assert!(error.contains("the kernel softmax_forward_f16 got F32 for its argument y, expected F16"), "{error}");
    }
}
