// Random numbers in f32. A block of the generator (philox.cuh) is four numbers: block b gives the elements 4b to 4b + 3 of the result y,
// the same numbers as on the CPU.
//
// `seed` and `offset`, the index of the first block, are the generator's position. In a CUDA graph `state` is not null; then the seed is
// state[0] and the first block is state[1] + offset.
// Launch of uniform and normal: one thread for each block of the generator (ceil(n / 4) threads), block of 256 threads, no shared memory.
#include "element.cuh"
#include "philox.cuh"

// The upper 24 of 32 random bits, divided by 2^24 = 16777216: a number in [0, 1). f32 represents every such number exactly.
__device__ __forceinline__ float unit_interval(uint32_t bits) { return float(bits >> 8) * (1.0f / 16777216.0f); }

// Writes four values to y, which has n elements, from element `first` on, without those beyond the end of y.
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
    for (int i = 0; i < 4; ++i) values[i] = float(low + (high - low) * double(unit_interval(words[i])));
    write(y, n, block * 4, values);
}

// `normal(y, n, state, seed, offset, mean, std)`: y = mean + std z, where z is standard normal by the method of Box and Muller. As on the
// CPU, the kernel computes z in f64 and rounds it to f32, then computes y in f64.
extern "C" __global__ void normal(float *y, uint64_t n, const uint64_t *state, uint64_t seed, uint64_t offset, double mean, double std) {
    follow();
    const uint64_t block = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block * 4 >= n) return;
    const uint4 bits = Generator(state, seed, offset)(block);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        // With u in [0, 1), 1 - u is in (0, 1], so the logarithm is finite.
        const double radius = sqrt(-2.0 * log(1.0 - double(unit_interval(words[i]))));
        double sine, cosine;
        sincospi(2.0 * double(unit_interval(words[i + 1])), &sine, &cosine);
        values[i] = float(mean + std * double(float(radius * cosine)));
        values[i + 1] = float(mean + std * double(float(radius * sine)));
    }
    write(y, n, block * 4, values);
}

// `set_generator(state, seed, offset)` sets the seed and the offset of the next replay of a CUDA graph: the kernels uniform and normal in
// the graph read them from `state`.
// Launch: one thread.
extern "C" __global__ void set_generator(uint64_t *state, uint64_t seed, uint64_t offset) {
    follow();
    state[0] = seed;
    state[1] = offset;
}
