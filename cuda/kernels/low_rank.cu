// Both low-rank products of adapted linear maps in one launch: hidden = scale_hidden · input · down, then
// dst += scale_dst · hidden · up.
//
// A block computes 16 rows of hidden, and a part of the columns of dst in these rows. To compute hidden, each warp sums over a part of the
// `inner` input features, and the block adds the warps' sums through shared memory. Then the warps divide the block's columns of dst among
// them. Blocks that compute other columns of the same rows compute the same hidden again. cuBLAS would need two launches, one for hidden
// and one for dst. At the sizes of one image, the start of these launches takes longer than their computation.
//
// include/low_rank.cuh describes the fragments of the products. In short, with g = lane / 4 and t = lane % 4, a thread has the rows g and
// g + 8 of the block (`half` 0 and 1), the features 8t to 8t + 7 of each 32 features, and the columns 8t to 8t + 7 of each 32 columns of
// dst. Of each tile of 16 ranks, it loads the ranks 2g and 2g + 1 of down, and gets the sums of the ranks 4t to 4t + 3 of hidden.
#include "architecture.cuh"
#include "low_rank.cuh"

namespace {

// The rows of a block.
constexpr int ROWS = 16;
// The input features, or the columns of dst, that a warp handles in one step.
constexpr int STEP = 32;
// The most linear maps (terms) of one launch.
constexpr int MOST_TERMS = 4;
// For hidden, a warp starts the loads of CHUNKS steps together; for dst, the loads of PIECES steps. At these sizes, nearly all time is
// spent waiting for memory.
constexpr int PIECES = 2;
template <int TILES> constexpr int CHUNKS = TILES == 1 ? 4 : 2;
// The number of warps of a block for TILES tiles of 16 ranks. A higher rank needs more registers in each thread, so fewer warps fit.
template <int TILES> constexpr int WARPS = TILES <= 2 ? 16 : 8;
// Whether the loads of dst start before hidden is computed. (The first loads of up always do.) This is false where the registers for dst
// would make the compiler spill others: for rank 32, and from compute capability 12.0 on in the backward pass of rank 16. (Blocks for
// rank 64 have half as many threads, so each thread may use more registers.)
template <int TILES, bool is_backward> constexpr bool LOADS_DST_EARLY = TILES == 1 ? ARCHITECTURE < 1200 || !is_backward : TILES != 2;

// The sizes of each of the `terms` terms: input is (rows, inner), hidden (rows, rank) and dst (rows, outer). `*_row` is the distance in
// elements between the starts of two neighbouring rows of a matrix.
struct LowRankSizes {
    uint32_t rows, inner, outer, terms;
    uint32_t input_row, hidden_row, dst_row, down_row, up_row;
    float scale_hidden, scale_dst;
};

// The matrices of one linear map: hidden = scale_hidden · input · down and dst += scale_dst · hidden · up.
struct LowRankTerm {
    const void *input, *down, *up;
    void *hidden, *dst;
};

struct LowRankTerms {
    LowRankTerm list[MOST_TERMS];
};

// Loads the right operands of the four matrix products of 32 input features with 16 ranks: those from `feature` and `rank` on. The indices
// of `b` are [rank % 2][the first or the last four of the thread's eight features][register]. `down` is stored as (inner, rank) if
// `is_transposed`, otherwise as (rank, inner), with rows `row` elements apart. `g` is the thread's lane / 4, and `t` is lane % 4.
template <typename T, bool is_transposed>
__device__ __forceinline__ void load_down(uint32_t (&b)[2][2][2], const T *down, uint32_t row, uint32_t feature, uint32_t rank,
                                          int g, int t) {
    if (is_transposed) {
        uint32_t pairs[8]; // the ranks 2g and 2g + 1 of each of the thread's eight features
#pragma unroll
        for (int i = 0; i < 8; i++)
            pairs[i] = words<uint32_t>(down + static_cast<uint64_t>(feature + 8 * t + i) * row + rank + 2 * g);
#pragma unroll
        for (int four = 0; four < 2; four++) // the first or the last four of the eight features
#pragma unroll
            for (int i = 0; i < 2; i++) {
                b[0][four][i] = low_halves(pairs[4 * four + 2 * i], pairs[4 * four + 2 * i + 1]);
                b[1][four][i] = high_halves(pairs[4 * four + 2 * i], pairs[4 * four + 2 * i + 1]);
            }
    } else {
#pragma unroll
        for (int pick = 0; pick < 2; pick++) {
            const uint4 found = words<uint4>(down + static_cast<uint64_t>(rank + 2 * g + pick) * row + feature + 8 * t);
            b[pick][0][0] = found.x, b[pick][0][1] = found.y, b[pick][1][0] = found.z, b[pick][1][1] = found.w;
        }
    }
}

// Computes one term's hidden for the block's rows. Writes it to shared memory (`hidden`, without gaps between rows) and, in the blocks
// with blockIdx.y = 0, to global memory (`term.hidden`). `parts` is shared memory for the sums of each warp: (warps, ROWS, rank).
template <typename T, int TILES, bool is_backward>
__device__ __forceinline__ void compute_hidden(const LowRankTerm &term, const LowRankSizes &sizes, float *parts, T *hidden) {
    constexpr int COUNT = TILES * RANKS; // the rank, which is the number of columns of hidden
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const uint32_t first_row = blockIdx.x * ROWS, last_row = sizes.rows - 1;
    const T *input = static_cast<const T *>(term.input), *down = static_cast<const T *>(term.down);
    // If the block has rows beyond the last row of input, its threads load the last row instead. The results of these rows are not written
    // to global memory.
    const T *rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t row = first_row + g + 8 * half;
        rows[half] = input + static_cast<uint64_t>(row < last_row ? row : last_row) * sizes.input_row + 8 * t;
    }
    // The indices are [tile of ranks][rank % 2][element of the thread's fragment].
    float sums[TILES][2][4] = {};
    for (uint32_t begin = warp * STEP; begin < sizes.inner; begin += CHUNKS<TILES> * WARPS<TILES> * STEP) {
        uint4 x[CHUNKS<TILES>][2] = {};
        uint32_t b[CHUNKS<TILES>][TILES][2][2][2] = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS<TILES>; chunk++) {
            const uint32_t feature = begin + chunk * WARPS<TILES> * STEP;
            if (feature >= sizes.inner) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) x[chunk][half] = words<uint4>(rows[half] + feature);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                load_down<T, is_backward>(b[chunk][tile], down, sizes.down_row, feature, tile * RANKS, g, t);
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS<TILES>; chunk++) {
            // The left operands of the two products that sum over the 32 features: a thread's first four features, then its last four.
            // The four registers are two features of row g, the same of row g + 8, then the next two features of both rows.
            const uint4 upper = x[chunk][0], lower = x[chunk][1];
            const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int pick = 0; pick < 2; pick++) {
                    const auto &right = b[chunk][tile][pick];
                    multiply_add<T>(sums[tile][pick], first, right[0][0], right[0][1]);
                    multiply_add<T>(sums[tile][pick], second, right[1][0], right[1][1]);
                }
        }
    }
    float *part = parts + warp * ROWS * COUNT;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto &s = sums[tile];
            // The sums of row g + 8 · half for the ranks 4t to 4t + 3 of the tile.
            const float4 ranks = make_float4(s[0][2 * half], s[1][2 * half], s[0][2 * half + 1], s[1][2 * half + 1]);
            *reinterpret_cast<float4 *>(part + (g + 8 * half) * COUNT + tile * RANKS + 4 * t) = ranks;
        }
    __syncthreads();
    for (uint32_t at = 2 * threadIdx.x; at < ROWS * COUNT; at += 2 * blockDim.x) {
        float2 sum = {};
#pragma unroll
        for (int other = 0; other < WARPS<TILES>; other++) {
            const float2 found = *reinterpret_cast<const float2 *>(parts + other * ROWS * COUNT + at);
            sum.x += found.x, sum.y += found.y;
        }
        const uint32_t values = pair<T>(sizes.scale_hidden * sum.x, sizes.scale_hidden * sum.y), row = first_row + at / COUNT;
        *reinterpret_cast<uint32_t *>(hidden + at) = values;
        if (blockIdx.y == 0 && row <= last_row) {
            T *to = static_cast<T *>(term.hidden) + static_cast<uint64_t>(row) * sizes.hidden_row + at % COUNT;
            *reinterpret_cast<uint32_t *>(to) = values;
        }
    }
    __syncthreads();
}

