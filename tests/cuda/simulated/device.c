// Start of the driver, devices, contexts, errors, and the log.
#include <fcntl.h>
#include <unistd.h>

#include "simulated.h"

pthread_mutex_t simulated_lock = PTHREAD_MUTEX_INITIALIZER;
_Thread_local CUcontext simulated_context;
static bool started;
static struct CUctx_st contexts[MAX_DEVICES] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

static long long setting(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoll(text, NULL, 10) : otherwise;
}

static int devices(void) { return (int)setting("SIMULATED_CUDA_DEVICES", 1); }

int simulated_capability(int device) {
    const char *text = getenv("SIMULATED_CUDA_CAPABILITY");
    // Go to entry `device` of the comma-separated list, or to the last entry if the list is shorter.
    for (const char *next; text && device-- && (next = strchr(text, ','));) text = next + 1;
    int major = 9, minor = 0;
    if (text) sscanf(text, "%d.%d", &major, &minor);
    return major * 10 + minor;
}

size_t simulated_total_memory(void) { return (size_t)setting("SIMULATED_CUDA_MEMORY", 80LL << 30); }

int simulated_peers(void) {
    const char *text = getenv("SIMULATED_CUDA_PEERS");
    return !text || !strcmp(text, "nvlink") ? 2 : !strcmp(text, "bus"); // 2: NVLink, 1: bus, 0: none
}

void simulated_log(const char *format, ...) {
    static int file = -2; // -2: not opened yet; -1: there is no log, or writing to it failed
    if (file == -2) {
        const char *path = getenv("SIMULATED_CUDA_LOG");
        file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    }
    if (file < 0) return;
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length] = '\n';
    if (write(file, line, length + 1) < 0) file = -1;
}

void simulatedLog(const char *text) { simulated_log("%s", text); }

CUresult simulated_fail(const char *call, CUresult status, const char *why) {
    simulated_log("refused call=%s status=%d why=%s", call, status, why);
    return status;
}

CUresult simulated_ready(bool context) {
    if (!started) return simulated_fail("any", CUDA_ERROR_NOT_INITIALIZED, "before-cuInit");
    if (context && !simulated_context) return simulated_fail("any", CUDA_ERROR_INVALID_CONTEXT, "no-context-on-thread");
    return CUDA_SUCCESS;
}

static CUresult known(CUdevice device) {
    TRY(simulated_ready(false));
    return device >= 0 && device < devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuInit(unsigned flags) {
    CUresult status = flags ? CUDA_ERROR_INVALID_VALUE : (CUresult)setting("SIMULATED_CUDA_INIT", 0);
    if (status == CUDA_SUCCESS && devices() < 1) status = CUDA_ERROR_NO_DEVICE;
    started = status == CUDA_SUCCESS;
    return status;
}

CUresult cuDriverGetVersion(int *version) {
    *version = (int)setting("SIMULATED_CUDA_VERSION", 13000);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    TRY(simulated_ready(false));
    *count = devices();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    TRY(known(ordinal));
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    TRY(known(device));
    snprintf(name, length, "Simulated GPU");
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    TRY(known(device));
    *bytes = simulated_total_memory();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    TRY(known(device));
    memset(uuid, device, sizeof *uuid);
    return CUDA_SUCCESS;
}

// The attributes of an H200, except those that depend on the capability.
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    TRY(known(device));
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = (int)simulated_most_shared(device); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 50 << 20; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = simulated_capability(device) / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = simulated_capability(device) % 10; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: *value = 1; break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    TRY(known(device));
    snprintf(id, length, "0000:%02X:00.0", 16 + device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
    unsigned bus;
    if (sscanf(id, "0000:%X:00.0", &bus) != 1) return CUDA_ERROR_INVALID_VALUE;
    *device = (CUdevice)bus - 16;
    return known(*device);
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
    TRY(known(from));
    TRY(known(to));
    if (from == to) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED: *value = simulated_peers() > 0; return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: *value = simulated_peers() > 1; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    TRY(known(device));
    *context = &contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return known(device); }

CUresult cuCtxSetCurrent(CUcontext context) {
    TRY(simulated_ready(false));
    simulated_context = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    TRY(simulated_ready(false));
    *context = simulated_context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    TRY(simulated_ready(true));
    *device = simulated_context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context) { return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }

static const struct {
    CUresult status;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

static CUresult describe(CUresult status, const char **text, bool name) {
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) *text = name ? errors[i].name : errors[i].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult status, const char **text) { return describe(status, text, false); }
CUresult cuGetErrorName(CUresult status, const char **text) { return describe(status, text, true); }
