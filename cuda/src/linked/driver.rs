//! The driver's functions that this crate itself calls, with their types and constants. [`symbols`](super::symbols) defines the functions,
//! as jumps into the driver's library. The parameters are in the order of `cuda.h`.

use std::ffi::{c_char, c_int, c_void};

/// `CUDA_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: c_int = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: c_int = 600;
/// `CUDA_ERROR_NOT_PERMITTED`.
pub const NOT_PERMITTED: c_int = 800;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: c_int = 801;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub const CAPTURE_UNSUPPORTED: c_int = 900;

/// `CUstream`, an opaque handle.
pub type Stream = *mut c_void;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    /// `CUmemLocationType`.
    pub kind: u32,
    /// For a device, its ordinal.
    pub id: c_int,
}

impl Location {
    /// The memory of the GPU with ordinal `id`.
    pub const fn device(id: c_int) -> Self {
        /// `CU_MEM_LOCATION_TYPE_DEVICE`.
        const DEVICE: u32 = 1;
        Self { kind: DEVICE, id }
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub struct AllocationProperties {
    /// `CUmemAllocationType`, such as [`PINNED`].
    pub kind: u32,
    /// `requestedHandleTypes`, 0 for none.
    pub handle_kinds: u32,
    pub location: Location,
    /// `win32HandleMetaData`, null on Linux.
    pub windows: *mut c_void,
    /// The eight bytes of the structure `allocFlags`; 0 for its defaults.
    pub flags: u64,
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub struct Access {
    pub location: Location,
    /// `CUmemAccess_flags`, such as [`READ_WRITE`].
    pub flags: u32,
}

/// `CUipcMemHandle`: the handle with which another process of the machine opens device memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; 64]);

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const PINNED: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const READ_WRITE: u32 = 3;
/// `CU_EVENT_DISABLE_TIMING`.
pub const NO_TIMING: u32 = 2;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub const LAZY_PEER_ACCESS: u32 = 1;
/// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`.
pub const PEER_ACCESS: c_int = 2;
/// `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
pub const PEER_ATOMICS: c_int = 3;

unsafe extern "C" {
    pub fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int;
    pub fn cuCtxGetDevice(device: *mut c_int) -> c_int;
    pub fn cuCtxSetCurrent(context: *mut c_void) -> c_int;
    pub fn cuDeviceGetByPCIBusId(device: *mut c_int, id: *const c_char) -> c_int;
    pub fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_int, from: c_int, to: c_int) -> c_int;
    pub fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: c_int) -> c_int;
    pub fn cuEventCreate(event: *mut *mut c_void, flags: u32) -> c_int;
    pub fn cuEventRecord(event: *mut c_void, stream: Stream) -> c_int;
    pub fn cuEventSynchronize(event: *mut c_void) -> c_int;
    pub fn cuIpcCloseMemHandle(address: u64) -> c_int;
    pub fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64) -> c_int;
    pub fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, flags: u32) -> c_int;
    pub fn cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, wanted: u64, flags: u64) -> c_int;
    pub fn cuMemAlloc_v2(address: *mut u64, size: usize) -> c_int;
    pub fn cuMemCreate(handle: *mut u64, size: usize, properties: *const AllocationProperties, flags: u64) -> c_int;
    pub fn cuMemFree_v2(address: u64) -> c_int;
    pub fn cuMemFreeHost(address: *mut c_void) -> c_int;
    pub fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
    pub fn cuMemHostAlloc(address: *mut *mut c_void, size: usize, flags: u32) -> c_int;
    pub fn cuMemHostRegister_v2(address: *mut c_void, size: usize, flags: u32) -> c_int;
    pub fn cuMemHostUnregister(address: *mut c_void) -> c_int;
    pub fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) -> c_int;
    pub fn cuMemRelease(handle: u64) -> c_int;
    pub fn cuMemSetAccess(address: u64, size: usize, access: *const Access, count: usize) -> c_int;
    pub fn cuMemUnmap(address: u64, size: usize) -> c_int;
    pub fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: Stream) -> c_int;
    pub fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: Stream) -> c_int;
    pub fn cuStreamQuery(stream: Stream) -> c_int;
    pub fn cuStreamSynchronize(stream: Stream) -> c_int;
}
