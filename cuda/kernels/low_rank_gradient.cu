// Gradients of the factors of low-rank maps, for many maps in one launch. A gradient is the product narrowᵀ · wide of two matrices with
// the same number of rows.
//
// `narrow` has 16 columns, one for each of 16 ranks. For the gradient of a map's first factor A, `wide` is the map's input x, and `narrow`
// is the gradient of x Aᵀ. For the gradient of the second factor, `wide` is the gradient of the map's result, and `narrow` is x Aᵀ. Nearly
// all time is spent reading `wide`, so each block reads all rows of 64 columns of `wide`, and no other block reads them.
#include "low_rank.cuh"

namespace {

// A block handles COLUMNS columns of wide. STEP is the number of rows in a step of a warp, and also the number of ranks.
constexpr int COLUMNS = 64, WARPS = 8, STEP = 16, THREADS = WARPS * WARP;
// The number of steps whose loads a warp starts together.
constexpr int AT_ONCE = 2;
// The largest number of factors in a launch, each with a product of its own.
constexpr int MOST_FACTORS = 48;
// The distance between neighbouring ranks of a warp's sums in shared memory, in floats. It is not a multiple of the number of banks, which
// avoids bank conflicts.
constexpr int SUM_ROW = COLUMNS + 4;

// One product: sum[r · rank_step + c · column_step] += scale · Σ_row narrow[row, r] · wide[row, c], for 16 ranks r and `columns` columns c.
// `*_row` is the distance in elements between the starts of two neighbouring rows of a matrix.
struct LowRankFactor {
    const void *wide, *narrow;
    float *sum;
    uint32_t rows, columns, wide_row, narrow_row, rank_step, column_step;
    float scale;
    uint32_t unused; // fills the structure up to a multiple of its alignment, 8 bytes
};

// Product i has ceil(columns / 64) blocks: from block ends[i - 1] (0 for i = 0) up to, but not including, block ends[i]. Unused `ends` are
// the largest uint32_t. `ends` is an array of its own, because a block reads several of its values to find the block's product.
struct LowRankFactors {
    uint32_t ends[MOST_FACTORS];
    LowRankFactor list[MOST_FACTORS];

    // The index of the product to which block `index` belongs: the number of `ends` that are at most `index`, by binary search.
    __device__ __forceinline__ uint32_t find(uint32_t index) const {
        uint32_t found = 0;
        // The first step is the largest power of two below MOST_FACTORS.
#pragma unroll
        for (uint32_t step = 32; step > 0; step /= 2)
            if (found + step < MOST_FACTORS && index >= ends[found + step - 1]) found += step;
        return found;
    }
};

// A warp's operands for 16 rows: the block's 64 columns of wide, and the 16 ranks of narrow. With g = lane / 4 and t = lane % 4, a thread
// holds in the rows 4t to 4t + 3 the columns 8g to 8g + 7 of wide and the ranks 2g and 2g + 1 of narrow. `multiply` runs PTX'
// `mma.m16n8k16` (layout: attention/mma.cuh) eight times. Column n of the result of mma j is the block's column 8n + j. Rows g and g + 8
// of a result are the ranks 2g and 2g + 1. PTX gives a thread the positions 2t, 2t + 1, 2t + 8 and 2t + 9 of the sum; here they stand for
// the rows 4t to 4t + 3, in both operands, which changes only the order of the terms.
template <typename T> struct Rows {
    uint4 wide[4];
    uint32_t narrow[4];

    // Loads four rows from row `first` on. Rows beyond the last one become zeros, and so does all of wide unless `is_inside`, which tells
    // whether the product has the thread's columns. The addresses are those of the thread's first column and first rank in row 0.
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

    // Adds the products of the warp's 16 rows to `sums`: sums[j] belongs to mma j. A word has two neighbouring ranks or columns of one row.
    // A register of an operand has two neighbouring rows of one rank or column: `low_halves` of two words gives the even rank or column,
    // `high_halves` the odd one.
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
    // Each thread adds to EACH elements of `product.sum`. Neighbouring threads add to neighbouring elements: to neighbouring ranks if
    // `by_rank`, otherwise to neighbouring columns. The old values are loaded here, so that the loads run during the products.
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
    // sums[j][2 · pick + n] belongs to the rank 2g + pick and to the block's column 8 (2t + n) + j. Each store has four of the eight j.
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

// Computes the products (LowRankFactor) of a list. The `sum`s of two products must not overlap. columns, wide_row and narrow_row must be
// multiples of 8. The addresses of wide and narrow must be multiples of 16 bytes.
// Launch: block 256, grid Σ ceil(columns / 64) over the products, which is the last product's value of `ends`, no dynamic shared memory.
#define DEFINE_GRADIENT(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) low_rank_gradient_##SUFFIX(                               \
        const __grid_constant__ LowRankFactors products) {                                                             \
        follow();                                                                                                      \
        low_rank_gradient<T>(products);                                                                                \
    }
DEFINE_GRADIENT(f16, __half)
DEFINE_GRADIENT(bf16, __nv_bfloat16)
