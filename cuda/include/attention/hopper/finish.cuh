// The computations of the kernels that run before and after the main attention kernels for compute capability 9.0. Before the backward
// pass: the statistics of each query. After a pass: the sums of the parts of items that several blocks shared, and dq narrowed from its
// f32 sums. An item is a tile of queries (forward pass) or of keys (backward pass) of one head. It is split if several blocks computed it;
// then each of them has written a part in f32.
// In all templates, T is the dtype of the operands, and D (64 or 128) the width of a head, rounded up; `shape.width` is the width itself.
#pragma once

#include "backward.cuh"
#include "forward.cuh"

// Number of threads of a block of these kernels.
constexpr int FINISH_THREADS = 256;

// Writes eight values to global memory, narrowed to `T`.
template <typename T> __device__ __forceinline__ void write_eight(T *to, const float (&x)[8]) {
    store_words(to, make_uint4(pair<T>(x[0], x[1]), pair<T>(x[2], x[3]), pair<T>(x[4], x[5]), pair<T>(x[6], x[7])));
}
// Reads eight values, 16-byte aligned.
__device__ __forceinline__ void read_eight(float (&x)[8], const float *from) {
    const float4 a = reinterpret_cast<const float4 *>(from)[0], b = reinterpret_cast<const float4 *>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Computes the results and the log-sums of queries whose keys were divided among several blocks, from the parts that these blocks have
// written. A thread computes eight columns of a row, and a block computes `AT_ONCE` of the `ROWS` queries of an item. The first
// `schedule.whole` items are not split.
template <typename T, int D, int ROWS>
__device__ __forceinline__ void sum_results(T *o, float *log_sums, const float *parts, const Strides &o_strides,
                                            const AttentionShape &shape, const Schedule &schedule) {
    constexpr int AT_ONCE = FINISH_THREADS / (D / 8), BLOCKS_OF_ITEM = ROWS / AT_ONCE;
    const uint32_t item = schedule.whole + blockIdx.x / BLOCKS_OF_ITEM;
    const uint32_t row = blockIdx.x % BLOCKS_OF_ITEM * AT_ONCE + threadIdx.x / (D / 8);
    const uint32_t column = threadIdx.x % (D / 8) * 8;
    const Task task(item, ceil_divide(shape.queries, ROWS), shape.heads);
    const uint32_t query = task.tile * ROWS + row;
    if (query >= shape.queries) return;
    // Blocks `first` to `first + count - 1` of the attention kernel have each written a part of the item.
    uint32_t count;
    const uint32_t first = schedule.first_block(item, count);
    // A part has the sums of weights of all rows, then the bases of all rows, then the rows of results before their division by the sums
    // (HopperForward::finish). A weight is 2^(score * scale / ln 2 - base); each part has its own base, near its largest exponent. So the
    // parts of a row are added after they are brought to one base, the largest.
    const auto part = [&](uint32_t i) { return parts + uint64_t(schedule.slot(item, first + i)) * (ROWS * (D + 2)); };
    float base = -INFINITY, sum = 0.0f, result[8] = {};
    for (uint32_t i = 0; i < count; i++) base = fmaxf(base, part(i)[ROWS + row]);
    for (uint32_t i = 0; i < count; i++) {
        const float *from = part(i), factor = fast_exp2(from[ROWS + row] - base);
        float x[8];
        read_eight(x, from + 2 * ROWS + row * D + column);
        sum += factor * from[row];
#pragma unroll
        for (int j = 0; j < 8; j++) result[j] += factor * x[j];
    }
    if (column == 0) log_sums[uint64_t(task.index) * shape.queries + query] = base * LN_2 + logf(sum);
    if (column >= shape.width) return;
#pragma unroll
    for (int j = 0; j < 8; j++) result[j] /= sum;
    write_eight(o_strides.matrix(o, task.batch, task.head) + query * o_strides.row + column, result);
}

// Writes the statistics of the M queries of tile `block`; `block` counts the tiles of all batches and heads. First come log_sums / ln 2 of
// all M queries, then delta of all M queries. Delta is the sum of o ∘ d_o over the columns. In rows beyond the last query, log_sums / ln 2
// is infinity, so that the attention weights are zero, and delta is zero. Also sets the tile's entry of `turns` to zero;
// the backward pass counts the additions to the tile's dq there.
template <typename T, int D, int M>
__device__ __forceinline__ void backward_statistics(uint32_t block, const T *o, const T *d_o, const float *log_sums, float *statistics,
                                                    uint32_t *turns, const Strides &o_strides, const Strides &do_strides,
                                                    const AttentionShape &shape) {
    constexpr int LANES = D / 8, AT_ONCE = FINISH_THREADS / LANES;
    const Task task(block, ceil_divide(shape.queries, M), shape.heads);
    const uint32_t column = threadIdx.x % LANES * 8;
    if (threadIdx.x == 0) turns[block] = 0;
    o = o_strides.matrix(o, task.batch, task.head) + column;
    d_o = do_strides.matrix(d_o, task.batch, task.head) + column;
    // Eight columns of o and of d_o, for each row of this thread.
    Pack<T, 8> x[M / AT_ONCE] = {}, y[M / AT_ONCE] = {};
#pragma unroll
    for (int i = 0; i < M / AT_ONCE; i++) {
        const uint32_t query = task.tile * M + i * AT_ONCE + threadIdx.x / LANES;
        if (query < shape.queries && column < shape.width) {
            x[i] = *reinterpret_cast<const Pack<T, 8> *>(o + query * o_strides.row);
            y[i] = *reinterpret_cast<const Pack<T, 8> *>(d_o + query * do_strides.row);
        }
    }
    statistics += uint64_t(block) * 2 * M;
#pragma unroll
    for (int i = 0; i < M / AT_ONCE; i++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) sum += widen(x[i].values[j]) * widen(y[i].values[j]);
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        const uint32_t row = i * AT_ONCE + threadIdx.x / LANES, query = task.tile * M + row;
        if (column == 0) {
            statistics[row] =
                query < shape.queries ? log_sums[uint64_t(task.index) * shape.queries + query] * LOG2_E : INFINITY;
            statistics[M + row] = query < shape.queries ? sum : 0.0f;
        }
    }
}

