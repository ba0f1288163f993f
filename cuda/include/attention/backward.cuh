// The gradients of attention on tensor cores, from the log-sums of the forward pass (Dao 2023, arXiv:2307.08691). Scores are
// computed twice, once for the gradients of keys and values and once for those of queries, so that each block owns the sums that
// it writes: there are no atomics, and results are reproducible.
//
// With P = e^(scale q kᵀ - log_sum), dP = do vᵀ, delta = rowsum(do ∘ o) and dS = P ∘ (dP - delta):
// dv = Pᵀ do, dk = scale dSᵀ q, dq = scale dS k.
// The exponentials have base 2, so the kernels multiply `scale` and the log-sums by log2(e).
//
// Products and sums have the shape [M][N / 8][4] in each thread, for the 16 M rows of its warp and N columns. Element [m][n][i] is at
// row m * 16 + i / 2 * 8 + lane / 4 of the warp and at column n * 8 + lane % 4 * 2 + i % 2 (see mma.cuh). Values of rows, such as
// `row_delta`, have the shape [M][2], with i / 2 as the last index. With `wgmma`, products are asynchronous: `wait_for_products<n>` waits
// until at most the last n groups that `end_products` has ended still run. With `mma.sync`, there is nothing to wait for.
#pragma once

#include "mma.cuh"
#include "shape.cuh"

