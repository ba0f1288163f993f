// Computes the unit, the elementwise product h * SiLU(gate), of a feed-forward network with LoRA of rank 16 (ops/gated/feed_forward), and
// the matrix product of the unit with the LoRA factor A of the linear map that reads the unit. The matrix product costs almost nothing
// while the unit is in registers; a separate kernel would have to read the unit from memory.
//
// A warp has sixteen rows and goes over the columns of its block, 32 at a time. include/low_rank.cuh describes the low-rank products and
// their fragments. g is lane / 4, t is lane % 4, and RANKS is the rank, 16. The index `matrix` is 0 for h, 1 for gate.
#include "functions.cuh"
#include "low_rank.cuh"
#include "rows.cuh"

namespace {

// COLUMNS: the number of columns that a warp works on at a time. TILE: the number of rows of a warp.
constexpr int WARPS = 8, COLUMNS = 32, TILE = 16;

// A thread's values of two rows: eight columns of each.
struct Values {
    uint4 rows[2];

    // Columns 2 i and 2 i + 1 (of the eight) of row `row` (0 or 1).
    __device__ __forceinline__ uint32_t word(int row, int i) const { return (&rows[row].x)[i]; }
};

// The kernel's arguments (see DEFINE_FORWARD), and the place of this thread: `first` is the first row of the warp, `last` the last row of
// x. A thread has the rows g + 8 half of the warp (`half` is 0 or 1), and the columns 8 t to 8 t + 7 of each 32.
template <typename T> struct Warp {
    const T *x, *hidden, *up[2], *down;
    T *unit;
    float scales[2];
    uint32_t width, first, last;
    int g, t;

    // Rows beyond the last one load the last row, and are not written.
    __device__ __forceinline__ uint64_t row(int half) const {
        const uint32_t row = first + g + 8 * half;
        return row < last ? row : last;
    }

    // Loads this thread's values of h and gate in the 32 columns from `column` on.
    __device__ __forceinline__ void load(Values (&values)[2], uint32_t column) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int matrix = 0; matrix < 2; matrix++)
                values[matrix].rows[half] = words<uint4>(x + (2 * row(half) + matrix) * width + column + 8 * t);
    }

    // Loads the warp's rows of `hidden`, for h and for gate, as left operands of products. A thread has the ranks 4 t to 4 t + 3; load_up
    // loads the right operands in the same order of ranks. left[matrix][half] has the first two ranks of row g + 8 half,
    // left[matrix][2 + half] the other two.
    __device__ __forceinline__ void load_hidden(uint32_t (&left)[2][4]) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int matrix = 0; matrix < 2; matrix++) {
                const uint2 found = words<uint2>(hidden + row(half) * 2 * RANKS + matrix * RANKS + 4 * t);
                left[matrix][half] = found.x, left[matrix][2 + half] = found.y;
            }
    }

    // Computes 32 columns of the unit, from `column` on. results[half][i] is word i of row g + 8 half: columns 2 i and 2 i + 1 of the
    // thread's eight.
    __device__ __forceinline__ void compute(uint32_t (&results)[2][4], const Values (&values)[2], const uint32_t (&left)[2][4],
                                            uint32_t column) const {
        float products[2][4][4] = {};
#pragma unroll
        for (int matrix = 0; matrix < 2; matrix++) {
            uint32_t right[4][2];
            // `up` is stored as (width, RANKS), so `is_turned` is false and a row has RANKS elements; the first rank is 0.
            load_up<T, false>(right, up[matrix], RANKS, column, 0, g, t);
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_add<T>(products[matrix][i], left[matrix], right[i][0], right[i][1]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float found[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    // load_up gives product p every fourth of the 32 columns, from p on. Of each product, the thread gets two sums for each
                    // of its two rows: those of columns 8 t + p and 8 t + p + 4. So column j = 2 i + k of the thread's eight is in product
                    // j % 4, as sum j / 4 of the row.
                    const int product = 2 * (i % 2) + k, at = 2 * half + i / 2;
                    const auto value = [&](int matrix) {
                        const uint32_t word = values[matrix].word(half, i);
                        return widen(reinterpret_cast<const T *>(&word)[k]) + scales[matrix] * products[matrix][product][at];
                    };
                    found[k] = value(0) * Silu::value<T>(value(1));
                }
                results[half][i] = pair<T>(found[0], found[1]);
            }
    }

    // sums += unit down.T, summed over the 32 columns in `results`. Of each group of eight ranks, a thread has the sums of ranks 2 t and
    // 2 t + 1, for rows g and g + 8.
    __device__ __forceinline__ void sum_columns(float (&sums)[2][4], const uint32_t (&results)[2][4], uint32_t column) const {
#pragma unroll
        for (int group = 0; group < 2; group++) {
            const uint4 found = words<uint4>(down + static_cast<uint64_t>(8 * group + g) * width + column + 8 * t);
            // Each product sums over 16 of the 32 columns: `words_01` over words 0 and 1 of all threads, `words_23` over words 2 and 3.
            // `down` is loaded in the same order of columns.
            const uint32_t words_01[4] = {results[0][0], results[1][0], results[0][1], results[1][1]};
            const uint32_t words_23[4] = {results[0][2], results[1][2], results[0][3], results[1][3]};
            multiply_add<T>(sums[group], words_01, found.x, found.y);
            multiply_add<T>(sums[group], words_23, found.z, found.w);
        }
    }

    // Computes the unit's columns `begin` to `end` (exclusive), writes them unless `unit` is null, and adds their products to `sums`.
    __device__ __forceinline__ void run(float (&sums)[2][4], uint32_t begin, uint32_t end) const {
        uint32_t left[2][4];
        load_hidden(left);
        Values next[2];
        load(next, begin);
        for (uint32_t column = begin; column < end; column += COLUMNS) {
            const Values values[2] = {next[0], next[1]};
            if (column + COLUMNS < end) load(next, column + COLUMNS);
            uint32_t results[2][4];
            compute(results, values, left, column);
            sum_columns(sums, results, column);
            if (unit == nullptr) continue;
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (first + g + 8 * half <= last)
                    store_words(unit + row(half) * width + column + 8 * t,
                                make_uint4(results[half][0], results[half][1], results[half][2], results[half][3]));
        }
    }
};

