// The backward pass of y = W unit, where the unit is the elementwise product h * SiLU(gate), with LoRA of rank 16 on W, on the map to h
// and on the map to gate (ops/gated/feed_forward). One kernel reads the results of the maps to h and gate and the gradient of the unit
// once, and computes from them
// - the gradients of h and gate,
// - parts of the gradients of three LoRA factors (B of the maps to h and gate, A of W), each part summed over the rows of a block,
// - parts of the products of the gradients of h and gate with the maps' factors B, each part summed over the columns of a block.
// The unit itself, which the gradient of W's factor A needs, exists only in registers. A second kernel adds the parts in a fixed order.
//
// The products use PTX' `mma.m16n8k16`. A warp has 32 columns, and works on sixteen rows at a time. A thread has eight neighbouring columns
// of two of these rows. It loads and stores them at once, as four 32-bit words of two columns. Of a product's result (16 rows, 8 columns),
// a thread has four values: value 2 half + k is column 2 (lane % 4) + k of row lane / 4 + 8 half. Product i (0 to 3) computes word i of
// every thread, so column n of the product is column 8 (n / 2) + 2 i + n % 2 of the warp, with integer division. The words with the
// results serve as left operands of products that sum over columns and, after `turn`, as right operands of products that sum over rows.
//
// Indices: `matrix` is 0 for h, 1 for gate, 2 for the unit; `half` is 0 or 1 for row lane / 4 + 8 half of a tile of sixteen rows; `index`
// is the stage, 0 or 1, of the shared memory that holds a tile. In names, `last` stands for W.
#include "functions.cuh"
#include "low_rank.cuh"
#include "architecture.cuh"
#include "rows.cuh"

namespace {

constexpr int WARPS = 8, COLUMNS = 32;
// TILE: the number of rows that a warp works on at a time. ROWS: the number of rows of a block.
constexpr int TILE = 16;
constexpr uint32_t ROWS = 560;
// The matrices for which the kernel sums gradients of factors: h and gate (factors B of their maps) and the unit (factor A of W).
constexpr int MATRICES = 3;
// The bytes of a row of 16 ranks.
constexpr int ROW_OF_RANKS = RANKS * 2;

// Sizes in shared memory, in bytes, except that SUMS is a number of f32 values. A warp's tile of one matrix has a 16-byte chunk for each
// thread and each half (8 rows). HIDDEN is the size of the block's sixteen rows of hidden values for one matrix.
constexpr int TILE_OF_WARP = 2 * WARP * 16, FACTOR_OF_WARP = COLUMNS * ROW_OF_RANKS, HIDDEN = TILE * ROW_OF_RANKS;
constexpr int STAGE = MATRICES * (WARPS * TILE_OF_WARP + HIDDEN);
constexpr int SUMS = WARPS * TILE * 2 * RANKS;
constexpr int SHARED = MATRICES * WARPS * FACTOR_OF_WARP + 2 * STAGE + SUMS * 4;
static_assert(SHARED == 93184, "ops/gated/feed_forward/cuda.rs has this number");
// The number of blocks that a multiprocessor must have room for. On compute capability 9.0, its shared memory holds two.
constexpr int BLOCKS = ARCHITECTURE == 900 ? 2 : 1;

// Transposes a matrix of 8 x 8 values, of which a thread has two neighbouring values of row lane / 4, before and after.
__device__ __forceinline__ uint32_t turn(uint32_t values) {
    uint32_t turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(values));
    return turned;
}

// The offset, in bytes, of a 16-byte chunk of a row. Rows of 16 ranks have two chunks. Rows 8 n to 8 n + 7 store the same chunk in
// different banks.
__device__ __forceinline__ uint32_t ranks_offset(int row, int chunk) { return row * ROW_OF_RANKS + ((chunk ^ (row / 4 % 2)) << 4); }

// The column of a warp that belongs to row `row` of a factor in shared memory: rows 8 i to 8 i + 7 are the columns of product i.
__device__ __forceinline__ uint32_t column_of(int row) { return 8 * (row % 8 / 2) + 2 * (row / 8) + row % 2; }