// One block computes the gradients of a tile of queries and loops over tiles of keys. It has `WARPS` warps with 16 `M` queries
// each. It copies `KEYS` keys at a time and works on `STEP` of them at a time. `Rows` is the class of the block's own rows (queries
// and gradients of the result), which are in registers or in shared memory. `VisibleKeys` tells which keys a query sees: `Dense` or, for
// packed rows, `Spans` (shape.cuh); `visible.group()` is the number of heads of queries that share a head of keys, 1 with `Dense`.
template <typename T, int D, int WARPS, int M, int KEYS, int STEP, template <int, int, int> class Rows, class VisibleKeys>
__device__ __forceinline__ void attention_backward_query(uint32_t block, const T *q, const T *k, const T *v, const T *d_o, const float *log_sums,
                                                         const float *delta, T *dq, const Strides &q_strides,
                                                         const Strides &k_strides, const Strides &v_strides,
                                                         const Strides &do_strides, const Strides &dq_strides,
                                                         const AttentionShape &shape, const VisibleKeys &visible) {
    // Shared memory has the tiles of queries and of their gradients, then two stages, which the steps of the loop use in turn. A stage of
    // `STAGE` bytes has a tile of keys, then a tile of values.
    constexpr int THREADS = WARPS * WARP, QUERIES = WARPS * 16 * M, STAGE = tile_bytes<D>(2 * KEYS);
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t query_tile = shared_address(shared), grad_tile = query_tile + tile_bytes<D>(QUERIES);
    const uint32_t stages = grad_tile + tile_bytes<D>(QUERIES);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    const uint32_t tiles = ceil_divide(shape.queries, QUERIES);
    const Task task(block, tiles, shape.heads);
    // The tile's first query. With a causal mask, the last tiles see the most keys, so they go to the blocks that start first.
    const uint32_t first = (shape.is_causal ? tiles - 1 - task.tile : task.tile) * QUERIES;
    const int rows = min(shape.queries - first, uint32_t(QUERIES));
    q = q_strides.matrix(q, task.batch, task.head) + first * q_strides.row;
    k = k_strides.matrix(k, task.batch, task.head / visible.group());
    v = v_strides.matrix(v, task.batch, task.head / visible.group());
    d_o = do_strides.matrix(d_o, task.batch, task.head) + first * do_strides.row;
    dq = dq_strides.matrix(dq, task.batch, task.head) + first * dq_strides.row;

    // The end (exclusive) of the keys that the causal mask lets some query of the tile see.
    const uint32_t seen = shape.is_causal ? min(shape.keys, first + QUERIES) : shape.keys;
    // Step i has the tile of keys i. The loop runs from step `begin` to `steps` (exclusive); the tiles before `begin` are not visible.
    const uint32_t begin = visible.first_key(first) / KEYS, steps = ceil_divide(seen, KEYS);
    // The last query of the tile does not see the keys below `floor`, so weights of these keys need the mask.
    const uint32_t floor = visible.first_key(first + rows - 1);
    const auto copy_keys = [&](uint32_t step) {
        const uint32_t key = step * KEYS, stage = stages + step % 2 * STAGE;
        copy_tile<T, D, KEYS, THREADS>(stage, k + key * k_strides.row, k_strides.row, shape.keys - key, shape.width);
        copy_tile<T, D, KEYS, THREADS>(stage + STAGE / 2, v + key * v_strides.row, v_strides.row, shape.keys - key, shape.width);
        end_copies();
    };
    copy_tile<T, D, QUERIES, THREADS>(query_tile, q, q_strides.row, rows, shape.width);
    copy_tile<T, D, QUERIES, THREADS>(grad_tile, d_o, do_strides.row, rows, shape.width);
    if (begin < steps) copy_keys(begin);
    end_copies(); // For the copies of the block's own rows if there is no step.

    const float scale = static_cast<float>(shape.scale), scale2 = scale * LOG2_E;
    // The number of the warp's queries that exist; 0 or less if none does.
    const int warp_rows = rows - warp * 16 * M;
    // The first key that each of the thread's queries sees.
    uint32_t lowest[M][2];
    first_keys(lowest, visible, first + warp * 16 * M + lane / 4);
    const uint64_t start = uint64_t(task.index) * shape.queries + first + warp * 16 * M;
    float log_sum[M][2], row_delta[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = m * 16 + r * 8 + lane / 4;
            log_sum[m][r] = row < warp_rows ? log_sums[start + row] * LOG2_E : 0.0f;
            row_delta[m][r] = row < warp_rows ? delta[start + row] : 0.0f;
        }
    wait_for_copies();
    Rows<D, M, QUERIES> queries(query_tile);
    Rows<D, M, QUERIES> grads(grad_tile);

    float sum[M][D / 8][4] = {};
    for (uint32_t step = begin; step < steps; step++) {
        wait_for_copies();
        if (step + 1 < steps) copy_keys(step + 1);
        const uint32_t stage = stages + step % 2 * STAGE;
        queries.begin_iteration(), grads.begin_iteration();
#pragma unroll
        for (int offset = 0; offset < KEYS; offset += STEP) {
            const uint32_t key_tile = stage + offset * ROW_BYTES, key = step * KEYS + offset;
            // (queries, keys): `p` is P; `ds` is first dP, then dS.
            float p[M][STEP / 8][4], ds[M][STEP / 8][4];
            begin_products();
            multiply_rows<T, D, M, STEP, KEYS>(p, queries, key_tile);
            end_products();
            multiply_rows<T, D, M, STEP, KEYS>(ds, grads, key_tile + STAGE / 2);
            end_products();
            wait_for_products<1>();
            products_are_ready(p);
            // Whether the mask hides some of these keys from some of the warp's queries.
            const bool hides = key + STEP > shape.keys || key < floor || (shape.is_causal && key + STEP > first + warp * 16 * M + 1);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        p[m][n][i] = fast_exp2(fmaf(p[m][n][i], scale2, -log_sum[m][i / 2]));
                        if (hides) {
                            const uint32_t query = first + warp * 16 * M + m * 16 + i / 2 * 8 + lane / 4;
                            const uint32_t limit = shape.is_causal ? min(shape.keys, query + 1) : shape.keys;
                            const uint32_t element_key = key + n * 8 + lane % 4 * 2 + i % 2;
                            if (element_key >= limit || (VisibleKeys::HAS_SPANS && element_key < lowest[m][i / 2])) p[m][n][i] = 0.0f;
                        }
                    }
            wait_for_products<0>();
            products_are_ready(ds);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - row_delta[m][i / 2]);
            const Weights<T, M, STEP> weights(ds);
            begin_products();
            add_weighted_rows<T, D, M, STEP, KEYS>(sum, weights, key_tile);
            end_products();
            wait_for_products<0>();
            products_are_ready(sum);
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int d = 0; d < D / 8; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][d][i] *= scale;
    // The last argument is memory that `write_rows` overwrites: the warp's rows of the query tile, which are no longer needed.
    write_rows<T, D, M, QUERIES>(dq + warp * 16 * M * dq_strides.row, dq_strides.row, warp_rows, shape.width, sum,
                        shared + warp * 16 * M * ROW_BYTES);
}

