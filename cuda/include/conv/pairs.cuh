// f32 numbers as sums of two bf16 numbers, for products on tensor cores.
#pragma once

#include "../element.cuh"

// x = hi + lo with a relative error of at most 2^-17, if hi is finite and x at least 2^-117 in magnitude. If hi is infinite, lo is
// 0, because x - hi would be NaN or infinite.
struct Pair {
    __nv_bfloat16 hi, lo;

    __device__ __forceinline__ explicit Pair(float x) : hi(__float2bfloat16_rn(x)) {
        lo = __float2bfloat16_rn(isinf(widen(hi)) ? 0.f : x - widen(hi));
    }
};

// Writes each row of `channels` numbers as a row of three parts, each of `padded` numbers. Part LOW (0 to 2) has the lo of the
// row's numbers, the other two parts have their hi. So the scalar product of a row with LOW = 2 and a row with LOW = 1 is the sum of
// hi * hi, hi * lo and lo * hi, which leaves out only lo * lo. In each part, the numbers after the first `channels` are 0. `padded` must
// be `channels`, rounded up to a multiple of 8. `to` is a multiple of 16 bytes.
template <int LOW> __device__ __forceinline__ void
write_pairs(__nv_bfloat16 *to, const float *from, uint64_t rows, uint32_t channels, uint32_t padded) {
    constexpr int GROUP = 8;
    const uint32_t row_groups = padded / GROUP;
    // Whether two 16-byte loads read a group. Otherwise its numbers are loaded one by one.
    const bool wide = channels % GROUP == 0 && is_wide(from);
    for (uint64_t index = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < rows * row_groups;
         index += uint64_t(gridDim.x) * blockDim.x) {
        const uint64_t row = index / row_groups;
        const uint32_t first = uint32_t(index - row * row_groups) * GROUP;
        const float *x = from + row * channels + first;
        Pack<float, GROUP / 2> values[2] = {};
        if (wide) {
            values[0] = reinterpret_cast<const Pack<float, GROUP / 2> *>(x)[0];
            values[1] = reinterpret_cast<const Pack<float, GROUP / 2> *>(x)[1];
        } else {
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
                if (first + i < channels) values[i / 4].values[i % 4] = x[i];
        }
        Pack<__nv_bfloat16, GROUP> hi, lo;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const Pair pair(values[i / 4].values[i % 4]);
            hi.values[i] = pair.hi;
            lo.values[i] = pair.lo;
        }
        __nv_bfloat16 *parts = to + row * 3 * padded + first;
#pragma unroll
        for (int part = 0; part < 3; ++part)
            *reinterpret_cast<Pack<__nv_bfloat16, GROUP> *>(parts + part * padded) = part == LOW ? lo : hi;
    }
}
