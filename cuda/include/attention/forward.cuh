// The forward pass of attention on tensor cores. The matrix of scores is never stored in global memory. Each query has a running maximum
// and sum (Milakov & Gimelshein 2018, arXiv:1805.02867), and one block computes the results of a tile of queries (Dao 2023,
// arXiv:2307.08691).
#pragma once

#include <cfloat>

#include "mma.cuh"
#include "shape.cuh"

// The softmax over the keys, for the 16 * M queries of a warp. A score is the product of a query row and a key row. Each thread has scores
// of 2 * M query rows, and four threads share each row. `scores[m][n][i]` belongs to query m * 16 + i / 2 * 8 and to key n * 8 + i % 2,
// counted from the thread's first query and key.
template <int M> struct RunningSoftmax {
    // For each query row, the largest score so far, times the factor `scale` of `weigh`.
    float base[M][2];
    // For each query row, the sum of the weights 2^(score * scale - base) over the keys whose scores this thread has.
    float sum[M][2];

    // `lowest` is the initial base, below all scaled scores. If all keys of the first call of `weigh` may be hidden from a row, as with
    // spans, `lowest` must be finite: all scores of the row are then negative infinity, and their difference from an infinite base would
    // be NaN. Without spans, the first call has a key that the row sees, so the base is finite in later calls.
    __device__ __forceinline__ explicit RunningSoftmax(float lowest) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) base[m][r] = lowest, sum[m][r] = 0.0f;
    }

    // Replaces scores by weights 2^(score * scale - base). `scale` is attention's scale divided by ln 2: the weights are powers of 2, not
    // of e. Returns whether a base of the warp was raised; if so, sets `correction`, by which the caller must multiply earlier results.
    template <int N>
    __device__ __forceinline__ bool weigh(float (&scores)[M][N][4], float (&correction)[M][2], float scale) {
        float top[M][2];
        bool raises = false;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = -INFINITY;
#pragma unroll
                for (int n = 0; n < N; n++) x = fmaxf(x, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
                x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
                x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
                top[m][r] = x * scale;
                raises |= top[m][r] > base[m][r];
            }
        raises = __any_sync(ALL_LANES, raises);
        if (raises) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float raised = fmaxf(base[m][r], top[m][r]);
                    correction[m][r] = fast_exp2(base[m][r] - raised);
                    base[m][r] = raised;
                    sum[m][r] *= correction[m][r];
                }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[m][n][i] = fast_exp2(fmaf(scores[m][n][i], scale, -base[m][i / 2]));
                    sum[m][i / 2] += scores[m][n][i];
                }
        return raises;
    }
};

// Multiplies each row of accumulators by the row's factor.
template <int M, int N> __device__ __forceinline__ void scale_rows(float (&rows)[M][N][4], const float (&factors)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) rows[m][n][i] *= factors[m][i / 2];
}

// Sets `keys` to the first key that each query of a thread sees. `query` is the thread's first query.
template <int M, class VisibleKeys>
__device__ __forceinline__ void first_keys(uint32_t (&keys)[M][2], const VisibleKeys &visible, uint32_t query) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) keys[m][r] = visible.first_key(query + m * 16 + r * 8);
}

// Sets scores to negative infinity for keys that do not exist, that come after their query if attention is causal, or, with spans, that
// come before the first key that their query sees (`first_seen`). The thread's first score is that of query `query` and key `key`.
template <class VisibleKeys, int M, int N>
__device__ __forceinline__ void hide(float (&scores)[M][N][4], uint32_t query, uint32_t key, const AttentionShape &shape,
                                     const uint32_t (&first_seen)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // The end (exclusive) of the keys that the query may see.
            const uint32_t seen = shape.is_causal ? min(shape.keys, query + m * 16 + i / 2 * 8 + 1) : shape.keys;
#pragma unroll
            for (int n = 0; n < N; n++)
                if (key + n * 8 + i % 2 >= seen || (VisibleKeys::HAS_SPANS && key + n * 8 + i % 2 < first_seen[m][i / 2]))
                    scores[m][n][i] = -INFINITY;
        }
}