// Writes a warp's sums, which are those of `rows` keys or values from row `first` on. They go to `grad` or, if `partial` is not null, to
// part `part` of the partial sums (parts, heads, keys, width), where `heads` is the number of heads of keys in the whole batch.
// `write_rows` overwrites `tile`.
template <typename T, int D, int M, int ROWS>
__device__ __forceinline__ void write_key_rows(T *grad, const Strides &strides, float *partial, const Task &task, uint32_t part,
                                               uint32_t first, int rows, const float (&sum)[M][D / 8][4], unsigned char *tile,
                                               uint64_t heads, const AttentionShape &shape) {
    if (partial == nullptr) {
        write_rows<T, D, M, ROWS>(strides.matrix(grad, task.batch, task.head) + first * strides.row, strides.row, rows, shape.width, sum,
                            tile);
        return;
    }
    float *to = partial + ((part * heads + task.index) * shape.keys + first) * shape.width;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = m * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int d = 0; d < D / 8; d++) {
                const int column = d * 8 + lane % 4 * 2;
                if (row < rows && column < shape.width)
                    *reinterpret_cast<float2 *>(to + uint64_t(row) * shape.width + column) =
                        make_float2(sum[m][d][2 * half], sum[m][d][2 * half + 1]);
            }
        }
}