// Writes dq from its sums in f32, which lack the factor `shape.scale`, and dk and dv of split items from their parts. Each of the first
// blocks takes a tile of M queries; each block after them takes 2048 values (eight for each thread) of dk or dv of one split item. An item
// is a tile of KEYS_AT_ONCE keys. Gradients that are null are not written.
template <typename T, int D, int M, typename Order>
__device__ __forceinline__ void backward_finish(const float *sums, const float *parts, T *dq, T *dk, T *dv, const Strides &dq_strides,
                                                const Strides &dk_strides, const Strides &dv_strides, const AttentionShape &shape,
                                                const Order &order) {
    const uint32_t tiles = ceil_divide(shape.queries, M) * shape.batch * shape.heads;
    float x[8];
    if (blockIdx.x < tiles) {
        if (dq == nullptr) return;
        const Task task(blockIdx.x, ceil_divide(shape.queries, M), shape.heads);
        dq = dq_strides.matrix(dq, task.batch, task.head);
        const float scale = static_cast<float>(shape.scale);
        // The sums of a tile are two arrays of 64 queries x 64 columns: one for each half of the queries if D = 64 (M = 128), one for
        // each half of the columns if D = 128 (M = 64). An array has eight columns of all 64 queries, then the next eight columns.
        constexpr int ARRAY = 64 * 64;
        sums += uint64_t(blockIdx.x) * 2 * ARRAY;
#pragma unroll
        for (int i = 0; i < 2 * ARRAY / 8 / FINISH_THREADS; i++) {
            const uint32_t index = i * FINISH_THREADS + threadIdx.x, row = index / (D / 8), eight = index % (D / 8);
            const uint32_t half = D == 64 ? row / 64 : eight / 8;
            const uint32_t query = task.tile * M + row;
            read_eight(x, sums + half * ARRAY + (eight % 8 * 64 + row % 64) * 8);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] *= scale;
            if (query < shape.queries && eight * 8 < shape.width) write_eight(dq + query * dq_strides.row + eight * 8, x);
        }
        return;
    }
    // Number of blocks for dk of an item; dv takes as many, and they follow those of dk.
    constexpr uint32_t EACH = KEYS_AT_ONCE * D / 8 / FINISH_THREADS;
    const uint32_t index = blockIdx.x - tiles, is_dv = index / EACH % 2;
    T *to = is_dv ? dv : dk;
    SplitItem split;
    // `order.split` sets `split` to the split item of this block and the number of its parts. It returns false if this index has none.
    if (to == nullptr || !order.split(index / (2 * EACH), split)) return;
    const Strides &strides = is_dv ? dv_strides : dk_strides;
    const Task task = order.keys(split.item);
    // Among the groups of eight values of dk or dv, the one that this thread computes.
    const uint32_t eight = index % EACH * FINISH_THREADS + threadIdx.x, row = eight / (D / 8), column = eight % (D / 8) * 8;
    const uint32_t key = task.tile * KEYS_AT_ONCE + row;
    if (key >= shape.keys || column >= shape.width) return;
    float sum[8] = {};
    // A part has dk, then dv.
    for (uint32_t i = 0; i < split.count; i++) {
        read_eight(x, parts + (uint64_t(order.slot(split, i)) * 2 + is_dv) * (KEYS_AT_ONCE * D) + eight * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    write_eight(strides.matrix(to, task.batch, task.head) + key * strides.row + column, sum);
}
