// The copy engine of compute capability 9.0, the barriers in shared memory that count its bytes, and clusters of two
// blocks.
#pragma once

#include "copy.cuh"

// The structure that the driver's cuTensorMapEncode functions fill.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// Passed by value; conv_hopper.cu says how they are encoded. `dense` maps the weight, for the gradient of the weight
// that of the result. `windows[0]` maps the input; for the gradient of the input `windows[phase]` the gradient of the
// result for each phase of the stride.
struct Conv2dMaps {
    TensorMap dense, windows[4];
};

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine and the cluster.
__device__ __forceinline__ void barriers_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Arrives, and announces bytes that the phase waits for besides.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int rank) {
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (done == 0) {
        asm volatile("{\n.reg .pred done;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n}\n"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    }
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster's blocks.
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Fetches 64 channels from `channel` of the windows' pixels at one tap: the first window's lowest pixel is (image, y,
// x), the tap lies (offset_y, offset_x) further. BOTH: into both blocks of the cluster, each of whose barriers counts
// it.
template <bool BOTH> __device__ __forceinline__ void copy_windows(uint32_t to, const TensorMap &map, uint32_t barrier,
                                                                  int channel, int x, int y, int image,
                                                                  uint16_t offset_x, uint16_t offset_y) {
    if constexpr (BOTH) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;\n" ::"r"(to),
            "l"(&map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"(offset_x), "h"(offset_y),
            "h"(uint16_t(3))
            : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};\n" ::"r"(to),
                     "l"(&map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"(offset_x), "h"(offset_y)
                     : "memory");
    }
}

// Fetches a box of a tensor of three dimensions, the first of which lies densely.
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
