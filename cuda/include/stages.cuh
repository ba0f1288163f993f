// A ring of stages in shared memory, for a matrix product that sums over its inner dimension step by step. A stage holds both factors'
// tiles of one step. One thread starts the copies that fill the stages (by the copy engine of compute capability 9.0), and two warpgroups
// multiply the tiles.
#pragma once

#include "engine.cuh"

constexpr int WARPGROUP = 128;

// Starts to copy a box of a tensor of three dimensions to `to`. The box begins at the indices (first, second, third); elements are
// consecutive along the first dimension. `barrier` counts the bytes that arrive. With BOTH, the engine copies the box to both blocks of a
// cluster of two (3 is the mask of both). In the PTX, %0 is `to`, %1 the map, %2 to %4 the indices, %5 the barrier, and %6 the mask.
template <bool BOTH> __device__ __forceinline__ void copy_box(uint32_t to, const TensorMap &map, uint32_t barrier,
                                                              int first, int second, int third) {
    if constexpr (BOTH) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(to),
            "l"(&map), "r"(first), "r"(second), "r"(third), "r"(barrier), "h"(uint16_t(3))
            : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(to),
                     "l"(&map), "r"(first), "r"(second), "r"(third), "r"(barrier)
                     : "memory");
    }
}

// For a warpgroup's asynchronous products: call `multiply_fence` before them, and `multiply_commit` after them, which makes them a group.
// `multiply_wait` waits until at most the last PENDING groups are unfinished.
__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

// The stages of a block. Each stage has two barriers of 8 bytes: `filled` completes when its copies have arrived, `emptied` when the
// warpgroups of all blocks of the cluster have read it. `stages`, `filled` and `emptied` are the addresses of the first stage and of its
// barriers; those of the further stages follow. `stage` is the index of the current stage, and `round` is how often the ring has begun
// again. CLUSTER is the number of blocks of the cluster, 1 or 2.
template <int STAGES, int STAGE_BYTES, int CLUSTER> struct Stages {
    // The number of threads of a block that multiply.
    static constexpr int WORKERS = 2 * WARPGROUP;
    uint32_t stages, filled = stages + STAGES * STAGE_BYTES, emptied = filled + STAGES * 8;
    int stage = 0;
    uint32_t round = 0;

    // Initializes the barriers. All threads of the cluster's blocks call this.
    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                // `filled` expects one arrival, of the thread that starts the copies; `emptied` one of each warpgroup of the cluster.
                barrier_init(filled + i * 8, 1);
                barrier_init(emptied + i * 8, CLUSTER * WORKERS / WARPGROUP);
            }
            barriers_publish();
        }
        cluster_wait();
    }

    // The address of the current stage, and its `filled` barrier.
    __device__ __forceinline__ uint32_t address() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t barrier() const { return filled + stage * 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, ++round;
    }

    // For the thread that starts the copies: waits until the current stage may be overwritten, and announces to its `filled` barrier the
    // STAGE_BYTES bytes that the copies write.
    __device__ __forceinline__ void begin_copies() const {
        // The warpgroups end one phase of `emptied` in each round, with the parity of the round's number. This waits for the phase of the
        // previous round.
        if (round > 0) barrier_wait(emptied + stage * 8, (round - 1) & 1);
        barrier_expect(barrier(), STAGE_BYTES);
    }

    // For a warpgroup whose products of the stage before the current one are done: arrives at that stage's `emptied` barrier in every block
    // of the cluster. Thread i of the warpgroup arrives in block i.
    __device__ __forceinline__ void leave_last() const {
        const int in_group = int(threadIdx.x) % WARPGROUP;
        if (in_group < CLUSTER) barrier_arrive(emptied + (stage == 0 ? STAGES - 1 : stage - 1) * 8, in_group);
    }
};