// Loads the block's rows of hidden from shared memory, as the left operands of the products with up.
template <typename T, int TILES> __device__ __forceinline__ void load_hidden(uint32_t (&left)[TILES][4], const T *hidden) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint2 found = *reinterpret_cast<const uint2 *>(hidden + (g + 8 * half) * TILES * RANKS + tile * RANKS + 4 * t);
            left[tile][half] = found.x, left[tile][2 + half] = found.y; // the ranks 4t and 4t + 1, 4t + 2 and 4t + 3
        }
}

// A thread's share of the values that its warp loads together: the block's rows of PIECES times 32 columns of dst, and the values of up
// for these columns.
template <typename T, int TILES, bool is_backward> struct Share {
    uint4 dst[PIECES][2];
    uint32_t up[PIECES][TILES][4][2];

    // The address of the eight neighbouring columns of dst that this thread has among the 32 columns from `column` on, in the upper (0) or
    // lower (1) half of the block's rows; null outside dst.
    __device__ __forceinline__ static T *address_of(void *dst, const LowRankSizes &sizes, uint32_t column, int half) {
        const int lane = threadIdx.x % WARP;
        const uint64_t row = blockIdx.x * ROWS + lane / 4 + 8 * half;
        return column < sizes.outer && row < sizes.rows ? static_cast<T *>(dst) + row * sizes.dst_row + column + 8 * (lane % 4) : nullptr;
    }

    // Loads the values of dst. Piece i begins at column begin + i · stride.
    __device__ __forceinline__ void load_dst(const LowRankTerm &term, const LowRankSizes &sizes, uint32_t begin, uint32_t stride) {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const uint32_t column = begin + piece * stride;
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (const T *at = address_of(term.dst, sizes, column, half)) dst[piece][half] = *reinterpret_cast<const uint4 *>(at);
        }
    }

    // Loads the values of the factor up for the same pieces.
    __device__ __forceinline__ void load_factor(const LowRankTerm &term, const LowRankSizes &sizes, uint32_t begin, uint32_t stride) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const uint32_t column = begin + piece * stride;
            if (column >= sizes.outer) continue;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                load_up<T, is_backward>(up[piece][tile], static_cast<const T *>(term.up), sizes.up_row, column, tile * RANKS, lane / 4,
                                        lane % 4);
        }
    }

    // Adds the products hidden · up of one term to `sums`.
    __device__ __forceinline__ void multiply(float (&sums)[PIECES][4][4], const T *hidden) const {
        uint32_t left[TILES][4];
        load_hidden<T, TILES>(left, hidden);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) multiply_add<T>(sums[piece][i], left[tile], up[piece][tile][i][0], up[piece][tile][i][1]);
    }

    // Stores dst + scale_dst · sums, with the `sums` of `multiply`. A thread stores eight neighbouring columns of a row. The sum for its
    // column c is in the result of the matrix product c % 4: there, element c / 4 is of row g, and element 2 + c / 4 of row g + 8.
    __device__ __forceinline__ void store(const float (&sums)[PIECES][4][4], void *to, const LowRankSizes &sizes,
                                          uint32_t begin, uint32_t stride) {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                T *at = address_of(to, sizes, begin + piece * stride, half);
                if (at == nullptr) continue;
                uint32_t *pairs = &dst[piece][half].x;
#pragma unroll
                for (int i = 0; i < 4; i++) { // the columns 2i and 2i + 1
                    const T *old = reinterpret_cast<const T *>(pairs + i);
                    const int from = 2 * half + i / 2;
                    pairs[i] = pair<T>(widen(old[0]) + sizes.scale_dst * sums[piece][2 * (i % 2)][from],
                                       widen(old[1]) + sizes.scale_dst * sums[piece][2 * (i % 2) + 1][from]);
                }
                store_words(at, dst[piece][half]);
            }
    }
};

