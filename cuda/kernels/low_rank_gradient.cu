// Gradients of the factors of low-rank maps: products of a wide and a narrow matrix over their rows, for many maps in one launch.
//
// Wide is an input or a gradient of a result, narrow has the values of sixteen ranks. Nearly all time goes into reading wide, so a block
// reads 64 of its columns, all rows, once.
#include "low_rank.cuh"

namespace {

constexpr int COLUMNS = 64, WARPS = 8, STEP = 16, THREADS = WARPS * WARP;
// A warp starts the loads of so many steps together.
constexpr int AT_ONCE = 2;
constexpr int MOST_PRODUCTS = 48;
// The distance between two ranks of a warp's sums in shared memory, in floats: not a multiple of the number of banks.
constexpr int SUM_ROW = COLUMNS + 4;

// sum[r · rank_step + c · column_step] += scale · Σ narrow[row, r] wide[row, c], for 16 ranks r. wide and narrow are `*_row` elements
// from row to row.
struct LowRankFactor {
    const void *wide, *narrow;
    float *sum;
    uint32_t rows, columns, wide_row, narrow_row, rank_step, column_step;
    float scale;
    uint32_t unused;
};

// The columns of all products follow one another: those of product i end at 64 `ends[i]`, rounded up for each product. Ends that are
// not used are the largest number. They lie together, because a block reads several of them to find its product.
struct LowRankFactors {
    uint32_t ends[MOST_PRODUCTS];
    LowRankFactor list[MOST_PRODUCTS];

    // The product that has the 64 columns `index`.
    __device__ __forceinline__ uint32_t find(uint32_t index) const {
        uint32_t found = 0;
#pragma unroll
        for (uint32_t step = 32; step > 0; step /= 2)
            if (found + step < MOST_PRODUCTS && index >= ends[found + step - 1]) found += step;
        return found;
    }
};

// Sixteen rows of a block's columns, and of the ranks. In the layout of PTX' `mma.m16n8k16` (attention/mma.cuh), with g = lane / 4 and
// t = lane % 4: a thread has the rows 4t to 4t + 3, of wide the columns 8g to 8g + 7, of narrow the ranks 2g and 2g + 1. Column n of
// product j is 8n + j, and rows g and g + 8 of a product are ranks 2g and 2g + 1.
template <typename T> struct Rows {
    uint4 wide[4];
    uint32_t narrow[4];

    __device__ __forceinline__ void load(const T *wide_at, const T *narrow_at, const LowRankFactor &product, uint32_t first,
                                         bool is_inside) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t row = first + i;
            const bool is_there = row < product.rows;
            wide[i] = is_there && is_inside ? words<uint4>(wide_at + static_cast<uint64_t>(row) * product.wide_row) : uint4{};
            narrow[i] = is_there ? words<uint32_t>(narrow_at + static_cast<uint64_t>(row) * product.narrow_row) : 0;
        }
    }

    __device__ __forceinline__ void multiply(float (&sums)[8][4]) const {
        const uint32_t left[4] = {low_halves(narrow[0], narrow[1]), high_halves(narrow[0], narrow[1]),
                                  low_halves(narrow[2], narrow[3]), high_halves(narrow[2], narrow[3])};
        const auto word = [&](int row, int i) { return i == 0 ? wide[row].x : i == 1 ? wide[row].y : i == 2 ? wide[row].z : wide[row].w; };
#pragma unroll
        for (int i = 0; i < 4; i++) {
            multiply_add<T>(sums[2 * i], left, low_halves(word(0, i), word(1, i)), low_halves(word(2, i), word(3, i)));
            multiply_add<T>(sums[2 * i + 1], left, high_halves(word(0, i), word(1, i)), high_halves(word(2, i), word(3, i)));
        }
    }
};

template <typename T> __device__ __forceinline__ void low_rank_gradient(const LowRankFactors &products) {
    __shared__ alignas(16) float parts[WARPS][STEP * SUM_ROW];
    const uint32_t found = products.find(blockIdx.x), begin = found == 0 ? 0 : products.ends[found - 1];
    const LowRankFactor &product = products.list[found];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const uint32_t first_column = (blockIdx.x - begin) * COLUMNS;
    const bool is_inside = first_column + 8 * g < product.columns;
    const T *wide = static_cast<const T *>(product.wide) + first_column + 8 * g;
    const T *narrow = static_cast<const T *>(product.narrow) + 2 * g;
    // Neighbouring threads have neighbouring sums, which they load early.
    constexpr int EACH = STEP * COLUMNS / THREADS;
    const bool by_rank = product.rank_step == 1;
    float *to[EACH], old[EACH];
    uint32_t from[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const uint32_t place = i * THREADS + threadIdx.x;
        const uint32_t rank = by_rank ? place % STEP : place / COLUMNS, column = by_rank ? place / STEP : place % COLUMNS;
        from[i] = rank * SUM_ROW + column;
        to[i] = first_column + column < product.columns ? product.sum + static_cast<uint64_t>(rank) * product.rank_step +
                                                              static_cast<uint64_t>(first_column + column) * product.column_step
                                                        : nullptr;
        if (to[i] != nullptr) old[i] = *to[i];
    }
    float sums[8][4] = {};
    for (uint32_t first = warp * STEP; first < product.rows; first += AT_ONCE * WARPS * STEP) {
        Rows<T> rows[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) rows[i].load(wide, narrow, product, first + i * WARPS * STEP + 4 * t, is_inside);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) rows[i].multiply(sums);
    }
#pragma unroll
    for (int pick = 0; pick < 2; pick++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int four = 0; four < 2; four++) {
                const int i = 2 * pick + n;
                *reinterpret_cast<float4 *>(parts[warp] + (2 * g + pick) * SUM_ROW + 8 * (2 * t + n) + 4 * four) =
                    make_float4(sums[4 * four][i], sums[4 * four + 1][i], sums[4 * four + 2][i], sums[4 * four + 3][i]);
            }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPS; part++) sum += parts[part][from[i]];
        if (to[i] != nullptr) *to[i] = old[i] + product.scale * sum;
    }
}

} // namespace

// The products of a list (LowRankFactor); no two have the same sum. columns, wide_row and narrow_row are multiples of 8. Addresses of wide
// and narrow are multiples of 16 bytes.
// Launch: block 256, grid (the end of the last product, where each has ceil(columns / 64) blocks), no dynamic shared memory.
#define DEFINE_GRADIENT(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) low_rank_gradient_##SUFFIX(                               \
        const __grid_constant__ LowRankFactors products) {                                                             \
        follow();                                                                                                      \
        low_rank_gradient<T>(products);                                                                                \
    }
DEFINE_GRADIENT(f16, __half)
DEFINE_GRADIENT(bf16, __nv_bfloat16)
