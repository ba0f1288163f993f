// Fragments of products with low-rank factors, loaded in the memory order of the factors.
//
// Products are PTX' `mma.m16n8k16` (attention/mma.cuh describes its fragments). Any assignment of columns, features and ranks to the
// indices of a fragment works if both operands agree. The assignment here makes a thread's values contiguous in memory: with
// g = lane / 4 and t = lane % 4,
// - among 32 features, a thread has 8t to 8t + 7, for two products one after the other;
// - among 16 ranks, which take two products, column g is rank 2g in the first product and rank 2g + 1 in the second, so that a
//   thread's sums are the ranks 4t to 4t + 3;
// - among 32 columns of the result, column g of product i is 4g + i, so that a thread's sums are the columns 8t to 8t + 7.
#pragma once

#include "element.cuh"

#include "attention/mma.cuh"

// The number of ranks in a tile: the ranks that one product with `up` sums over.
constexpr int RANKS = 16;

// Loads memory that the kernel does not write, so that the loads need not wait for stores.
template <typename W, typename T> __device__ __forceinline__ W words(const T *at) { return __ldg(reinterpret_cast<const W *>(at)); }

__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) { return __byte_perm(first, second, 0x5410); }
__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) { return __byte_perm(first, second, 0x7632); }

// Loads the right operands of the four products of 16 ranks with 32 columns: [product][register].
// `up` is stored as (rank, outer) if `is_turned`, otherwise as (outer, rank), with rows `row` elements apart.
template <typename T, bool is_turned>
__device__ __forceinline__ void load_up(uint32_t (&b)[4][2], const T *up, uint32_t row, uint32_t column, uint32_t rank, int g, int t) {
    if (is_turned) {
        uint2 of_rank[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            of_rank[i] = words<uint2>(up + static_cast<uint64_t>(rank + 4 * t + i) * row + column + 4 * g);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint2 first = of_rank[2 * i], second = of_rank[2 * i + 1];
            b[0][i] = low_halves(first.x, second.x), b[1][i] = high_halves(first.x, second.x);
            b[2][i] = low_halves(first.y, second.y), b[3][i] = high_halves(first.y, second.y);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint2 found = words<uint2>(up + static_cast<uint64_t>(column + 4 * g + i) * row + rank + 4 * t);
            b[i][0] = found.x, b[i][1] = found.y;
        }
    }
}
