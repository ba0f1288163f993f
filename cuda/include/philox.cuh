// The library's random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the same words
// as on the CPU.
#pragma once

#include <cstdint>

// One round with the key `key`. `c` is the counter in the first round, later the result of the round before. The last round's result is the
// block of random words.
__device__ __forceinline__ uint4 philox_round(uint4 c, uint2 key) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c.x, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c.z;
    return {static_cast<uint32_t>(p1 >> 32) ^ c.y ^ key.x, static_cast<uint32_t>(p1),
            static_cast<uint32_t>(p0 >> 32) ^ c.w ^ key.y, static_cast<uint32_t>(p0)};
}

// The key of round `round`, from 0.
__device__ __forceinline__ uint2 philox_key(uint64_t seed, int round) {
    return {static_cast<uint32_t>(seed) + round * 0x9E3779B9u, static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u};
}

// Draws blocks of four words: the seed is Philox's key, and the index of a block is its counter. In a CUDA graph, a draw must read
// seed and offset from device memory, because every replay has the same launch arguments.
struct Generator {
    static constexpr int ROUNDS = 10;
    uint64_t offset;
    uint2 keys[ROUNDS];

    // If `state` is null, takes `seed` and `offset` as they are. Otherwise the seed is state[0], and the offset is state[1] + `offset`.
    // Offsets are numbers of blocks.
    __device__ __forceinline__ Generator(const uint64_t *state, uint64_t seed, uint64_t offset)
        : offset(state != nullptr ? state[1] + offset : offset) {
        if (state != nullptr) seed = state[0];
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            keys[round] = philox_key(seed, round);
            // Without this statement, the compiler would compute the keys again for each block of words.
            asm volatile("" : "+r"(keys[round].x), "+r"(keys[round].y));
        }
    }

    // The four words of the block that is `block` blocks after the offset.
    __device__ __forceinline__ uint4 operator()(uint64_t block) const {
        const uint64_t counter = offset + block;
        uint4 c{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) c = philox_round(c, keys[round]);
        return c;
    }
};
