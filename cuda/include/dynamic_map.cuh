// The dynamic maps of 8-bit optimizer states, built at compile time, and the search for the value nearest to a state.
//
// A block of 256 states is divided by its largest magnitude, and each quotient is rounded to the nearest of the 256 values of a map.
// There are seven decades from 1e-7 to 1. Decade i holds 2^i evenly spaced magnitudes in the map with signs, 2^(i+1) in the map without
// signs; 0 and 1 complete the map. The map with signs also has the negative of each magnitude but 1. Codes number the values in ascending
// order. The maps, the rounding of ties (to the even code) and the rules for signs are those of bitsandbytes 0.50.
// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861.
#pragma once

#include <cstdint>

// The number of states that share a scale.
constexpr int STATE_BLOCK = 256;

namespace dynamic_map {

constexpr int DECADES = 7;
// In both maps, the value nearest to a quotient below 2^-23 is zero.
constexpr int OCTAVES = 23;
// The bits of an f32 number have an upper half: sign, exponent and 7 bits of the fraction. The table has an entry for each upper half that
// occurs in the numbers from 2^-23 to 1. FIRST_ENTRY is the upper half of 2^-23.
constexpr int ENTRIES = OCTAVES * 128 + 1;
constexpr uint32_t FIRST_ENTRY = (127 - OCTAVES) << 7;
// `ENTRIES`, rounded up so that the table's size is a multiple of 16 bytes.
constexpr int PADDED_ENTRIES = (ENTRIES + 3) / 4 * 4;

// `values` has the 256 values by code. `to_rank` serves to find the rank of the magnitude nearest to a quotient, among the magnitudes of
// the map. Let b be the bits of the quotient. The upper half of b selects an entry e, and the rank is the upper half of (b + e) mod 2^32.
// So the upper half of e is the rank of the smallest quotient that selects e, minus the upper half of b. Larger quotients that select e
// may have the next rank. The lower half of e is then such that b + e carries into the upper half for exactly these quotients; otherwise it
// is 0. No entry needs three ranks.
struct alignas(16) Table {
    float values[256];
    uint32_t to_rank[PADDED_ENTRIES];
};

// Returns point number `i`, from 0 to `intervals`, of evenly spaced points from 0.1 to 1. Rounds as torch's `linspace` does: the step is
// rounded to f32; the point is computed from the nearer end, exactly in double, and then rounded.
constexpr float spaced(int intervals, int i) {
    const float step = (1.0f - 0.1f) / static_cast<float>(intervals);
    if (i < (intervals + 1) / 2) return static_cast<float>(0.1f + static_cast<double>(step) * i);
    return static_cast<float>(1.0 - static_cast<double>(step) * (intervals - i));
}

// The upper ends of the decades.
constexpr float DECADE_SCALES[DECADES] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};

// The magnitudes in ascending order: `values[rank]`, from 0 to 1. There are 129 in the map with signs, and 256 in the map without.
template <bool SIGNED> struct Magnitudes {
    static constexpr int COUNT = SIGNED ? 129 : 256;
    float values[COUNT];

    constexpr Magnitudes() : values() {
        int rank = 1;
        for (int decade = 0; decade < DECADES; ++decade) {
            // A decade is divided into `items` intervals, whose middles are the magnitudes.
            const int items = 1 << (SIGNED ? decade : decade + 1);
            for (int i = 0; i < items; ++i) {
                const float middle = static_cast<float>(spaced(items, i) + spaced(items, i + 1)) / 2;
                values[rank++] = DECADE_SCALES[decade] * middle;
            }
        }
        values[rank] = 1.0f;
    }
};

// The code of 0. The code of a magnitude is this code plus its rank. A tie goes to the rank whose code is even.
template <bool SIGNED> constexpr int ZERO_CODE = SIGNED ? 127 : 0;

// Builds the table of the map with or without signs.
template <bool SIGNED> constexpr Table make_table() {
    constexpr Magnitudes<SIGNED> magnitudes;
    constexpr int LAST = Magnitudes<SIGNED>::COUNT - 1;
    Table table{};
    for (int rank = 0; rank <= LAST; ++rank) {
        table.values[ZERO_CODE<SIGNED> + rank] = magnitudes.values[rank];
        if (SIGNED && rank < LAST) table.values[ZERO_CODE<SIGNED> - rank] = rank == 0 ? 0.0f : -magnitudes.values[rank];
    }
    // At the start of each iteration, `rank` is the rank of the largest quotient before those of the entry. `octave` is the power of two
    // at or below the entry's quotients.
    int rank = 0;
    double octave = 1.0 / (1 << OCTAVES);
    for (int entry = 0; entry < ENTRIES; ++entry) {
        if (entry > 0 && entry % 128 == 0) octave *= 2;
        // The quotients of this entry are `smallest + k * spacing` with k from 0 to 0xffff.
        const double smallest = octave * (1 + entry % 128 / 128.0), spacing = octave / (1 << 23);
        // `sum` is b + e of the smallest quotient, with b and e as above `Table`. For the other quotients, b + e is sum + k, which carries
        // into the upper half at the first quotient of the next rank.
        uint32_t sum = static_cast<uint32_t>(rank) << 16;
        if (rank < LAST) {
            const float middle = static_cast<float>(static_cast<double>(magnitudes.values[rank]) + magnitudes.values[rank + 1]) / 2;
            // The first quotient of the next rank is halfway between the two magnitudes; if a tie goes down, it is the quotient after that.
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

// Returns the rank of the magnitude nearest to `x`, which must be from 2^-23 to 1.
__device__ __forceinline__ uint32_t rank_of(const uint32_t *to_rank, float x) {
    const uint32_t bits = __float_as_uint(x);
    return (to_rank[(bits >> 16) - FIRST_ENTRY] + bits) >> 16;
}

// The smallest quotient that the table covers. Smaller ones have the same rank, 0.
constexpr float SMALLEST = 1.0f / (1 << OCTAVES);

// Returns the code of a quotient in the map with signs. A negative quotient (-0 included) never becomes zero; if it is close to zero, it
// becomes the negative value nearest to zero. In a block of zeros, 0 / 0 gives a NaN whose sign bit is 0; it gets the code 255.
__device__ __forceinline__ uint32_t encode_signed(const uint32_t *to_rank, float x) {
    // fminf(NaN, 1) is 1.
    const int rank = rank_of(to_rank, fmaxf(fminf(fabsf(x), 1.0f), SMALLEST));
    // The code if `x` is negative. -1 is not in the map, so its code is that of the lowest value.
    const int below = ZERO_CODE<true> - min(max(rank, 1), ZERO_CODE<true>);
    return __float_as_int(x) < 0 ? below : ZERO_CODE<true> + rank;
}

// Returns the code of a quotient, which must be at least 0, in the map without signs. The code of NaN is 0.
__device__ __forceinline__ uint32_t encode_unsigned(const uint32_t *to_rank, float x) {
    return rank_of(to_rank, fminf(fmaxf(x, SMALLEST), 1.0f));
}

} // namespace dynamic_map
