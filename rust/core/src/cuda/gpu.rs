//! CUDA devices: one state each, with the functions found so far and the handle of cuBLAS.

use std::error::Error as StdError;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::cublas::{CudaBlas, sys as blas};
use candle_core::cuda_backend::cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, CUresult};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaModule, CudaSlice, CudaStream, DevicePtr, DriverError,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaError, DeviceId};
use candle_core::{CudaDevice, Device, DeviceLocation};
use rustc_hash::FxHashMap;
use trainable_candle_cuda::kernels::Module;

use super::board::Board;
use super::gemm_bias::Products;
use super::launch::{Address, Arguments, Function, Kernel, Loaded};
use crate::{Error, Raw, Result};

/// The size of cuBLAS' workspace that NVIDIA recommends for the Hopper generation.
const BLAS_WORKSPACE: usize = 32 << 20;

/// A CUDA device with its stream, kernels and libraries.
pub struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    blas: Arc<CudaBlas>,
    modules: RwLock<FxHashMap<&'static str, Arc<CudaModule>>>,
    functions: RwLock<FxHashMap<Name, Loaded>>,
    /// Compute capability 9.0, whose own instructions some modules use.
    is_hopper: bool,
    multiprocessors: usize,
    board: Board,
    products: Products,
    /// cuBLAS and cuBLASLt work in it, one after the other.
    workspace: CudaSlice<u8>,
}

/// A function: its module, its name and the dtypes at the end of it.
type Name = (&'static str, &'static str, &'static [&'static str]);

