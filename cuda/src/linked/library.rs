//! Opens the driver's library and the CUDA libraries, and fills the slots of [`symbols`](super::symbols) with their functions.

use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use libloading::Library as Handle;

use super::symbols::{DRIVER, Library, Symbol, TOOLKIT};
use super::{memory, upload};
use crate::architectures::{Architecture, Capability};
use crate::{MINIMUM_CAPABILITY, MINIMUM_DRIVER, Unavailable};

/// The architectures that the kernels were compiled for.
const COMPILED: &str = env!("COMPILED_ARCHITECTURES");

/// For each GPU, by ordinal, `Ok` or the reason why it cannot be used. None until the slots are filled.
static DEVICES: Mutex<Option<Vec<Result<(), Unavailable>>>> = Mutex::new(None);

/// A symbol and the address of its function in the opened library.
type Found = (&'static Symbol, *mut ());

/// See [`load`](crate::load). The slots are filled last, so they stay empty if anything fails.
pub fn load(folders: &[&Path]) -> Result<(), Unavailable> {
    let mut known = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if known.is_some() {
        return Ok(());
    }
    let driver = open(DRIVER.file, &[]).map_err(Unavailable::NoDriver)?;
    let mut found = resolve(&driver, DRIVER)?;
    let devices = Driver(&found).check()?;
    let mut handles = vec![driver];
    for library in TOOLKIT {
        let handle =
            open(library.file, folders).map_err(|reason| Unavailable::NoLibrary { file: library.file, reason })?;
        found.extend(resolve(&handle, library)?);
        handles.push(handle);
    }
    for ((name, slot), address) in found {
        slot.store(stand_in(name, address), Ordering::Release);
    }
    // The libraries are never closed, because the slots' addresses must stay valid as long as the process runs.
    handles.into_iter().for_each(std::mem::forget);
    *known = Some(devices);
    Ok(())
}

/// Check that GPU `ordinal` is new enough and that the kernels were compiled for it. Must be called after [`load`](crate::load). If the
/// driver has no GPU with this ordinal, the function returns no error: the driver itself rejects such an ordinal when the GPU is opened.
///
/// # Errors
/// The reason why the GPU cannot be used.
pub fn check_device(ordinal: usize) -> Result<(), Unavailable> {
    let known = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    known.as_ref().and_then(|devices| devices.get(ordinal)).cloned().unwrap_or(Ok(()))
}

/// The address to store in the slot of the function `name`, which is at `address` in its library. It is `address`, except for the functions
/// that allocate memory, free memory or copy from the host to the device: this crate has its own functions for them.
fn stand_in(name: &str, address: *mut ()) -> *mut () {
    match name {
        "cuMemAllocAsync" => memory::allocate as *mut (),
        "cuMemFreeAsync" => memory::free as *mut (),
        "cuMemcpyHtoDAsync_v2" => {
            upload::COPY.store(address, Ordering::Release);
            upload::upload as *mut ()
        }
        _ => address,
    }
}

/// Open the library from the first of `folders` that has it, or else let the system's loader find it. The error is the loader's message.
pub(super) fn open(file: &str, folders: &[&Path]) -> Result<Handle, String> {
    let path = folders.iter().map(|folder| folder.join(file)).find(|path| path.is_file());
    let name = path.as_deref().map_or(OsStr::new(file), Path::as_os_str);
    // SAFETY: these are NVIDIA's libraries, whose initializers have no conditions that the caller must meet.
    unsafe { Handle::new(name) }.map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

/// Find the addresses of all functions that the library must have.
fn resolve(handle: &Handle, library: &'static Library) -> Result<Vec<Found>, Unavailable> {
    library
        .symbols
        .iter()
        .map(|symbol| {
            // SAFETY: only the address is taken here.
            match unsafe { handle.get::<*mut ()>(symbol.0) } {
                Ok(address) => Ok((symbol, *address)),
                Err(_) => Err(Unavailable::NoFunction { file: library.file, symbol: symbol.0 }),
            }
        })
        .collect()
}

/// Calls the driver's functions at the addresses found in its library, before the slots are filled.
struct Driver<'a>(&'a [Found]);

impl Driver<'_> {
    /// The address of a function in [`DRIVER`]'s list.
    fn address(&self, name: &str) -> *mut () {
        let found = self.0.iter().find(|((symbol, _), _)| *symbol == name);
        found.map_or_else(|| unreachable!("{name} is in the list"), |&(_, address)| address)
    }

    /// Return an error unless `status` is `CUDA_SUCCESS`.
    fn ok(&self, status: c_int) -> Result<(), Unavailable> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the signature is that of the driver's header, and the driver's text for a status is a static string.
        let text = unsafe {
            let describe: extern "C" fn(c_int, *mut *const c_char) -> c_int =
                std::mem::transmute(self.address("cuGetErrorString"));
            let mut text = std::ptr::null();
            describe(status, &raw mut text);
            if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
        };
        let text = text.unwrap_or_else(|| "unknown error".to_owned());
        /// `CUDA_ERROR_NO_DEVICE`.
        const NO_DEVICE: c_int = 100;
        if status == NO_DEVICE {
            return Err(Unavailable::NoDevice);
        }
        Err(Unavailable::DriverFailed(format!("{text} (error {status})")))
    }

    /// Check that the driver is new enough, can be initialized, and has a usable GPU. Returns for each GPU whether it is usable.
    fn check(&self) -> Result<Vec<Result<(), Unavailable>>, Unavailable> {
        // SAFETY: the signatures are those of the driver's header.
        unsafe {
            let version: extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(self.address("cuDriverGetVersion"));
            let mut number = 0;
            self.ok(version(&raw mut number))?;
            // The driver encodes its CUDA version as major * 1000 + minor * 10.
            let found = (number / 1000, number % 1000 / 10);
            if found < MINIMUM_DRIVER {
                return Err(Unavailable::DriverTooOld { found });
            }
            let init: extern "C" fn(u32) -> c_int = std::mem::transmute(self.address("cuInit"));
            self.ok(init(0))?;
            let count: extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(self.address("cuDeviceGetCount"));
            let mut devices = 0;
            self.ok(count(&raw mut devices))?;
            if devices == 0 {
                return Err(Unavailable::NoDevice);
            }
            let devices: Vec<_> = (0..devices).map(|ordinal| self.check_device(ordinal)).collect();
            // If no GPU is usable, the error is the reason of the first.
            if devices.iter().all(Result::is_err) {
                devices[0].clone()?;
            }
            Ok(devices)
        }
    }

    /// Check that GPU `ordinal` is new enough and that the kernels were compiled for it.
    ///
    /// # Safety
    /// The driver must be initialized and have a GPU with this ordinal.
    unsafe fn check_device(&self, ordinal: c_int) -> Result<(), Unavailable> {
        /// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
        const MAJOR: c_int = 75;
        /// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
        const MINOR: c_int = 76;
        // SAFETY: the signatures are those of the driver's header.
        unsafe {
            let attribute: extern "C" fn(*mut c_int, c_int, c_int) -> c_int =
                std::mem::transmute(self.address("cuDeviceGetAttribute"));
            let mut found: Capability = (0, 0);
            self.ok(attribute(&raw mut found.0, MAJOR, ordinal))?;
            self.ok(attribute(&raw mut found.1, MINOR, ordinal))?;
            let has_code =
                Architecture::parse_list(COMPILED).unwrap_or_default().iter().any(|code| code.runs_on(found));
            if found >= MINIMUM_CAPABILITY && has_code {
                return Ok(());
            }
            let name_of: extern "C" fn(*mut c_char, c_int, c_int) -> c_int =
                std::mem::transmute(self.address("cuDeviceGetName"));
            let mut name = [0; 128];
            // One byte less than the array has, so that the last byte stays zero.
            self.ok(name_of(name.as_mut_ptr(), 127, ordinal))?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            if found < MINIMUM_CAPABILITY {
                return Err(Unavailable::CardTooOld { name, found });
            }
            Err(Unavailable::NoCode { name, found, built: COMPILED })
        }
    }
}
