//! Loads modules of kernels into the driver, and finds the kernels in them.

use std::sync::{Arc, PoisonError, RwLock};

use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule, CudaStream, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use rustc_hash::FxHashMap;
use trainable_candle_cuda::kernels::{Arguments, Element, Kernel, Module};

use crate::{Error, Result};

/// Identifies a kernel's variant: the name of the module, the kernel's name, and the dtypes, which are the suffix of
/// the variant's name.
type Name = (&'static str, &'static str, &'static [&'static str]);

/// A kernel's variant for certain dtypes, loaded by the driver.
#[derive(Clone)]
pub(super) struct Loaded {
    pub(super) function: CudaFunction,
    /// The variant's name, with the suffix.
    pub(super) name: Arc<str>,
    /// The names of the pointers among its parameters, and their element types.
    pub(super) pointers: &'static [(&'static str, Element)],
    /// Whether the kernel may be launched while the kernel before it runs, because its code waits for the end of that
    /// kernel (`cuda/include/follow.cuh`).
    pub(super) overlaps: bool,
}

/// The oldest architecture (`__CUDA_ARCH__` / 10) for which the compiled code of a kernel waits for the kernel before
/// it. The architecture of the code decides, not that of the GPU, because a newer GPU may run code for an older
/// architecture.
const FIRST_TO_WAIT: i32 = 90;

/// The modules and the variants of kernels that were loaded on a device so far.
pub(super) struct Loader {
    stream: Arc<CudaStream>,
    modules: RwLock<FxHashMap<&'static str, Arc<CudaModule>>>,
    functions: RwLock<FxHashMap<Name, Loaded>>,
}

impl Loader {
    pub(super) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, modules: RwLock::default(), functions: RwLock::default() }
    }

    /// Finds the variant of `kernel` for `dtypes`: the function `<name>_<dtype>_...` in the kernel's module. The driver
    /// loads it on first use.
    ///
    /// # Errors
    /// [`Error::Device`] if the kernel has no variant for these dtypes, or the driver cannot load it.
    pub(super) fn find<A: Arguments>(&self, kernel: &Kernel<A>, dtypes: &'static [&'static str]) -> Result<Loaded> {
        let key = (kernel.module.name, kernel.name, dtypes);
        if let Some(loaded) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(loaded.clone());
        }
        let mut full_name = kernel.name.to_owned();
        for dtype in dtypes {
            full_name.push('_');
            full_name.push_str(dtype);
        }
        let variant = kernel.variants.iter().find(|variant| variant.dtypes == dtypes).ok_or_else(|| {
            let message = format!("the kernel {} has no variant for {}", kernel.name, dtypes.join(" and "));
            Error::device("cuda", message)
        })?;
        let failed = |error: DriverError| {
            let module = kernel.module.name;
            Error::device("cuda", format!("the driver cannot load {full_name} of the module {module} ({error})"))
        };
        let function = self.module(kernel.module)?.load_function(&full_name).map_err(failed)?;
        // The architecture that the compiler compiled the kernel's source for, as in `FIRST_TO_WAIT`.
        let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        let compiled_for = function.get_attribute(attribute).map_err(failed)?;
        let overlaps = compiled_for >= FIRST_TO_WAIT;
        let loaded = Loaded { function, name: full_name.as_str().into(), pointers: variant.pointers, overlaps };
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(key, loaded.clone());
        Ok(loaded)
    }

    /// Returns a module, which the driver loads on first use.
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
