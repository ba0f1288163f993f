// The second products of adapted linear maps alone: dst += s hidden up. At thousands of rows they move memory at nearly its full speed;
// cuBLAS reaches 60 % of it, and adds the products of several maps to one dst one after the other.
#include "low_rank.cuh"

namespace {

constexpr int COLUMNS = 32, WARPS = 8, TILE = 16;
constexpr uint32_t ROWS = 128;
constexpr int MOST_TILES = 4;

// Sixteen ranks: columns of hidden and rows of up.
struct LowRankTile {
    const void *hidden, *up;
};

struct LowRankTiles {
    LowRankTile list[MOST_TILES];
};

// All matrices are `*_row` elements from row to row; `up` is stored as (outer, rank) in the forward pass and as (rank, outer) in the
// backward pass.
struct LowRankAddSizes {
    uint32_t rows, outer, hidden_row, up_row, dst_row;
    float scale;
};

// A warp has 32 columns of the block's rows, sixteen rows at a time (include/low_rank.cuh), and loads the next rows of dst meanwhile. A
// thread keeps its values of `up` for all rows.
template <typename T, int TILES, bool is_backward> struct Adder {
    const LowRankTiles &tiles;
    const LowRankAddSizes &sizes;
    T *dst;
    uint32_t end;
    int g, t;
    uint32_t up[TILES][4][2];

    __device__ __forceinline__ T *place(uint32_t row) const { return dst + static_cast<uint64_t>(row) * sizes.dst_row; }

    __device__ __forceinline__ void load(uint4 (&values)[2], uint32_t first) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t row = first + g + 8 * half;
            if (row < end) values[half] = *reinterpret_cast<const uint4 *>(place(row));
        }
    }

    __device__ __forceinline__ void multiply(float (&sums)[4][4], uint32_t first) const {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint32_t left[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Rows beyond the last one load the last row and are not written.
                const uint32_t row = first + g + 8 * half, at = row < end ? row : end - 1;
                const T *from = static_cast<const T *>(tiles.list[tile].hidden) + static_cast<uint64_t>(at) * sizes.hidden_row + 4 * t;
                const uint2 found = words<uint2>(from);
                left[half] = found.x, left[2 + half] = found.y;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_add<T>(sums[i], left, up[tile][i][0], up[tile][i][1]);
        }
    }

    __device__ __forceinline__ void run(uint32_t begin) const {
        uint4 next[2] = {};
        load(next, begin);
        for (uint32_t first = begin; first < end; first += TILE) {
            uint4 values[2] = {next[0], next[1]};
            load(next, first + TILE);
            float sums[4][4] = {};
            multiply(sums, first);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t row = first + g + 8 * half;
                if (row >= end) continue;
                uint32_t *word = &values[half].x;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const T *old = reinterpret_cast<const T *>(word + i);
                    const int from = 2 * half + i / 2;
                    word[i] = pair<T>(widen(old[0]) + sizes.scale * sums[2 * (i % 2)][from],
                                      widen(old[1]) + sizes.scale * sums[2 * (i % 2) + 1][from]);
                }
                *reinterpret_cast<uint4 *>(place(row)) = values[half];
            }
        }
    }
};

template <typename T, int TILES, bool is_backward>
__device__ __forceinline__ void low_rank_add(const LowRankTiles &tiles, const LowRankAddSizes &sizes, T *dst) {
    const uint32_t column = (blockIdx.x * WARPS + threadIdx.x / WARP) * COLUMNS, begin = blockIdx.y * ROWS;
    if (column >= sizes.outer) return;
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const uint32_t end = sizes.rows - begin < ROWS ? sizes.rows : begin + ROWS;
    Adder<T, TILES, is_backward> adder{tiles, sizes, dst + column + 8 * t, end, g, t};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        load_up<T, is_backward>(adder.up[tile], static_cast<const T *>(tiles.list[tile].up), sizes.up_row, column, 0, g, t);
    adder.run(begin);
}

} // namespace

// dst (rows, outer) += scale hidden (rows, TILES x 16) up (TILES x 16, outer), in tiles of sixteen ranks. outer is a multiple of 32,
// dst_row of 8, hidden_row and up_row of 4. Addresses of hidden and up are multiples of 8 bytes, dst of 16 bytes.
// Launch: block 256, grid (ceil(outer / 256), ceil(rows / 128)), no dynamic shared memory.
#define DEFINE_ADD(NAME, IS_BACKWARD, TILES, SUFFIX, T)                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, 2) low_rank_add_##NAME##TILES##_##SUFFIX(                \
        const __grid_constant__ LowRankTiles tiles, const __grid_constant__ LowRankAddSizes sizes, T *dst) {           \
        follow();                                                                                                      \
        low_rank_add<T, TILES, IS_BACKWARD>(tiles, sizes, dst);                                                        \
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
