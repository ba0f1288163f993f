// Kernels for products of 8-bit codes: they make the codes of the operands, and scale the sums (rust/core/src/quantized/w8a8).
//
// Codes are int8 (-127 to 127) or e4m3 (Micikevicius et al. 2022, arXiv:2209.05433). The length of every row is a multiple of
// 16 elements, and every row begins at a 16-byte boundary.
#include <cuda_fp8.h>

#include "codes/parts.cuh"
#include "rows.cuh"

namespace {

constexpr int CHUNK = 16;
constexpr float LARGEST_INT8 = 127.0f, LARGEST_E4M3 = 448.0f;

// Loads a chunk of a row of x in f32, and multiplies each column by its scale unless `parts` is 0.
template <typename T> __device__ __forceinline__ void load_chunk(const T *row, uint32_t column, uint32_t parts, const CodeParts &scales, float (&values)[CHUNK]) {
    load_values(row + column, values);
    if (parts == 0) return;
    // A chunk never crosses parts, so one part has the scales of all its columns.
    uint32_t index = 0;
    while (index + 1 < parts && column >= scales.list[index + 1].start) index++;
    const CodePart &part = scales.list[index];
#pragma unroll
    for (int i = 0; i < CHUNK; i++) values[i] *= scale_of(part, column + i - part.start);
}

__device__ __forceinline__ uint8_t code_of(float x, bool is_int8) {
    if (is_int8) return static_cast<uint8_t>(__float2int_rn(fminf(fmaxf(x, -LARGEST_INT8), LARGEST_INT8)));
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// codes[i, :] = round(x[i, :] column_scales / scale), where scale = the row's largest magnitude / the largest code. The scale is NaN
// for a row with a non-finite number, and 1 for a row of zeros. Launch: block 256, any grid.
template <typename T>
__device__ __forceinline__ void quantize_rows(const T *x, const CodeParts &column_scales, uint32_t parts, uint32_t rows, uint32_t columns, uint32_t is_int8, uint8_t *codes, float *scales) {
    __shared__ float shared[256 / WARP];
    for (uint32_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T *row = x + static_cast<uint64_t>(i) * columns;
        float largest = 0.0f;
        for (uint32_t column = threadIdx.x * CHUNK; column < columns; column += blockDim.x * CHUNK) {
            float values[CHUNK];
            load_chunk(row, column, parts, column_scales, values);
#pragma unroll
            for (int k = 0; k < CHUNK; k++) {
                // fmaxf would drop NaN, so NaN counts as infinity here.
                const float magnitude = fabsf(values[k]);
                largest = fmaxf(largest, magnitude <= 3.4028234e38f ? magnitude : __int_as_float(0x7f800000));
            }
        }
        largest = warp_max(largest);
        if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = largest;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 256 / WARP; k++) largest = fmaxf(largest, shared[k]);
        __syncthreads();
        float scale = largest > 0.0f ? __fdiv_rn(largest, is_int8 ? LARGEST_INT8 : LARGEST_E4M3) : 1.0f;
        if (isinf(largest)) scale = __int_as_float(0x7fc00000);
        if (threadIdx.x == 0) scales[i] = scale;
        for (uint32_t column = threadIdx.x * CHUNK; column < columns; column += blockDim.x * CHUNK) {
            float values[CHUNK];
            load_chunk(row, column, parts, column_scales, values);
            Pack<uint8_t, CHUNK> pack;
#pragma unroll
            for (int k = 0; k < CHUNK; k++) pack.values[k] = code_of(__fdiv_rn(values[k], scale), is_int8 != 0);
            store_pack(codes + static_cast<uint64_t>(i) * columns + column, pack);
        }
    }
}

// Transposes four rows of four codes; a word is a row.
__device__ __forceinline__ void transpose(uint32_t (&words)[4]) {
    const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140), high01 = __byte_perm(words[0], words[1], 0x7362);
    const uint32_t low23 = __byte_perm(words[2], words[3], 0x5140), high23 = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(low01, low23, 0x5410);
    words[1] = __byte_perm(low01, low23, 0x7632);
    words[2] = __byte_perm(high01, high23, 0x5410);
    words[3] = __byte_perm(high01, high23, 0x7632);
}

// Converts a sum to f32. Its 32 bits are an integer for int8 codes, and an f32 for e4m3.
__device__ __forceinline__ float number(uint32_t sum, bool is_integer) {
    return is_integer ? static_cast<float>(static_cast<int32_t>(sum)) : __uint_as_float(sum);
}

