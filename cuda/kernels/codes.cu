// Kernels for products of 8-bit codes: they make the codes of the operands, and scale the sums (rust/core/src/quantized/w8a8).
//
// Codes are int8 (-127 to 127) or e4m3 (Micikevicius et al. 2022, arXiv:2209.05433). The length of every row is a multiple of
// 16 elements, and every row begins at a 16-byte boundary. The sums are those of products of codes, before they are scaled.
//
// A team of threads (a warp, or a whole block of up to TEAM threads) works on a row. The threads of a team have the same threadIdx.y.
#include "codes/round.cuh"

namespace {

// A matrix (rows, columns), and the codes and scales of its rows: codes[i, :] = round(x[i, :] / scale) with the scale that RowScale
// finds.
template <typename T> struct Rounding {
    static constexpr int N = WIDE<T>;
    const T *x;
    uint32_t rows, columns;
    bool is_int8;
    uint8_t *codes;
    float *scales;

    // Rounds the rows of block `block` of `blocks`. Before that, change(values, index of the first column) changes N values of x at a
    // time.
    template <typename F> __device__ __forceinline__ void run(uint32_t block, uint32_t blocks, F change) const {
        const uint64_t first = static_cast<uint64_t>(block) * blockDim.y + threadIdx.y, stride = static_cast<uint64_t>(blocks) * blockDim.y;
        for (uint64_t i = first; i < rows; i += stride) {
            Row<T, N> row(x + i * columns, columns);
            const auto changed = [&](uint64_t at, const Pack<T, N> &pack, float (&values)[N]) {
                widen_pack(pack, values);
                change(values, static_cast<uint32_t>(at));
            };
            // The first loop over the row finds its scale, the second one rounds.
            RowScale row_scale;
            row.for_each([&](uint64_t at, const Pack<T, N> &pack) {
                float values[N];
                changed(at, pack, values);
                row_scale.see(values);
            });
            const float scale = row_scale.of_team(is_int8);
            if (threadIdx.x == 0) scales[i] = scale;
            // Widened values of the row must not stay in registers: they take more registers than the values of type T.
            row.keep_narrow();
            with_rounder(scale, is_int8, [&](auto rounder) {
                row.for_each([&](uint64_t at, const Pack<T, N> &pack) {
                    float values[N];
                    changed(at, pack, values);
                    rounder.store(codes + i * columns + at, values);
                });
            });
        }
    }
};

// Transposes four rows of four codes; a word is a row. A digit of a selector of __byte_perm is the number of a byte: 0 to 3 in the first
// word, 4 to 7 in the second; the digit on the right selects the lowest byte. low01 has the columns 0 and 1 of the rows 0 and 1, column by
// column; high01 has the columns 2 and 3.
__device__ __forceinline__ void transpose(uint32_t (&words)[4]) {
    const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140), high01 = __byte_perm(words[0], words[1], 0x7362);
    const uint32_t low23 = __byte_perm(words[2], words[3], 0x5140), high23 = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(low01, low23, 0x5410);
    words[1] = __byte_perm(low01, low23, 0x7632);
    words[2] = __byte_perm(high01, high23, 0x5410);
    words[3] = __byte_perm(high01, high23, 0x7632);
}

// The codes (rows, columns) of a matrix whose rows are in `count` parts, and their transpose `out` (columns, rows). `rows` is the sum of
// the parts' rows. `columns` and the number of rows of each part are multiples of 16. Unless `ones` (columns) is null, it is filled with
// 1: these are the scales of the rows of `out`.
struct Transposition {
    // An item is 16 neighbouring codes of one line of a tile, which a thread loads or stores at once: four items are a line. A word is four
    // codes.
    static constexpr uint32_t TILE = 64, WORDS = TILE / 4, ITEMS = TILE * TILE / 16, FEWEST_THREADS = 64;
    const CodeParts &parts;
    uint32_t count, rows, columns;
    uint8_t *out;
    float *ones;

