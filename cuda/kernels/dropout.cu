// Dropout (Srivastava et al. 2014) with probability p: y = factor * x, where the factor is 0 if the element's random word is below
// `threshold`, else `scale`. The gradient of x is the same function of the gradient of y.
//
// The mask is the same as on the CPU. Elements are taken in groups of 64. For each group the generator gives 16 blocks of 4 words; word
// w of block i decides element 16 w + i of the group. `threshold` is floor(p 2^32), at most 2^32 - 1; `scale` is 1 / (1 - p), or 0 for
// p = 1. If `state` is null, `seed` and `offset` are the generator's seed and offset; otherwise these are state[0] and
// state[1] + `offset`. x and y have `len` elements and may be the same memory.
// Launch: block 256, grid clamp(ceil(len / (1024 WIDE)), 1, 2^31 - 1), where WIDE elements take 16 bytes, and each of the 256 threads has
// 4 WIDE elements; no dynamic shared memory. Any grid gives the same results.

#include "philox.cuh"
#include "rows.cuh"

namespace {

constexpr int WORDS = 4, BLOCKS = 16, GROUP = WORDS * BLOCKS;

template <typename T>
__device__ __forceinline__ void dropout(const T *x, T *y, uint64_t len, Generator generator, uint32_t threshold, Acc<T> scale) {
    // A thread has N neighbouring elements in each of the four quarters of a group, which need N blocks of random words. So a group has
    // GROUP_THREADS threads.
    constexpr int N = WIDE<T>, GROUP_THREADS = BLOCKS / N;
    const bool aligned = are_wide(x, y);
    const uint64_t threads = (len + GROUP - 1) / GROUP * GROUP_THREADS;
    for (uint64_t index = flat_index(); index < threads; index += flat_stride()) {
        const uint64_t group = index / GROUP_THREADS, block = group * BLOCKS + index % GROUP_THREADS * N;
        const uint64_t start = group * GROUP + index % GROUP_THREADS * N;
        const bool wide = aligned && start + (WORDS - 1) * BLOCKS + N <= len;
        // The lowest 4 N bits are one bit for each element i of each quarter w, which is 1 if the element stays. From the highest of
        // them down, they are the bits of the four quarters for i = 0, then for i = 1, and so on. The loop is unrolled only by two,
        // because the words of more blocks would take many registers.
        uint32_t stays = 0;
#pragma unroll 2
        for (int i = 0; i < N; i++) {
            const uint4 words = generator(block + i);
            const uint32_t word[WORDS] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int w = 0; w < WORDS; w++) stays += stays + (word[w] >= threshold);
        }
        auto factor = [&](int w, int i) { return stays >> (WORDS * (N - i) - 1 - w) & 1 ? scale : Acc<T>(0); };
        // With `wide`, all of the thread's elements exist, and its four packs begin at 16-byte boundaries.
        if (wide) {
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                Acc<T> values[N];
                load_values(x + start + w * BLOCKS, values);
#pragma unroll
                for (int i = 0; i < N; i++) values[i] *= factor(w, i);
                store_pack(y + start + w * BLOCKS, narrow_pack<T>(values));
            }
        } else {
            for (int k = 0; k < WORDS * N; k++) {
                const uint64_t at = start + k / N * BLOCKS + k % N;
                if (at < len) y[at] = narrow<T>(widen(x[at]) * factor(k / N, k % N));
            }
        }
    }
}

} // namespace

#define DEFINE_DROPOUT(SUFFIX, T)                                                                                      \
    extern "C" __global__ void                                                                                         \
        dropout_##SUFFIX(const T *x, T *y, const uint64_t *state, uint64_t seed, uint64_t offset, uint64_t len,        \
                         uint32_t threshold, double scale) {                                                           \
        follow();                                                                                                      \
        dropout<T>(x, y, len, Generator(state, seed, offset), threshold, static_cast<Acc<T>>(scale));                  \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_DROPOUT)
