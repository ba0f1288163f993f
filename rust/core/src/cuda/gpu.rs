//! The state of each CUDA device in use: its streams, its loaded kernels, and what cuBLAS and cuBLASLt need.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::cublas::{CudaBlas, sys as blas};
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError};
use candle_core::{CudaDevice, Device, DeviceLocation};
use trainable_candle_cuda::structs::Address;

use super::board::Board;
use super::copies::{Copies, Lazy};
use super::error::{check_blas, driver_error};
use super::loader::Loader;
use super::product_calls::ProductCalls;
use super::recorder;
use crate::device::name;
use crate::{Error, Raw, Result};

/// The size of cuBLAS' workspace that NVIDIA recommends for the Hopper generation.
const BLAS_WORKSPACE: usize = 32 << 20;

/// The environment variable that is 1 if a GPU of compute capability 9.0 shall not choose what is for 9.0 alone: the
/// kernels of `*_hopper.cu`, and tiles and scales of cuBLASLt. It then runs the general kernels as they are compiled
/// for 9.0. Their times are not those of other GPUs: attention's general kernels use other tiles and instructions on
/// 9.0.
const GENERAL_KERNELS: &str = "TRAINABLE_CANDLE_GENERAL_KERNELS";

/// A CUDA device with its stream, kernels and libraries.
pub struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    blas: Arc<CudaBlas>,
    loader: Loader,
    /// Whether the compute capability is 9.0.
    is_hopper: bool,
    /// Whether what is for compute capability 9.0 alone is chosen; see [`GENERAL_KERNELS`].
    runs_hopper_kernels: bool,
    multiprocessors: usize,
    /// Device memory in which kernels report ids out of range.
    board: Board,
    /// The calls of cuBLASLt that were chosen so far.
    product_calls: ProductCalls,
    /// The stream of copies, made on first use.
    copies: Lazy,
    /// Memory that cuBLAS and cuBLASLt use for intermediate results. They share it, because their work runs in the
    /// order of one stream.
    workspace: CudaSlice<u8>,
}