    // Transposes a tile: tile index = (tile of rows, counted through the parts) * (tiles of columns) + (tile of columns). The block has
    // at least FEWEST_THREADS threads.
    __device__ __forceinline__ void run(uint32_t tile) const {
        // One more word in each line puts the words of a column into different banks of shared memory.
        __shared__ uint32_t original[TILE][WORDS + 1], transposed[TILE][WORDS + 1];
        const uint32_t across_tiles = (columns + TILE - 1) / TILE, first_column = tile % across_tiles * TILE;
        const uint32_t thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
        uint32_t down_tile = tile / across_tiles, index = 0;
        if (ones != nullptr && down_tile == 0)
            for (uint32_t i = thread; i < TILE; i += threads)
                if (first_column + i < columns) ones[first_column + i] = 1.0f;
        // Finds the part that has this tile. `down_tile` then counts the tiles of rows in this part.
        for (; index + 1 < count; index++) {
            const uint32_t tiles = (parts.list[index].rows + TILE - 1) / TILE;
            if (down_tile < tiles) break;
            down_tile -= tiles;
        }
        const CodePart &part = parts.list[index];
        const uint32_t first_row = down_tile * TILE;
        const auto *codes = static_cast<const uint8_t *>(part.codes);
        uint4 loaded[ITEMS / FEWEST_THREADS];
#pragma unroll
        for (uint32_t k = 0; k < ITEMS / FEWEST_THREADS; k++) {
            const uint32_t item = thread + k * threads, line = item / 4, first_code = item % 4 * 16;
            loaded[k] = make_uint4(0, 0, 0, 0);
            if (item < ITEMS && first_row + line < part.rows && first_column + first_code < columns)
                loaded[k] = __ldg(reinterpret_cast<const uint4 *>(
                    codes + static_cast<uint64_t>(first_row + line) * columns + first_column + first_code));
        }
#pragma unroll
        for (uint32_t k = 0; k < ITEMS / FEWEST_THREADS; k++) {
            const uint32_t item = thread + k * threads;
            if (item >= ITEMS) break;
            uint32_t *to = &original[item / 4][item % 4 * 4];
            to[0] = loaded[k].x, to[1] = loaded[k].y, to[2] = loaded[k].z, to[3] = loaded[k].w;
        }
        __syncthreads();
        // Here an item is a square of 4 × 4 codes, so there are as many items. `across` and `down` are the square's column and row.
        for (uint32_t item = thread; item < ITEMS; item += threads) {
            const uint32_t across = item % WORDS, down = item / WORDS;
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 4; k++) words[k] = original[4 * down + k][across];
            transpose(words);
#pragma unroll
            for (int k = 0; k < 4; k++) transposed[4 * across + k][down] = words[k];
        }
        __syncthreads();
        for (uint32_t item = thread; item < ITEMS; item += threads) {
            const uint32_t line = item / 4, first_code = item % 4 * 16;
            if (first_column + line >= columns || first_row + first_code >= part.rows) continue;
            const uint32_t *from = &transposed[line][first_code / 4];
            uint8_t *to = out + static_cast<uint64_t>(first_column + line) * rows + part.start + first_row + first_code;
            *reinterpret_cast<uint4 *>(to) = make_uint4(from[0], from[1], from[2], from[3]);
        }
    }
};

// Converts a sum to f32. Its 32 bits are an integer for int8 codes, and an f32 for e4m3.
__device__ __forceinline__ float number(uint32_t sum, bool is_integer) {
    return is_integer ? static_cast<float>(static_cast<int32_t>(sum)) : __uint_as_float(sum);
}

// Loads `N` neighbouring values, widened. The address needs only the alignment of one value.
template <int N, typename T> __device__ __forceinline__ void load_any(const T *from, float (&values)[N]) {
    if (is_wide(from)) {
        load_values(from, values);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = widen(from[i]);
    }
}

