// Handles by which other processes map device memory. memory.c rejects a call that frees memory which another process maps.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated.h"

// A handle names the exporting process and the file behind the memory: the file's descriptor in that process, and its inode.
struct handle {
    char kind[8];
    int process;
    ino_t inode;
    struct simulated_direct memory;
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "the size of a handle");

static CUresult ipc_get(CUipcMemHandle *made, CUdeviceptr address) {
    TRY(simulated_ready(true));
    struct simulated_direct memory;
    struct stat found;
    if (!simulated_find_direct(address, &memory) || fstat(memory.file, &found))
        return simulated_fail("cuIpcGetMemHandle", CUDA_ERROR_INVALID_VALUE, "not-from-cuMemAlloc");
    struct handle handle = {"shared", (int)getpid(), found.st_ino, memory};
    memset(made, 0, sizeof *made);
    memcpy(made, &handle, sizeof handle);
    simulated_log("ipc-export bytes=%zu device=%d", memory.bytes, memory.device);
    return CUDA_SUCCESS;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) { LOCKED(ipc_get(handle, address)); }

static CUresult ipc_open(CUdeviceptr *address, CUipcMemHandle given, unsigned flags) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe("cuIpcOpenMemHandle"));
    struct handle handle;
    memcpy(&handle, &given, sizeof handle);
    if (strcmp(handle.kind, "shared") || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return simulated_fail("cuIpcOpenMemHandle", CUDA_ERROR_INVALID_VALUE, "arguments");
    if (handle.process == (int)getpid()) return simulated_fail("cuIpcOpenMemHandle", CUDA_ERROR_INVALID_CONTEXT, "own-process");
    if (handle.memory.device != simulated_context->device && !simulated_peers())
        return simulated_fail("cuIpcOpenMemHandle", CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peers");
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.memory.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    struct stat found;
    if (file < 0 || fstat(file, &found) || found.st_ino != handle.inode)
        return simulated_fail("cuIpcOpenMemHandle", CUDA_ERROR_INVALID_HANDLE, "the-memory-is-gone");
    *address = simulated_map_direct((struct simulated_direct){file, handle.memory.device, handle.memory.bytes});
    close(file);
    if (!*address) return simulated_fail("cuIpcOpenMemHandle", CUDA_ERROR_OUT_OF_MEMORY, "the-machine's-memory-is-full");
    simulated_log("ipc-open bytes=%zu device=%d", handle.memory.bytes, handle.memory.device);
    return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) { LOCKED(ipc_open(address, handle, flags)); }

static CUresult ipc_close(CUdeviceptr address) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe("cuIpcCloseMemHandle"));
    int device = simulated_owner(address);
    if (!simulated_unmap_direct(address)) return simulated_fail("cuIpcCloseMemHandle", CUDA_ERROR_INVALID_VALUE, "not-opened");
    simulated_log("ipc-close device=%d", device);
    return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { LOCKED(ipc_close(address)); }
