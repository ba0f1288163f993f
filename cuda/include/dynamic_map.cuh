// The dynamic maps of 8-bit optimizer states, built at compile time, and the search for their nearest values.
//
// A block of 256 states is divided by its largest magnitude, and each quotient is rounded to the nearest of 256 values. From 1e-7 to
// 1 there are seven decades. Decade i holds 2^i magnitudes (2^(i+1) in the map without signs), evenly spaced; 0 and 1 complete the map.
// Codes number the values in ascending order. The map, the rounding of ties (to the even code) and the rules for signs are those of
// bitsandbytes 0.50.
// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861.
#pragma once

#include <cstdint>

// The number of states that share a scale.
constexpr int STATE_BLOCK = 256;

namespace dynamic_map {

constexpr int DECADES = 7;
// In both maps, the value nearest to a quotient below 2^-23 is zero.
constexpr int OCTAVES = 23;
// The table has an entry for each upper half (exponent and 7 bits of the fraction) of the bits of f32 numbers from 2^-23 to 1.
constexpr int ENTRIES = OCTAVES * 128 + 1;
constexpr uint32_t FIRST_ENTRY = (127 - OCTAVES) << 7;
// `ENTRIES`, rounded up to a multiple of 16 bytes.
constexpr int PADDED_ENTRIES = (ENTRIES + 3) / 4 * 4;

// `values` has the 256 values by code. `to_rank` serves to find the rank of a quotient among the magnitudes of the map: the upper half of
// the quotient's bits b selects an entry e, and the rank is the upper half of (b + e) mod 2^32. So the upper half of e is the rank of the
// smallest quotient that selects e, minus the upper half of b. Larger quotients that select e may have the next rank. Then the lower half
// of e is such that b + e carries into the upper half for exactly these quotients. No two ranks begin in one entry.
struct alignas(16) Table {
    float values[256];
    uint32_t to_rank[PADDED_ENTRIES];
};

// Point `i` of `0..=intervals` between 0.1 and 1, rounded as in torch's `linspace`: computed from the nearer end, exactly in double,
// and rounded once.
constexpr float spaced(int intervals, int i) {
    const float step = (1.0f - 0.1f) / static_cast<float>(intervals);
    if (i < (intervals + 1) / 2) return static_cast<float>(0.1f + static_cast<double>(step) * i);
    return static_cast<float>(1.0 - static_cast<double>(step) * (intervals - i));
}

constexpr float DECADE_SCALES[DECADES] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};

// The magnitudes upwards from 0, by rank: 129 with signs, 256 without.
template <bool SIGNED> struct Magnitudes {
    static constexpr int COUNT = SIGNED ? 129 : 256;
    float values[COUNT];

    constexpr Magnitudes() : values() {
        int rank = 1;
        for (int decade = 0; decade < DECADES; ++decade) {
            const int items = 1 << (SIGNED ? decade : decade + 1);
            for (int i = 0; i < items; ++i) {
                const float middle = static_cast<float>(spaced(items, i) + spaced(items, i + 1)) / 2;
                values[rank++] = DECADE_SCALES[decade] * middle;
            }
        }
        values[rank] = 1.0f;
    }
};

// The code of 0. A tie goes to the rank for which this code plus the rank is even.
template <bool SIGNED> constexpr int ZERO_CODE = SIGNED ? 127 : 0;

template <bool SIGNED> constexpr Table make_table() {
    constexpr Magnitudes<SIGNED> magnitudes;
    constexpr int LAST = Magnitudes<SIGNED>::COUNT - 1;
    Table table{};
    for (int rank = 0; rank <= LAST; ++rank) {
        table.values[ZERO_CODE<SIGNED> + rank] = magnitudes.values[rank];
        if (SIGNED && rank < LAST) table.values[ZERO_CODE<SIGNED> - rank] = rank == 0 ? 0.0f : -magnitudes.values[rank];
    }
    int rank = 0;
    double octave = 1.0 / (1 << OCTAVES);
    for (int entry = 0; entry < ENTRIES; ++entry) {
        if (entry > 0 && entry % 128 == 0) octave *= 2;
        // The quotients of this entry are `smallest + k * spacing` with k from 0 to 0xffff.
        const double smallest = octave * (1 + entry % 128 / 128.0), spacing = octave / (1 << 23);
        uint32_t sum = static_cast<uint32_t>(rank) << 16;
        if (rank < LAST) {
            const float middle = static_cast<float>(static_cast<double>(magnitudes.values[rank]) + magnitudes.values[rank + 1]) / 2;
            // The first quotient of the next rank is halfway between the two magnitudes, or just above that if a tie goes down.
            const bool goes_down = (ZERO_CODE<SIGNED> + rank) % 2 == 0;
            const double k = (middle - smallest) / spacing + (goes_down ? 1 : 0);
            if (k < 0x10000) {
                sum += 0x10000 - static_cast<uint32_t>(k);
                ++rank;
            }
        }
        table.to_rank[entry] = sum - ((FIRST_ENTRY + entry) << 16);
    }
    return table;
}

// The rank of `x`, which is from 2^-23 to 1.
__device__ __forceinline__ uint32_t rank_of(const uint32_t *to_rank, float x) {
    const uint32_t bits = __float_as_uint(x);
    return (to_rank[(bits >> 16) - FIRST_ENTRY] + bits) >> 16;
}

constexpr float SMALLEST = 1.0f / (1 << OCTAVES);

// The code of a quotient in the map with signs. A negative quotient never becomes zero; if it is close to zero, it becomes the negative
// value nearest to zero. NaN, which is 0 / 0 in a block of zeros, gets the code 255.
__device__ __forceinline__ uint32_t encode_signed(const uint32_t *to_rank, float x) {
    // fminf of NaN and 1 is 1.
    const int rank = rank_of(to_rank, fmaxf(fminf(fabsf(x), 1.0f), SMALLEST));
    const int below = ZERO_CODE<true> - min(max(rank, 1), ZERO_CODE<true>);
    return __float_as_int(x) < 0 ? below : ZERO_CODE<true> + rank;
}

// The code, in the map without signs, of a quotient that is at least 0. The code of NaN is 0.
__device__ __forceinline__ uint32_t encode_unsigned(const uint32_t *to_rank, float x) {
    return rank_of(to_rank, fminf(fmaxf(x, SMALLEST), 1.0f));
}

} // namespace dynamic_map