template <typename T>
__device__ __forceinline__ void forward(Warp<T> warp, float *parts, uint32_t rows, uint32_t columns) {
    warp.first = (blockIdx.y * WARPS + threadIdx.x / WARP) * TILE;
    if (warp.first >= rows) return;
    warp.last = rows - 1, warp.g = threadIdx.x % WARP / 4, warp.t = threadIdx.x % 4;
    const uint32_t begin = blockIdx.x * columns, end = warp.width - begin < columns ? warp.width : begin + columns;
    float sums[2][4] = {};
    warp.run(sums, begin, end);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (warp.first + warp.g + 8 * half > warp.last) continue;
        float *to = parts + (static_cast<uint64_t>(blockIdx.x) * rows + warp.row(half)) * RANKS + 2 * warp.t;
#pragma unroll
        for (int group = 0; group < 2; group++)
            *reinterpret_cast<float2 *>(to + 8 * group) = make_float2(sums[group][2 * half], sums[group][2 * half + 1]);
    }
}

} // namespace

// A row of x (rows, 2 width) has the results of the maps to h, then to gate, without their low-rank products. A row of hidden
// (rows, 2 x 16) has the product of the maps' input with A of the map to h, then the product with A of the map to gate. up_h and up_gate
// (width, 16) are the factors B of these maps; scale_h and scale_gate multiply their low-rank products. down (16, width) is A of the map
// that reads the unit. The kernel writes unit (rows, width), unless it is null, and parts (ceil(width / columns), rows, 16), f32: the parts
// of unit down.T, each summed over `columns` columns.
// width and columns are multiples of 32; all addresses are multiples of 16 bytes.
// Launch: block 256, grid (ceil(width / columns), ceil(rows / 128)), no dynamic shared memory.
#define DEFINE_FORWARD(SUFFIX, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, 2) swiglu_feed_forward_unit_##SUFFIX(                    \
        const T *x, const T *hidden, const T *up_h, const T *up_gate, const T *down, T *unit, float *parts,            \
        float scale_h, float scale_gate, uint32_t rows, uint32_t width, uint32_t columns) {                            \
        follow();                                                                                                      \
        forward<T>({x, hidden, {up_h, up_gate}, down, unit, {scale_h, scale_gate}, width}, parts, rows, columns);      \
    }
DEFINE_FORWARD(f16, __half)
DEFINE_FORWARD(bf16, __nv_bfloat16)

// hidden (count) = the sum of its `number` parts, f32 (number, count); count is a multiple of 4. Unlike the argument `hidden` of the kernel
// above, this hidden is unit down.T, (rows, 16), from the parts that the kernel above writes.
// Thread i computes the elements 4 i to 4 i + 3.
// Launch: block 256, grid clamp(ceil(count / 1024), 1, 2^31 - 1), no dynamic shared memory. Any grid gives the same results.
#define DEFINE_HIDDEN(SUFFIX, T)                                                                                       \
    extern "C" __global__ void swiglu_feed_forward_hidden_##SUFFIX(const float *parts, T *hidden, uint64_t count,      \
                                                                   uint32_t number) {                                  \
        follow();                                                                                                      \
        for (uint64_t i = flat_index(); i < count / 4; i += flat_stride()) {                                           \
            float4 sum = {};                                                                                           \
            for (uint32_t part = 0; part < number; part++) {                                                           \
                const float4 found = words<float4>(parts + part * count + 4 * i);                                      \
                sum.x += found.x, sum.y += found.y, sum.z += found.z, sum.w += found.w;                                \
            }                                                                                                          \
            *reinterpret_cast<uint2 *>(hidden + 4 * i) = make_uint2(pair<T>(sum.x, sum.y), pair<T>(sum.z, sum.w));     \
        }                                                                                                              \
    }
DEFINE_HIDDEN(f16, __half)
DEFINE_HIDDEN(bf16, __nv_bfloat16)
