// Dequantizes one or several matrices for a matrix product. Each matrix becomes one part of `out`, which is dense. The formats are:
//
// - int8: two's complement, with a scale for each row.
// - e4m3, with a scale for each row, or one for the part.
// - NF4 (Dettmers et al. 2023, arXiv:2305.14314; bitsandbytes): two codes per byte, the first in the upper half, and a scale for each
//   64 elements. In NF4 the scales are f32. In nested NF4 they are quantized, too: a scale is the value of its 8-bit code in the signed
//   dynamic map (dynamic_map.cuh), times the outer scale that 256 such codes share, plus the offset of the part.
// - The block formats of ggml (ggml.cuh), which divide a row into blocks. Each block holds its scales and its codes.
//
// A value is the product, in f32, of the scale and the number that the code stands for; some formats of ggml add a minimum. The value
// is then rounded to the dtype of `out`. Values equal those of the CPU bit for bit.
// Launch: block 256, grid (any number, number of parts), no dynamic shared memory.
#include "rows.cuh"

#include "dynamic_map.cuh"
#include "ggml.cuh"

namespace {

constexpr int MOST_PARTS = 8;
// CHUNK is the number of elements in a chunk. BATCH is the number of chunks that a thread loads before it stores the first of them, so
// that the loads overlap.
constexpr int CHUNK = 8;
constexpr int BATCH = 4;
// The number of elements that share a scale of NF4, and the number of quantized scales that share an outer scale.
constexpr int NF4_BLOCK = 64;
constexpr int NESTED = 256;

// NESTED_NF4 is NF4 with quantized scales. A format of ggml has the number FIRST_GGML plus its `ggml::Type`.
enum Format : uint32_t { INT8, E4M3, NF4, NESTED_NF4, FIRST_GGML };

// A part has `count` elements in rows of `columns`; `start` is the index of its first element in `out`. `scales` has `scale_count` f32
// scales; for formats of ggml it is not read. For NESTED_NF4 these are the outer scales, and `inner` has the codes of the scales; no other
// format reads `inner` and `offset`.
struct QuantizedPart {
    const void *codes, *scales, *inner;
    uint64_t start, count;
    uint32_t columns, format, scale_count;
    float offset;
};

struct QuantizedParts {
    QuantizedPart list[MOST_PARTS];
};

// The values of the 16 codes of NF4.
__device__ const float NF4_VALUES[16] = {
    -1.0f, -0.696192801f, -0.525073051f, -0.394917488f, -0.284441382f, -0.18477343f,
    -0.0910500363f, 0.0f, 0.0795802996f, 0.160930201f, 0.246112302f, 0.337915242f,
    0.440709829f, 0.562617004f, 0.722956836f, 1.0f
};

// The magnitudes of the signed dynamic map: 8-bit codes of numbers from -1 to 1 (dynamic_map.cuh).
__device__ const dynamic_map::Magnitudes<true> MAGNITUDES{};

// The number of an e4m3 code that is not NaN: its bits, shifted to the fields of an f16, are the number times 2^-8.
__device__ __forceinline__ float e4m3(uint32_t code) {
    const uint16_t bits = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
    return __half2float(__ushort_as_half(bits)) * 256.0f;
}

// Reads the codes and the scales of a part that is not in a format of ggml. `nf4_values` are the values of the 16 codes of NF4, and `map`
// has the 256 values of the signed dynamic map; both are in shared memory.
template <Format FORMAT> struct Codes {
    static constexpr bool IS_NF4 = FORMAT == NF4 || FORMAT == NESTED_NF4;
    using Word = std::conditional_t<IS_NF4, uint32_t, uint2>;
    const QuantizedPart &part;
    const float *nf4_values, *map;

    // The scale of element `index` of the part.
    __device__ __forceinline__ float scale(uint64_t index) const {
        const float *scales = static_cast<const float *>(part.scales);
        if constexpr (FORMAT == NF4) return __ldg(scales + index / NF4_BLOCK);
        else if constexpr (FORMAT == NESTED_NF4) {
            const uint64_t block = index / NF4_BLOCK;
            const float outer = __ldg(scales + block / NESTED);
            return __fadd_rn(__fmul_rn(map[__ldg(static_cast<const uint8_t *>(part.inner) + block)], outer), part.offset);
        } else return __ldg(scales + (part.scale_count == 1 ? 0 : divide(index, part.columns).quotient));
    }

    // The codes of the chunk that begins at element `index`.
    __device__ __forceinline__ Word load(uint64_t index) const {
        const auto *codes = static_cast<const uint8_t *>(part.codes);
        return __ldg(reinterpret_cast<const Word *>(codes + (IS_NF4 ? index / 2 : index)));
    }

    // The number that the code of element `i` of the chunk `word` stands for.
    __device__ __forceinline__ float number(const Word &word, int i) const {
        if constexpr (IS_NF4) return nf4_values[word >> (8 * (i / 2) + (i % 2 == 0 ? 4 : 0)) & 0xf];
        else {
            const uint32_t code = (i < 4 ? word.x : word.y) >> (8 * (i % 4)) & 0xff;
            if constexpr (FORMAT == INT8) return static_cast<float>(static_cast<int8_t>(code));
            else return e4m3(code);
        }
    }

    // The number that the code of element `index` of the part stands for. Unlike `load`, works for any address and any element.
    __device__ __forceinline__ float number_at(uint64_t index) const {
        const auto *codes = static_cast<const uint8_t *>(part.codes);
        if constexpr (IS_NF4) return nf4_values[codes[index / 2] >> (index % 2 == 0 ? 4 : 0) & 0xf];
        else if constexpr (FORMAT == INT8) return static_cast<float>(static_cast<int8_t>(codes[index]));
        else return e4m3(codes[index]);
    }
};

// Writes the values of a part: in chunks where that is possible, else one by one.
template <Format FORMAT, typename T> __device__ __forceinline__ void write(const Codes<FORMAT> codes, T *out) {
    using Word = typename Codes<FORMAT>::Word;
    const QuantizedPart &part = codes.part;
    T *to = out + part.start;
    // All elements of a chunk must have the same scale. A chunk of NF4 lies within one block of 64 elements. A chunk of 8-bit codes lies
    // within one row if the length of a row is a multiple of CHUNK; parts of e4m3 with a single scale are not treated specially.
    const bool is_whole = Codes<FORMAT>::IS_NF4 || part.columns % CHUNK == 0;
    // The addresses must allow wide stores and a load of all codes of a chunk at once.
    const bool is_aligned = are_wide(to) && reinterpret_cast<uintptr_t>(part.codes) % sizeof(Word) == 0;
    const uint64_t chunks = is_whole && is_aligned ? part.count / CHUNK : 0;
    // A thread block takes BATCH · blockDim.x neighbouring chunks at a time, and a thread every blockDim.x-th of them, from `first` on.
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x * BATCH;
    for (uint64_t first = static_cast<uint64_t>(blockIdx.x) * blockDim.x * BATCH + threadIdx.x; first < chunks; first += stride) {
        Word words[BATCH];
        float scales[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const uint64_t chunk = first + k * blockDim.x;
            if (chunk >= chunks) break;
            words[k] = codes.load(chunk * CHUNK);
            scales[k] = codes.scale(chunk * CHUNK);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const uint64_t chunk = first + k * blockDim.x;
            if (chunk >= chunks) break;
            constexpr int PACK = CHUNK < WIDE<T> ? CHUNK : WIDE<T>; // The number of elements that one store writes.
#pragma unroll
            for (int start = 0; start < CHUNK; start += PACK) {
                Acc<T> values[PACK];
#pragma unroll
                for (int i = 0; i < PACK; i++) values[i] = __fmul_rn(codes.number(words[k], start + i), scales[k]);
                store_pack(to + chunk * CHUNK + start, narrow_pack<T>(values));
            }
        }
    }
    for (uint64_t index = chunks * CHUNK + flat_index(); index < part.count; index += flat_stride())
        to[index] = narrow<T>(static_cast<Acc<T>>(__fmul_rn(codes.number_at(index), codes.scale(index))));
}

// Like `write`, for the block formats of ggml. The number of elements of a block is a multiple of CHUNK, so a chunk lies within one block.
template <ggml::Type TYPE, typename T> __device__ __forceinline__ void write_blocks(const QuantizedPart &part, T *out) {
    T *to = out + part.start;
    const auto *blocks = static_cast<const uint8_t *>(part.codes);
    const bool is_aligned = are_wide(to);
    constexpr int PACK = CHUNK < WIDE<T> ? CHUNK : WIDE<T>;
    for (uint64_t chunk = flat_index(); chunk < part.count / CHUNK; chunk += flat_stride()) {
        const uint64_t index = chunk * CHUNK;
        const uint8_t *block = blocks + index / ggml::BLOCK<TYPE> * ggml::BYTES<TYPE>;
        const ggml::Codes codes = ggml::load<TYPE>(block, index % ggml::BLOCK<TYPE>);
#pragma unroll
        for (int start = 0; start < CHUNK; start += PACK) {
            Acc<T> values[PACK];
#pragma unroll
            for (int i = 0; i < PACK; i++) values[i] = ggml::value<TYPE>(codes, start + i);
            if (is_aligned) store_pack(to + index + start, narrow_pack<T>(values));
            else
                for (int i = 0; i < PACK; i++) to[index + start + i] = narrow<T>(values[i]);
        }
    }
}

template <typename T> __device__ __forceinline__ void dequantize(const QuantizedParts &parts, T *out) {
    __shared__ float nf4_values[16], map[256];
    const QuantizedPart &part = parts.list[blockIdx.y];
    if (threadIdx.x < 16) nf4_values[threadIdx.x] = NF4_VALUES[threadIdx.x];
    for (int code = threadIdx.x; code < 256; code += blockDim.x) {
        // The code of 0. Smaller codes stand for negative numbers.
        constexpr int ZERO = dynamic_map::ZERO_CODE<true>;
        map[code] = code < ZERO ? -MAGNITUDES.values[ZERO - code] : MAGNITUDES.values[code - ZERO];
    }
    __syncthreads();
    switch (part.format) {
    case INT8: return write(Codes<INT8>{part, nf4_values, map}, out);
    case E4M3: return write(Codes<E4M3>{part, nf4_values, map}, out);
    case NF4: return write(Codes<NF4>{part, nf4_values, map}, out);
    case NESTED_NF4: return write(Codes<NESTED_NF4>{part, nf4_values, map}, out);
    case FIRST_GGML + ggml::Q4_0: return write_blocks<ggml::Q4_0>(part, out);
    case FIRST_GGML + ggml::Q4_1: return write_blocks<ggml::Q4_1>(part, out);
    case FIRST_GGML + ggml::Q5_0: return write_blocks<ggml::Q5_0>(part, out);
    case FIRST_GGML + ggml::Q5_1: return write_blocks<ggml::Q5_1>(part, out);
    case FIRST_GGML + ggml::Q8_0: return write_blocks<ggml::Q8_0>(part, out);
    case FIRST_GGML + ggml::Q4_K: return write_blocks<ggml::Q4_K>(part, out);
    case FIRST_GGML + ggml::Q5_K: return write_blocks<ggml::Q5_K>(part, out);
    default: return write_blocks<ggml::Q6_K>(part, out);
    }
}

} // namespace

#define DEFINE_DEQUANTIZE(SUFFIX, T)                                                                                   \
    extern "C" __global__ void dequantize_##SUFFIX(const __grid_constant__ QuantizedParts parts, T *out) {             \
        follow();                                                                                                      \
        dequantize<T>(parts, out);                                                                                     \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_DEQUANTIZE)
