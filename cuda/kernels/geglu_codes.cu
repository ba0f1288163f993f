// GEGLU (gated.cu) whose result, or whose input's gradient, is rounded to 8-bit codes with a scale for each row (codes.cu). Products of
// codes read these codes, so that no kernel writes the result or the gradient itself.
//
// The codes are those that gated.cu followed by codes.cu would make: results and gradients are first rounded to T. A row of x
// (rows, 2 width) has h, then the gate. `width` is a multiple of 16, and at most 8192 (f16, bf16) or 4096 (f32), which the largest team of
// threads can hold. Every row and `column_scales` begin at a 16-byte boundary.
#include "architecture.cuh"
#include "codes/round.cuh"
#include "functions.cuh"

namespace {

// Elements of a pack. Packs of eight elements would take so many registers that a multiprocessor could hold fewer teams.
constexpr int N = 4;
// Packs of each part of a row's result that a thread computes: as many elements as two packs of 16 bytes have.
template <typename T> constexpr int KEPT = 2 * WIDE<T> / N;
// The number of the largest teams that a multiprocessor shall hold at least. For compute capability 12.0 the compiler needs more
// registers.
constexpr int TEAMS = ARCHITECTURE >= 1200 ? 1 : 2;

// Rounds a row of PARTS * packs packs to codes. compute(pack, results) computes pack `pack` of each of the row's PARTS parts, and
// change(values, part, pack) changes the values of a pack before they are rounded.
template <typename T, int PARTS, typename Compute, typename Change>
__device__ __forceinline__ void round_row(uint32_t packs, bool is_int8, uint8_t *codes, float *row_scale, Compute compute, Change change) {
    Pack<T, N> kept[KEPT<T>][PARTS];
    RowScale found;
    // Calls f(values, part, pack) for each pack that `kept` has at place `i`.
    const auto for_each_part = [&](int i, auto f) {
        const uint32_t pack = threadIdx.x + i * blockDim.x;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            float values[N];
#pragma unroll
            for (int k = 0; k < N; k++) values[k] = widen(kept[i][part].values[k]);
            change(values, part, pack);
            f(values, part, pack);
        }
    };
#pragma unroll
    for (int i = 0; i < KEPT<T>; i++) {
        const uint32_t pack = threadIdx.x + i * blockDim.x;
        if (pack >= packs) continue;
        compute(pack, kept[i]);
        for_each_part(i, [&](const float(&values)[N], int, uint32_t) { found.see(values); });
    }
    const float scale = found.of_team(is_int8);
    if (threadIdx.x == 0) *row_scale = scale;
#pragma unroll
    for (int i = 0; i < KEPT<T>; i++) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) keep_narrow(kept[i][part]);
    }
    with_rounder(scale, is_int8, [&](auto rounder) {
#pragma unroll
        for (int i = 0; i < KEPT<T>; i++) {
            if (threadIdx.x + i * blockDim.x >= packs) continue;
            for_each_part(i, [&](const float(&values)[N], int part, uint32_t pack) {
                rounder.store(codes + (static_cast<uint64_t>(part) * packs + pack) * N, values);
            });
        }
    });
}

template <typename T>
__device__ __forceinline__ void forward(const T *x, uint32_t rows, uint32_t width, bool is_int8, uint8_t *codes, float *scales) {
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        const T *start = x + row * 2 * width;
        const auto compute = [&](uint32_t pack, Pack<T, N>(&result)[1]) {
            const auto h = load_pack<N>(start + pack * N), gate = load_pack<N>(start + width + pack * N);
            Acc<T> values[N];
#pragma unroll
            for (int i = 0; i < N; i++) values[i] = widen(h.values[i]) * GeluExact::value<T>(widen(gate.values[i]));
            result[0] = narrow_pack<T>(values);
        };
        round_row<T, 1>(width / N, is_int8, codes + row * width, scales + row, compute, [](float(&)[N], int, uint32_t) {});
    }
}

template <typename T>
__device__ __forceinline__ void backward(const T *x, const T *grad, const float *column_scales, bool is_one_scale, uint32_t rows, uint32_t width,
                                         bool is_int8, uint8_t *codes, float *scales) {
    const float one = __ldg(column_scales);
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        const T *start = x + row * 2 * width, *from = grad + row * width;
        const auto compute = [&](uint32_t pack, Pack<T, N>(&results)[2]) {
            const auto h = load_pack<N>(start + pack * N), gate = load_pack<N>(start + width + pack * N), g = load_pack<N>(from + pack * N);
            Acc<T> to_h[N], to_gate[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                Acc<T> value, slope;
                GeluExact::both<T>(widen(gate.values[i]), value, slope);
                to_h[i] = widen(g.values[i]) * value;
                to_gate[i] = widen(g.values[i]) * widen(h.values[i]) * slope;
            }
            results[0] = narrow_pack<T>(to_h);
            results[1] = narrow_pack<T>(to_gate);
        };
        const auto change = [&](float(&values)[N], int part, uint32_t pack) {
            float factors[N] = {one, one, one, one};
            if (!is_one_scale) load_values(column_scales + part * width + pack * N, factors);
#pragma unroll
            for (int k = 0; k < N; k++) values[k] *= factors[k];
        };
        round_row<T, 2>(width / N, is_int8, codes + row * 2 * width, scales + row, compute, change);
    }
}

} // namespace

// geglu_codes_forward: the codes (rows, width) and scales (rows) of the GEGLU of x.
// geglu_codes_backward: the codes (rows, 2 width) and scales (rows) of the gradient of x, whose columns are first multiplied by
// `column_scales` (2 width), or by its only element if `is_one_scale`. `grad` is the gradient of the GEGLU.
// Launch: as rows.cuh says for rows of `width` elements, with teams whose threads hold up to two packs of 16 bytes of a row.
#define DEFINE_GEGLU_CODES(SUFFIX, T)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(TEAM, TEAMS) geglu_codes_forward_##SUFFIX(const T *x, uint32_t rows, uint32_t width,      \
                                                                                       uint32_t is_int8, uint8_t *codes, float *scales) { \
        follow();                                                                                                                      \
        forward<T>(x, rows, width, is_int8 != 0, codes, scales);                                                                       \
    }                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(TEAM, TEAMS) geglu_codes_backward_##SUFFIX(                                               \
        const T *x, const T *grad, const float *column_scales, uint32_t is_one_scale, uint32_t rows, uint32_t width, uint32_t is_int8, \
        uint8_t *codes, float *scales) {                                                                                               \
        follow();                                                                                                                      \
        backward<T>(x, grad, column_scales, is_one_scale != 0, rows, width, is_int8 != 0, codes, scales);                              \
    }
FOR_EACH_FLOAT(DEFINE_GEGLU_CODES)