// out[i, j] = sums[i, j] row_scales[i] column_scales[j] + bias[j]; `column_scales` and `bias` may be null. If `scale_count` is 1, all
// columns have the same scale. Rows of `sums` have `columns` elements, rows of out are `stride` apart. Launch: block 256, any grid.
template <typename T>
__device__ __forceinline__ void scale_sums(const uint32_t *sums, const float *row_scales, const float *column_scales, const T *bias, uint32_t rows, uint32_t columns, uint32_t scale_count, uint32_t stride, uint32_t is_integer, T *out) {
    constexpr int PACK = 8, STEP = PACK < WIDE<T> ? PACK : WIDE<T>;
    const uint32_t packs = columns / PACK;
    const uint64_t count = static_cast<uint64_t>(rows) * packs;
    for (uint64_t index = flat_index(); index < count; index += flat_stride()) {
        const Quotient place = divide(index, packs);
        const uint32_t column = place.remainder * PACK;
        const float row_scale = __ldg(row_scales + place.quotient);
        const uint32_t *from = sums + place.quotient * columns + column;
        T *to = out + place.quotient * stride + column;
        uint32_t words[PACK];
#pragma unroll
        for (int k = 0; k < PACK; k += 4) {
            const uint4 four = *reinterpret_cast<const uint4 *>(from + k);
            words[k] = four.x, words[k + 1] = four.y, words[k + 2] = four.z, words[k + 3] = four.w;
        }
#pragma unroll
        for (int start = 0; start < PACK; start += STEP) {
            float values[STEP];
#pragma unroll
            for (int k = 0; k < STEP; k++) {
                const uint32_t j = column + start + k;
                float value = number(words[start + k], is_integer != 0) * row_scale;
                if (column_scales != nullptr) value *= __ldg(column_scales + (scale_count == 1 ? 0 : j));
                values[k] = bias == nullptr ? value : value + widen(bias[j]);
            }
            store_pack(to + start, narrow_pack<T>(values));
        }
    }
}

} // namespace

// out (columns, rows) = the codes (rows, columns) of all parts, transposed; `rows` is the sum of the parts' rows. The rows of each part and
// `columns` are multiples of 16.
// Launch: block 256, grid (ceil(columns / 64), ceil(R / 64), number of parts), where R is the number of rows of the largest part.
extern "C" __global__ void transpose_codes(const __grid_constant__ CodeParts parts, uint32_t rows, uint32_t columns, uint8_t *out) {
    follow();
    constexpr int TILE = 64, WORDS = TILE / 4;
    __shared__ uint32_t read[TILE][WORDS + 1], turned[TILE][WORDS + 1];
    const CodePart &part = parts.list[blockIdx.z];
    const uint32_t first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    if (first_row >= part.rows) return;
    const uint32_t line = threadIdx.x / 4, sixteenth = threadIdx.x % 4 * 16;
    if (first_row + line < part.rows && first_column + sixteenth < columns) {
        const auto *codes = static_cast<const uint8_t *>(part.codes);
        const uint4 four = *reinterpret_cast<const uint4 *>(codes + static_cast<uint64_t>(first_row + line) * columns + first_column + sixteenth);
        uint32_t *to = &read[line][sixteenth / 4];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
    __syncthreads();
    const uint32_t across = threadIdx.x % WORDS, down = threadIdx.x / WORDS;
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] = read[4 * down + k][across];
    transpose(words);
#pragma unroll
    for (int k = 0; k < 4; k++) turned[4 * across + k][down] = words[k];
    __syncthreads();
    if (first_column + line < columns && first_row + sixteenth < part.rows) {
        const uint32_t *from = &turned[line][sixteenth / 4];
        uint8_t *to = out + static_cast<uint64_t>(first_column + line) * rows + part.start + first_row + sixteenth;
        *reinterpret_cast<uint4 *>(to) = make_uint4(from[0], from[1], from[2], from[3]);
    }
}

#define DEFINE_CODES(SUFFIX, T)                                                                                                        \
    extern "C" __global__ void quantize_rows_##SUFFIX(const T *x, const __grid_constant__ CodeParts column_scales, uint32_t parts,    \
                                                      uint32_t rows, uint32_t columns, uint32_t is_int8, uint8_t *codes,              \
                                                      float *scales) {                                                                 \
        follow();                                                                                                                      \
        quantize_rows<T>(x, column_scales, parts, rows, columns, is_int8, codes, scales);                                              \
    }                                                                                                                                  \
    extern "C" __global__ void scale_sums_##SUFFIX(const uint32_t *sums, const float *row_scales, const float *column_scales,         \
                                                   const T *bias, uint32_t rows, uint32_t columns, uint32_t scale_count,              \
                                                   uint32_t stride, uint32_t is_integer, T *out) {                                    \
        follow();                                                                                                                     \
        scale_sums<T>(sums, row_scales, column_scales, bias, rows, columns, scale_count, stride, is_integer, out);                     \
    }
FOR_EACH_FLOAT(DEFINE_CODES)
