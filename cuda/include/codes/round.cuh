// Rounding of the rows of a matrix to codes, with a scale for each row.
#pragma once

#include <cuda_fp8.h>

#include "../rows.cuh"
#include "parts.cuh"

constexpr float LARGEST_INT8 = 127.0f, LARGEST_E4M3 = 448.0f;

// Multiplies `N` values of one row of a gradient, from column `column` on, by the scales of their columns. The scale of column j is the
// scale of row j of the weight: the matrix of codes, by which the gradient is multiplied afterwards. It consists of the `count` parts in
// `parts`. All `N` columns belong to one part. `N` is a multiple of 4.
template <int N>
__device__ __forceinline__ void scale_columns(float (&values)[N], uint32_t column, const CodeParts &parts, uint32_t count) {
    uint32_t index = 0;
    while (index + 1 < count && column >= parts.list[index + 1].start) index++;
    const CodePart &part = parts.list[index];
    const float *from = static_cast<const float *>(part.scales);
    if (part.scale_count == 1) {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] *= __ldg(from);
        return;
    }
    from += column - part.start;
    // Whether the address allows reads of 16 bytes.
    if (is_wide(from)) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = __ldg(reinterpret_cast<const float4 *>(from + i));
            values[i] *= four.x, values[i + 1] *= four.y, values[i + 2] *= four.z, values[i + 3] *= four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] *= __ldg(from + i);
    }
}

// Converts the values of a pack to f32. For the second bf16 number of a 32-bit word, nvcc 13.0 compiles `widen` to two instructions, and
// the mask below to one.
template <typename T, int N> __device__ __forceinline__ void widen_pack(const Pack<T, N> &pack, float (&values)[N]) {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
        uint32_t words[N / 2];
        memcpy(words, &pack, sizeof(words));
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            values[i] = __uint_as_float(words[i / 2] << 16);
            values[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = widen(pack.values[i]);
    }
}

// Rounds values divided by a scale to codes. The division is correctly rounded for quotients of at most about 448; quotients so small
// that their code is zero may be inexact. The code of zero may have either sign.
//
// If the scale IS_EXTREME (below 2^-60 or above 2^60, see `with_rounder`), values and scale are multiplied by a power of two, so that no
// step of a division underflows or overflows.
template <bool IS_INT8, bool IS_EXTREME> struct Rounder {
    float factor, scale, inverse;

    __device__ __forceinline__ explicit Rounder(float row_scale) : factor(row_scale < 1.0f ? 0x1p64f : 0x1p-64f) {
        scale = IS_EXTREME ? row_scale * factor : row_scale;
        inverse = __fdiv_rn(1.0f, scale);
    }

    // `inverse` is correctly rounded. So the first correction of the quotient gives one of the two numbers next to the exact quotient,
    // and the second correction gives the nearer one (Markstein 1990, doi:10.1147/rd.341.0111, theorem 8.1).
    __device__ __forceinline__ float divide(float value) const {
        const float x = IS_EXTREME ? value * factor : value;
        float quotient = x * inverse;
        quotient = fmaf(fmaf(-quotient, scale, x), inverse, quotient);
        return fmaf(fmaf(-quotient, scale, x), inverse, quotient);
    }

    // The codes of four values, the first in the lowest byte.
    __device__ __forceinline__ uint32_t four(const float *values) const {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = divide(values[i]);
        if constexpr (IS_INT8) {
            uint32_t codes[4];
            // 12582912 is 1.5 * 2^23. A sum of this size has no bits for a fraction, and its lowest byte is the code. No quotient by
            // the scale of its row rounds to more than 127.
#pragma unroll
            for (int i = 0; i < 4; i++) codes[i] = __float_as_uint(x[i] + 12582912.0f);
            // Selector 0x0040 joins the lowest bytes of two words, and 0x5410 the lower halves of two words.
            return __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
        } else {
            const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x[0], x[1]), __NV_SATFINITE, __NV_E4M3);
            const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x[2], x[3]), __NV_SATFINITE, __NV_E4M3);
            return high << 16 | low;
        }
    }

    // Writes the codes of `N` values.
    template <int N> __device__ __forceinline__ void store(uint8_t *to, const float (&values)[N]) const {
        Pack<uint32_t, N / 4> words;
#pragma unroll
        for (int k = 0; k < N; k += 4) words.values[k / 4] = four(values + k);
        store_pack(reinterpret_cast<uint32_t *>(to), words);
    }
};

// Calls f with the Rounder for a scale: format and kind of scale are decided once for a row, not for each value.
template <typename F> __device__ __forceinline__ void with_rounder(float scale, bool is_int8, F f) {
    if (scale < 0x1p-60f || scale > 0x1p60f) {
        if (is_int8) f(Rounder<true, true>(scale));
        else f(Rounder<false, true>(scale));
    } else {
        if (is_int8) f(Rounder<true, false>(scale));
        else f(Rounder<false, false>(scale));
    }
}

// The scale of a row: its largest magnitude / the largest code. It is NaN for a row with a non-finite number, and 1 for a row of zeros.
struct RowScale {
    // The bits of the largest magnitude that this thread has seen.
    uint32_t bits = 0;

    template <int N> __device__ __forceinline__ void see(const float (&values)[N]) {
        // Magnitudes are ordered like their bits, and the bits of NaN are above those of infinity.
#pragma unroll
        for (int k = 0; k < N; k++) bits = max(bits, __float_as_uint(values[k]) & 0x7fffffff);
    }

    // The scale of the row whose values the threads of a team have seen. A team is the threads that work on the same row.
    __device__ __forceinline__ float of_team(bool is_int8) const {
        constexpr uint32_t INFINITE = 0x7f800000;
        __shared__ uint32_t shared[WARP];
        const uint32_t largest = team_max(bits, shared);
        if (largest >= INFINITE) return __uint_as_float(0x7fc00000); // NaN
        return largest > 0 ? __fdiv_rn(__uint_as_float(largest), is_int8 ? LARGEST_INT8 : LARGEST_E4M3) : 1.0f;
    }
};
