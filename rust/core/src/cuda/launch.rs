//! What every launch of a CUDA kernel needs: addresses of tensors, arguments, the kernel's variant, the grid of blocks,
//! new tensors for the results.

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
use crate::device::name;
use crate::{Error, Raw, Result};

/// The most bytes of dynamic shared memory that a block may have if the kernel's attribute does not request more.
const COMMON_SHARED_MEMORY: u32 = 48 << 10;

/// The threads of a warp.
const WARP: usize = 32;
/// The threads of a block, where no other number is given.
const BLOCK: usize = 256;

/// The variant of a kernel for certain dtypes, loaded by the driver. It takes the arguments `A`.
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

/// The number of threads of the largest team. A team is the threads that work on one row (`cuda/include/rows.cuh`).
pub const TEAM: usize = 512;

impl Shape {
    /// Describes `blocks` blocks of `threads` threads, in one dimension.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are more than 2^31 - 1 blocks.
    pub fn linear(op: &'static str, blocks: usize, threads: u32) -> Result<Self> {
        let grid = u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32);
        let too_many = || {
            Error::argument(op, format!("{blocks} thread blocks are more than a GPU can launch; use a smaller batch"))
        };
        Ok(Self { grid: [grid.ok_or_else(too_many)?, 1, 1], block: [threads, 1, 1], shared: 0 })
    }

    /// Describes blocks of 256 threads for a kernel whose threads loop until all `count` elements are done. Each thread
    /// gets about `each` elements.
    pub fn flat(count: usize, each: usize) -> Self {
        let blocks = count.div_ceil(BLOCK * each.max(1)).clamp(1, i32::MAX as usize);
        Self { grid: [blocks as u32, 1, 1], block: [BLOCK as u32, 1, 1], shared: 0 }
    }

    /// Describes a team of threads for each row of `len` elements, as `cuda/include/rows.cuh` requires. Each thread
    /// holds up to four packs of its row in registers, unless the row is too long for the largest team. A pack is 16
    /// bytes of neighbouring elements.
    pub fn rows(rows: usize, len: usize, dtype: DType) -> Self {
        Self::teams(rows, len, 4, dtype)
    }

    /// As [`rows`](Self::rows), for a kernel whose threads each hold up to `held` packs of a row in registers.
    pub fn teams(rows: usize, len: usize, held: usize, dtype: DType) -> Self {
        // The fewest whole warps whose threads hold the row.
        let threads = (WARP * len.div_ceil(WARP * held * wide(dtype))).clamp(WARP, TEAM);
        // A block has one team, or four teams of one warp each.
        let teams = if threads == WARP { 4 } else { 1 };
        let blocks = rows.div_ceil(teams).clamp(1, i32::MAX as usize);
        Self { grid: [blocks as u32, 1, 1], block: [threads as u32, teams as u32, 1], shared: 0 }
    }

    /// Describes a thread for each of `count` items, in blocks of 256.
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    pub fn threads(op: &'static str, count: usize) -> Result<Self> {
        Self::linear(op, count.div_ceil(BLOCK), BLOCK as u32)
    }
}

impl Gpu {
    /// Finds the variant of `kernel` for `dtypes`: the function `<name>_<dtype>_...` in the kernel's module. The driver
    /// loads it on first use.
    ///
    /// # Errors
    /// [`Error::Device`] if the kernel has no variant for these dtypes, or the driver cannot load it.
    pub fn function<A: Arguments>(&self, kernel: &Kernel<A>, dtypes: &'static [&'static str]) -> Result<Function<A>> {
        Ok(Function { loaded: self.loader().find(kernel, dtypes)?, takes: PhantomData })
    }

    /// Finds the variant for `dtypes` of the kernel `<name><end>`, one of those that take the arguments `A`.
    ///
    /// # Errors
    /// As [`function`](Self::function), and [`Error::Device`] if no such kernel takes these arguments.
    pub fn named<A: Arguments>(&self, name: &str, end: &str, dtypes: &'static [&'static str]) -> Result<Function<A>> {
        let kernel = A::KERNELS.iter().find(|kernel| kernel.name.strip_suffix(end) == Some(name));
        let missing =
            || Error::device("cuda", format!("no kernel {name}{end} takes these arguments; please report this"));
        self.function(kernel.ok_or_else(missing)?, dtypes)
    }
}