// One block computes the gradients of a tile of keys and values. It loops over a range of the tiles of queries or, with spans (packed
// rows), over a range of the heads of queries that share the keys. It has `WARPS` warps with 16 `M` keys each. It copies `QUERIES`
// queries at a time and works on `STEP` of them at a time. `Rows` is the class of the block's own rows (keys and values), which are
// in registers or in shared memory. Nothing is written for a gradient whose pointer (`dk` or `dv`) is null. Otherwise, if `dk_parts` or
// `dv_parts` is not null, it gets partial sums, and `dk` or `dv` is not written: `shape.parts` blocks share each tile.
template <typename T, int D, int WARPS, int M, int QUERIES, int STEP, template <int, int, int> class Rows, class VisibleKeys>
__device__ __forceinline__ void
attention_backward_key_value(uint32_t block, const T *q, const T *k, const T *v, const T *d_o, const float *log_sums, const float *delta, T *dk, T *dv,
                             float *dk_parts, float *dv_parts, const Strides &q_strides, const Strides &k_strides,
                             const Strides &v_strides, const Strides &do_strides, const Strides &dk_strides,
                             const Strides &dv_strides, const AttentionShape &shape, const VisibleKeys &visible) {
    constexpr int THREADS = WARPS * WARP, KEYS = WARPS * 16 * M;
    // As in `attention_backward_query`; here, a stage has a tile of queries, then the tile of their gradients.
    constexpr int STAGE = tile_bytes<D>(2 * QUERIES), NUMBERS = 2 * QUERIES * sizeof(float);
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t key_tile = shared_address(shared), value_tile = key_tile + tile_bytes<D>(KEYS);
    // `numbers` has, for each of the two stages, the log-sums and then the deltas of its queries.
    const uint32_t stages = value_tile + tile_bytes<D>(KEYS), numbers = stages + 2 * STAGE;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    const uint32_t tiles = ceil_divide(shape.keys, KEYS);
    const auto part_of = [&](uint32_t block) { return block % shape.parts; };
    const auto task_of = [&](uint32_t block) { return Task(block / shape.parts, tiles, shape.heads / visible.group()); };
    const uint32_t part = part_of(block);
    const Task task = task_of(block);
    const uint32_t first = task.tile * KEYS;
    const int rows = min(shape.keys - first, uint32_t(KEYS));
    k = k_strides.matrix(k, task.batch, task.head) + first * k_strides.row;
    v = v_strides.matrix(v, task.batch, task.head) + first * v_strides.row;

    // The parts of a gradient divide `units` among themselves: the heads of queries that share the keys or, without spans, the tiles of
    // queries. The block reads `heads` query heads from `head` on. For each head it reads the tiles of queries from `begin` to `end`.
    const uint32_t units = VisibleKeys::HAS_SPANS ? visible.group() : ceil_divide(shape.queries, QUERIES);
    const uint32_t per_part = ceil_divide(units, shape.parts), part_begin = part * per_part, part_end = min(units, part_begin + per_part);
    const uint32_t heads = !VisibleKeys::HAS_SPANS ? 1 : part_end > part_begin ? part_end - part_begin : 0;
    const uint32_t head = task.head * visible.group() + (VisibleKeys::HAS_SPANS ? part_begin : 0);
    // Queries from `ceiling` on do not see all keys of the tile, and queries from `query_end` on see none of them.
    const uint32_t ceiling = visible.query_end(first, shape), query_end = visible.query_end(first + rows - 1, shape);
    // With a causal mask, a key is visible to the queries from its position on.
    const uint32_t causal_begin = shape.is_causal ? first / QUERIES : 0;
    const uint32_t begin = VisibleKeys::HAS_SPANS ? causal_begin : max(part_begin, causal_begin);
    const uint32_t end = VisibleKeys::HAS_SPANS ? ceil_divide(query_end, QUERIES) : part_end;
    q = q_strides.matrix(q, task.batch, head);
    d_o = do_strides.matrix(d_o, task.batch, head);
    log_sums += (uint64_t(task.batch) * shape.heads + head) * shape.queries;
    delta += (uint64_t(task.batch) * shape.heads + head) * shape.queries;
    const uint32_t tiles_a_head = begin < end ? end - begin : 0, steps = heads * tiles_a_head;

    // The tile of queries that is copied next. After the last tile of a head come the tiles of the next head.
    uint32_t next = begin;
    const auto copy_queries = [&](uint32_t step) {
        const uint32_t query = next * QUERIES, stage = stages + step % 2 * STAGE;
        const int left = shape.queries - query;
        copy_tile<T, D, QUERIES, THREADS>(stage, q + query * q_strides.row, q_strides.row, left, shape.width);
        copy_tile<T, D, QUERIES, THREADS>(stage + STAGE / 2, d_o + query * do_strides.row, do_strides.row, left, shape.width);
        static_assert(2 * QUERIES <= THREADS, "one number per thread");
        if (threadIdx.x < 2 * QUERIES) {
            const int row = threadIdx.x % QUERIES;
            const float *from = threadIdx.x < QUERIES ? log_sums : delta;
            // Queries that do not exist get zeros, like their rows, so they add nothing.
            copy_word(numbers + step % 2 * NUMBERS + threadIdx.x * sizeof(float), row < left ? from + query + row : from,
                      row < left ? 4 : 0);
        }
        end_copies();
        next++;
        if (VisibleKeys::HAS_SPANS && next == end) {
            next = begin;
            q += q_strides.head, d_o += do_strides.head, log_sums += shape.queries, delta += shape.queries;
        }
    };
    copy_tile<T, D, KEYS, THREADS>(key_tile, k, k_strides.row, rows, shape.width);
    copy_tile<T, D, KEYS, THREADS>(value_tile, v, v_strides.row, rows, shape.width);
    if (steps > 0) copy_queries(0);
    end_copies(); // For the copies of the block's own rows if there is no step.
    wait_for_copies();
    Rows<D, M, KEYS> keys(key_tile);
    Rows<D, M, KEYS> values(value_tile);

    const float scale = static_cast<float>(shape.scale), scale2 = scale * LOG2_E;
    // The end (exclusive) of the queries that see each of the thread's keys.
    uint32_t ends[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) ends[m][r] = visible.query_end(first + warp * 16 * M + m * 16 + r * 8 + lane / 4, shape);
    float key_sum[M][D / 8][4] = {}, value_sum[M][D / 8][4] = {};
    uint32_t tile = begin;
    for (uint32_t step = 0; step < steps; step++) {
        wait_for_copies();
        if (step + 1 < steps) copy_queries(step + 1);
        const uint32_t stage = stages + step % 2 * STAGE;
        // `key_tile` is the address of `shared` in the shared window, so the difference is the offset of the numbers in bytes.
        const float *log_sum = reinterpret_cast<const float *>(shared + (numbers - key_tile) + step % 2 * NUMBERS);
        const float *deltas = log_sum + QUERIES;
        keys.begin_iteration(), values.begin_iteration();
#pragma unroll
        for (int offset = 0; offset < QUERIES; offset += STEP) {
            const uint32_t query_tile = stage + offset * ROW_BYTES, query = tile * QUERIES + offset;
            // Transposed, (keys, queries): `p` is P; `ds` is first dP, then dS.
            float p[M][STEP / 8][4], ds[M][STEP / 8][4];
            begin_products();
            multiply_rows<T, D, M, STEP, QUERIES>(p, keys, query_tile);
            end_products();
            multiply_rows<T, D, M, STEP, QUERIES>(ds, values, query_tile + STAGE / 2);
            end_products();
            wait_for_products<1>();
            products_are_ready(p);
            // Whether the mask hides some of the warp's keys from some of these queries. Keys and queries that do not exist need no
            // mask: the sums of such keys are not written, and the zero rows of such queries add nothing.
            const bool hides =
                shape.is_causal && (query < first + (warp + 1) * 16 * M || (VisibleKeys::HAS_SPANS && query + STEP > ceiling));
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const float2 log_sum_pair = *reinterpret_cast<const float2 *>(log_sum + offset + n * 8 + lane % 4 * 2);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        p[m][n][i] = fast_exp2(fmaf(p[m][n][i], scale2, (i % 2 ? log_sum_pair.y : log_sum_pair.x) * -LOG2_E));
                        if (hides) {
                            const uint32_t element_query = query + n * 8 + lane % 4 * 2 + i % 2;
                            const uint32_t element_key = first + warp * 16 * M + m * 16 + i / 2 * 8 + lane / 4;
                            if (element_query < element_key || (VisibleKeys::HAS_SPANS && element_query >= ends[m][i / 2]))
                                p[m][n][i] = 0.0f;
                        }
                    }
            }
            const Weights<T, M, STEP> weights(p);
            begin_products();
            add_weighted_rows<T, D, M, STEP, QUERIES>(value_sum, weights, query_tile + STAGE / 2);
            end_products();
            wait_for_products<1>();
            products_are_ready(ds);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const float2 delta_pair = *reinterpret_cast<const float2 *>(deltas + offset + n * 8 + lane % 4 * 2);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - (i % 2 ? delta_pair.y : delta_pair.x));
            }
            const Weights<T, M, STEP> grads(ds);
            begin_products();
            add_weighted_rows<T, D, M, STEP, QUERIES>(key_sum, grads, query_tile);
            end_products();
            wait_for_products<0>();
            products_are_ready(value_sum);
            products_are_ready(key_sum);
        }
        tile++;
        if (VisibleKeys::HAS_SPANS && tile == end) tile = begin;
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int d = 0; d < D / 8; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) key_sum[m][d][i] *= scale;
    const uint32_t warp_first = first + warp * 16 * M;
    const int warp_rows = rows - warp * 16 * M;
    // The warp's rows of the key tile, which are no longer needed: `write_rows` overwrites them.
    unsigned char *own_rows = shared + warp * 16 * M * ROW_BYTES;
    const uint64_t key_heads = uint64_t(shape.batch) * (shape.heads / visible.group());
    // The compiler must divide again (in `task_of` and `part_of`) instead of keeping the quotients in registers, of which the loop has
    // none to spare.
    asm volatile("" : "+r"(block));
    const auto write = [&](T *grad, const Strides &strides, float *parts, const float(&sum)[M][D / 8][4]) {
        write_key_rows<T, D, M, KEYS>(grad, strides, parts, task_of(block), part_of(block), warp_first, warp_rows, sum, own_rows, key_heads,
                                      shape);
    };
    if (dk != nullptr) write(dk, dk_strides, dk_parts, key_sum);
    __syncwarp();
    if (dv != nullptr) write(dv, dv_strides, dv_parts, value_sum);
}

// Sums the parts of a gradient of keys or values: (parts, batch, heads, keys, width) → (batch, heads, keys, width). Here
// `shape.heads` is the number of heads of keys. A thread sums four columns of a row: the width is a multiple of `CHUNK`, 8.
template <typename T>
__device__ __forceinline__ void attention_sum_parts(const float *parts, T *grad, const Strides &strides, const AttentionShape &shape) {
    const uint64_t count = uint64_t(shape.batch) * shape.heads * shape.keys * shape.width;
    const uint64_t start = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (start >= count || grad == nullptr) return;
    float4 sum = {};
    for (uint32_t part = 0; part < shape.parts; part++) {
        const float4 x = *reinterpret_cast<const float4 *>(parts + part * count + start);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const uint64_t row = start / shape.width, index = row / shape.keys;
    T *to = strides.matrix(grad, index / shape.heads, index % shape.heads) + row % shape.keys * strides.row + start % shape.width;
    store_words(to, make_uint2(pair<T>(sum.x, sum.y), pair<T>(sum.z, sum.w)));
}