// out[i, j] = sums[i, j] row_scales[i] column_scales[j] + bias[j]; `column_scales` and `bias` may be null. If `scale_count` is 1, all
// columns have the same scale. Rows of `sums` have `columns` elements, rows of out are `stride` apart. Launch: block 256, any grid.
template <typename T>
__device__ __forceinline__ void scale_sums(const uint32_t *sums, const float *row_scales, const float *column_scales, const T *bias,
                                           uint32_t rows, uint32_t columns, uint32_t scale_count, uint32_t stride,
                                           uint32_t is_integer, T *out) {
    // A thread computes PACK results at a time, and stores STEP of them at once: 16 bytes.
    constexpr int PACK = 8, STEP = PACK < WIDE<T> ? PACK : WIDE<T>;
    const uint32_t packs = columns / PACK;
    const uint64_t count = static_cast<uint64_t>(rows) * packs;
    for (uint64_t index = flat_index(); index < count; index += flat_stride()) {
        // The quotient is the row, the remainder is the pack in the row.
        const Quotient place = divide(index, packs);
        const uint32_t column = place.remainder * PACK;
        const float row_scale = __ldg(row_scales + place.quotient);
        const uint32_t *from = sums + place.quotient * columns + column;
        T *to = out + place.quotient * stride + column;
        uint32_t words[PACK];
        float factors[PACK], addends[PACK] = {};
        if (column_scales != nullptr && scale_count > 1) {
            load_any(column_scales + column, factors);
        } else {
            const float factor = column_scales == nullptr ? 1.0f : __ldg(column_scales);
#pragma unroll
            for (int k = 0; k < PACK; k++) factors[k] = factor;
        }
        if (bias != nullptr) load_any(bias + column, addends);
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
                const float value = number(words[start + k], is_integer != 0) * row_scale * factors[start + k];
                values[k] = value + addends[start + k];
            }
            store_pack(to + start, narrow_pack<T>(values));
        }
    }
}

} // namespace

// quantize_rows: the codes and scales of x (rows, columns).
// quantize_gradient: multiplies the columns of x (rows, columns) by scales, and computes the codes and scales of the result. The `count`
// parts together are the codes of a weight (columns, inner); the scale of its row j multiplies column j of x. Also writes the transpose of
// the weight's codes, and fills `ones` with the scales of the transpose's rows. The first `tiles` blocks transpose, the others round; with
// no tiles, nothing is transposed.
// Launch: as rows.cuh says, with teams whose threads hold up to two packs of a row; quantize_gradient has `tiles` =
// (sum over the parts of ceil(rows / 64)) ceil(inner / 64) blocks more.
#define DEFINE_CODES(SUFFIX, T)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(TEAM, 2) quantize_rows_##SUFFIX(                                                      \
        const T *x, uint32_t rows, uint32_t columns, uint32_t is_int8, uint8_t *codes, float *scales) {                                \
        follow();                                                                                                                      \
        Rounding<T>{x, rows, columns, is_int8 != 0, codes, scales}.run(blockIdx.x, gridDim.x, [](float(&)[WIDE<T>], uint32_t) {});     \
    }                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(TEAM, 2) quantize_gradient_##SUFFIX(                                                  \
        const T *x, const __grid_constant__ CodeParts parts, uint32_t count, uint32_t rows, uint32_t columns, uint32_t inner,          \
        uint32_t tiles, uint32_t is_int8, uint8_t *codes, float *scales, uint8_t *transposed, float *ones) {                           \
        follow();                                                                                                                      \
        if (blockIdx.x < tiles) {                                                                                                      \
            Transposition{parts, count, columns, inner, transposed, ones}.run(blockIdx.x);                                             \
        } else {                                                                                                                       \
            const auto change = [&](float(&values)[WIDE<T>], uint32_t column) { scale_columns(values, column, parts, count); };        \
            Rounding<T>{x, rows, columns, is_int8 != 0, codes, scales}.run(blockIdx.x - tiles, gridDim.x - tiles, change);             \
        }                                                                                                                              \
    }                                                                                                                                  \
    extern "C" __global__ void scale_sums_##SUFFIX(const uint32_t *sums, const float *row_scales, const float *column_scales,          \
                                                   const T *bias, uint32_t rows, uint32_t columns, uint32_t scale_count,               \
                                                   uint32_t stride, uint32_t is_integer, T *out) {                                     \
        follow();                                                                                                                      \
        scale_sums<T>(sums, row_scales, column_scales, bias, rows, columns, scale_count, stride, is_integer, out);                     \
    }
FOR_EACH_FLOAT(DEFINE_CODES)