// The arguments of the kernel `swiglu_feed_forward_backward`, described below.
template <typename T> struct BackwardArguments {
    const T *x, *grad;
    T *dx;
    const T *hidden, *last_hidden;
    const T *up[2], *last_down;
    float *factor_parts, *hidden_parts;
    float scales[2];
    uint32_t rows, width;
};

// The arguments, and the place of this thread: `column` is the first of its eight columns, `end` the end of the block's rows. `is_active`
// tells whether the warp has columns at all. Shared memory has the warps' factors, two stages (tiles of all warps, then hidden values),
// and the warps' sums.
template <typename T> struct Block : BackwardArguments<T> {
    unsigned char *shared;
    int lane, warp;
    uint32_t column, end;
    bool is_active;

    __device__ __forceinline__ uint32_t factor(int matrix) const {
        return shared_address(shared) + (warp * MATRICES + matrix) * FACTOR_OF_WARP;
    }
    __device__ __forceinline__ unsigned char *stage(int index) const {
        return shared + MATRICES * WARPS * FACTOR_OF_WARP + index * STAGE;
    }
    __device__ __forceinline__ uint4 *tile(int index, int matrix) const {
        return reinterpret_cast<uint4 *>(stage(index) + (warp * MATRICES + matrix) * TILE_OF_WARP) + lane;
    }
    __device__ __forceinline__ uint32_t ranks(int index, int matrix) const {
        return shared_address(stage(index)) + MATRICES * WARPS * TILE_OF_WARP + matrix * HIDDEN;
    }
    __device__ __forceinline__ float *sums() const {
        return reinterpret_cast<float *>(shared + MATRICES * WARPS * FACTOR_OF_WARP + 2 * STAGE);
    }

    // Copies the warp's columns of the factors to shared memory: B of h and gate as rows of ranks (one row per lane), A of W as right
    // operands of products.
    __device__ __forceinline__ void load_factors() const {
        if (!is_active) return;
        const uint32_t warp_column = column - 8 * (lane % 4);
#pragma unroll
        for (int matrix = 0; matrix < 2; matrix++)
#pragma unroll
            for (int chunk = 0; chunk < 2; chunk++) {
                const uint64_t at = static_cast<uint64_t>(warp_column + column_of(lane)) * RANKS + 8 * chunk;
                const uint4 found = words<uint4>(this->up[matrix] + at);
                *reinterpret_cast<uint4 *>(shared + (warp * MATRICES + matrix) * FACTOR_OF_WARP + ranks_offset(lane, chunk)) = found;
            }
        const T *down = this->last_down + warp_column;
        // Register k of the right operand of product i: two of the ranks 8 k to 8 k + 7.
        uint32_t fragments[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const T *at = down + static_cast<uint64_t>(8 * k + 2 * (lane % 4)) * this->width + column_of(8 * i + lane / 4);
                fragments[i][k] = pair<T>(widen(at[0]), widen(at[this->width]));
            }
        uint4 *to = reinterpret_cast<uint4 *>(shared + (warp * MATRICES + 2) * FACTOR_OF_WARP) + lane;
        to[0] = make_uint4(fragments[0][0], fragments[0][1], fragments[1][0], fragments[1][1]);
        to[WARP] = make_uint4(fragments[2][0], fragments[2][1], fragments[3][0], fragments[3][1]);
    }

    // Starts to copy the sixteen rows from `first` on to stage `index`: x and the gradient of the unit to the warps' tiles, and the hidden
    // values. Rows beyond the block's last row become zeros, which add nothing to any sum.
    __device__ __forceinline__ void start_copies(int index, uint32_t first) const {
        if (is_active) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t row = first + 8 * half + lane / 4;
                const int bytes = row < end ? 16 : 0;
                const uint64_t at = row < end ? row : end - 1;
                const T *x = this->x + at * 2 * this->width + column;
                copy_wide(shared_address(tile(index, 0) + half * WARP), x, bytes);
                copy_wide(shared_address(tile(index, 1) + half * WARP), x + this->width, bytes);
                copy_wide(shared_address(tile(index, 2) + half * WARP), this->grad + at * this->width + column, bytes);
            }
        }
        if (threadIdx.x < MATRICES * TILE * 2) {
            const int matrix = threadIdx.x / (2 * TILE), row = threadIdx.x / 2 % TILE, chunk = threadIdx.x % 2;
            const bool exists = first + row < end;
            const uint64_t at = exists ? first + row : end - 1;
            const T *from = matrix < 2 ? this->hidden + at * 2 * RANKS + matrix * RANKS : this->last_hidden + at * RANKS;
            copy_wide(ranks(index, matrix) + ranks_offset(row, chunk), from + 8 * chunk, exists ? 16 : 0);
        }
        end_copies();
    }

    // The gradients of h and of gate, and the unit: values[matrix][half][i] is word i. `compute` first loads its inputs to the same
    // places: h and gate without their low-rank products, and the gradient of the unit without its own.
    struct Results {
        uint32_t values[MATRICES][2][4];
    };

    __device__ __forceinline__ void compute(Results &results, int index) const {
        const int row = lane % 16, chunk = lane / 16;
        uint32_t left[MATRICES][4];
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
            load_matrices(left[matrix], ranks(index, matrix) + ranks_offset(row, chunk));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 found = tile(index, matrix)[half * WARP];
                results.values[matrix][half][0] = found.x, results.values[matrix][half][1] = found.y;
                results.values[matrix][half][2] = found.z, results.values[matrix][half][3] = found.w;
            }
        }
        // Products i and i + 1 (`next` is 0 or 1), whose right operands are loaded at once.
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            uint32_t right[MATRICES][4];
            load_matrices(right[0], factor(0) + factor_offset(i));
            load_matrices(right[1], factor(1) + factor_offset(i));
            const uint4 down = (reinterpret_cast<const uint4 *>(shared + (warp * MATRICES + 2) * FACTOR_OF_WARP) + lane)[i / 2 * WARP];
            right[2][0] = down.x, right[2][1] = down.y, right[2][2] = down.z, right[2][3] = down.w;
