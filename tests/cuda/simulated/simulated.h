// A CUDA driver and libraries for machines without a GPU. Device memory is host memory, so copies and fills are real; kernels and
// matrix products do not compute. The simulation checks each call that starts work by the rules of the real driver, and logs the call.
//
// Environment: SIMULATED_CUDA_INIT (status of cuInit), _VERSION (of the driver), _DEVICES (how many), _CAPABILITY (such as 9.0, or a
// comma-separated list with one capability for each device; devices beyond the end of the list have its last capability), _MEMORY (bytes
// of each device), _PINNED (the most bytes of pinned memory of a process), _REGISTER (status of cuMemHostRegister), _KERNELS (a table of
// the kernels of modules), _LOG (the file of the log), _PEERS (how devices reach each other: nvlink, bus or none).
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

// An operation of a stream. A stream performs the operation at once. A stream that is captured puts the operation into a graph, which
// performs the operation at each launch of the graph.
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
    // joined: an event made this stream part of a capture that began on another stream. ahead: this joined stream has work for which the
    // stream where the capture began has not waited yet.
    bool joined, ahead;
};

// One lock protects the whole state of the simulation.
HIDDEN extern pthread_mutex_t simulated_lock;
HIDDEN extern _Thread_local CUcontext simulated_context;

// Write a line to the log.
HIDDEN void simulated_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
HIDDEN int simulated_capability(int device);
HIDDEN size_t simulated_total_memory(void);
// The most shared memory that a block may ask for, in bytes.
HIDDEN unsigned simulated_most_shared(int device);
// Returns an error if cuInit has not succeeded, or if `context` is true and the thread has no context.
HIDDEN CUresult simulated_ready(bool context);
HIDDEN CUresult simulated_fail(const char *call, CUresult status, const char *why);

// Device addresses are not host addresses: code on the host that dereferences a device address crashes.
HIDDEN bool simulated_is_device(CUdeviceptr address);
// Whether a number is between the lowest and the highest device address of all allocations so far.
HIDDEN bool simulated_looks_like_device(CUdeviceptr value);
HIDDEN unsigned char *simulated_host(CUdeviceptr address);
// Whether all of a range of device memory is allocated.
HIDDEN bool simulated_covers(CUdeviceptr address, size_t bytes);
// Whether a range of the host's memory is pinned.
HIDDEN bool simulated_pinned(const void *address, size_t bytes);
// The device whose memory an address is in; -1 for the host's.
HIDDEN int simulated_owner(CUdeviceptr address);
// An allocation of cuMemAlloc, which other processes can map, or this process's mapping of another process's allocation.
struct simulated_direct {
    int file, device;
    size_t bytes;
};
HIDDEN bool simulated_find_direct(CUdeviceptr address, struct simulated_direct *found);
HIDDEN CUdeviceptr simulated_map_direct(struct simulated_direct of);
HIDDEN bool simulated_unmap_direct(CUdeviceptr address);
// How devices reach each other: 2 by NVLink, 1 by the bus, 0 not at all.
HIDDEN int simulated_peers(void);

// Check a call that may wait for the device. If a capture forbids the call, the call fails and invalidates the capture.
HIDDEN CUresult simulated_unsafe(const char *call);
// Returns an error if a stream cannot take work.
HIDDEN CUresult simulated_stream(const char *call, CUstream stream);
// Perform an operation now or, while the stream is captured, put the operation into the stream's graph.
HIDDEN void simulated_queue(CUstream stream, struct CUgraphNode_st node);
HIDDEN bool simulated_capturing(CUstream stream);
HIDDEN int simulated_number(CUstream stream);
HIDDEN CUresult simulated_synchronize(const char *call, CUstream stream);

// The simulated libraries call simulatedProduct, a function of the driver, to queue a product or an NCCL operation. The ranges are the
// memory that the operation reads and writes; all of it must be allocated. `text` is the line for the log.
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
