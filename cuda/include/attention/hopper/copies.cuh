// Copies between heads of tensors in global memory and tiles in shared memory, by the copy engine (TMA) of compute capability 9.0. The
// dimensions of a tensor map are (width, rows, heads, batch). A tile of D columns consists of D / 64 panels of 64 columns; in a panel, rows
// of ROW_BYTES (128) follow one another. A box, the elements that one instruction copies, has the columns of a panel. Elements of a box
// that are outside the head are read as zeros and never written.
//
// Addresses in shared memory are uint32_t: of data, and of barriers (`mbarrier`), which count the bytes that arrive.
#pragma once

#include "../../engine.cuh"
#include "../shape.cuh"
#include "products.cuh"

// The maps of the forward pass. Boxes have 64 rows of q and o, and 128 rows of k and v.
struct AttentionForwardMaps {
    TensorMap q, k, v, o;
};

// The maps of the backward pass; d_o is the gradient of o, and dk and dv are the gradients of k and v. Boxes have 128 rows of k and v, and
// 64 rows of dk and dv. Boxes of q and d_o have 128 rows in the kernels for heads of width 64, and 64 rows in those for width 128.
// The gradient of q needs no map: it is added up by `add_bytes`.
struct AttentionBackwardMaps {
    TensorMap q, k, v, d_o, dk, dv;
};

// Starts to copy `BOX` rows of the head of `task`, from `row` on, into a tile of `ROWS` rows and D columns. `to` is the address, in the
// tile's first panel, of the first row to write. `barrier` counts the bytes that arrive, including the zeros. The boxes of `map`
// determine the number of rows; `BOX` only documents it at the call.
template <int D, int BOX, int ROWS>
__device__ __forceinline__ void fetch_rows(uint32_t to, const TensorMap &map, uint32_t barrier, uint32_t row, const Task &task) {
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
                     "[%6];" ::"r"(to + panel * ROWS * ROW_BYTES),
                     "l"(&map), "r"(panel * 64), "r"(row), "r"(task.head), "r"(task.batch), "r"(barrier)
                     : "memory");
}

// Starts to copy 64 rows of a tile of `ROWS` rows, the first of them at `from`, to rows `row` to `row` + 63 of the head of `task`.
template <int D, int ROWS>
__device__ __forceinline__ void store_rows(const TensorMap &map, uint32_t from, uint32_t row, const Task &task) {
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                     "r"(panel * 64), "r"(row), "r"(task.head), "r"(task.batch), "r"(from + panel * ROWS * ROW_BYTES)
                     : "memory");
}

// `fetch_bytes` starts to copy consecutive bytes to shared memory, where `barrier` counts them; `store_bytes` to global memory.
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

// A thread calls `stores_commit` after starting stores and additions. Then `stores_have_read` waits until those of the thread have read
// shared memory, which may be overwritten from then on; `stores_are_done` waits until they are complete.
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void stores_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The position of a thread in a ring of stages in shared memory: the stage in use, and the parity of the current round through the ring.
// Each stage has two barriers: FULL completes a phase when the stage has been filled, EMPTY when its readers have finished. A thread that
// reads the stages waits for the phase of parity `parity` of the stage's FULL barrier. A thread that fills the stages waits for the phase
// of parity `parity ^ 1` of the EMPTY barrier; in the first round this wait returns at once, as it must for empty stages, because a new
// barrier is in a phase of parity 0, and the phase of parity 1 before it counts as complete.
template <int STAGES> struct Ring {
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
