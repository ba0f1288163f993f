// Gated linear units (kernels/gated.cu) of x + s hidden upᵀ. A row of x (rows, 2 width) has two halves: h, then the gate; the unit is h
// times an activation of the gate. Each half has its own low-rank product hidden upᵀ (include/low_rank.cuh) and its own scale s. The
// products are computed in registers: to add them to x in memory, a kernel would have to read and write x once more, and with thousands of
// rows these accesses would take most of the time.
//
// y and its gradient grad are (rows, width); dx, the gradient of x + s hidden upᵀ, has the shape of x. For each half, the rows of hidden
// (rows, RANK) are `hidden_row` elements apart, and those of up (width, RANK) `up_row` elements; hidden is null for a half without a
// product. RANK is 16, 32 or 64, as in the name of the function. width is a multiple of 32; hidden_row and up_row are multiples of 4.
// Addresses of hidden and up are multiples of 8 bytes, the other addresses of 16 bytes.
// Launch: block 256, grid (ceil(width / 256), ceil(rows / 128)), no dynamic shared memory.
#include "functions.cuh"
#include "low_rank.cuh"

namespace {

// The number of columns of a warp.
constexpr int COLUMNS = 32;
constexpr int WARPS = 8;
// The number of rows of a block. A thread keeps its values of `up` for all of them.
constexpr uint32_t ROWS = 128;

// The low-rank product of one half. `unused` fills the structure up to a multiple of 8 bytes.
struct LowRankHalf {
    const void *hidden, *up;
    uint32_t hidden_row, up_row;
    float scale;
    uint32_t unused;
};

// The products of h and of the gate.
struct LowRankHalves {
    LowRankHalf list[2];
};

// The low-rank product of one half (h or gate), with the values of `up` for the 32 columns of a warp, from `first_column` on. The ranks are
// divided into TILES tiles of 16 (RANKS). `row_stride` is the distance between rows of `hidden`, in elements. Of sixteen rows at a time, a
// thread has rows lane / 4 (i = 0) and lane / 4 + 8 (i = 1).
template <typename T, int TILES> struct Half {
    const T *hidden;
    uint32_t row_stride;
    float scale;
    // The right operands of `multiply`: for each tile of ranks, those of four products with eight columns each.
    uint32_t up[TILES][4][2];

    // The values that a thread has of sixteen rows: eight columns of its two rows of x, and, of `hidden` in these two rows, four of every
    // sixteen ranks.
    struct Values {
        uint4 x[2];
        uint2 hidden[TILES][2];
    };

    __device__ __forceinline__ Half(const LowRankHalf &half, uint32_t first_column)
        : hidden(static_cast<const T *>(half.hidden)), row_stride(half.hidden_row), scale(half.scale) {
        if (hidden == nullptr) return;
        const int lane = threadIdx.x % WARP;
        // `false`: up is stored as (width, RANK), not as (RANK, width).
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            load_up<T, false>(up[tile], static_cast<const T *>(half.up), half.up_row, first_column, tile * RANKS, lane / 4, lane % 4);
    }

    // Loads row i of the thread's two: eight columns from `x` on, and row `at` of `hidden`.
    __device__ __forceinline__ void load(Values &values, int i, const T *x, uint32_t at) const {
        values.x[i] = words<uint4>(x);
        if (hidden == nullptr) return;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            values.hidden[tile][i] = words<uint2>(hidden + static_cast<uint64_t>(at) * row_stride + tile * RANKS + 4 * (threadIdx.x % 4));
    }

    // Adds the product hidden upᵀ to `products`, where column k (of the thread's eight) of row i (of its two) is at [k % 4][2 i + k / 4]:
    // the tensor cores compute four products p, each with the columns for which k % 4 = p.
    // low_rank.cuh says which columns and ranks the fragments have; their order makes a thread's columns and ranks neighbours in memory.
    __device__ __forceinline__ void multiply(float (&products)[4][4], const Values &values) const {
        if (hidden == nullptr) return;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint2 first = values.hidden[tile][0], second = values.hidden[tile][1];
            const uint32_t left[4] = {first.x, second.x, first.y, second.y};
#pragma unroll
            for (int p = 0; p < 4; p++) multiply_add<T>(products[p], left, up[tile][p][0], up[tile][p][1]);
        }
    }

    // Column k of row i of x, plus the scaled product.
    __device__ __forceinline__ float sum(const Values &values, const float (&products)[4][4], int i, int k) const {
        return widen(reinterpret_cast<const T *>(&values.x[i])[k]) + scale * products[k % 4][2 * i + k / 4];
    }
};

