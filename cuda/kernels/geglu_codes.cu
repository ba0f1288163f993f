// GEGLU (gated.cu) that rounds its result to 8-bit codes with a scale for each row (codes.cu). The backward pass does the same with the
// gradient of the input. The result and the gradient are read only by matrix products that multiply codes, so no kernel has to write them
// in T, the dtype of the input x.
//
// The codes are those that gated.cu followed by codes.cu would make: results and gradients are first rounded to T. A row of x
// (rows, 2 width) has h, then the gate. `width` is a multiple of 16. A team of blockDim.x threads works on a row. `width` is at most what
// the largest team can hold in registers: 8192 (f16, bf16) or 4096 (f32). Every row and `column_scales` begin at a 16-byte boundary. Codes
// are int8 if `is_int8` is 1, else e4m3.
#include "architecture.cuh"
#include "codes/round.cuh"
#include "functions.cuh"

namespace {

// Elements of a pack. Packs of eight elements would take so many registers that a multiprocessor could hold fewer teams.
constexpr int N = 4;
// A row to round has one part in the forward pass (the result) and two in the backward pass (the gradients of h and of the gate).
// HELD_PACKS is how many packs of each part a thread can keep in registers: as many elements as 32 bytes of T hold.
template <typename T> constexpr int HELD_PACKS = 2 * WIDE<T> / N;
// How many teams of the largest size a multiprocessor must have room for. From compute capability 12.0 on, only one: there the compiler
// needs more registers.
constexpr int TEAMS = ARCHITECTURE >= 1200 ? 1 : 2;

// Rounds a row to codes and writes its scale. The row has PARTS parts of `packs` packs. compute(pack, results) sets results[part] to the
// numbers of pack `pack` of each part.
template <typename T, int PARTS, typename Compute>
__device__ __forceinline__ void round_row(uint32_t packs, bool is_int8, uint8_t *codes, float *row_scale, Compute compute) {
    float held[HELD_PACKS<T>][PARTS][N];
    RowScale largest; // finds the scale from the row's largest magnitude
#pragma unroll
    for (int i = 0; i < HELD_PACKS<T>; i++) {
        const uint32_t pack = threadIdx.x + i * blockDim.x;
        if (pack >= packs) continue;
        compute(pack, held[i]);
#pragma unroll
        for (int part = 0; part < PARTS; part++) largest.see(held[i][part]);
    }
    const float scale = largest.of_team(is_int8);
    if (threadIdx.x == 0) *row_scale = scale;
    with_rounder(scale, is_int8, [&](auto rounder) {
#pragma unroll
        for (int i = 0; i < HELD_PACKS<T>; i++) {
            const uint32_t pack = threadIdx.x + i * blockDim.x;
            if (pack >= packs) continue;
#pragma unroll
            for (int part = 0; part < PARTS; part++) rounder.store(codes + (static_cast<uint64_t>(part) * packs + pack) * N, held[i][part]);
        }
    });
}

// Rounds values to T.
template <typename T> __device__ __forceinline__ void round_to(float (&values)[N]) { widen_pack(narrow_pack<T>(values), values); }

template <typename T>
__device__ __forceinline__ void forward(const T *x, uint32_t rows, uint32_t width, bool is_int8, uint8_t *codes, float *scales) {
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        const T *start = x + row * 2 * width;
        const auto compute = [&](uint32_t pack, float(&result)[1][N]) {
            float h[N], gate[N];
            widen_pack(load_pack<N>(start + pack * N), h);
            widen_pack(load_pack<N>(start + width + pack * N), gate);
#pragma unroll
            for (int i = 0; i < N; i++) result[0][i] = h[i] * GeluExact::value<T>(gate[i]);
            round_to<T>(result[0]);
        };
        round_row<T, 1>(width / N, is_int8, codes + row * width, scales + row, compute);
    }
}

// The next product multiplies the codes of this gradient by a weight's codes, and sums over the weight's rows, which have a scale each.
// So column j of the gradient is first multiplied by the scale of the weight's row j, `column_scales[j]`. If `is_one_scale`, the first of
// `column_scales` is for all columns.
template <typename T>
__device__ __forceinline__ void backward(const T *x, const T *grad, const float *column_scales, bool is_one_scale, uint32_t rows,
                                         uint32_t width, bool is_int8, uint8_t *codes, float *scales) {
    const float first_scale = __ldg(column_scales);
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        const T *start = x + row * 2 * width, *from = grad + row * width;
        const auto compute = [&](uint32_t pack, float(&results)[2][N]) {
            float h[N], gate[N], g[N];
            widen_pack(load_pack<N>(start + pack * N), h);
            widen_pack(load_pack<N>(start + width + pack * N), gate);
            widen_pack(load_pack<N>(from + pack * N), g);
#pragma unroll
            for (int i = 0; i < N; i++) {
                float value, slope; // GELU and its derivative, at the gate
                GeluExact::both<T>(gate[i], value, slope);
                results[0][i] = g[i] * value;
                results[1][i] = g[i] * h[i] * slope;
            }
#pragma unroll
            for (int part = 0; part < 2; part++) {
                float factors[N] = {first_scale, first_scale, first_scale, first_scale};
                if (!is_one_scale) load_values(column_scales + part * width + pack * N, factors);
                round_to<T>(results[part]);
#pragma unroll
                for (int i = 0; i < N; i++) results[part][i] *= factors[i];
            }
        };
        round_row<T, 2>(width / N, is_int8, codes + row * 2 * width, scales + row, compute);
    }
}

} // namespace

// geglu_codes_forward: the codes (rows, width) and scales (rows) of the GEGLU of x.
// geglu_codes_backward: the codes (rows, 2 width) and scales (rows) of the gradient of x, whose columns are first multiplied by
// `column_scales` (2 width), or by its only element if `is_one_scale`. `grad` (rows, width) is the gradient of the GEGLU's result.
// Launch: block (threads, threads == 32 ? 4 : 1), where threads = clamp(32 ceil(width / (64 WIDE)), 32, TEAM) is the size of a team, with
// WIDE = 8 (f16, bf16) or 4 (f32) and TEAM = 512; grid min(ceil(rows / blockDim.y), 2^31 - 1), no dynamic shared memory. This is the launch
// that rows.cuh gives for HELD = 2 packs of WIDE elements, which are HELD_PACKS packs of N.
#define DEFINE_GEGLU_CODES(SUFFIX, T)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(TEAM, TEAMS) geglu_codes_forward_##SUFFIX(const T *x, uint32_t rows, uint32_t width,  \
                                                                                       uint32_t is_int8, uint8_t *codes, float *scales) { \
        follow();                                                                                                                      \
        forward<T>(x, rows, width, is_int8 != 0, codes, scales);                                                                       \
    }                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(TEAM, TEAMS) geglu_codes_backward_##SUFFIX(                                           \
        const T *x, const T *grad, const float *column_scales, uint32_t is_one_scale, uint32_t rows, uint32_t width, uint32_t is_int8, \
        uint8_t *codes, float *scales) {                                                                                               \
        follow();                                                                                                                      \
        backward<T>(x, grad, column_scales, is_one_scale != 0, rows, width, is_int8 != 0, codes, scales);                              \
    }
FOR_EACH_FLOAT(DEFINE_GEGLU_CODES)
