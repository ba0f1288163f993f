// A ring of stages in shared memory. A stage holds the tiles of one step of a product's sum. One thread lets the copy engine of compute
// capability 9.0 fill the stages, and two warpgroups multiply their tiles.
#pragma once

#include "engine.cuh"

constexpr int WARPGROUP = 128;

// Starts to copy the box at (first, second, third) of a tensor of three dimensions, the first of which is dense. With BOTH, the engine
// copies the box into both blocks of the cluster.
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

__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

// The stages of a block, with two barriers for each stage, one for "the copies have arrived" and one for "the readers in all blocks of
// the cluster are done".
template <int STAGES, int STAGE_BYTES, int CLUSTER> struct Stages {
    static constexpr int WORKERS = 2 * WARPGROUP;
    uint32_t stages, filled = stages + STAGES * STAGE_BYTES, emptied = filled + STAGES * 8;
    int stage = 0;
    uint32_t round = 0;

    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(filled + i * 8, 1);
                barrier_init(emptied + i * 8, CLUSTER * WORKERS / WARPGROUP);
            }
            barriers_publish();
        }
        cluster_wait();
    }

    __device__ __forceinline__ uint32_t address() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t barrier() const { return filled + stage * 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, ++round;
    }

    // For the copying thread: waits until the stage may be overwritten, and announces the STAGE_BYTES bytes that the copies write.
    __device__ __forceinline__ void begin_copies() const {
        if (round > 0) barrier_wait(emptied + stage * 8, (round - 1) & 1);
        barrier_expect(barrier(), STAGE_BYTES);
    }

    // For a warpgroup: reports that its products of the previous stage are done.
    __device__ __forceinline__ void leave_last() const {
        const int in_group = int(threadIdx.x) % WARPGROUP;
        if (in_group < CLUSTER) barrier_arrive(emptied + (stage == 0 ? STAGES - 1 : stage - 1) * 8, in_group);
    }
};
