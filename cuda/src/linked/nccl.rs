//! NCCL's functions. A process loads the library when it first needs a communicator: a program on one GPU never loads it.
//!
//! Signatures, constants and the layout of the configuration are those of `nccl.h` 2.27
//! (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html>). A newer library reads a configuration of that version and
//! uses defaults for newer fields.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libloading::Library as Handle;

use super::driver;
use super::library::open;
use super::memory::Status;
use crate::Unavailable;

/// The name under which the system's loader finds the library.
const FILE: &str = "libnccl.so.2";
/// The oldest supported version, as `major * 10000 + minor * 100 + patch`. [`Config`] is the configuration of this version.
const MINIMUM: c_int = 22_700;
/// The first version that is not supported: the next major version may have another interface.
const NEXT_MAJOR: c_int = 30_000;

/// `ncclResult_t`: `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclResult_t`: `ncclInProgress`, the result of a call that returned before the library has completed the operation.
pub const IN_PROGRESS: c_int = 7;
/// `ncclRedOp_t`: `ncclSum`.
pub const SUM: c_int = 0;

/// `ncclComm_t`, an opaque handle.
pub type Comm = *mut c_void;

/// `ncclUniqueId`: the id with which the processes of a communicator find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of 2.27.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

impl Config {
    /// A configuration with which NCCL's calls return at once instead of waiting for other ranks, so that a rank that has ended cannot
    /// block this process. All other settings have NCCL's defaults.
    const fn not_blocking() -> Self {
        // `NCCL_CONFIG_UNDEF_INT`: use the default.
        const UNSET: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            // NCCL rejects a configuration without this number.
            magic: 0xcafe_beef,
            version: MINIMUM as u32,
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            comm_name: std::ptr::null(),
            collnet_enable: UNSET,
            cta_policy: UNSET,
            shrink_share: UNSET,
            nvls_ctas: UNSET,
        }
    }
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of the library.
        #[derive(Clone, Copy)]
        pub struct Nccl {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Nccl {
            fn of(handle: &Handle) -> Result<Self, Unavailable> {
                // SAFETY: the signatures are those of the header.
                unsafe {
                    Ok(Self {
                        $($name: *handle.get($symbol).map_err(|_| Unavailable::NoFunction { file: FILE, symbol: $symbol })?,)*
                    })
                }
            }
        }
    };
}

// Not obvious from the types: the two numbers of `ncclCommInitRankConfig` are the number of ranks and this process's rank. `ncclAllReduce`
// and `ncclBroadcast` take the source, the destination, the number of elements, their type, then the reduction or the root, and last the
// stream.
functions! {
    version = "ncclGetVersion" (*mut c_int) -> c_int;
    error_string = "ncclGetErrorString" (c_int) -> *const c_char;
    last_error = "ncclGetLastError" (Comm) -> *const c_char;
    unique_id = "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    init_rank = "ncclCommInitRankConfig" (*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
    async_error = "ncclCommGetAsyncError" (Comm, *mut c_int) -> c_int;
    finalize = "ncclCommFinalize" (Comm) -> c_int;
    destroy = "ncclCommDestroy" (Comm) -> c_int;
    abort = "ncclCommAbort" (Comm) -> c_int;
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
    broadcast = "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
    group_start = "ncclGroupStart" () -> c_int;
    group_end = "ncclGroupEnd" () -> c_int;
}

static LOADED: Mutex<Option<Nccl>> = Mutex::new(None);

/// Load the library: from the first of `folders` that has it, or else by the system's loader. Further calls return the loaded library.
/// Turns NVLink multicast off unless the environment has the variable `NCCL_NVLS_ENABLE`: with multicast, the results of sums differ from
/// run to run, and on a shared host, multicast can disable the GPUs of other users.
///
/// # Errors
/// [`Unavailable::NoNccl`] if the library cannot be opened, [`Unavailable::NcclVersion`] if its version is not supported,
/// [`Unavailable::NoFunction`] if it lacks a function.
pub fn load(folders: &[&Path]) -> Result<Nccl, Unavailable> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(nccl) = *loaded {
        return Ok(nccl);
    }
    const MULTICAST: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(MULTICAST).is_none() {
        // SAFETY: NCCL reads its environment at its first call, which follows below in this thread.
        unsafe { std::env::set_var(MULTICAST, "0") };
    }
    let handle = open(FILE, folders).map_err(Unavailable::NoNccl)?;
    let nccl = Nccl::of(&handle)?;
    let found = nccl.version();
    if !(MINIMUM..NEXT_MAJOR).contains(&found) {
        return Err(Unavailable::NcclVersion { found });
    }
    // The library is never closed, because the functions' addresses must stay valid as long as the process runs.
    std::mem::forget(handle);
    *loaded = Some(nccl);
    Ok(nccl)
}

impl Nccl {
    /// The library's version, as `major * 10000 + minor * 100 + patch`; 0 if the library does not say.
    pub fn version(&self) -> c_int {
        let mut version = 0;
        // SAFETY: the result goes to a local variable.
        unsafe { (self.version)(&raw mut version) };
        version
    }

    /// The library's text for a result, followed by the library's last error message if there is one.
    pub fn describe(&self, result: c_int) -> String {
        // SAFETY: both strings live as long as the library. `ncclGetLastError` accepts a null communicator.
        let texts = unsafe { [(self.error_string)(result), (self.last_error)(std::ptr::null_mut())] };
        let read = |text: *const c_char| {
            // SAFETY: the library's texts end with a zero.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned())
        };
        let texts: Vec<String> = texts.into_iter().filter_map(read).filter(|text| !text.is_empty()).collect();
        texts.join(": ")
    }

