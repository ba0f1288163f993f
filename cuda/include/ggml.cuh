// Reads the block formats of ggml, eight codes at a time. A block of a row holds its scales beside its codes; f16 numbers are little
// endian. The layouts are those in `ggml-common.h` and `ggml-quants.c` of llama.cpp at 0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

namespace ggml {

// In the order of `Ggml::ALL` on the host.
enum Type : uint32_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

template <Type TYPE> constexpr bool IS_K = TYPE >= Q4_K;
// Elements and bytes of a block. All sizes are even, so blocks are aligned to two bytes.
template <Type TYPE> constexpr uint32_t BLOCK = IS_K<TYPE> ? 256 : 32;
template <Type TYPE>
constexpr uint32_t BYTES = TYPE == Q4_0   ? 18
                           : TYPE == Q4_1 ? 20
                           : TYPE == Q5_0 ? 22
                           : TYPE == Q5_1 ? 24
                           : TYPE == Q8_0 ? 34
                           : TYPE == Q4_K ? 144
                           : TYPE == Q5_K ? 176
                                          : 210;
// Whether a block's minimum is added to the product of code and scale.
template <Type TYPE> constexpr bool HAS_LEAST = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K;

// Eight codes of one byte each. A value is (code - zero) scale + least.
struct Codes {
    uint2 bytes;
    int zero;
    float scale, least;
};

__device__ __forceinline__ uint32_t half_word(const uint8_t *at) { return __ldg(reinterpret_cast<const uint16_t *>(at)); }
__device__ __forceinline__ uint32_t word(const uint8_t *at) { return half_word(at) | half_word(at + 2) << 16; }
__device__ __forceinline__ uint2 eight(const uint8_t *at) { return {word(at), word(at + 4)}; }
__device__ __forceinline__ float scale(const uint8_t *at) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(half_word(at))));
}

// Of each of eight bytes, the four bits from bit `shift` (0 or 4) on.
__device__ __forceinline__ uint2 nibbles(uint2 bytes, uint32_t shift) {
    return {bytes.x >> shift & 0x0f0f0f0f, bytes.y >> shift & 0x0f0f0f0f};
}

// Bit i of the lowest byte of `bits` becomes bit 4 of byte i.
__device__ __forceinline__ uint2 fifth(uint32_t bits) {
    const auto spread = [](uint32_t four) {
        return (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
    };
    return {spread(bits), spread(bits >> 4)};
}

__device__ __forceinline__ uint2 both(uint2 a, uint2 b) { return {a.x | b.x, a.y | b.y}; }

// The scale and the minimum of part `part` of a Q4_K or Q5_K block, which has eight parts of 32 elements. Each is a number of six bits in
// the twelve bytes at `scales`.
__device__ __forceinline__ float2 part_scales(const uint8_t *scales, uint32_t part) {
    const uint32_t middle = __ldg(scales + part % 4 + 4), first = __ldg(scales + part % 4);
    if (part < 4) return {static_cast<float>(first & 63), static_cast<float>(middle & 63)};
    const uint32_t last = __ldg(scales + part + 4);
    return {static_cast<float>((last & 15) | first >> 6 << 4), static_cast<float>(last >> 4 | middle >> 6 << 4)};
}

// The eight codes from element `at` of a block on. `at` is a multiple of eight.
template <Type TYPE> __device__ __forceinline__ Codes load(const uint8_t *block, uint32_t at) {
    if constexpr (TYPE == Q8_0) return {eight(block + 2 + at), 0, scale(block), 0.0f};
    else if constexpr (!IS_K<TYPE>) {
        constexpr bool HAS_FIFTH = TYPE == Q5_0 || TYPE == Q5_1;
        constexpr uint32_t HEAD = HAS_LEAST<TYPE> ? 4 : 2, START = HEAD + (HAS_FIFTH ? 4 : 0);
        uint2 codes = nibbles(eight(block + START + at % 16), at / 16 * 4);
        if constexpr (HAS_FIFTH) codes = both(codes, fifth(word(block + HEAD) >> at & 0xff));
        const float least = HAS_LEAST<TYPE> ? scale(block + 2) : 0.0f;
        return {codes, HAS_LEAST<TYPE> ? 0 : HAS_FIFTH ? 16 : 8, scale(block), least};
    } else if constexpr (TYPE == Q6_K) {
        // The codes of a half block (128 elements) have six bits. Quarter r of the half block (32 elements) has the codes' low four bits
        // in nibble r / 2 of the bytes 32 (r % 2) to 32 (r % 2) + 31, and the high two bits in bits 2 r and 2 r + 1 of 32 further bytes.
        const uint32_t half = at / 128, quarter = at / 32 % 4, place = at % 32;
        const uint2 low = nibbles(eight(block + 64 * half + 32 * (quarter % 2) + place), quarter / 2 * 4);
        const uint2 high = eight(block + 128 + 32 * half + place);
        const auto two = [&](uint32_t bytes) { return (bytes >> 2 * quarter & 0x03030303) << 4; };
        const auto factor = static_cast<float>(static_cast<int8_t>(__ldg(block + 192 + at / 16)));
        return {both(low, {two(high.x), two(high.y)}), 32, __fmul_rn(scale(block + 208), factor), 0.0f};
    } else {
        const uint32_t part = at / 32, place = at % 32;
        constexpr uint32_t START = TYPE == Q5_K ? 48 : 16;
        uint2 codes = nibbles(eight(block + START + 32 * (part / 2) + place), part % 2 * 4);
        if constexpr (TYPE == Q5_K) {
            const uint2 bits = eight(block + 16 + place);
            const auto one = [&](uint32_t bytes) { return (bytes >> part & 0x01010101) << 4; };
            codes = both(codes, {one(bits.x), one(bits.y)});
        }
        const float2 factors = part_scales(block + 4, part);
        return {codes, 0, __fmul_rn(scale(block), factors.x), -__fmul_rn(scale(block + 2), factors.y)};
    }
}

// The value of code `i`.
template <Type TYPE> __device__ __forceinline__ float value(const Codes &codes, int i) {
    const uint32_t byte = (i < 4 ? codes.bytes.x : codes.bytes.y) >> (8 * (i % 4)) & 0xff;
    const int number = TYPE == Q8_0 ? static_cast<int8_t>(byte) : static_cast<int>(byte) - codes.zero;
    const float product = __fmul_rn(codes.scale, static_cast<float>(number));
    return HAS_LEAST<TYPE> ? __fadd_rn(product, codes.least) : product;
}

} // namespace ggml