template <typename T> __device__ __forceinline__ void store(T *to, const float (&values)[8]) {
    store_words(to, make_uint4(pair<T>(values[0], values[1]), pair<T>(values[2], values[3]), pair<T>(values[4], values[5]),
                               pair<T>(values[6], values[7])));
}

// A warp works on 32 columns of sixteen rows at a time, and loads the next sixteen rows meanwhile. In the forward pass, `grad` is null
// and `out` is y; in the backward pass, `out` is dx. `h_half` is the half with h, `gate_half` that with the gate. `column` is the first of
// the thread's eight columns, and `end` is the end of the block's rows.
template <typename T, int TILES, typename F, bool is_backward> struct Gated {
    using Values = typename Half<T, TILES>::Values;

    const T *x, *grad;
    T *out;
    uint32_t width, column, end;
    Half<T, TILES> h_half, gate_half;

    struct Tile {
        Values h_half, gate_half;
        uint4 grad[2];
    };

    __device__ __forceinline__ void load(Tile &tile, uint32_t first) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // In place of rows beyond the block's last one, a thread loads the last row. `write` leaves them out.
            const uint32_t row = first + threadIdx.x % WARP / 4 + 8 * i, at = row < end ? row : end - 1;
            const T *start = x + static_cast<uint64_t>(at) * 2 * width + column;
            h_half.load(tile.h_half, i, start, at);
            gate_half.load(tile.gate_half, i, start + width, at);
            if (is_backward) tile.grad[i] = words<uint4>(grad + static_cast<uint64_t>(at) * width + column);
        }
    }

    // Computes and writes the sixteen rows from `first` on. In the backward pass, results[0] is the gradient of h, results[1] that of gate.
    __device__ __forceinline__ void write(const Tile &tile, uint32_t first) const {
        float h_products[4][4] = {}, gate_products[4][4] = {};
        h_half.multiply(h_products, tile.h_half);
        gate_half.multiply(gate_products, tile.gate_half);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float results[2][8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float h = h_half.sum(tile.h_half, h_products, i, k), gate = gate_half.sum(tile.gate_half, gate_products, i, k);
                if (is_backward) {
                    const float dy = widen(reinterpret_cast<const T *>(&tile.grad[i])[k]);
                    // The activation of the gate, and its derivative.
                    float value, slope;
                    F::template both<T>(gate, value, slope);
                    results[0][k] = dy * value;
                    results[1][k] = dy * h * slope;
                } else {
                    results[0][k] = h * F::template value<T>(gate);
                }
            }
            const uint32_t row = first + threadIdx.x % WARP / 4 + 8 * i;
            if (row >= end) continue;
            T *to = out + static_cast<uint64_t>(row) * (is_backward ? 2 * width : width) + column;
            store(to, results[0]);
            if (is_backward) store(to + width, results[1]);
        }
    }

    __device__ __forceinline__ void run(uint32_t first) const {
        Tile tile, next;
        load(tile, first);
#pragma unroll 1
        for (; first < end; first += 16) {
            if (first + 16 < end) load(next, first + 16);
            write(tile, first);
            tile = next;
        }
    }
};

template <typename T, int TILES, typename F, bool is_backward>
__device__ __forceinline__ void gated(const T *x, const T *grad, T *out, const LowRankHalves &halves, uint32_t rows, uint32_t width) {
    const uint32_t first_column = (blockIdx.x * WARPS + threadIdx.x / WARP) * COLUMNS;
    if (first_column >= width) return;
    const uint32_t column = first_column + 8 * (threadIdx.x % 4), begin = blockIdx.y * ROWS;
    const uint32_t end = rows - begin < ROWS ? rows : begin + ROWS;
    const Half<T, TILES> h_half(halves.list[0], first_column), gate_half(halves.list[1], first_column);
    Gated<T, TILES, F, is_backward>{x, grad, out, width, column, end, h_half, gate_half}.run(begin);
}

} // namespace

// For ranks of 32 and more, a thread takes too many registers for two blocks on a multiprocessor.
#define DEFINE_GATED(NAME, F, RANK, SUFFIX, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, RANK < 32 ? 2 : 1)                                       \
        NAME##_low_rank##RANK##_forward_##SUFFIX(const T *x, T *y, const __grid_constant__ LowRankHalves halves,       \
                                                 uint32_t rows, uint32_t width) {                                      \
        follow();                                                                                                      \
        gated<T, RANK / RANKS, F, false>(x, nullptr, y, halves, rows, width);                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, RANK < 32 ? 2 : 1)                                       \
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