// Computes the results and the log-sums of one tile of queries. A block has `WARPS` warps with 16 * M queries each. Shared memory holds the
// tile of queries and two stages, each with `KEYS` keys and their values: one stage is filled while the warps work on the other. Rows in
// shared memory have `D` columns, at least `shape.width`. `Rows` is the class of the queries' rows: `HeldRows` loads them into registers,
// `SharedRows` leaves them in shared memory. `VisibleKeys`, `Dense` or `Spans`, tells which keys a query sees; `group()` is the number of
// query heads that share a key head. With `BY_WARPGROUP<M>`, `wgmma` multiplies (compute capability 9.0); otherwise each warp does, with
// `mma.sync`. `wait_for_copies` is also a barrier of the block: after it, copies may overwrite what products before it have read.
template <typename T, int D, int WARPS, int M, int KEYS, template <int, int, int> class Rows, class VisibleKeys>
__device__ __forceinline__ void attention_forward(const T *q, const T *k, const T *v, T *o, float *log_sums, const Strides &q_strides,
                                                  const Strides &k_strides, const Strides &v_strides, const Strides &o_strides,
                                                  const AttentionShape &shape, const VisibleKeys &visible) {
    constexpr int THREADS = WARPS * WARP, QUERIES = WARPS * 16 * M, STAGE = tile_bytes<D>(2 * KEYS);
    // `wgmma` reads swizzled tiles in groups of eight rows of 128 bytes, which must be aligned to their size.
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t query_tile = shared_address(shared), stages = query_tile + tile_bytes<D>(QUERIES);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    const uint32_t tiles = ceil_divide(shape.queries, QUERIES);
    const Task task(blockIdx.x, tiles, shape.heads);
    // With a causal mask the last tiles have the most work, so they start first.
    const uint32_t first = (shape.is_causal ? tiles - 1 - task.tile : task.tile) * QUERIES;
    const int rows = min(shape.queries - first, uint32_t(QUERIES));
    q = q_strides.matrix(q, task.batch, task.head) + first * q_strides.row;
    k = k_strides.matrix(k, task.batch, task.head / visible.group());
    v = v_strides.matrix(v, task.batch, task.head / visible.group());
    o = o_strides.matrix(o, task.batch, task.head) + first * o_strides.row;

    // The end (exclusive) of the keys that some query of the tile may see.
    const uint32_t seen = shape.is_causal ? min(shape.keys, first + QUERIES) : shape.keys;
    // Each step works on `KEYS` keys. The steps run from `begin` to `steps` (exclusive).
    const uint32_t begin = visible.first_key(first) / KEYS, steps = ceil_divide(seen, KEYS);
    // The last query of the tile does not see the keys below `floor`, so scores of these keys need `hide`.
    const uint32_t floor = visible.first_key(first + rows - 1);
    // The first half of a stage has the keys, the second half the values.
    const auto copy_keys = [&](uint32_t step) {
        const uint32_t key = step * KEYS;
        copy_tile<T, D, KEYS, THREADS>(stages + step % 2 * STAGE, k + key * k_strides.row, k_strides.row, shape.keys - key,
                                       shape.width);
    };
    const auto copy_values = [&](uint32_t step) {
        const uint32_t key = step * KEYS;
        copy_tile<T, D, KEYS, THREADS>(stages + STAGE / 2 + step % 2 * STAGE, v + key * v_strides.row, v_strides.row,
                                       shape.keys - key, shape.width);
    };
    copy_tile<T, D, QUERIES, THREADS>(query_tile, q, q_strides.row, rows, shape.width);
    if (begin < steps) {
        copy_keys(begin);
        if constexpr (BY_WARPGROUP<M>) copy_values(begin);
    }
    end_copies();
    wait_for_copies();
    Rows<D, M, QUERIES> queries(query_tile);

    const float scale = static_cast<float>(shape.scale) * LOG2_E;
    const uint32_t query = first + warp * 16 * M + lane / 4;
    uint32_t first_seen[M][2];
    first_keys(first_seen, visible, query);
    RunningSoftmax<M> softmax(VisibleKeys::HAS_SPANS ? -FLT_MAX : -INFINITY);
    float result[M][D / 8][4] = {}, correction[M][2];
    const auto weigh = [&](float(&scores)[M][KEYS / 8][4], uint32_t step) {
        const uint32_t key = step * KEYS;
        // Some of the step's keys are hidden only if they reach beyond the last key, begin below `floor` or, with a causal mask, reach
        // beyond the warp's first query.
        if (key + KEYS > shape.keys || key < floor || (shape.is_causal && key + KEYS > first + warp * 16 * M + 1))
            hide<VisibleKeys>(scores, query, key + lane % 4 * 2, shape, first_seen);
        return softmax.weigh(scores, correction, scale);
    };
    if constexpr (BY_WARPGROUP<M>) {
        // Four warps multiply together (warpgroup.cuh). A block does not multiply while it computes weights; other blocks of the
        // multiprocessor then multiply.
        for (uint32_t step = begin; step < steps; step++) {
            if (step > begin) wait_for_copies();
            if (step + 1 < steps) copy_keys(step + 1), copy_values(step + 1);
            end_copies();
            float scores[M][KEYS / 8][4];
            queries.begin_iteration(); // if `Rows` is `HeldRows`, loads the queries again (warpgroup.cuh says why)
            begin_products();
            // The template arguments `KEYS, KEYS`: the keys to multiply, and the rows of the tile that they are in.
            multiply_rows<T, D, M, KEYS, KEYS>(scores, queries, stages + step % 2 * STAGE);
            end_products();
            wait_for_products<0>();
            products_are_ready(scores);
            if (weigh(scores, step)) scale_rows(result, correction);
            const Weights<T, M, KEYS> weights(scores);
            products_are_ready(result); // keeps the compiler from moving the scaling of `result` after this line
            begin_products();
            add_weighted_rows<T, D, M, KEYS, KEYS>(result, weights, stages + step % 2 * STAGE + STAGE / 2);
            end_products();
            wait_for_products<0>();
            products_are_ready(result);
        }
    } else if (begin < steps) {
        // In each iteration, a warp computes the scores of the next step together with the weighted sum of this step's values: the two
        // products are independent.
        copy_values(begin);
        if (begin + 1 < steps) copy_keys(begin + 1);
        end_copies();
        float scores[M][KEYS / 8][4];
        multiply_rows<T, D, M, KEYS, KEYS>(scores, queries, stages + begin % 2 * STAGE);
        uint32_t step = begin;
        for (; step + 1 < steps; step++) {
            if (weigh(scores, step)) scale_rows(result, correction);
            const Weights<T, M, KEYS> weights(scores);
            wait_for_copies();
            copy_values(step + 1);
            if (step + 2 < steps) copy_keys(step + 2);
            end_copies();
            multiply_rows<T, D, M, KEYS, KEYS>(scores, queries, stages + (step + 1) % 2 * STAGE);
            add_weighted_rows<T, D, M, KEYS, KEYS>(result, weights, stages + step % 2 * STAGE + STAGE / 2);
        }
        if (weigh(scores, step)) scale_rows(result, correction);
        const Weights<T, M, KEYS> weights(scores);
        wait_for_copies();
        add_weighted_rows<T, D, M, KEYS, KEYS>(result, weights, stages + step % 2 * STAGE + STAGE / 2);
    }

    // The number of the warp's queries that exist; 0 or less if none does.
    const int warp_rows = rows - warp * 16 * M;
    log_sums += uint64_t(task.index) * shape.queries + first + warp * 16 * M;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = softmax.sum[m][r];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const int row = m * 16 + r * 8 + lane / 4;
            if (lane % 4 == 0 && row < warp_rows) log_sums[row] = softmax.base[m][r] * LN_2 + logf(sum);
            // If no key is visible, the result is zero, not zero divided by zero.
            const float share = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
            for (int d = 0; d < D / 8; d++) result[m][d][2 * r] *= share, result[m][d][2 * r + 1] *= share;
        }
    // The results pass through shared memory: each warp overwrites its own rows of the tile of queries.
    write_rows<T, D, M, QUERIES>(o + warp * 16 * M * o_strides.row, o_strides.row, warp_rows, shape.width, result,
                        shared + warp * 16 * M * ROW_BYTES);
}