// In the forward pass, each term has its own dst and its own blocks (blockIdx.z). down is the factor A, stored as (rank, inner), and up is
// the factor B, stored as (outer, rank).
// In the backward pass, input is the gradient of a map's result, and dst the gradient of the input that all maps share. So down is the B of
// the forward pass and up its A, and all terms add to the dst of the first term. down is stored as (inner, rank) and up as (rank, outer).
template <typename T, int TILES, bool is_backward>
__device__ __forceinline__ void low_rank(const LowRankTerms &terms, const LowRankSizes &sizes) {
    constexpr int HIDDEN_SIZE = ROWS * TILES * RANKS; // the number of elements of a block's rows of hidden
    __shared__ alignas(16) float parts[WARPS<TILES> * HIDDEN_SIZE];
    __shared__ alignas(16) T hidden[is_backward ? MOST_TERMS : 1][HIDDEN_SIZE];
    const LowRankTerm *list = terms.list + blockIdx.z;
    const uint32_t count = is_backward ? sizes.terms : 1, stride = gridDim.y * WARPS<TILES> * STEP;
    // The first column of the warp's next step. All warps of the blocks of these rows take `stride` columns together, STEP each.
    uint32_t begin = (blockIdx.y * WARPS<TILES> + threadIdx.x / WARP) * STEP;
    constexpr bool loads_early = LOADS_DST_EARLY<TILES, is_backward>;
    Share<T, TILES, is_backward> share;
    // These loads run while hidden is computed.
    if (loads_early) share.load_dst(list[0], sizes, begin, stride);
    share.load_factor(list[0], sizes, begin, stride);
#pragma unroll 1
    for (uint32_t i = 0; i < count; i++) compute_hidden<T, TILES, is_backward>(list[i], sizes, parts, hidden[i]);
    while (begin < sizes.outer) {
        if (!loads_early) share.load_dst(list[0], sizes, begin, stride);
        float sums[PIECES][4][4] = {};
        share.multiply(sums, hidden[0]);
#pragma unroll 1
        for (uint32_t i = 1; i < count; i++) {
            share.load_factor(list[i], sizes, begin, stride);
            share.multiply(sums, hidden[i]);
        }
        share.store(sums, list[0].dst, sizes, begin, stride);
        begin += PIECES * stride;
        if (begin < sizes.outer) {
            if (loads_early) share.load_dst(list[0], sizes, begin, stride);
            share.load_factor(list[0], sizes, begin, stride);
        }
    }
}

} // namespace

