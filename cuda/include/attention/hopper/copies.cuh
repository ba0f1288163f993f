// Copies between heads of tensors in global memory and tiles in shared memory, by the copy engine. The dimensions of a tensor map are
// (width, rows, heads, batch). A box, the elements that one instruction copies, has 64 columns. Elements of a box that are outside the head
// are read as zeros and never written.
#pragma once

#include "../../engine.cuh"
#include "../shape.cuh"
#include "products.cuh"

// The maps of the forward pass. Boxes have 64 rows of q and o, and 128 rows of k and v.
struct AttentionForwardMaps {
    TensorMap q, k, v, o;
};

// The maps of the backward pass. Boxes have 128 rows of k and v, and 64 rows of dk and dv. Boxes of q and d_o have 128 rows in the
// kernels of width 64, and 64 rows in the kernels of width 128.
struct AttentionBackwardMaps {
    TensorMap q, k, v, d_o, dk, dv;
};

// Starts to copy `BOX` rows of a head, from `row` on, into a tile of `ROWS` rows. `to` is the address of the first row in the tile, and
// `barrier` counts the bytes that arrive, including the zeros.
template <int D, int BOX, int ROWS>
__device__ __forceinline__ void fetch_rows(uint32_t to, const TensorMap &map, uint32_t barrier, uint32_t row, const Task &task) {
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
                     "[%6];" ::"r"(to + panel * ROWS * ROW_BYTES),
                     "l"(&map), "r"(panel * 64), "r"(row), "r"(task.head), "r"(task.batch), "r"(barrier)
                     : "memory");
}

// Starts to copy 64 rows of a tile of `ROWS` rows, the first of them at `from`, to rows `row` to `row` + 63 of a head.
template <int D, int ROWS>
__device__ __forceinline__ void store_rows(const TensorMap &map, uint32_t from, uint32_t row, const Task &task) {
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                     "r"(panel * 64), "r"(row), "r"(task.head), "r"(task.batch), "r"(from + panel * ROWS * ROW_BYTES)
                     : "memory");
}

// Both start to copy consecutive bytes: `fetch_bytes` to shared memory, where `barrier` counts them, `store_bytes` to global memory.
__device__ __forceinline__ void fetch_bytes(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void store_bytes(void *to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Starts to add consecutive f32 values in shared memory, `bytes` bytes in all, to those in global memory.
__device__ __forceinline__ void add_bytes(float *to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Call `stores_commit` after stores and additions. `stores_have_read` waits until those of this thread have read shared memory,
// `stores_are_done` until they are complete.
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void stores_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The position of a thread in a ring of stages in shared memory: the stage in use, and the parity of the current round through the ring. A
// thread that reads the stages waits for the phase of this parity of the stage's FULL barrier. A thread that fills the stages waits for the
// phase of parity `parity ^ 1` of the EMPTY barrier; in the first round this wait returns at once.
template <int STAGES> struct Ring {
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
