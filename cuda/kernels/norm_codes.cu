// Layer norm of the sum of two tensors (norm.cu), rounded to 8-bit codes with a scale for each row (codes.cu). Matrix products read these
// codes, so no kernel needs to write the normalized values themselves.
//
// The codes are those that norm.cu followed by codes.cu would make, because the kernel first rounds the normalized values to T, the dtype
// of the two tensors. A team of blockDim.x threads, at most TEAM, works on a row (rows.cuh). A thread holds up to NORM_HELD packs of the
// row in registers; a pack is WIDE<T> neighbouring elements. `len` must be a multiple of 16, and at most NORM_HELD · TEAM · WIDE: then the
// threads of the largest team hold a whole row in registers. All tensors must begin at a 16-byte boundary.
#include "codes/round.cuh"
#include "norm_rows.cuh"

namespace {

template <typename T>
__device__ __forceinline__ void forward(const T *x, const T *residual, T *sum, Affine affine, Acc<T> *mean, Acc<T> *rstd, uint64_t rows,
                                        uint32_t len, Acc<T> eps, bool is_int8, uint8_t *codes, float *scales, Acc<T> *shared) {
    constexpr int N = WIDE<T>;
    // Called for each row, with its `values`, which are the sum. normalized(i, at, result) computes the results of the thread's i-th pack,
    // whose first element has the index `at` in the row.
    const auto write = [&](uint64_t row, NormRow<T, N> &values, auto normalized) {
        // Changes nothing, but lets the compiler drop the loops over packs that are not in registers. With these loops, it would spill
        // registers.
        values.packs = min(values.packs, NORM_HELD * blockDim.x);
        RowScale row_scale;
        // In the registers, the normalized values replace the row's values.
#pragma unroll
        for (int i = 0; i < NORM_HELD; i++) {
            const uint32_t pack = threadIdx.x + i * blockDim.x;
            if (pack >= values.packs) continue;
            float result[N];
            normalized(i, static_cast<uint64_t>(pack) * N, result);
            // Rounds the results to T.
            values.held[i] = narrow_pack<T>(result);
            widen_pack(values.held[i], result);
            row_scale.see(result);
        }
        const float scale = row_scale.of_team(is_int8);
        // Keeps the compiler from holding the values widened to f32, which takes more registers, until they are rounded to codes.
        values.keep_narrow();
        with_rounder(scale, is_int8, [&](auto rounder) {
#pragma unroll
            for (int i = 0; i < NORM_HELD; i++) {
                const uint32_t pack = threadIdx.x + i * blockDim.x;
                if (pack >= values.packs) continue;
                float result[N];
                widen_pack(values.held[i], result);
                rounder.store(codes + row * len + static_cast<uint64_t>(pack) * N, result);
            }
        });
        if (threadIdx.x == 0) scales[row] = scale;
    };
    constexpr uint32_t SHARING = 1; // unused: only modulated layer norm reads it
    normalize<T, N, Kind::LAYER>(x, residual, sum, affine, mean, rstd, rows, len, SHARING, eps, shared, write);
}

} // namespace

// x and residual are (rows, len); weight and bias are (len), f32 if `affine_f32` is 1, otherwise T. add_layer_norm_codes writes
// sum = x + residual, rounded to T, the codes (rows, len) and scales (rows) of the layer norm of `sum`, and its mean and
// rstd = 1/√(var + eps) for each row. The codes are int8 if `is_int8` is 1, otherwise e4m3. Launch: as for the forward pass of norm.cu.
#define DEFINE_NORM_CODES(SUFFIX, T)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(TEAM, 2) add_layer_norm_codes_##SUFFIX(                                               \
        const T *x, const T *residual, T *sum, const void *weight, const void *bias, float *mean, float *rstd, uint64_t rows,          \
        uint32_t len, double eps, uint32_t affine_f32, uint32_t is_int8, uint8_t *codes, float *scales) {                              \
        follow();                                                                                                                      \
        __shared__ float shared[WARP];                                                                                                 \
        const Affine affine{weight, bias, affine_f32 != 0};                                                                            \
        forward<T>(x, residual, sum, affine, mean, rstd, rows, len, static_cast<float>(eps), is_int8 != 0, codes, scales, shared);     \
    }
FOR_EACH_FLOAT(DEFINE_NORM_CODES)
