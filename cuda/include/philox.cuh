// The library's random numbers: Philox4x32-10 (Salmon et al. 2011), the same stream as on the CPU.
#pragma once

#include <cstdint>

// Ten rounds on counter `block` under key `seed`.
__device__ __forceinline__ void philox(uint64_t seed, uint64_t block, uint32_t (&words)[4]) {
    uint32_t c0 = uint32_t(block), c1 = uint32_t(block >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(p1);
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// A number in [0, 1) with 24 bits, exact in f32.
__device__ __forceinline__ float unit(uint32_t bits) { return float(bits >> 8) * (1.0f / 16777216.0f); }
