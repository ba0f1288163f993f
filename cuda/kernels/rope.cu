// Rotary position embedding (Su et al. 2021, arXiv:2104.09864): the pair (a, b) becomes (a cos - b sin, a sin + b cos).
//
// x and y are (rows, width), and may be the same; cos and sin are (positions, width / 2) of f32 (f64 for f64). Row r has the
// position (r / repeats) % positions: repeats is 1, or the number of heads where they lie inside of the positions. Pair i is
// elements 2i and 2i + 1 if `interleaved`, else i and i + width / 2. `back` turns by the negative angle: the gradient.
// Launch: block 256, grid clamp(ceil(rows width / (512 WIDE)), 1, 2^31 - 1), no dynamic shared memory. Any grid is right.

#include "rows.cuh"

namespace {

struct Turn {
    uint64_t rows;
    uint32_t positions, repeats, width;
    bool back;
};

// A thread turns N pairs of a row.
template <typename T, int N, bool INTERLEAVED>
__device__ __forceinline__ void turn(const T *x, const Acc<T> *cos, const Acc<T> *sin, T *y, Turn turn) {
    using A = Acc<T>;
    const uint32_t half = turn.width / 2, packs = half / N;
    for (uint64_t index = flat_index(); index < turn.rows * packs; index += flat_stride()) {
        const auto [row, pack] = divide(index, packs);
        const uint64_t angle = divide(divide(row, turn.repeats).quotient, turn.positions).remainder * static_cast<uint64_t>(half);
        const uint64_t pair = pack * static_cast<uint64_t>(N);
        A c[N], s[N];
        load_values(cos + angle + pair, c);
        load_values(sin + angle + pair, s);
        // Of interleaved pairs the first 2N values are read as two packs, of halves N from each.
        const uint64_t start = row * turn.width + pair * (INTERLEAVED ? 2 : 1), second = start + (INTERLEAVED ? N : half);
        const auto first_pack = load_pack<N>(x + start), second_pack = load_pack<N>(x + second);
        A in[2 * N], out[2 * N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            in[i] = widen(first_pack.values[i]);
            in[N + i] = widen(second_pack.values[i]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : N + i;
            const A sine = turn.back ? -s[i] : s[i];
            out[a] = in[a] * c[i] - in[b] * sine;
            out[b] = in[a] * sine + in[b] * c[i];
        }
        store_pack(y + start, narrow_pack<T>(reinterpret_cast<const A(&)[N]>(out[0])));
        store_pack(y + second, narrow_pack<T>(reinterpret_cast<const A(&)[N]>(out[N])));
    }
}

} // namespace

#define DEFINE_ROPE(SUFFIX, T)                                                                                         \
    extern "C" __global__ void rope_##SUFFIX(const T *x, const Acc<T> *cos, const Acc<T> *sin, T *y, uint64_t rows,    \
                                             uint32_t positions, uint32_t repeats, uint32_t width,                     \
                                             uint32_t interleaved, uint32_t back) {                                    \
        const Turn how{rows, positions, repeats, width, back != 0};                                                    \
        const bool wide = width / 2 % WIDE<T> == 0 && are_wide(x, y) && are_wide(cos, sin);                            \
        if (interleaved != 0) {                                                                                        \
            if (wide) turn<T, WIDE<T>, true>(x, cos, sin, y, how);                                                     \
            else turn<T, 1, true>(x, cos, sin, y, how);                                                                \
        } else {                                                                                                       \
            if (wide) turn<T, WIDE<T>, false>(x, cos, sin, y, how);                                                    \
            else turn<T, 1, false>(x, cos, sin, y, how);                                                               \
        }                                                                                                              \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_ROPE)
