// Gated linear units (kernels/gated.cu) of x + s hidden up, where the low-rank products (include/low_rank.cuh) of both halves are
// made on the way: added to x in memory they would cost another pass over it, which is most of the time at thousands of rows.
//
// A row of x (rows, 2 width) is h, then the gate; y and grad (of y) are (rows, width), dx is as x and the gradient of the sum.
// hidden (rows, RANK) and up (width, RANK) of a half lie `*_row` elements apart; hidden is null for a half without a product.
// width is a multiple of 32, distances of rows of 4; addresses of hidden and up are multiples of 8 bytes, the others of 16.
// Launch: block 256, grid (ceil(width / 256), ceil(rows / 128)), no dynamic shared memory.
#include "functions.cuh"
#include "low_rank.cuh"

namespace {

constexpr int COLUMNS = 32;
constexpr int WARPS = 8;
// Rows that a thread's values of `up` serve.
constexpr uint32_t ROWS = 128;

struct LowRankHalf {
    const void *hidden, *up;
    uint32_t hidden_row, up_row;
    float scale;
    uint32_t unused;
};

struct LowRankHalves {
    LowRankHalf list[2];
};

// One half, with what a warp needs of `up` for its 32 columns.
template <typename T, int TILES> struct Half {
    const T *hidden;
    uint32_t row;
    float scale;
    uint32_t up[TILES][4][2];

    __device__ __forceinline__ Half(const LowRankHalf &half, uint32_t column)
        : hidden(static_cast<const T *>(half.hidden)), row(half.hidden_row), scale(half.scale) {
        if (hidden == nullptr) return;
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            load_up<T, false>(up[tile], static_cast<const T *>(half.up), half.up_row, column, tile * RANKS, lane / 4, lane % 4);
    }

    // x + s hidden up: of the rows `at` the thread's eight columns.
    __device__ __forceinline__ void add(float (&sum)[2][8], const uint4 (&x)[2], const uint32_t (&at)[2]) const {
        float products[4][4] = {};
        if (hidden != nullptr) {
            const int t = threadIdx.x % 4;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                uint32_t left[4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint2 found = words<uint2>(hidden + static_cast<uint64_t>(at[i]) * row + tile * RANKS + 4 * t);
                    left[i] = found.x, left[2 + i] = found.y;
                }
#pragma unroll
                for (int i = 0; i < 4; i++) multiply_add<T>(products[i], left, up[tile][i][0], up[tile][i][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const T *values = reinterpret_cast<const T *>(&x[i]);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[i][k] = widen(values[k]) + scale * products[k % 4][2 * i + k / 4];
        }
    }
};

template <typename T> __device__ __forceinline__ void store(T *to, const float (&values)[8]) {
    const uint4 word = make_uint4(pair<T>(values[0], values[1]), pair<T>(values[2], values[3]), pair<T>(values[4], values[5]),
                                  pair<T>(values[6], values[7]));
    *reinterpret_cast<uint4 *>(to) = word;
}

// A thread has eight columns of two rows in sixteen. `grad` is null forward, where y is written, and dx backward.
template <typename T, int TILES, typename F, bool is_backward>
__device__ __forceinline__ void gated(const T *x, const T *grad, T *out, const LowRankHalves &halves, uint32_t rows, uint32_t width) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32_t first_column = (blockIdx.x * WARPS + warp) * COLUMNS;
    if (first_column >= width) return;
    const Half<T, TILES> half(halves.list[0], first_column), gate(halves.list[1], first_column);
    const uint32_t column = first_column + 8 * (lane % 4), begin = blockIdx.y * ROWS;
    const uint32_t end = rows - begin < ROWS ? rows : begin + ROWS;
    for (uint32_t first = begin; first < end; first += 16) {
        uint4 of_half[2], of_gate[2], of_grad[2];
        uint32_t at[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Rows behind the last are computed as the last, and not written.
            const uint32_t row = first + lane / 4 + 8 * i;
            at[i] = row < end ? row : end - 1;
            const T *start = x + static_cast<uint64_t>(at[i]) * 2 * width + column;
            of_half[i] = words<uint4>(start), of_gate[i] = words<uint4>(start + width);
            if (is_backward) of_grad[i] = words<uint4>(grad + static_cast<uint64_t>(at[i]) * width + column);
        }
        float h[2][8], g[2][8];
        half.add(h, of_half, at);
        gate.add(g, of_gate, at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float to_h[8], to_gate[8];
            const T *grads = reinterpret_cast<const T *>(&of_grad[i]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (is_backward) {
                    float value, slope;
                    F::template both<T>(g[i][k], value, slope);
                    to_h[k] = widen(grads[k]) * value;
                    to_gate[k] = widen(grads[k]) * h[i][k] * slope;
                } else {
                    to_h[k] = h[i][k] * F::template value<T>(g[i][k]);
                }
            }
            const uint32_t row = first + lane / 4 + 8 * i;
            if (row >= end) continue;
            T *to = out + static_cast<uint64_t>(row) * (is_backward ? 2 * width : width) + column;
            store(to, to_h);
            if (is_backward) store(to + width, to_gate);
        }
    }
}

} // namespace

#define DEFINE_GATED(NAME, F, RANK, SUFFIX, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, RANK < 64 ? 2 : 1)                                       \
        NAME##_low_rank##RANK##_forward_##SUFFIX(const T *x, T *y, const __grid_constant__ LowRankHalves halves,       \
                                                 uint32_t rows, uint32_t width) {                                      \
        follow();                                                                                                      \
        gated<T, RANK / RANKS, F, false>(x, nullptr, y, halves, rows, width);                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, RANK < 64 ? 2 : 1)                                       \
        NAME##_low_rank##RANK##_backward_##SUFFIX(const T *x, const T *grad, T *dx,                                    \
                                                  const __grid_constant__ LowRankHalves halves, uint32_t rows,         \
                                                  uint32_t width) {                                                    \
        follow();                                                                                                      \
        gated<T, RANK / RANKS, F, true>(x, grad, dx, halves, rows, width);                                             \
    }
#define DEFINE_RANKS(SUFFIX, T)                                                                                        \
    DEFINE_GATED(swiglu, Silu, 16, SUFFIX, T)                                                                          \
    DEFINE_GATED(swiglu, Silu, 32, SUFFIX, T)                                                                          \
    DEFINE_GATED(swiglu, Silu, 64, SUFFIX, T)
DEFINE_RANKS(f16, __half)
DEFINE_RANKS(bf16, __nv_bfloat16)