/// The devices in use, with their ids in candle. They stay until the process ends, because tensors may outlive all
/// other owners of their device.
static GPUS: RwLock<Vec<(DeviceId, &'static Gpu)>> = RwLock::new(Vec::new());

/// Returns the device in use for which `is_it` is true.
fn known(is_it: impl Fn(&(DeviceId, &'static Gpu)) -> bool) -> Option<&'static Gpu> {
    GPUS.read().unwrap_or_else(PoisonError::into_inner).iter().find(|entry| is_it(entry)).map(|&(_, gpu)| gpu)
}

/// Returns the device with the number `ordinal`. All calls with the same number return the same device. The CUDA
/// libraries are looked for in `folders` first.
///
/// # Errors
/// [`Error::CudaUnavailable`] with the reason if CUDA or this device cannot be used, [`Error::Device`] if there is no
/// device of this number or the driver reports an error, [`Error::OutOfMemory`] if the device's memory is full.
pub fn open(ordinal: usize, folders: &[&Path]) -> Result<Device> {
    if let Some(gpu) = known(|(_, gpu)| gpu.ordinal() == ordinal) {
        return Ok(Device::Cuda(gpu.device.clone()));
    }
    let count = devices(folders)?;
    if ordinal >= count {
        let plural = if count == 1 { "device" } else { "devices" };
        return Err(Error::device("device", format!("there is no cuda:{ordinal}; found {count} CUDA {plural}")));
    }
    check_usable(ordinal)?;
    let mut gpus = GPUS.write().unwrap_or_else(PoisonError::into_inner);
    // Another thread may have opened the device since the first look.
    if let Some((_, gpu)) = gpus.iter().find(|(_, gpu)| gpu.ordinal() == ordinal) {
        return Ok(Device::Cuda(gpu.device.clone()));
    }
    let device = CudaDevice::new_with_stream(ordinal)?;
    // SAFETY: this switches off cudarc's events, which order the work of different streams. They are not needed: all
    // work goes to the device's one stream or is ordered with it (see `copies.rs`), and memory is freed in the order of
    // this stream.
    unsafe { device.disable_event_tracking() };
    gpus.push((device.id(), Gpu::leak(device.clone())?));
    Ok(Device::Cuda(device))
}

/// Returns an error if this library cannot use the device.
fn check_usable(ordinal: usize) -> Result<()> {
    trainable_candle_cuda::check_device(ordinal)
        .map_err(|reason| Error::CudaUnavailable(format!("cuda:{ordinal}: {reason}")))
}

/// Returns the number of devices that the driver reports. At least one of them can be used.
///
/// # Errors
/// [`Error::CudaUnavailable`] with the reason if CUDA cannot be used, [`Error::Device`] if the driver reports an error.
pub fn devices(folders: &[&Path]) -> Result<usize> {
    trainable_candle_cuda::load(folders).map_err(|reason| Error::CudaUnavailable(reason.to_string()))?;
    Ok(CudaContext::device_count().map_err(|error| driver_error("device", error))? as usize)
}

impl Gpu {
    /// Makes the state of a device, which lives as long as the process.
    fn leak(device: CudaDevice) -> Result<&'static Self> {
        let stream = device.cuda_stream();
        let blas = device.cublas_handle();
        let capability = stream.context().compute_capability().map_err(|error| driver_error("cuda", error))?;
        let is_hopper = capability == (9, 0);
        let runs_hopper_kernels = is_hopper && std::env::var_os(GENERAL_KERNELS).is_none_or(|value| value != "1");
        let multiprocessors = stream.context().attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let multiprocessors = multiprocessors.map_err(|error| driver_error("cuda", error))? as usize;
        // SAFETY: only cuBLAS and cuBLASLt use the memory, and they read only values that they have written.
        let workspace = unsafe { device.alloc::<u8>(BLAS_WORKSPACE) }?;
        let (pointer, _) = workspace.device_ptr(&stream);
        // SAFETY: the handle is candle's for this device; the workspace lives as long as the device.
        unsafe {
            check_blas(blas::cublasSetWorkspace_v2(*blas.handle(), pointer as *mut _, BLAS_WORKSPACE))?;
            // If cuBLAS splits a sum over k, it adds up the parts of the sum in f32 for f16 and bf16, too.
            let mode = blas::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
            check_blas(blas::cublasSetMathMode(*blas.handle(), mode))?;
        }
        let board = Board::new(&device)?;
        Ok(Box::leak(Box::new(Self {
            device,
            board,
            loader: Loader::new(stream.clone()),
            stream,
            blas,
            is_hopper,
            runs_hopper_kernels,
            multiprocessors,
            product_calls: ProductCalls::default(),
            copies: Lazy::new(),
            workspace,
        })))
    }

    /// Returns the GPU of a tensor.
    ///
    /// # Errors
    /// [`Error::Device`] if the tensor is not on a CUDA device, another thread captures a function, or the driver
    /// reports an error. At the first use of a device, [`Error::OutOfMemory`] if the device's memory is full, and
    /// [`Error::CudaUnavailable`] if this library cannot use the device.
    pub fn of(op: &'static str, tensor: &Raw) -> Result<&'static Self> {
        if !tensor.device().is_cuda() {
            return Err(Error::device(
                op,
                "found a tensor on the CPU, expected one on a CUDA device; move it with to()",
            ));
        }
        Self::of_device(op, tensor.device())
    }

    /// Returns the GPU of a device.
    ///
    /// # Errors
    /// [`Error::Device`] if `device` is not a CUDA device; the other errors of [`of`](Self::of).
    pub fn of_device(op: &'static str, device: &Device) -> Result<&'static Self> {
        let Device::Cuda(device) = device else {
            let message = format!("found the device \"{}\", expected a CUDA device", name(device));
            return Err(Error::device(op, message));
        };
        recorder::check_thread(op)?;
        if let Some(gpu) = known(|(id, _)| *id == device.id()) {
            return Ok(gpu);
        }
        // Candle made the device, not `open`, so it was not checked yet.
        if let DeviceLocation::Cuda { gpu_id } = device.location() {
            check_usable(gpu_id)?;
        }
        let mut gpus = GPUS.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have added the device since the first look.
        if let Some((_, gpu)) = gpus.iter().find(|(id, _)| *id == device.id()) {
            return Ok(gpu);
        }
        let gpu = Self::leak(device.clone())?;
        gpus.push((device.id(), gpu));
        Ok(gpu)
    }

    /// Returns candle's device.
    pub const fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Returns the stream in which all work is queued, except copies that run in parallel (`copies.rs`).
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns cuBLAS with its handle for [`stream`](Self::stream).
    pub(super) const fn blas(&self) -> &Arc<CudaBlas> {
        &self.blas
    }

    /// Returns the calls of cuBLASLt that were chosen so far.
    pub(super) const fn product_calls(&self) -> &ProductCalls {
        &self.product_calls
    }

    /// Returns the stream of copies from the host, to the host and from other devices; it is made on first use. These
    /// copies run in parallel with the work in [`stream`](Self::stream).
    pub(super) fn copies(&self) -> Result<&'static Copies> {
        self.copies.get_or_make(&self.stream)
    }

    /// Returns the stream of [`copies`](Self::copies), if it was made.
    pub(super) fn known_copies(&self) -> Option<&'static Copies> {
        self.copies.get()
    }

    /// Lets [`stream`](Self::stream) wait for all copies, and counts a meeting of the two streams. After a meeting,
    /// code that has made copies must assume that a replay has overwritten their destinations: copies in the graph may
    /// have the same destinations (see `copies.rs`). To be called where the recording of a CUDA graph begins, where it
    /// ends, and where a replay begins.
    pub(super) fn meet_copies(&self) -> std::result::Result<(), DriverError> {
        self.copies.get().map_or(Ok(()), |copies| copies.meet(&self.stream))
    }

    /// Returns the loader of the device's kernels.
    pub(super) const fn loader(&self) -> &Loader {
        &self.loader
    }

    /// Returns the address and the size in bytes of the workspace of cuBLAS and cuBLASLt.
    pub(super) fn workspace(&self) -> (Address, usize) {
        (self.workspace.device_ptr(&self.stream).0, BLAS_WORKSPACE)
    }

    /// Returns whether the GPU is of compute capability 9.0.
    pub const fn is_hopper(&self) -> bool {
        self.is_hopper
    }

    /// Returns whether the GPU may choose what is for compute capability 9.0 alone: the kernels of `*_hopper.cu`, and
    /// tiles and scales of cuBLASLt.
    pub const fn runs_hopper_kernels(&self) -> bool {
        self.runs_hopper_kernels
    }

    /// Returns the number of multiprocessors of the GPU.
    pub const fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Returns the board on which kernels report ids out of range.
    pub(crate) const fn board(&self) -> &Board {
        &self.board
    }

    /// Returns the driver's number of the device.
    fn ordinal(&self) -> usize {
        match self.device.location() {
            DeviceLocation::Cuda { gpu_id } => gpu_id,
            // Not reached: the device is a CUDA device.
            _ => usize::MAX,
        }
    }
}
