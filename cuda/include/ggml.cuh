// Reads the block formats of ggml, eight codes at a time. A row is a sequence of blocks, and each block contains its scales and its codes;
// f16 numbers are little-endian. The layouts are those in `ggml-common.h` and `ggml-quants.c` of llama.cpp at
// 0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c. Products and sums are written as intrinsics, so that the compiler does not fuse them into
// multiply-adds, which round differently.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

namespace ggml {

// In the order of `Ggml::ALL` on the host.
enum Type : uint32_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

template <Type TYPE> constexpr bool IS_K = TYPE >= Q4_K;
// The numbers of elements (BLOCK) and of bytes (BYTES) of a block. All numbers of bytes are even, so blocks are aligned to two bytes.
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
// Whether blocks store minimums, which are added to (in Q4_K and Q5_K, subtracted from) the products of codes and scales.
template <Type TYPE> constexpr bool HAS_MINIMUM = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K;

// Eight codes, one in each byte: signed in Q8_0, otherwise unsigned. The value of a code is (code - zero) * scale + minimum. In formats of
// unsigned codes without a minimum, `zero` is half of the range: 8, 16 or 32 for four, five or six bits.
struct Codes {
    uint2 bytes;
    int zero;
    float scale, minimum;
};

// Loads of 2, 4 and 8 bytes from an address that is a multiple of two.
__device__ __forceinline__ uint32_t half_word(const uint8_t *at) { return __ldg(reinterpret_cast<const uint16_t *>(at)); }
__device__ __forceinline__ uint32_t word(const uint8_t *at) { return half_word(at) | half_word(at + 2) << 16; }
__device__ __forceinline__ uint2 eight(const uint8_t *at) { return {word(at), word(at + 4)}; }
// The f16 number at `at`.
__device__ __forceinline__ float f16_at(const uint8_t *at) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(half_word(at))));
}

// The lower (`shift` = 0) or the upper (`shift` = 4) four bits of each of eight bytes.
__device__ __forceinline__ uint2 nibbles(uint2 bytes, uint32_t shift) {
    return {bytes.x >> shift & 0x0f0f0f0f, bytes.y >> shift & 0x0f0f0f0f};
}