impl<A: Arguments> Function<A> {
    /// Queues the kernel.
    ///
    /// # Safety
    /// The memory to which the arguments point is valid for the kernel's accesses.
    ///
    /// # Errors
    /// [`Error::DType`] if an argument points to elements of another type than the kernel reads or writes there,
    /// [`Error::Device`] if the driver reports an error.
    pub unsafe fn launch(&self, op: &'static str, gpu: &Gpu, shape: Shape, arguments: A) -> Result<()> {
        // `values` points to the value of each argument. `elements` has the element type of each pointer among the
        // arguments.
        arguments.lend(|values, elements| {
            check(op, &self.loaded.name, self.loaded.pointers, elements)?;
            // SAFETY: the arguments are the kernel's; the rest is the caller's promise.
            unsafe { self.loaded.launch(op, gpu, shape, values) }
        })
    }
}

impl Loaded {
    /// Queues the kernel.
    ///
    /// # Safety
    /// `arguments` point to the values of the kernel's parameters, in order and of the right types. The memory to which
    /// these values point is valid for the kernel's accesses.
    unsafe fn launch(&self, op: &'static str, gpu: &Gpu, shape: Shape, arguments: &mut [*mut c_void]) -> Result<()> {
        let mut queue = || {
            gpu.stream().context().bind_to_thread()?;
            if shape.shared > COMMON_SHARED_MEMORY {
                let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                self.function.set_attribute(attribute, shape.shared as i32)?;
            }
            let (function, stream) = (self.function.cu_function(), gpu.stream().cu_stream());
            if self.overlaps {
                // SAFETY: the caller's promise; the code of this kernel waits for the kernel before it.
                return unsafe { launch_early(function, shape, stream, arguments) };
            }
            let (grid, block) = (shape.grid.into(), shape.block.into());
            // SAFETY: the caller's promise.
            unsafe { result::launch_kernel(function, grid, block, shape.shared, stream, arguments) }
        };
        measured(gpu, || self.name.as_ref().to_owned(), || queue().map_err(|error| driver_error(op, error)))
    }
}

/// Queues a kernel that may start while the kernel before it still runs.
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
/// `pointers` has the names and the expected types, `elements` the types found, both in the order of the arguments.
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

/// Returns the address of the first element of a tensor. The address is valid while the tensor lives, and for all work
/// that is queued while the tensor lives. If a graph is being captured, the graph keeps the tensor alive.
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

/// Returns the [`Element`] that stands for a dtype in the signatures of kernels; `Any` for a dtype that kernels do not
/// support.
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

/// Makes the argument for a tensor that a kernel reads.
///
/// # Errors
/// As [`address`].
pub fn input(op: &'static str, tensor: &Raw) -> Result<Const> {
    Ok(Const::new(address(op, tensor)?, element(tensor.dtype())))
}

/// Makes the argument for a tensor that a kernel reads: null if there is none.
///
/// # Errors
/// As [`address`].
pub fn optional_input(op: &'static str, tensor: Option<&Raw>) -> Result<Const> {
    tensor.map_or(Ok(Const::NULL), |tensor| input(op, tensor))
}

/// Makes the argument for a tensor that a kernel writes.
///
/// # Errors
/// As [`address`].
pub fn output(op: &'static str, tensor: &Raw) -> Result<Mut> {
    Ok(Mut::new(address(op, tensor)?, element(tensor.dtype())))
}

/// Makes the argument for a tensor that a kernel writes: null if there is none.
///
/// # Errors
/// As [`address`].
pub fn optional_output(op: &'static str, tensor: Option<&Raw>) -> Result<Mut> {
    tensor.map_or(Ok(Mut::NULL), |tensor| output(op, tensor))
}

/// Returns the number of rows of a tensor, and the length of a row: the size of the last dimension, 1 for a scalar. An
/// empty tensor has no rows.
pub fn rows_of(x: &Raw) -> (usize, usize) {
    let len = x.dims().last().copied().unwrap_or(1);
    (x.elem_count() / len.max(1), len)
}

/// Returns the number of elements in 16 bytes, the widest access of a thread.
pub fn wide(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

/// Returns the dtype in which kernels compute with tensors of `dtype`, and in which they store statistics.
pub const fn accumulator(dtype: DType) -> DType {
    if matches!(dtype, DType::F64) { DType::F64 } else { DType::F32 }
}

/// Converts `size` to an argument of a kernel that counts in 32 bits.
///
/// # Errors
/// [`Error::Shape`] if `size` is 2^32 or more.
pub fn count32(op: &'static str, size: usize) -> Result<u32> {
    u32::try_from(size)
        .map_err(|_| Error::shape(op, format!("found a dimension of size {size}, CUDA kernels take less than 2^32")))
}

/// Makes a tensor whose values are not set yet.
///
/// # Errors
/// [`Error::OutOfMemory`] if the tensor does not fit into memory, [`Error::DType`] if kernels do not support the dtype.
pub fn empty(op: &'static str, gpu: &Gpu, dims: &[usize], dtype: DType) -> Result<Raw> {
    tensor_in(op, gpu, dims, dtype, &InDeviceMemory { op, gpu, dims })
}

/// Allocates the memory of a tensor.
pub(super) trait Allocate {
    /// Memory for `count` elements.
    fn allocate<T: DeviceRepr>(&self, count: usize) -> Result<CudaSlice<T>>;
}

/// Allocates the memory of a tensor of shape `dims` on the device.
struct InDeviceMemory<'a> {
    op: &'static str,
    gpu: &'a Gpu,
    /// For the error message alone.
    dims: &'a [usize],
}

