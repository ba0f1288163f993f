// Loads the operands of LoRA's products from memory as fragments for the tensor cores. Each thread loads values that are neighbours in
// memory. A low-rank product is (x downᵀ) upᵀ, where x is (rows, features), `down` (ranks, features), and `up` (columns, ranks).
//
// Products are PTX' `mma.m16n8k16` (attention/mma.cuh describes its fragments). An index that a product sums over may be permuted if both
// operands have the same permutation, and columns of the right operand may be permuted if the result's columns are. The permutations here
// make a thread's values contiguous in memory. With g = lane / 4 and t = lane % 4, a thread loads values of column g of the right operand,
// and gets the sums of the columns 2t and 2t + 1:
// - Features, which the product with `down` sums over, are taken 32 at a time, in two products. A thread loads 8t to 8t + 7 of the 32.
// - Ranks are taken 16 at a time. The product with `down` has ranks as columns and takes two products of 8 columns: column g is rank 2g in
//   the first, and rank 2g + 1 in the second. So a thread's sums are those of the ranks 4t and 4t + 2 (first) and 4t + 1 and 4t + 3
//   (second). The product with `up`, which sums over ranks, has the same four ranks in this thread.
// - Columns of the result are taken 32 at a time, in four products with `up`. Column g of product i is column 4g + i of the 32, so a
//   thread's sums, of the columns 2t and 2t + 1 of each product, are those of the columns 8t to 8t + 7 of the 32.
#pragma once

#include "element.cuh"

#include "attention/mma.cuh"

// The number of ranks that one product with `up` sums over: a tile of ranks.
constexpr int RANKS = 16;

// Loads one `W`, such as uint2, from memory that the kernel does not write: the load through the read-only cache need not wait for stores.
template <typename W, typename T> __device__ __forceinline__ W words(const T *at) { return __ldg(reinterpret_cast<const W *>(at)); }

// The lower, or the upper, 16 bits of both words; `first` provides the lower half of the result.
__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) { return __byte_perm(first, second, 0x5410); }
__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) { return __byte_perm(first, second, 0x7632); }

// Loads the right operands of the four products that sum over 16 ranks, from `rank` on, and compute 32 columns, from `column` on:
// b[product][register]. `up` is stored as (ranks, columns) if `is_turned`, otherwise as (columns, ranks), with `row` elements from the
// start of a stored row to the start of the next. g and t are those of the thread (see above).
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