    /// A new id for a communicator. The process that creates the id must join the communicator, because the other processes connect to
    /// this process.
    ///
    /// # Errors
    /// The library's result.
    pub fn unique_id(&self) -> Result<UniqueId, c_int> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the result goes to a local variable.
        check(unsafe { (self.unique_id)(&raw mut id) })?;
        Ok(id)
    }

    /// Begin to join the communicator `id` of `size` ranks as rank `rank`. The returned communicator can be used once
    /// [`async_error`](Self::async_error) returns `SUCCESS`.
    ///
    /// # Errors
    /// The library's result.
    ///
    /// # Safety
    /// The context of the process's GPU must be current.
    pub unsafe fn init_rank(&self, id: UniqueId, rank: c_int, size: c_int) -> Result<Comm, c_int> {
        let mut comm = std::ptr::null_mut();
        let mut config = Config::not_blocking();
        // SAFETY: the results go to local variables; the caller promises that the context is current.
        check(unsafe { (self.init_rank)(&raw mut comm, size, id, rank, &raw mut config) })?;
        Ok(comm)
    }

    /// The state of the last call with the communicator: `SUCCESS`, `IN_PROGRESS` or an error.
    ///
    /// # Safety
    /// The communicator must not have been destroyed or aborted.
    pub unsafe fn async_error(&self, comm: Comm) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: the caller's promise.
        let result = unsafe { (self.async_error)(comm, &raw mut state) };
        if result == SUCCESS { state } else { result }
    }

    /// Queue on the stream: replace each rank's `count` values at `address` by their sums over all ranks. `dtype` is an `ncclDataType_t`.
    ///
    /// # Errors
    /// The library's result.
    ///
    /// # Safety
    /// `address` must have `count` elements of the type, and only work on this stream may use them. Only one thread at a time may use the
    /// communicator.
    pub unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: c_int,
        comm: Comm,
        stream: *mut c_void,
    ) -> Result<(), c_int> {
        // Source and destination are the same: the call works in place.
        let buffer = address as *mut c_void;
        // SAFETY: the caller's promise.
        check(unsafe { (self.all_reduce)(buffer, buffer, count, dtype, SUM, comm, stream) })
    }

    /// Queue on the stream: replace each rank's `count` values at `address` by those of rank `root`.
    ///
    /// # Errors
    /// The library's result.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn broadcast(
        &self,
        address: u64,
        count: usize,
        dtype: c_int,
        root: c_int,
        comm: Comm,
        stream: *mut c_void,
    ) -> Result<(), c_int> {
        // Source and destination are the same: the call works in place.
        let buffer = address as *mut c_void;
        // SAFETY: the caller's promise.
        check(unsafe { (self.broadcast)(buffer, buffer, count, dtype, root, comm, stream) })
    }

    /// Begin a group of calls: NCCL merges the calls of this thread up to [`group_end`](Self::group_end) into one operation.
    ///
    /// # Errors
    /// The library's result.
    pub fn group_start(&self) -> Result<(), c_int> {
        // SAFETY: the function has no arguments.
        check(unsafe { (self.group_start)() })
    }

    /// End the group of calls that [`group_start`](Self::group_start) began.
    ///
    /// # Errors
    /// The library's result.
    pub fn group_end(&self) -> Result<(), c_int> {
        // SAFETY: the function has no arguments.
        check(unsafe { (self.group_end)() })
    }

    /// Begin to finalize a communicator; NCCL completes the communicator's queued work first. The communicator is finalized once
    /// [`async_error`](Self::async_error) returns `SUCCESS`.
    ///
    /// # Errors
    /// The library's result.
    ///
    /// # Safety
    /// As [`async_error`](Self::async_error).
    pub unsafe fn finalize(&self, comm: Comm) -> Result<(), c_int> {
        // SAFETY: the caller's promise.
        check(unsafe { (self.finalize)(comm) })
    }

    /// Free a communicator that is finalized.
    ///
    /// # Safety
    /// The communicator must not be used again.
    pub unsafe fn destroy(&self, comm: Comm) {
        // SAFETY: the caller's promise. A failure cannot be reported from here.
        unsafe { (self.destroy)(comm) };
    }

    /// Free a communicator at once. Its kernels that wait for other ranks stop.
    ///
    /// # Safety
    /// The communicator must not be used again, and no other thread may be in a call with it.
    pub unsafe fn abort(&self, comm: Comm) {
        // SAFETY: the caller's promise. A failure cannot be reported from here.
        unsafe { (self.abort)(comm) };
    }
}

/// Whether all work of a stream is done, such as the sums that [`Nccl::all_reduce`] has queued.
///
/// # Errors
/// The driver's error, which may be that of earlier work.
///
/// # Safety
/// `stream` must be a stream of the current device and must not be capturing.
pub unsafe fn is_done(stream: *mut c_void) -> Result<bool, Status> {
    // SAFETY: the caller's promise.
    match unsafe { driver::cuStreamQuery(stream) } {
        driver::SUCCESS => Ok(true),
        driver::NOT_READY => Ok(false),
        status => Err(Status(status)),
    }
}

/// Return the result as an error unless the call succeeded or is in progress.
fn check(result: c_int) -> Result<(), c_int> {
    if matches!(result, SUCCESS | IN_PROGRESS) { Ok(()) } else { Err(result) }
}