/// The devices in use. They stay until the process ends: tensors may outlive every other owner.
static GPUS: RwLock<Vec<(DeviceId, &'static Gpu)>> = RwLock::new(Vec::new());

fn known(find: impl Fn(&(DeviceId, &'static Gpu)) -> bool) -> Option<&'static Gpu> {
    GPUS.read().unwrap_or_else(PoisonError::into_inner).iter().find(|gpu| find(gpu)).map(|&(_, gpu)| gpu)
}

/// The device of a number; the same one at each call. The CUDA libraries are looked for in `folders` first.
///
/// # Errors
/// [`Error::CudaUnavailable`] with the reason, [`Error::Device`] if there is no device of this number.
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
    if let Some((_, gpu)) = gpus.iter().find(|(_, gpu)| gpu.ordinal() == ordinal) {
        return Ok(Device::Cuda(gpu.device.clone()));
    }
    let device = CudaDevice::new_with_stream(ordinal)?;
    // SAFETY: all work goes to the device's one stream, and memory is freed in its order.
    unsafe { device.disable_event_tracking() };
    gpus.push((device.id(), Gpu::leak(device.clone())?));
    Ok(Device::Cuda(device))
}

fn check_usable(ordinal: usize) -> Result<()> {
    trainable_candle_cuda::check_device(ordinal)
        .map_err(|reason| Error::CudaUnavailable(format!("cuda:{ordinal}: {reason}")))
}

/// The number of devices that the driver sees; one of them at least can be used.
///
/// # Errors
/// [`Error::CudaUnavailable`] with the reason.
pub fn devices(folders: &[&Path]) -> Result<usize> {
    trainable_candle_cuda::load(folders).map_err(|reason| Error::CudaUnavailable(reason.to_string()))?;
    Ok(CudaContext::device_count().map_err(|error| driver_error("device", error))? as usize)
}

impl Gpu {
    fn leak(device: CudaDevice) -> Result<&'static Self> {
        let stream = device.cuda_stream();
        let blas = device.cublas_handle();
        let capability = stream.context().compute_capability().map_err(|error| driver_error("cuda", error))?;
        let is_hopper = capability == (9, 0);
        let multiprocessors = stream.context().attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let multiprocessors = multiprocessors.map_err(|error| driver_error("cuda", error))? as usize;
        // SAFETY: cuBLAS alone uses the memory, and does not read what it has not written.
        let workspace = unsafe { device.alloc::<u8>(BLAS_WORKSPACE) }?;
        let (pointer, _) = workspace.device_ptr(&stream);
        // SAFETY: the handle is candle's for this device; the workspace lives as long as the device.
        unsafe {
            check_blas(blas::cublasSetWorkspace_v2(*blas.handle(), pointer as *mut _, BLAS_WORKSPACE))?;
            // Sums of products in f16 and bf16 stay in f32 also where they are cut in parts.
            let mode = blas::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
            check_blas(blas::cublasSetMathMode(*blas.handle(), mode))?;
        }
        let board = Board::new(&device)?;
        Ok(Box::leak(Box::new(Self {
            device,
            board,
            stream,
            blas,
            modules: RwLock::default(),
            functions: RwLock::default(),
            is_hopper,
            multiprocessors,
            products: Products::default(),
            workspace,
        })))
    }

    /// The device of a tensor, which must be on one.
    ///
    /// # Errors
    /// [`Error::Device`] if the tensor is not on a CUDA device; for a device that is met for the first time [`Error::OutOfMemory`] if it is
    /// full, [`Error::CudaUnavailable`] if there is no code for it.
    pub fn of(op: &'static str, tensor: &Raw) -> Result<&'static Self> {
        Self::of_device(op, tensor.device())
    }

    /// As [`of`](Self::of), for the device itself.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_device(op: &'static str, device: &Device) -> Result<&'static Self> {
        let Device::Cuda(device) = device else {
            return Err(Error::device(
                op,
                "found a tensor on the CPU, expected one on a CUDA device; move it with to()",
            ));
        };
        super::graph::check_thread(op)?;
        if let Some(gpu) = known(|(id, _)| *id == device.id()) {
            return Ok(gpu);
        }
        // A device that was made with candle.
        if let DeviceLocation::Cuda { gpu_id } = device.location() {
            check_usable(gpu_id)?;
        }
        let mut gpus = GPUS.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, gpu)) = gpus.iter().find(|(id, _)| *id == device.id()) {
            return Ok(gpu);
        }
        let gpu = Self::leak(device.clone())?;
        gpus.push((device.id(), gpu));
        Ok(gpu)
    }

    /// Candle's handle.
    pub const fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The stream that all work goes to.
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(super) const fn blas(&self) -> &Arc<CudaBlas> {
        &self.blas
    }

    /// The products with a bias that have been met.
    pub(super) const fn products(&self) -> &Products {
        &self.products
    }

    /// Address and size of what libraries may use for themselves.
    pub(super) fn workspace(&self) -> (Address, usize) {
        (self.workspace.device_ptr(&self.stream).0, BLAS_WORKSPACE)
    }

    /// Whether the GPU is of compute capability 9.0.
    pub const fn is_hopper(&self) -> bool {
        self.is_hopper
    }

    /// How many multiprocessors the GPU has.
    pub const fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Where kernels note ids that are out of range.
    pub(crate) const fn board(&self) -> &Board {
        &self.board
    }

    fn ordinal(&self) -> usize {
        match self.device.location() {
            DeviceLocation::Cuda { gpu_id } => gpu_id,
            _ => usize::MAX,
        }
    }

    /// The kernel for some dtypes, `<name>_<dtype>_...` of its module; found once.
    ///
    /// # Errors
    /// [`Error::Device`] if there is none or the driver cannot load it.
    pub fn function<A: Arguments>(&self, kernel: &Kernel<A>, dtypes: &'static [&'static str]) -> Result<Function<A>> {
        let key = (kernel.module.name, kernel.name, dtypes);
        if let Some(loaded) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Function::new(loaded.clone()));
        }
        let mut full = kernel.name.to_owned();
        for dtype in dtypes {
            full.push('_');
            full.push_str(dtype);
        }
        let missing = |reason: &dyn std::fmt::Display| {
            let module = kernel.module.name;
            Error::device("cuda", format!("the module {module} has no function {full} for this GPU ({reason})"))
        };
        let variant = kernel.variants.iter().find(|variant| variant.dtypes == dtypes);
        let variant = variant.ok_or_else(|| missing(&"there is none for these dtypes"))?;
        let found = self.module(kernel.module)?.load_function(&full).map_err(|error| missing(&error))?;
        let loaded = Loaded::new(found, &full, variant.pointers);
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(key, loaded.clone());
        Ok(Function::new(loaded))
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

    fn module(&self, module: &Module) -> Result<Arc<CudaModule>> {
        if let Some(loaded) = self.modules.read().unwrap_or_else(PoisonError::into_inner).get(module.name) {
            return Ok(loaded.clone());
        }
        let image = Ptx::from_binary(module.image.to_vec());
        let loaded = self.stream.context().load_module(image).map_err(|error| {
            Error::device("cuda", format!("the driver cannot load the module {} for this GPU ({error})", module.name))
        })?;
        self.modules.write().unwrap_or_else(PoisonError::into_inner).insert(module.name, loaded.clone());
        Ok(loaded)
    }
}

/// The driver's error as the library's.
#[cold]
pub(super) fn driver_error(op: &'static str, error: DriverError) -> Error {
    if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Error::OutOfMemory {
            op,
            message: "the GPU has no memory left; use a smaller batch, checkpointing, or an 8-bit optimizer".to_owned(),
        };
    }
    if error.0 == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED {
        return Error::device(op, "this cannot be a part of a captured function; do it before or after the call");
    }
    Error::device(op, format!("the NVIDIA driver reports: {error}"))
}

pub(super) fn check_blas(status: blas::cublasStatus_t) -> Result<()> {
    if status == blas::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::device("matmul", format!("cuBLAS reports {status:?}")))
}

/// Candle's CUDA error as the library's.
#[cold]
pub(crate) fn from_candle(error: Box<dyn StdError + Send + Sync>) -> Error {
    match error.downcast::<CudaError>() {
        Ok(error) => match *error {
            CudaError::Cuda(error) => driver_error("cuda", error),
            other => Error::device("cuda", other.to_string()),
        },
        Err(other) => Error::device("cuda", other.to_string()),
    }
}
