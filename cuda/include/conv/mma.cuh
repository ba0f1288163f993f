// Matrix products of 16-bit values for the convolution kernels, with the tensor-core instructions of compute capability 8.0. The
// operands are tiles in shared memory, whose rows have STEP (64) values; copy.cuh says how a row is arranged. A product sums over
// the dimension k, whose indices other files call summed values. It is a sum over many steps, each over STEP indices of k.
// `tile_offset(row, column)` is the offset, in bytes, of a value in a tile, and SQUARE_BYTES the size of a tile of 64 rows.
#pragma once

#include "copy.cuh"

// Computes acc (16 rows, 8 columns) += a (16, 16) * b (16, 8), as one warp. A lane passes the values of a and b that `load_left`
// and `load_right` give it. It has the columns 2 (lane % 4) and 2 (lane % 4) + 1 of acc:
// acc[0] and acc[1] are in row lane / 4, acc[2] and acc[3] in row lane / 4 + 8.
template <typename T>
__device__ __forceinline__ void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<__half>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices, each transposed if TRANSPOSED. Lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
template <bool TRANSPOSED> __device__ __forceinline__ void load_fragments(uint32_t (&to)[4], uint32_t address) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    }
}

// How k runs in the tiles of an operand.
// ALONG_ROWS: each row of the tile belongs to a row of the left operand or a column of the right operand.
// ACROSS_ROWS: each row of a tile belongs to one index of k. A tile has 64 rows of the left operand or 64 columns of the right
// operand, so an operand with more of them has several tiles, one after another.
enum class Summed { ALONG_ROWS, ACROSS_ROWS };

// Loads a 16 x 16 part of the left operand: rows `first` to `first` + 15, and the step's indices k to k + 15.
// to[0] and to[1] get the first and the last eight rows at the first eight indices, to[2] and to[3] the same rows at the last eight.
template <Summed S> __device__ __forceinline__ void load_left(uint32_t (&to)[4], uint32_t tile, int first, int k) {
    const int lane = int(threadIdx.x) % WARP;
    if constexpr (S == Summed::ALONG_ROWS) {
        load_fragments<false>(to, tile + tile_offset(first + lane % 16, k + lane / 16 * 8));
    } else {
        // A row of the operand is a column of the tiles, so the loaded matrices are transposed.
        const int column = first + lane / 8 % 2 * 8;
        load_fragments<true>(to, tile + column / STEP * SQUARE_BYTES +
                                     tile_offset(k + lane % 8 + lane / 16 * 8, column % STEP));
    }
}

// Loads a 16 x 16 part of the right operand: columns `first` to `first` + 15, and the step's indices k to k + 15.
// to[0] and to[1] get the first eight columns at the first and at the last eight indices, to[2] and to[3] the last eight columns.
template <Summed S> __device__ __forceinline__ void load_right(uint32_t (&to)[4], uint32_t tile, int first, int k) {
    const int lane = int(threadIdx.x) % WARP;
    if constexpr (S == Summed::ALONG_ROWS) {
        load_fragments<false>(to, tile + tile_offset(first + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 8));
    } else {
        const int column = first + lane / 16 * 8;
        load_fragments<true>(to, tile + column / STEP * SQUARE_BYTES + tile_offset(k + lane % 16, column % STEP));
    }
}

// Computes acc += left * right over one step, for this warp's MF * 16 rows from `row` on and NF * 8 columns (NF even) from
// `column` on. `left` and `right` are the addresses of the operands' tiles.
template <typename T, Summed LEFT, Summed RIGHT, int MF, int NF> __device__ __forceinline__ void
multiply_step(float (&acc)[MF][NF][4], uint32_t left, uint32_t right, int row, int column) {
#pragma unroll 2
    for (int k = 0; k < STEP; k += 16) {
        uint32_t a[MF][4];
#pragma unroll
        for (int i = 0; i < MF; ++i) load_left<LEFT>(a[i], left, row + i * 16, k);
#pragma unroll
        for (int j = 0; j < NF; j += 2) {
            uint32_t b[4];
            load_right<RIGHT>(b, right, column + j * 8, k);
#pragma unroll
            for (int i = 0; i < MF; ++i) {
                mma<T>(acc[i][j], a[i], b[0], b[1]);
                mma<T>(acc[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}