#pragma unroll
            for (int next = 0; next < 2; next++) {
                float products[MATRICES][4] = {};
#pragma unroll
                for (int matrix = 0; matrix < MATRICES; matrix++)
                    multiply_add<T>(products[matrix], left[matrix], right[matrix][2 * next], right[matrix][2 * next + 1]);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    // The results of the two columns of word i + next.
                    float found[MATRICES][2];
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        const auto value = [&](int matrix) {
                            return widen(reinterpret_cast<const T *>(&results.values[matrix][half][i + next])[k]);
                        };
                        const float h = value(0) + this->scales[0] * products[0][2 * half + k];
                        const float gate = value(1) + this->scales[1] * products[1][2 * half + k];
                        const float grad = value(2) + products[2][2 * half + k];
                        float activated, slope;
                        Silu::both<T>(gate, activated, slope);
                        found[0][k] = grad * activated, found[1][k] = grad * h * slope, found[2][k] = h * activated;
                    }
#pragma unroll
                    for (int matrix = 0; matrix < MATRICES; matrix++)
                        results.values[matrix][half][i + next] = pair<T>(found[matrix][0], found[matrix][1]);
                }
            }
        }
    }

    // The offset in a factor, in bytes, of the row whose address this lane passes to `ldmatrix`, which loads the four 8 x 8 matrices of
    // products `i` and `i + 1`: for product i, the ranks 0 to 7 and 8 to 15 of its eight rows, then the same for product i + 1.
    __device__ __forceinline__ uint32_t factor_offset(int i) const { return ranks_offset(8 * i + lane / 16 * 8 + lane % 8, lane / 8 % 2); }

    // Writes the gradients of h and gate to rows `first` + lane / 4 + 8 half of dx.
    __device__ __forceinline__ void store(const Results &results, uint32_t first) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t row = first + 8 * half + lane / 4;
            if (row >= end) continue;
            T *to = this->dx + static_cast<uint64_t>(row) * 2 * this->width + column;
            const auto &h = results.values[0][half], &gate = results.values[1][half];
            store_words(to, make_uint4(h[0], h[1], h[2], h[3]));
            store_words(to + this->width, make_uint4(gate[0], gate[1], gate[2], gate[3]));
        }
    }

    // The index in a warp's sums of group `group` of row `row`. A row has the 16 ranks of h, then those of gate, in four groups of eight.
    // Group g of row r is stored as group g ^ (r % 4), so that rows that a warp writes together are in different banks.
    __device__ __forceinline__ static uint32_t sum_at(int row, int group) { return row * 2 * RANKS + 8 * (group ^ row % 4); }

    // Writes the products of the gradients of h and gate with the factors B, summed over the warp's columns, to the warp's sums.
    __device__ __forceinline__ void sum_columns(const Results &results) const {
#pragma unroll
        for (int matrix = 0; matrix < 2; matrix++) {
            // found[0] has ranks 0 to 7, found[1] ranks 8 to 15.
            float found[2][4] = {};
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                // One `multiply_add` sums over the sixteen columns of products i and i + 1. For these, right[0] and right[2] have ranks 0
                // to 7, right[1] and right[3] ranks 8 to 15.
                const auto &values = results.values[matrix];
                const uint32_t left[4] = {values[0][i], values[1][i], values[0][i + 1], values[1][i + 1]};
                uint32_t right[4];
                load_transposed(right, factor(matrix) + factor_offset(i));
                multiply_add<T>(found[0], left, right[0], right[2]);
                multiply_add<T>(found[1], left, right[1], right[3]);
            }
#pragma unroll
            for (int group = 0; group < 2; group++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float *to = sums() + warp * TILE * 2 * RANKS + sum_at(lane / 4 + 8 * half, 2 * matrix + group) + 2 * (lane % 4);
                    *reinterpret_cast<float2 *>(to) = make_float2(found[group][2 * half], found[group][2 * half + 1]);
                }
        }
    }

    // Adds the sums of the block's `warps` active warps and writes the totals to the rows of `hidden_parts` from `first` on.
    __device__ __forceinline__ void write_hidden_parts(uint32_t first, int warps) const {
        static_assert(WARPS * WARP * 2 == TILE * 2 * RANKS, "a thread adds two sums");
        const int row = threadIdx.x / RANKS, at = threadIdx.x % RANKS * 2;
        const float *from = sums() + sum_at(row, at / 8) + at % 8;
        float2 sum = {};
        for (int other = 0; other < warps; other++) {
            const float2 found = *reinterpret_cast<const float2 *>(from + other * TILE * 2 * RANKS);
            sum.x += found.x, sum.y += found.y;
        }
        if (first + row >= end) return;
        float *to = this->hidden_parts + (static_cast<uint64_t>(blockIdx.x) * this->rows + first + row) * 2 * RANKS + at;
        *reinterpret_cast<float2 *>(to) = sum;
    }

    // A thread's sums for the gradients of the factors: [matrix][i][k] is for rank lane / 4 + 8 (k / 2) and column 2 i + k % 2 of the
    // thread's eight.
    using FactorSums = float[MATRICES][4][4];

    // sums += hidden.T @ (gradient of h or gate), and last_hidden.T @ unit for W. The products sum over the sixteen rows of stage `index`.
    __device__ __forceinline__ void sum_rows(FactorSums &sums, const Results &results, int index) const {
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
            uint32_t found[4];
            load_transposed(found, ranks(index, matrix) + ranks_offset(lane % 16, lane / 16));
            // `found` has ranks 0 to 7 of rows 0 to 7 and of rows 8 to 15, then ranks 8 to 15 of the same rows. In a left operand, here
            // with the ranks as its rows, left[1] is below left[0]: it has ranks 8 to 15 of rows 0 to 7.
            const uint32_t left[4] = {found[0], found[2], found[1], found[3]};
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_add<T>(sums[matrix][i], left, turn(results.values[matrix][0][i]), turn(results.values[matrix][1][i]));
        }
    }

    // Writes the sums to `factor_parts`, in the layouts of the factors: (width, 16) for h and gate, (16, width) for W.
    __device__ __forceinline__ void write_factor_parts(const FactorSums &sums) const {
        float *to = this->factor_parts + static_cast<uint64_t>(blockIdx.y) * MATRICES * RANKS * this->width;
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
            const bool is_last = matrix == 2;
            const uint32_t rank_stride = is_last ? this->width : 1, column_stride = is_last ? 1 : RANKS;
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    to[static_cast<uint64_t>(lane / 4 + k / 2 * 8) * rank_stride + (column + 2 * i + k % 2) * column_stride] =
                        sums[matrix][i][k];
            to += RANKS * this->width;
        }
    }

    // Computes the block's rows, which begin at row `begin`.
    __device__ __forceinline__ void run(uint32_t begin) const {
        const uint32_t columns_left = this->width - blockIdx.x * WARPS * COLUMNS;
        const int warps = columns_left < WARPS * COLUMNS ? columns_left / COLUMNS : WARPS;
        FactorSums sums = {};
        start_copies(0, begin);
        load_factors();
        int index = 0;
#pragma unroll 1
        for (uint32_t first = begin; first < end; first += TILE, index ^= 1) {
            // This also waits for all threads of the block: they have read the other stage and the previous sums.
            wait_for_copies();
            if (first + TILE < end) start_copies(index ^ 1, first + TILE);
            if (is_active) {
                Results results;
                compute(results, index);
                store(results, first);
                sum_columns(results);
                sum_rows(sums, results, index);
            }
            __syncthreads();
            write_hidden_parts(first, warps);
        }
        if (is_active) write_factor_parts(sums);
    }
};

