// A CUDA driver and libraries for machines without a GPU. Device memory is host memory, so copies and fills are real; kernels and
// matrix products do not compute. The simulation checks every call that does work as the real driver does, and writes it to a log.
//
// Environment: SIMULATED_CUDA_INIT (status of cuInit), _VERSION (of the driver), _DEVICES (how many), _CAPABILITY (such as 9.0, or a
// list with commas, one for each device, the last for all that follow), _MEMORY (bytes of each device), _PINNED (the most bytes of
// pinned memory), _REGISTER (status of cuMemHostRegister), _KERNELS (a table of the kernels of modules), _LOG (the file of the log), _PEERS
// (how devices reach each other: nvlink, bus or none).
#pragma once

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define MAX_DEVICES 8

struct CUctx_st {
    int device;
};

// An operation of a stream. The stream does it at once, or at each launch of the graph that captured it.
struct CUgraphNode_st {
    enum { LAUNCH, PRODUCT, COPY, FILL, HOST, ALLOCATE, FREE } kind;
    unsigned char *to;
    const unsigned char *from;
    size_t bytes;
    unsigned value, width;
    CUhostFn function;
};

struct CUgraph_st {
    size_t count, capacity;
    struct CUgraphNode_st *nodes;
};

struct CUgraphExec_st {
    struct CUgraph_st graph;
    size_t counts[FREE + 1];
};

struct CUstream_st {
    CUcontext context;
    bool blocking;
    CUstreamCaptureStatus status;
    CUstreamCaptureMode mode;
    pthread_t thread;
    cuuint64_t capture;
    CUgraph graph;
    // joined: an event made this stream part of another stream's capture. ahead: this stream has work that the other has not waited for.
    bool joined, ahead;
};

// One lock for everything.
HIDDEN extern pthread_mutex_t simulated_lock;
HIDDEN extern _Thread_local CUcontext simulated_context;

// Write a line to the log.
HIDDEN void simulated_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
HIDDEN int simulated_capability(int device);
HIDDEN size_t simulated_total_memory(void);
// Shared memory that a block may ask for.
HIDDEN unsigned simulated_most_shared(int device);
// An error unless the driver is started and, if `context` is true, the thread has a context.
HIDDEN CUresult simulated_ready(bool context);
HIDDEN CUresult simulated_fail(const char *call, CUresult status, const char *why);

// Device addresses are not host addresses: code on the host that dereferences a device address crashes.
HIDDEN bool simulated_is_device(CUdeviceptr address);
// Whether a number is in the range of the addresses that allocations have, or had.
HIDDEN bool simulated_looks_like_device(CUdeviceptr value);
HIDDEN unsigned char *simulated_host(CUdeviceptr address);
// Whether all of a range of device memory is allocated.
HIDDEN bool simulated_covers(CUdeviceptr address, size_t bytes);
// Whether a range of the host's memory is pinned.
HIDDEN bool simulated_pinned(const void *address, size_t bytes);
// The device whose memory an address is in; -1 for the host's.
HIDDEN int simulated_owner(CUdeviceptr address);
// An allocation of cuMemAlloc, which other processes can map, or this process's mapping of another's allocation.
struct simulated_direct {
    int file, device;
    size_t bytes;
};
HIDDEN bool simulated_find_direct(CUdeviceptr address, struct simulated_direct *found);
HIDDEN CUdeviceptr simulated_map_direct(struct simulated_direct of);
HIDDEN bool simulated_unmap_direct(CUdeviceptr address);
// How devices reach each other: 2 by NVLink, 1 by the bus, 0 not at all.
HIDDEN int simulated_peers(void);

// Whether a call that may wait for the device is allowed while streams are captured. If not, the call invalidates these captures.
HIDDEN CUresult simulated_unsafe(const char *call);
// Whether a stream can take work.
HIDDEN CUresult simulated_stream(const char *call, CUstream stream);
// Do work of a stream now, or put it into the stream's graph.
HIDDEN void simulated_queue(CUstream stream, struct CUgraphNode_st node);
HIDDEN bool simulated_capturing(CUstream stream);
HIDDEN int simulated_number(CUstream stream);
HIDDEN CUresult simulated_synchronize(const char *call, CUstream stream);

// The simulated libraries call this function of the driver to queue a product that reads and writes these ranges.
struct simulated_range {
    CUdeviceptr address;
    size_t bytes;
};
CUresult simulatedProduct(CUstream stream, const char *text, const struct simulated_range *ranges, int count);
void simulatedLog(const char *text);

#define LOCKED(expression)                      \
    pthread_mutex_lock(&simulated_lock);        \
    CUresult locked_status_ = (expression);     \
    pthread_mutex_unlock(&simulated_lock);      \
    return locked_status_
#define TRY(expression)                                    \
    do {                                                   \
        CUresult status_ = (expression);                   \
        if (status_ != CUDA_SUCCESS) return status_;       \
    } while (0)
