// The second of the two low-rank products of linear maps with LoRA: dst += scale · hidden · up, for several maps in one launch. The first
// product, hidden = input · down, was computed earlier (low_rank.cu computes both). In the forward pass, dst is a map's result. In the
// backward pass, dst is the gradient of the map's input, hidden is the product of the result's gradient and LoRA's factor `up`, and the
// factor `down` takes the place of `up` in this file.
//
// At thousands of rows, this kernel reaches nearly the full speed of memory. cuBLAS reaches half of this speed, and adds the products of
// the maps one after the other.
#include "low_rank.cuh"

namespace {

// A warp handles COLUMNS columns of dst, and STEPS times TILE rows. (TILES, the parameter of the functions below, counts other tiles: those
// of 16 ranks, over which the product sums.)
constexpr int COLUMNS = 32, WARPS = 8, TILE = 16, STEPS = 2;
constexpr int MOST_TILES = 4, MOST_SUMS = 4;

// The factors of 16 ranks: 16 columns of hidden and the 16 rows of up that belong to them.
struct LowRankTile {
    const void *hidden, *up;
};

// The products of up to MOST_TILES tiles, added to one dst with `outer` columns. The blocks of this sum have a blockIdx.x from the `end` of
// the previous sum (0 for the first sum) up to, but not including, its own `end`.
struct LowRankSum {
    void *dst;
    uint32_t outer, end;
    LowRankTile tiles[MOST_TILES];
};

struct LowRankSums {
    LowRankSum list[MOST_SUMS];
};

// `rows` is the number of rows of dst and hidden. `*_row` is the distance in elements between the starts of two neighbouring rows of a
// matrix. `up` is stored as (outer, rank) in the forward pass and as (rank, outer) in the backward pass.
struct LowRankAddSizes {
    uint32_t rows, hidden_row, up_row, dst_row;
    float scale;
};

// How many blocks a multiprocessor must have room for at a time. More tiles need more registers, so fewer blocks fit.
template <int TILES> constexpr int BLOCKS = TILES == 1 ? 4 : 2;

// A thread, with g = lane / 4 and t = lane % 4, has the columns 8t to 8t + 7 of the warp's 32, and the rows g and g + 8 of each 16 (its two
// halves). It loads the ranks 4t to 4t + 3 of hidden. include/low_rank.cuh explains this order. All loads start before the first product.
template <typename T, int TILES, bool is_backward>
__device__ __forceinline__ void low_rank_add(const LowRankSums &sums, const LowRankAddSizes &sizes) {
    // Finds the sum that this block belongs to. `begin` becomes the blockIdx.x of the sum's first block.
    const LowRankSum *sum = sums.list;
    uint32_t begin = 0;
    while (blockIdx.x >= sum->end) begin = sum++->end;
    const uint32_t column = ((blockIdx.x - begin) * WARPS + threadIdx.x / WARP) * COLUMNS;
    if (column >= sum->outer) return;
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    // The thread's first row, and the last row of dst.
    const uint32_t first = blockIdx.y * STEPS * TILE + g, last = sizes.rows - 1;
    T *dst = static_cast<T *>(sum->dst) + column + 8 * t;
    uint4 values[STEPS][2];
    uint32_t left[STEPS][TILES][4], up[TILES][4][2];
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // In place of a row beyond the last one, the last row is loaded. The result is not written.
            const uint32_t row = min(first + step * TILE + 8 * half, last);
            values[step][half] = *reinterpret_cast<const uint4 *>(dst + static_cast<uint64_t>(row) * sizes.dst_row);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const T *hidden = static_cast<const T *>(sum->tiles[tile].hidden);
                const uint2 ranks = words<uint2>(hidden + static_cast<uint64_t>(row) * sizes.hidden_row + 4 * t);
                // The order of the left operand of mma: two ranks of row g, the same of row g + 8, then the other two of both rows.
                left[step][tile][half] = ranks.x, left[step][tile][2 + half] = ranks.y;
            }
        }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        load_up<T, is_backward>(up[tile], static_cast<const T *>(sum->tiles[tile].up), sizes.up_row, column, /* rank: */ 0, g, t);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float products[4][4] = {};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_add<T>(products[i], left[step][tile], up[tile][i][0], up[tile][i][1]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t row = first + step * TILE + 8 * half;
            // Returns word `i` of dst, whose old value is `two`, with the products added. The word has the thread's columns 2i and 2i + 1.
            // Column 4 e + p of the thread is products[p][2 * half + e]. For these two columns, e is i / 2, and p is 2 (i % 2) and
            // 2 (i % 2) + 1.
            const auto add = [&](uint32_t two, int i) {
                const T *old = reinterpret_cast<const T *>(&two);
                const int from = 2 * half + i / 2;
                return pair<T>(widen(old[0]) + sizes.scale * products[2 * (i % 2)][from],
                               widen(old[1]) + sizes.scale * products[2 * (i % 2) + 1][from]);
            };
            const uint4 old = values[step][half];
            const uint4 result = make_uint4(add(old.x, 0), add(old.y, 1), add(old.z, 2), add(old.w, 3));
            if (row <= last) store_words(dst + static_cast<uint64_t>(row) * sizes.dst_row, result);
        }
    }
}

} // namespace

// dst += scale · hidden · up for each sum, where dst is (rows, outer), hidden (rows, 16 · TILES) and up (16 · TILES, outer), both in tiles
// of 16 ranks. outer must be a multiple of 32, dst_row of 8, hidden_row and up_row of 4. The addresses of hidden and up must be multiples
// of 8 bytes, that of dst a multiple of 16 bytes.
// Launch: block 256, grid (blocks, ceil(rows / 32)), no dynamic shared memory. Each sum has ceil(outer / 256) blocks, so `blocks` is the
// `end` of the last sum.
#define DEFINE_ADD(NAME, IS_BACKWARD, TILES, SUFFIX, T)                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, BLOCKS<TILES>) low_rank_add_##NAME##TILES##_##SUFFIX(    \
        const __grid_constant__ LowRankSums sums, const __grid_constant__ LowRankAddSizes sizes) {                     \
        follow();                                                                                                      \
        low_rank_add<T, TILES, IS_BACKWARD>(sums, sizes);                                                              \
    }
#define DEFINE_TILES(NAME, IS_BACKWARD, SUFFIX, T)                                                                     \
    DEFINE_ADD(NAME, IS_BACKWARD, 1, SUFFIX, T)                                                                        \
    DEFINE_ADD(NAME, IS_BACKWARD, 2, SUFFIX, T)                                                                        \
    DEFINE_ADD(NAME, IS_BACKWARD, 3, SUFFIX, T)                                                                        \
    DEFINE_ADD(NAME, IS_BACKWARD, 4, SUFFIX, T)
#define DEFINE_BOTH(SUFFIX, T)                                                                                         \
    DEFINE_TILES(forward, false, SUFFIX, T)                                                                            \
    DEFINE_TILES(backward, true, SUFFIX, T)
DEFINE_BOTH(f16, __half)
DEFINE_BOTH(bf16, __nv_bfloat16)