// hidden = scale_hidden · input · down and dst += scale_dst · hidden · up for up to four terms of the same sizes, where input is
// (rows, inner), hidden (rows, rank) and dst (rows, outer). inner and outer must be multiples of 32. The addresses of the matrices and the
// distances between their rows must be multiples of 16 bytes.
// Launch: block 512 (256 for rank 64); grid (ceil(rows / 16), n, terms) for the forward pass and (ceil(rows / 16), n, 1) for the
// backward pass, with any n: n blocks divide the columns of dst among them; no dynamic shared memory.
#define DEFINE_LOW_RANK(NAME, IS_BACKWARD, RANK, SUFFIX, T)                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS<RANK / RANKS> *WARP, 1)                                         \
        low_rank_##NAME##RANK##_##SUFFIX(const __grid_constant__ LowRankTerms terms,                                   \
                                         const __grid_constant__ LowRankSizes sizes) {                                 \
        follow();                                                                                                      \
        low_rank<T, RANK / RANKS, IS_BACKWARD>(terms, sizes);                                                          \
    }

#define DEFINE_RANKS(SUFFIX, T)                                                                                        \
    DEFINE_LOW_RANK(forward, false, 16, SUFFIX, T)                                                                     \
    DEFINE_LOW_RANK(forward, false, 32, SUFFIX, T)                                                                     \
    DEFINE_LOW_RANK(forward, false, 64, SUFFIX, T)                                                                     \
    DEFINE_LOW_RANK(backward, true, 16, SUFFIX, T)                                                                     \
    DEFINE_LOW_RANK(backward, true, 32, SUFFIX, T)                                                                     \
    DEFINE_LOW_RANK(backward, true, 64, SUFFIX, T)
DEFINE_RANKS(f16, __half)
DEFINE_RANKS(bf16, __nv_bfloat16)