// The fifth bits of eight codes: bit i of `bits`, for i < 8, becomes bit 4 of byte i of the result. All other bits of the result are 0.
__device__ __forceinline__ uint2 fifth(uint32_t bits) {
    const auto spread = [](uint32_t four) {
        return (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
    };
    return {spread(bits), spread(bits >> 4)};
}

// The bits that are set in `a` or in `b`.
__device__ __forceinline__ uint2 merge(uint2 a, uint2 b) { return {a.x | b.x, a.y | b.y}; }

// The scale and the minimum of part `part` of a Q4_K or Q5_K block, which has eight parts of 32 elements. The twelve bytes at `scales` hold
// these sixteen numbers of six bits each. For parts 0 to 3, the scale is the lower six bits of byte `part`, and the minimum those of byte
// `part` + 4. For parts 4 to 7, byte `part` + 4 has the lower four bits of the scale (lower nibble) and of the minimum (upper nibble), and
// their upper two bits are the top two bits of the bytes `part` - 4 (scale) and `part` (minimum).
__device__ __forceinline__ float2 part_scales(const uint8_t *scales, uint32_t part) {
    const uint32_t middle = __ldg(scales + part % 4 + 4), first = __ldg(scales + part % 4);
    if (part < 4) return {static_cast<float>(first & 63), static_cast<float>(middle & 63)};
    const uint32_t last = __ldg(scales + part + 4);
    return {static_cast<float>((last & 15) | first >> 6 << 4), static_cast<float>(last >> 4 | middle >> 6 << 4)};
}

// The eight codes from element `at` of a block on. `at` is a multiple of eight.
template <Type TYPE> __device__ __forceinline__ Codes load(const uint8_t *block, uint32_t at) {
    // A block of Q8_0 has its scale (2 bytes), then its codes.
    if constexpr (TYPE == Q8_0) return {eight(block + 2 + at), 0, f16_at(block), 0.0f};
    else if constexpr (!IS_K<TYPE>) {
        constexpr bool HAS_FIFTH = TYPE == Q5_0 || TYPE == Q5_1;
        // A block begins with HEAD bytes of scale and minimum. The fifth bits of its codes follow, if there are any. At START, its codes
        // begin.
        constexpr uint32_t HEAD = HAS_MINIMUM<TYPE> ? 4 : 2, START = HEAD + (HAS_FIFTH ? 4 : 0);
        // The lower halves of 16 bytes belong to the elements 0 to 15, the upper halves to the elements 16 to 31.
        uint2 codes = nibbles(eight(block + START + at % 16), at / 16 * 4);
        if constexpr (HAS_FIFTH) codes = merge(codes, fifth(word(block + HEAD) >> at & 0xff));
        const float minimum = HAS_MINIMUM<TYPE> ? f16_at(block + 2) : 0.0f;
        return {codes, HAS_MINIMUM<TYPE> ? 0 : HAS_FIFTH ? 16 : 8, f16_at(block), minimum};
    } else if constexpr (TYPE == Q6_K) {
        // Codes have six bits. A half of the block (128 elements) has 64 bytes for the low four bits of its codes, and 32 bytes for the
        // high two bits. The block has the low bits of both halves, then the high bits of both (from byte 128 on), 16 factors (from byte
        // 192 on) and its scale (byte 208). Quarter r of a half (32 elements) has its low bits in nibble r / 2 of 32 bytes, which begin at
        // byte 32 (r % 2) of the half's low bits, and its high bits in the bits 2 r and 2 r + 1 of each of the half's 32 bytes of high
        // bits. Each 16 elements have a factor of the block's scale.
        const uint32_t half = at / 128, quarter = at / 32 % 4, offset = at % 32;
        const uint2 low = nibbles(eight(block + 64 * half + 32 * (quarter % 2) + offset), quarter / 2 * 4);
        const uint2 high = eight(block + 128 + 32 * half + offset);
        // Moves the quarter's two bits of each byte to bits 4 and 5.
        const auto two = [&](uint32_t bytes) { return (bytes >> 2 * quarter & 0x03030303) << 4; };
        const auto factor = static_cast<float>(static_cast<int8_t>(__ldg(block + 192 + at / 16)));
        return {merge(low, {two(high.x), two(high.y)}), 32, __fmul_rn(f16_at(block + 208), factor), 0.0f};
    } else {
        // Parts 2 i and 2 i + 1 share 32 bytes: the even part has the lower four bits of each byte, the odd part the upper four. In Q5_K,
        // bit `part` of 32 further bytes is the fifth bit of the part's codes. A block begins with its scale, the scale of the minimums,
        // and the 12 bytes that `part_scales` reads; the fifth bits follow, then, at START, the four bits.
        const uint32_t part = at / 32, offset = at % 32;
        constexpr uint32_t START = TYPE == Q5_K ? 48 : 16;
        uint2 codes = nibbles(eight(block + START + 32 * (part / 2) + offset), part % 2 * 4);
        if constexpr (TYPE == Q5_K) {
            const uint2 bits = eight(block + 16 + offset);
            const auto one = [&](uint32_t bytes) { return (bytes >> part & 0x01010101) << 4; };
            codes = merge(codes, {one(bits.x), one(bits.y)});
        }
        const float2 factors = part_scales(block + 4, part);
        return {codes, 0, __fmul_rn(f16_at(block), factors.x), -__fmul_rn(f16_at(block + 2), factors.y)};
    }
}

// The value of code `i` of the eight.
template <Type TYPE> __device__ __forceinline__ float value(const Codes &codes, int i) {
    const uint32_t byte = (i < 4 ? codes.bytes.x : codes.bytes.y) >> (8 * (i % 4)) & 0xff;
    const int number = TYPE == Q8_0 ? static_cast<int8_t>(byte) : static_cast<int>(byte) - codes.zero;
    const float product = __fmul_rn(codes.scale, static_cast<float>(number));
    return HAS_MINIMUM<TYPE> ? __fadd_rn(product, codes.minimum) : product;
}

} // namespace ggml