impl Allocate for InDeviceMemory<'_> {
    fn allocate<T: DeviceRepr>(&self, count: usize) -> Result<CudaSlice<T>> {
        allocate(self.op, self.gpu, count, self.dims)
    }
}

/// Makes a tensor on the device `gpu`, in memory that `memory` allocates.
///
/// # Errors
/// The errors of `memory`, [`Error::OutOfMemory`] if the tensor is larger than any memory, [`Error::DType`] if kernels
/// do not support the dtype.
pub(super) fn tensor_in(
    op: &'static str,
    gpu: &Gpu,
    dims: &[usize],
    dtype: DType,
    memory: &impl Allocate,
) -> Result<Raw> {
    // An empty tensor has room for one element, so that it has an address.
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
    // Without candle's autograd: the tensor is no result of an operation, and no variable (`false`).
    Ok(Raw::from_storage(storage, dims, BackpropOp::none(), false))
}

/// Returns the suffix of a kernel's name for a floating-point dtype, as a list of one name.
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

/// Returns the suffix of a kernel's name for a floating-point dtype, u8, u32 or i64, as a list of one name.
///
/// # Errors
/// [`Error::DType`] if `dtype` is not among these dtypes.
pub fn any_suffix(op: &'static str, dtype: DType) -> Result<&'static [&'static str]> {
    match dtype {
        DType::U8 => Ok(&["u8"]),
        DType::U32 => Ok(&["u32"]),
        DType::I64 => Ok(&["i64"]),
        other => suffix(op, other),
    }
}

/// Returns the suffix of the name of a kernel that only copies elements: the size of an element of `dtype` in bytes.
pub fn byte_suffix(dtype: DType) -> &'static [&'static str] {
    match dtype.size_in_bytes() {
        1 => &["1"],
        2 => &["2"],
        4 => &["4"],
        _ => &["8"],
    }
}

/// Returns the suffixes of a kernel's name for two floating-point dtypes.
///
/// # Errors
/// [`Error::DType`] if `from` or `to` is not a floating-point dtype.
pub fn suffixes(op: &'static str, from: DType, to: DType) -> Result<&'static [&'static str]> {
    suffix(op, from).and(suffix(op, to))?;
    any_suffixes(op, from, to)
}

/// Returns the suffixes of a kernel's name for two dtypes, each a floating-point dtype, u8, u32 or i64.
///
/// # Errors
/// [`Error::DType`] if `from` or `to` is not among these dtypes.
pub fn any_suffixes(op: &'static str, from: DType, to: DType) -> Result<&'static [&'static str]> {
    // Makes a static list of the two suffixes for every pair of dtypes: the first rule finds `from`, the second `to`.
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
    let Some(other) = others.iter().find(|other| !first.device().same_device(other.device())) else {
        return Ok(());
    };
    let (a, b) = (name(first.device()), name(other.device()));
    Err(Error::device(op, format!("tensors are on different devices ({a} and {b}); move one with to()")))
}

#[cfg(test)]
mod tests {
    use trainable_candle_cuda::kernels::softmax::SOFTMAX_FORWARD;

    use super::*;

    #[test]
    fn a_kernel_takes_pointers_to_its_dtype_and_null_but_not_to_another_dtype() {
        let f16 = SOFTMAX_FORWARD.variants.iter().find(|variant| variant.dtypes == ["f16"]).expect("a variant for f16");
        // The kernel's pointers are x and y.
        let check_f16 = |elements: [Element; 2]| check("softmax", "softmax_forward_f16", f16.pointers, &elements);
        assert!(check_f16([Element::F16, Element::F16]).is_ok());
        assert!(check_f16([Const::NULL.element, element(DType::F16)]).is_ok());
        let error = check_f16([element(DType::F16), element(DType::F32)]).expect_err("f32 for f16").to_string();
        assert!(error.contains("the kernel softmax_forward_f16 got F32 for its argument y, expected F16"), "{error}");
    }
}
