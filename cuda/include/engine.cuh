// The copy engine of compute capability 9.0 (TMA), and the barriers in shared memory (mbarriers) that count its bytes.
#pragma once

#include <cstdint>

// A tensor map, which describes a tensor to the copy engine. The driver's cuTensorMapEncode functions fill it.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// Starts to fetch a map that copies will use soon.
__device__ __forceinline__ void prefetch(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Initializes the barrier at address `barrier`. A phase of it ends when `arrivals` arrivals and all expected bytes have come.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine and the cluster.
__device__ __forceinline__ void barriers_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Makes the current phase of a barrier of this block wait for the copies of `bytes` more bytes, and arrives at the barrier.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at a barrier of this block.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of block `rank` of the cluster. `barrier` is the address of the corresponding barrier of this block. The arrival
// does not publish to that block what this thread has written: a release for the whole cluster would wait for all stores of the thread
// to global memory.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int rank) {
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// Waits for the end of the barrier's phase of parity `parity` (0 for the first phase, then alternating). Afterwards, this thread can read
// what the phase's copies wrote, and what threads of this block wrote before they arrived.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (done == 0)
        asm volatile("{\n.reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n}\n"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
}

// Returns the index of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster's blocks. All lanes of a warp must call it together.
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// These two functions move registers from the warps that only copy to the warps that multiply: COUNT is the number of registers that each
// thread of the calling warpgroup has afterwards. At the start all warps have the same number of registers per thread. In kernels of 384
// threads, this number is at most 168 because of their launch bounds: 65536 registers / 384, rounded down to a multiple of 8.
template <int COUNT> __device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
