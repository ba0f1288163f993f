// Rotary position embedding (Su et al. 2021, arXiv:2104.09864): the pair of features (a, b) becomes (a cos - b sin, a sin + b cos).
//
// x and y are (rows, width), and may be the same memory. cos and sin are (positions, width / 2) of f32 (f64 for f64). Row r has the
// position (r / repeats) % positions: `repeats` consecutive rows, such as the heads of a token, have the same position. If `interleaved`
// is 1, pair i of a row consists of the elements 2i and 2i + 1, otherwise of the elements i and i + width / 2.
// If `back` is 1, the kernel rotates by the negative angles. This is the backward pass: the caller passes the gradient of the forward
// pass's y as x, and gets the gradient of the forward pass's x in y.
// Launch: block 256, grid clamp(ceil(rows · width / (512 · WIDE)), 1, 2^31 - 1), no dynamic shared memory. WIDE is the number
// of elements in 16 bytes: each of the 256 threads rotates WIDE pairs. Any grid gives the same results.

#include "rope.cuh"

namespace {

// In each iteration, a thread rotates N pairs of a row (a pack).
template <typename T, int N, bool INTERLEAVED>
__device__ __forceinline__ void rotate(const T *x, Angles<Acc<T>> angles, T *y, uint64_t rows, bool back) {
    const uint32_t half = angles.half, packs = half / N;
    for (uint64_t index = flat_index(); index < rows * packs; index += flat_stride()) {
        const auto [row, pack] = divide(index, packs);
        const uint32_t pair = pack * N;
        Acc<T> cos[N], sin[N];
        angles.load(row, pair, cos, sin);
        Pairs<T, N, INTERLEAVED> pairs;
        pairs.load(x + row * 2 * half, pair, half);
        pairs.rotate(cos, sin, back);
        pairs.store(y + row * 2 * half, pair, half);
    }
}

} // namespace

#define DEFINE_ROPE(SUFFIX, T)                                                                                         \
    extern "C" __global__ void rope_##SUFFIX(const T *x, const Acc<T> *cos, const Acc<T> *sin, T *y, uint64_t rows,    \
                                             uint32_t positions, uint32_t repeats, uint32_t width,                     \
                                             uint32_t interleaved, uint32_t back) {                                    \
        follow();                                                                                                      \
        const Angles<Acc<T>> angles{cos, sin, positions, repeats, width / 2};                                          \
        const bool is_wide = angles.half % WIDE<T> == 0 && are_wide(x, y) && are_wide(cos, sin);                       \
        choose_pairs<T>(is_wide, interleaved != 0, [&](auto n, auto is_interleaved) {                                  \
            rotate<T, decltype(n)::value, decltype(is_interleaved)::value>(x, angles, y, rows, back != 0);             \
        });                                                                                                            \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_ROPE)
