// Rotary position embedding: the angles for a row, the places of its pairs of features, and the rotation.
#pragma once

#include <type_traits>

#include "rows.cuh"

// cos and sin are (positions, half), where half is the number of pairs in a row. Row r has the position (r / repeats) % positions.
// `repeats` is the number of consecutive rows with the same position: the number of heads if the axis of heads comes after that of
// positions, otherwise 1.
template <typename A> struct Angles {
    const A *cos, *sin;
    uint32_t positions, repeats, half;

    // Sets c and s to the cosines and sines of the N pairs of row `row` from `pair` on.
    template <int N> __device__ __forceinline__ void load(uint64_t row, uint32_t pair, A (&c)[N], A (&s)[N]) const {
        const uint64_t position = divide(divide(row, repeats).quotient, positions).remainder;
        load_values(cos + position * half + pair, c);
        load_values(sin + position * half + pair, s);
    }
};

// N neighbouring pairs of a row, as the two packs of N elements that contain them. If INTERLEAVED, pair i consists of the row's
// elements 2i and 2i + 1, and the second pack follows the first in memory. Otherwise pair i consists of the elements i and i + half: the
// first pack has the first elements of the pairs, and the second pack has the second elements.
template <typename T, int N, bool INTERLEAVED> struct Pairs {
    using A = Acc<T>;
    A values[2][N];

    // The offset of pack `pack` (0 or 1) from the start of the row, for the N pairs from `pair` on.
    static __device__ __forceinline__ uint64_t start(int pack, uint32_t pair, uint32_t half) {
        return INTERLEAVED ? 2ull * pair + pack * N : static_cast<uint64_t>(pair) + pack * half;
    }

    __device__ __forceinline__ void load(const T *row, uint32_t pair, uint32_t half) {
        const auto first = load_pack<N>(row + start(0, pair, half)), second = load_pack<N>(row + start(1, pair, half));
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[0][i] = widen(first.values[i]);
            values[1][i] = widen(second.values[i]);
        }
    }

    __device__ __forceinline__ void store(T *row, uint32_t pair, uint32_t half) const {
        store_pack(row + start(0, pair, half), narrow_pack<T>(values[0]));
        store_pack(row + start(1, pair, half), narrow_pack<T>(values[1]));
    }

    // Rotates the pairs: (a, b) becomes (a cos - b sin, a sin + b cos). With `back`, it rotates by the negative angles, which turns
    // the gradient of the rotated pairs into that of the original pairs.
    __device__ __forceinline__ void rotate(const A (&cos)[N], const A (&sin)[N], bool back) {
        // If INTERLEAVED, element e of the 2 N neighbouring ones is values[e / N][e % N].
#pragma unroll
        for (int i = 0; i < N; i++) {
            A &first = INTERLEAVED ? values[2 * i / N][2 * i % N] : values[0][i];
            A &second = INTERLEAVED ? values[(2 * i + 1) / N][(2 * i + 1) % N] : values[1][i];
            const A a = first, b = second, sine = back ? -sin[i] : sin[i];
            first = a * cos[i] - b * sine;
            second = a * sine + b * cos[i];
        }
    }
};

// Calls f(N, INTERLEAVED) with the template arguments of `Pairs` as integral constants. N is WIDE<T>, the elements in 16 bytes, if
// `is_wide`, otherwise 1. `is_wide` requires that half is a multiple of WIDE<T>, and all addresses are multiples of 16.
template <typename T, typename F> __device__ __forceinline__ void choose_pairs(bool is_wide, bool interleaved, F f) {
    using Many = std::integral_constant<int, WIDE<T>>;
    using One = std::integral_constant<int, 1>;
    if (is_wide && interleaved) f(Many{}, std::true_type{});
    else if (is_wide) f(Many{}, std::false_type{});
    else if (interleaved) f(One{}, std::true_type{});
    else f(One{}, std::false_type{});
}
