//! The functions of the driver and the CUDA libraries that candle and this crate call. This module defines each of them as a jump to the
//! address in the function's slot. So the program needs no libraries to link to: `library.rs` loads them and fills the slots.
//!
//! A function that candle or this crate calls, but that is missing in the lists below, becomes an undefined symbol of the extension. The
//! check of the wheel rejects such symbols.

use std::arch::global_asm;
use std::sync::atomic::AtomicPtr;

/// One function: its name, and the slot that contains the address to jump to.
pub type Symbol = (&'static str, &'static AtomicPtr<()>);

/// A library and the functions that it must have.
pub struct Library {
    /// The name under which the system's loader finds the library.
    pub file: &'static str,
    /// Its functions.
    pub symbols: &'static [Symbol],
}

/// The function whose address is in the slots until they are filled. All functions of these libraries return a status, so this one can
/// replace them: it returns `CUDA_ERROR_UNKNOWN`.
extern "C" fn absent() -> i32 {
    999
}

macro_rules! library {
    ($library:ident, $file:literal, [$($symbol:ident)*]) => {
        mod $library {
            use super::{AtomicPtr, Library, absent, global_asm};

            $(
                #[allow(non_upper_case_globals, reason = "named as the function")]
                static $symbol: AtomicPtr<()> = AtomicPtr::new(absent as *mut ());

                // The symbol is hidden, so that no other library of the process binds to it instead of to the function of CUDA's library.
                #[cfg(target_arch = "x86_64")]
                global_asm!(
                    concat!(".globl ", stringify!($symbol)),
                    concat!(".hidden ", stringify!($symbol)),
                    concat!(".type ", stringify!($symbol), ",@function"),
                    concat!(stringify!($symbol), ":"),
                    "jmp qword ptr [rip + {slot}]",
                    slot = sym $symbol,
                );
                // x16 has no argument: the calling convention reserves it for such jumps between caller and function.
                #[cfg(target_arch = "aarch64")]
                global_asm!(
                    concat!(".globl ", stringify!($symbol)),
                    concat!(".hidden ", stringify!($symbol)),
                    concat!(".type ", stringify!($symbol), ",@function"),
                    concat!(stringify!($symbol), ":"),
                    "adrp x16, {slot}",
                    "ldr x16, [x16, :lo12:{slot}]",
                    "br x16",
                    slot = sym $symbol,
                );
            )*

            pub static LIBRARY: Library =
                Library { file: $file, symbols: &[$((stringify!($symbol), &$symbol)),*] };
        }
    };
}

library!(driver, "libcuda.so.1", [
    cuCtxDestroy_v2 cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent cuCtxSynchronize cuDeviceGet cuDeviceGetAttribute
    cuDeviceGetByPCIBusId cuDeviceGetCount cuDeviceGetName cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDriverGetVersion cuEventCreate
    cuEventDestroy_v2 cuEventElapsedTime_v2 cuEventRecord cuEventSynchronize cuFuncGetAttribute cuFuncSetAttribute
    cuGetErrorName cuGetErrorString cuGraphDestroy cuGraphExecDestroy cuGraphInstantiateWithFlags cuGraphLaunch cuGraphUpload cuInit
    cuIpcCloseMemHandle cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuLaunchHostFunc cuLaunchKernel cuLaunchKernelEx cuMemAddressReserve cuMemAllocAsync cuMemAlloc_v2 cuMemCreate cuMemFreeAsync
    cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc cuMemHostRegister_v2 cuMemHostUnregister cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuMemcpyDtoDAsync_v2
    cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async cuModuleGetFunction cuModuleLoad
    cuModuleLoadData cuModuleUnload cuStreamBeginCapture_v2 cuStreamCreate cuStreamDestroy_v2 cuStreamEndCapture
    cuStreamIsCapturing cuStreamQuery cuStreamSynchronize cuStreamWaitEvent cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
]);
library!(blas, "libcublas.so.13", [
    cublasCreate_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasGemmBatchedEx cublasGemmStridedBatchedEx cublasSetMathMode
    cublasSetStream_v2 cublasSetWorkspace_v2
]);
library!(blas_lt, "libcublasLt.so.13", [
    cublasLtMatmul cublasLtMatmulAlgoConfigGetAttribute cublasLtMatmulAlgoGetHeuristic cublasLtMatmulDescCreate cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute
    cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceSetAttribute cublasLtMatrixLayoutCreate
    cublasLtMatrixLayoutDestroy
]);
library!(random, "libcurand.so.10", [
    curandCreateGenerator curandDestroyGenerator curandSetPseudoRandomGeneratorSeed curandSetStream
]);

/// The driver's library, which the NVIDIA driver installs.
pub static DRIVER: &Library = &driver::LIBRARY;
/// The libraries that pip's packages or the CUDA toolkit install.
pub static TOOLKIT: &[&Library] = &[&blas::LIBRARY, &blas_lt::LIBRARY, &random::LIBRARY];