template <typename T> __device__ __forceinline__ void backward(const BackwardArguments<T> &arguments) {
    extern __shared__ __align__(16) unsigned char shared[];
    Block<T> block{arguments};
    block.shared = shared, block.lane = threadIdx.x % WARP, block.warp = threadIdx.x / WARP;
    const uint32_t warp_column = (blockIdx.x * WARPS + block.warp) * COLUMNS, begin = blockIdx.y * ROWS;
    block.column = warp_column + 8 * (block.lane % 4), block.is_active = warp_column < arguments.width;
    block.end = arguments.rows - begin < ROWS ? arguments.rows : begin + ROWS;
    block.run(begin);
}

__device__ __forceinline__ void add(float4 &sum, const float4 &other) {
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// The sum of four neighbouring values over `count` parts, which are `distance` values apart.
__device__ __forceinline__ float4 sum_of(const float *parts, uint32_t count, uint64_t distance) {
    float4 sum = {};
#pragma unroll 8
    for (uint32_t i = 0; i < count; i++) add(sum, words<float4>(parts + i * distance));
    return sum;
}

} // namespace

// A row of x (rows, 2 width) has the results of the maps to h, then to gate, without their low-rank products; dx, of the same shape,
// becomes the gradients of h and gate. grad (rows, width) is the gradient of the unit without the low-rank product last_hidden last_down,
// which the kernel adds. A row of hidden (rows, 2 x 16) has the product of the maps' input with A of the map to h, then the product with A
// of the map to gate. last_hidden (rows, 16) is the gradient of the product of the unit with A of W: the gradient of y times B of W, times
// W's LoRA scale. up_h and up_gate (width, 16) are the factors B of the maps to h and gate; last_down (16, width) is A of W.
// factor_parts, f32 (ceil(rows / 560), 3, 16 width), become the parts of the gradients of up_h, up_gate and last_down. hidden_parts, f32
// (ceil(width / 256), rows, 2 x 16), become the parts of the gradient of hidden. The kernel multiplies the low-rank products of h and gate
// by scale_h and scale_gate, but not the parts: the second kernel does.
// width is a multiple of 32; all addresses are multiples of 16 bytes.
// Launch: block 256, grid (ceil(width / 256), ceil(rows / 560)), 93184 bytes of dynamic shared memory.
#define DEFINE_BACKWARD(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP, BLOCKS) swiglu_feed_forward_backward_##SUFFIX(           \
        const T *x, const T *grad, T *dx, const T *hidden, const T *last_hidden, const T *up_h, const T *up_gate,      \
        const T *last_down, float *factor_parts, float *hidden_parts, float scale_h, float scale_gate, uint32_t rows,  \
        uint32_t width) {                                                                                              \
        follow();                                                                                                      \
        backward<T>({x, grad, dx, hidden, last_hidden, {up_h, up_gate}, last_down, factor_parts, hidden_parts,         \
                     {scale_h, scale_gate}, rows, width});                                                             \
    }
