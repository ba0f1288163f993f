// Copies and fills.
#include "simulated.h"

// `host` is the host address of a copy, or NULL if no host memory takes part. `source` and `target` are devices; -1 stands for the host
// and for the value of a fill.
static CUresult transfer(const char *call, CUstream stream, struct CUgraphNode_st node, const void *host, int source, int target) {
    TRY(simulated_stream(call, stream));
    bool pageable = host && !simulated_pinned(host, node.bytes);
    if (pageable && simulated_capturing(stream)) {
        stream->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        return simulated_fail(call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "pageable-memory");
    }
    simulated_log("%s kind=%s bytes=%zu pageable=%d captured=%d stream=%d from=%d to=%d", node.kind == FILL ? "fill" : "copy", call,
                  node.bytes, pageable, simulated_capturing(stream), simulated_number(stream), source, target);
    simulated_queue(stream, node);
    return CUDA_SUCCESS;
}

static CUresult check(const char *call, CUdeviceptr address, size_t bytes) {
    return simulated_covers(address, bytes) ? CUDA_SUCCESS
                                            : simulated_fail(call, CUDA_ERROR_INVALID_VALUE, "not-within-an-allocation");
}

static CUresult to_device(const char *call, CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    TRY(check(call, to, bytes));
    struct CUgraphNode_st node = {.kind = COPY, .to = simulated_host(to), .from = from, .bytes = bytes};
    return transfer(call, stream, node, from, -1, simulated_owner(to));
}
static CUresult to_host(const char *call, void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    TRY(check(call, from, bytes));
    struct CUgraphNode_st node = {.kind = COPY, .to = to, .from = simulated_host(from), .bytes = bytes};
    return transfer(call, stream, node, to, simulated_owner(from), -1);
}
static CUresult device_to_device(const char *call, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    TRY(check(call, to, bytes));
    TRY(check(call, from, bytes));
    struct CUgraphNode_st node = {.kind = COPY, .to = simulated_host(to), .from = simulated_host(from), .bytes = bytes};
    return transfer(call, stream, node, NULL, simulated_owner(from), simulated_owner(to));
}
static CUresult fill(const char *call, CUdeviceptr to, unsigned value, unsigned width, size_t count, CUstream stream) {
    TRY(check(call, to, count * width));
    struct CUgraphNode_st node = {.kind = FILL, .to = simulated_host(to), .bytes = count * width, .value = value, .width = width};
    return transfer(call, stream, node, NULL, -1, simulated_owner(to));
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    LOCKED(to_device("cuMemcpyHtoDAsync", to, from, bytes, stream));
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    LOCKED(to_host("cuMemcpyDtoHAsync", to, from, bytes, stream));
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    LOCKED(device_to_device("cuMemcpyDtoDAsync", to, from, bytes, stream));
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream) {
    (void)to_context, (void)from_context;  // An address alone says which device has it.
    LOCKED(device_to_device("cuMemcpyPeerAsync", to, from, bytes, stream));
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    LOCKED(fill("cuMemsetD8Async", to, value, 1, count, stream));
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    LOCKED(fill("cuMemsetD16Async", to, value, 2, count, stream));
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    LOCKED(fill("cuMemsetD32Async", to, value, 4, count, stream));
}

// Copies that wait for the device.
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    pthread_mutex_lock(&simulated_lock);
    CUresult status = simulated_synchronize("cuMemcpyHtoD", NULL);
    if (status == CUDA_SUCCESS) status = to_device("cuMemcpyHtoD", to, from, bytes, NULL);
    pthread_mutex_unlock(&simulated_lock);
    return status;
}
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    pthread_mutex_lock(&simulated_lock);
    CUresult status = simulated_synchronize("cuMemcpyDtoH", NULL);
    if (status == CUDA_SUCCESS) status = to_host("cuMemcpyDtoH", to, from, bytes, NULL);
    pthread_mutex_unlock(&simulated_lock);
    return status;
}
