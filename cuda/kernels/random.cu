// Random numbers in f32. Each block of the generator (philox.cuh) yields four numbers, and element i has the same number as on the CPU.
//
// `seed` and `offset` (of the first block) are the generator's position. If `state` is not null, the seed is state[0] and the offset is
// state[1] + offset.
// Launch of uniform and normal: one thread for each generator block (ceil(n / 4) threads), block 256, no shared memory.
#include "element.cuh"
#include "philox.cuh"

// The upper 24 of 32 random bits as a number in [0, 1), which f32 represents exactly.
__device__ __forceinline__ float unit(uint32_t bits) { return float(bits >> 8) * (1.0f / 16777216.0f); }

__device__ __forceinline__ void write(float *y, uint64_t n, uint64_t first, const float (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + i < n) y[first + i] = values[i];
    }
}

// `uniform(y, n, state, seed, offset, low, high)`: y = low + (high - low) u, where u is uniform in [0, 1).
extern "C" __global__ void uniform(float *y, uint64_t n, const uint64_t *state, uint64_t seed, uint64_t offset, double low, double high) {
    follow();
    const uint64_t block = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block * 4 >= n) return;
    const uint4 bits = Generator(state, seed, offset)(block);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = float(low + (high - low) * double(unit(words[i])));
    write(y, n, block * 4, values);
}

// `normal(y, n, state, seed, offset, mean, std)`: y = mean + std z, where z is standard normal by the method of Box and
// Muller, computed in f64 as on the CPU.
extern "C" __global__ void normal(float *y, uint64_t n, const uint64_t *state, uint64_t seed, uint64_t offset, double mean, double std) {
    follow();
    const uint64_t block = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block * 4 >= n) return;
    const uint4 bits = Generator(state, seed, offset)(block);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        // 1 - u is in (0, 1], so that the logarithm is finite.
        const double radius = sqrt(-2.0 * log(1.0 - double(unit(words[i]))));
        double sine, cosine;
        sincospi(2.0 * double(unit(words[i + 1])), &sine, &cosine);
        values[i] = float(mean + std * double(float(radius * cosine)));
        values[i + 1] = float(mean + std * double(float(radius * sine)));
    }
    write(y, n, block * 4, values);
}

// `set_generator(state, seed, offset)` sets the seed and the offset from which the draws of a CUDA graph's next replay start. Launch: one
// thread.
extern "C" __global__ void set_generator(uint64_t *state, uint64_t seed, uint64_t offset) {
    follow();
    state[0] = seed;
    state[1] = offset;
}