DEFINE_BACKWARD(f16, __half)
DEFINE_BACKWARD(bf16, __nv_bfloat16)

// Adds the parts that `swiglu_feed_forward_backward` wrote. Here up_h, up_gate and last_down, all f32, are the buffers of the factors'
// gradients: the kernel adds to them. grad_hidden (rows, 2 x 16) = the gradient of hidden. The sums for h and gate are multiplied by
// scale_h and scale_gate. A thread adds four neighbouring values at a time: `i` counts these groups of four, first those of the factors,
// then those of grad_hidden.
// Launch: block 256, grid clamp(ceil((12 width + 8 rows) / 256), 1, 2^31 - 1), no dynamic shared memory. Any grid gives the same results.
#define DEFINE_SUMS(SUFFIX, T)                                                                                         \
    extern "C" __global__ void swiglu_feed_forward_sums_##SUFFIX(                                                      \
        const float *factor_parts, const float *hidden_parts, float *up_h, float *up_gate, float *last_down,           \
        T *grad_hidden, float scale_h, float scale_gate, uint32_t rows, uint32_t width) {                              \
        follow();                                                                                                      \
        const uint64_t of_factor = RANKS / 4 * width, of_factors = MATRICES * of_factor;                               \
        const uint32_t row_blocks = (rows + ROWS - 1) / ROWS, column_blocks = (width + 255) / 256;                     \
        for (uint64_t i = flat_index(); i < of_factors + 2 * RANKS / 4 * static_cast<uint64_t>(rows);                  \
             i += flat_stride()) {                                                                                     \
            if (i < of_factors) {                                                                                      \
                float4 sum = sum_of(factor_parts + 4 * i, row_blocks, 4 * of_factors);                                 \
                const uint32_t matrix = i / of_factor;                                                                 \
                const float scale = matrix == 0 ? scale_h : matrix == 1 ? scale_gate : 1.0f;                           \
                float4 *to = reinterpret_cast<float4 *>(matrix == 0 ? up_h : matrix == 1 ? up_gate : last_down) +      \
                             i % of_factor;                                                                            \
                const float4 old = *to;                                                                                \
                *to = make_float4(old.x + scale * sum.x, old.y + scale * sum.y, old.z + scale * sum.z,                 \
                                  old.w + scale * sum.w);                                                              \
            } else {                                                                                                   \
                const uint64_t at = i - of_factors;                                                                    \
                const float4 sum = sum_of(hidden_parts + 4 * at, column_blocks, 2 * RANKS * static_cast<uint64_t>(rows)); \
                const float scale = at % (2 * RANKS / 4) < RANKS / 4 ? scale_h : scale_gate;                           \
                *reinterpret_cast<uint2 *>(grad_hidden + 4 * at) =                                                     \
                    make_uint2(pair<T>(scale * sum.x, scale * sum.y), pair<T>(scale * sum.z, scale * sum.w));          \
            }                                                                                                          \
        }                                                                                                              \
    }
DEFINE_SUMS(f16, __half)
DEFINE_SUMS(bf16, __nv_bfloat16)
