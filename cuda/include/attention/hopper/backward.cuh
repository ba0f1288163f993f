// The backward pass of attention with the matrix instructions and the copy engine of compute capability 9.0. A block works on a tile of 128
// keys (KEYS_AT_ONCE), 64 for each of its two groups of four warps, and loops over tiles of queries. One thread copies the tiles that the
// groups multiply. Three more warps, the adders, add to the gradients of queries. ../backward.cuh has the formulas, and defines P, dP and
// dS.
//
// The gradients of a tile of queries are sums over the tiles of keys that the queries see. Blocks add to these sums, which are f32 in
// memory, in an order that is known in advance: the order in which the blocks would reach the tile of queries if all steps took equally
// long. So a block waits only briefly for its turn. Because blocks wait for each other, all blocks of a launch must run at the same
// time. So a launch has at most one block for each multiprocessor, and all launches are in one stream, so that no two of them overlap.
#pragma once

#include "copies.cuh"
#include "order.cuh"

// T is the dtype, D the width of a head. A tile of queries has M rows: 128 for D = 64, 64 for D = 128. The template parameter `Order` gives
// the blocks their work: it is `::Order<M>` (order.cuh), or `Shares<M>` (shares.cuh) for packed rows. An item is a tile of keys of one
// head, with one step for each tile of queries that sees these keys. A span is the steps of an item that one block takes, from `begin` to
// `end` (exclusive); the block does `time` steps before them. If several blocks share an item, each writes its sums for dk and dv, a part,
// to the span's `slot` in `parts`; a later kernel adds the parts. A `Walk` goes through the block's spans, a `QueryCursor` through the
// tiles of queries of a span. A `Ring` is a thread's position in a ring of buffers: the stage (the buffer) in use, and the parity of the
// round, for waits at barriers. A reader waits for the phase `parity` of a FULL barrier. A writer waits for the phase `parity ^ 1` of an
// EMPTY barrier; in the first round it need not wait. A `Task` is a tile of one head: `index` is that of the head over (batch, heads),
// `tile` that of the tile in the head.
//
// A tile in shared memory consists of panels of 64 columns, one after another. A row of a panel has ROW_BYTES (128).
template <typename T, int D, int M, typename Order> struct HopperBackward {
    static constexpr int GROUPS = 2, THREADS = (GROUPS + 1) * WARPGROUP, QUERY_STAGES = 3, GRADIENT_STAGES = 2, ADDERS = 3;
    static constexpr int KEY_BYTES = tile_bytes<D>(KEYS_AT_ONCE), QUERY_BYTES = tile_bytes<D>(M), STATISTICS_BYTES = 2 * M * 4;
    // The statistics of a tile of queries are M log-sums, then M deltas. A tile of dS, the gradients of the scores, is transposed: it has
    // a row for each key. Each group has sums of dq for 64 queries and 64 columns, in f32.
    static constexpr int SCORE_BYTES = tile_bytes<M>(KEYS_AT_ONCE), SUM_BYTES = 64 * 64 * 4;
    // Offsets in shared memory.
    static constexpr int K = 0, V = K + KEY_BYTES, Q = V + KEY_BYTES, DO = Q + QUERY_STAGES * QUERY_BYTES,
                         DS = DO + GRADIENT_STAGES * QUERY_BYTES, DQ = DS + 2 * SCORE_BYTES, STATISTICS = DQ + GROUPS * SUM_BYTES,
                         BARRIERS = STATISTICS + QUERY_STAGES * STATISTICS_BYTES;
    // Barriers, of 8 bytes each. FULL: the data has arrived; EMPTY: the memory may be overwritten. There are two buffers for dS, used in
    // turn. There is one buffer for dq, but each adder has a barrier DQ_FULL of its own, on which it waits only in the steps that it takes.
    static constexpr int K_FULL = BARRIERS, V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8, DO_FULL = Q_FULL + QUERY_STAGES * 8,
                         KV_EMPTY = DO_FULL + GRADIENT_STAGES * 8, Q_EMPTY = KV_EMPTY + 8, DO_EMPTY = Q_EMPTY + QUERY_STAGES * 8,
                         DS_FULL = DO_EMPTY + GRADIENT_STAGES * 8, DQ_FULL = DS_FULL + 2 * 8, DQ_EMPTY = DQ_FULL + ADDERS * 8,
                         SHARED = DQ_EMPTY + 8;
    // Named barriers: one for both groups together, and the first of those for a group alone.
    static constexpr int TOGETHER = 1, ALONE = 2;

    const AttentionBackwardMaps &maps;
    const AttentionShape &shape;
    const Order &order;
    uint32_t shared;

    // The index of a tile of queries over (batch, heads, tiles).
    __device__ __forceinline__ uint32_t tile_index(const Task &queries) const {
        return queries.index * ceil_divide(shape.queries, M) + queries.tile;
    }

    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            // One thread fills the tiles and arrives once. Each group arrives once when it no longer needs a tile. All threads of the
            // groups write dS and dq. One adder at a time empties dq.
            for (int at = K_FULL; at < KV_EMPTY; at += 8) barrier_init(shared + at, 1);
            for (int at = KV_EMPTY; at < DS_FULL; at += 8) barrier_init(shared + at, GROUPS);
            for (int at = DS_FULL; at < DQ_EMPTY; at += 8) barrier_init(shared + at, GROUPS * WARPGROUP);
            barrier_init(shared + DQ_EMPTY, 1);
            barriers_publish();
        }
        __syncthreads();
    }

    // The work of the copying thread: loads the tiles of keys and values of each span, and the tiles of queries of each step.
    __device__ __forceinline__ void copy(const float *statistics) const {
        typename Order::Walk walk(order);
        Span span;
        Ring<1> item;
        Ring<QUERY_STAGES> q;
        Ring<GRADIENT_STAGES> d_o;
        while (walk.next(order, span)) {
            const Task keys = order.keys(span.item);
            typename Order::QueryCursor cursor(order, span, keys);
            for (uint32_t step = span.begin; step < span.end; step++, cursor.advance(order)) {
                const Task queries = cursor.queries(order, keys);
                const uint32_t q_full = shared + Q_FULL + q.stage * 8, do_full = shared + DO_FULL + d_o.stage * 8;
                barrier_wait(shared + Q_EMPTY + q.stage * 8, q.parity ^ 1);
                barrier_expect(q_full, QUERY_BYTES + STATISTICS_BYTES);
                fetch_rows<D, M, M>(shared + Q + q.stage * QUERY_BYTES, maps.q, q_full, queries.tile * M, queries);
                fetch_bytes(shared + STATISTICS + q.stage * STATISTICS_BYTES, statistics + uint64_t(tile_index(queries)) * (2 * M),
                            STATISTICS_BYTES, q_full);
                q.advance();
                if (step == span.begin) {
                    const uint32_t row = keys.tile * KEYS_AT_ONCE;
                    barrier_wait(shared + KV_EMPTY, item.parity ^ 1);
                    item.advance();
                    barrier_expect(shared + K_FULL, KEY_BYTES);
                    fetch_rows<D, KEYS_AT_ONCE, KEYS_AT_ONCE>(shared + K, maps.k, shared + K_FULL, row, keys);
                    barrier_expect(shared + V_FULL, KEY_BYTES);
                    fetch_rows<D, KEYS_AT_ONCE, KEYS_AT_ONCE>(shared + V, maps.v, shared + V_FULL, row, keys);
                }
                barrier_wait(shared + DO_EMPTY + d_o.stage * 8, d_o.parity ^ 1);
                barrier_expect(do_full, QUERY_BYTES);
                fetch_rows<D, M, M>(shared + DO + d_o.stage * QUERY_BYTES, maps.d_o, do_full, queries.tile * M, queries);
                d_o.advance();
            }
        }
    }

    // Adds the sums of the groups to the gradients of the queries when it is the block's turn. The block whose turn is first stores its
    // sums instead. `turns` counts the additions to each tile of queries, including that first one. The `ADDERS` warps take the steps in
    // rotation, because a warp waits until its addition is in memory, which takes longer than a step. `sums` has GROUPS * SUM_BYTES / 4 f32
    // values for each tile of queries.
    __device__ __forceinline__ void add(uint32_t adder, float *sums, uint32_t *turns) const {
        typename Order::Walk walk(order);
        Span span;
        // The number of steps of the block before this one, and the number before the next step that this adder takes.
        uint32_t steps_before = 0, before_own_step = adder, parity = 0;
        while (walk.next(order, span)) {
            const Task keys = order.keys(span.item);
            typename Order::QueryCursor cursor(order, span, keys);
            for (uint32_t step = span.begin; step < span.end; step++, steps_before++, cursor.advance(order)) {
                if (steps_before != before_own_step) continue;
                before_own_step += ADDERS;
                const uint32_t turn = order.turn(keys, cursor, span.time + step - span.begin);
                if (threadIdx.x % WARP == 0) {
                    const uint32_t index = tile_index(cursor.queries(order, keys));
                    float *const to = sums + uint64_t(index) * (GROUPS * SUM_BYTES / 4);
                    uint32_t additions;
                    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(additions) : "l"(turns + index) : "memory");
                    while (additions < turn);
                    barrier_wait(shared + DQ_FULL + adder * 8, parity);
                    // The copy engine, too, then sees what the groups wrote.
                    publish_to_products();
                    if (turn == 0)
                        store_bytes(to, shared + DQ, GROUPS * SUM_BYTES);
                    else
                        add_bytes(to, shared + DQ, GROUPS * SUM_BYTES);
                    stores_commit();
                    stores_have_read();
                    barrier_arrive(shared + DQ_EMPTY);
                    stores_are_done();
                    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turns + index) : "memory");
                }
                parity ^= 1;
                __syncwarp();
            }
        }
    }

    // Signals to the copying thread that the group no longer uses a tile. `barrier` is the offset of the tile's EMPTY barrier.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (threadIdx.x % WARPGROUP == 0) barrier_arrive(shared + barrier);
    }

    // Starts the products k qᵀ of 64 keys with 2 * N queries, or v doᵀ of 64 values with 2 * N rows of gradients of the result. `keys` and
    // `rows` are the addresses of the first rows.
    template <int N> __device__ __forceinline__ void multiply_keys(float (&sum)[N], uint32_t keys, uint32_t rows) const {
        begin_products();
        multiply_rows<T, D, KEYS_AT_ONCE, M>(sum, keys, rows);
        end_products();
    }

    // Reads log-sums / ln 2 (`which` = 0) or deltas (`which` = 1) of the two neighbouring queries that the thread has in the n-th eight
    // queries of a tile.
    __device__ __forceinline__ float2 statistic(uint32_t stage, int which, int n) const {
        float2 x;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x.x), "=f"(x.y)
                     : "r"(shared + STATISTICS + stage * STATISTICS_BYTES + which * M * 4 + n * 32 + threadIdx.x % 4 * 8));
        return x;
    }

    // The work of the two groups: computes dk and dv, and the terms of dq, which the adders take.
    //
    // Products run asynchronously: `end_products` closes a batch of them, and `wait_for_products<N>` waits until at most the latest N
    // batches are unfinished. The results of a group are matrices of 64 rows. Element 4 * n + i of a thread's results is in row
    // 16 * warp + lane / 4 + i / 2 * 8 and column 8 * n + lane % 4 * 2 + i % 2. Scores, P and dP have a row for each key and a column for
    // each query.
    __device__ __forceinline__ void work(float *parts) const {
        const int group = warpgroup();
        const float scale = static_cast<float>(shape.scale) * LOG2_E;
        const uint32_t keys = shared + K + group * 64 * ROW_BYTES, values = shared + V + group * 64 * ROW_BYTES;
        typename Order::Walk walk(order);
        Span span;
        Ring<1> item, dq_buffer;
        Ring<ADDERS> adder;
        Ring<QUERY_STAGES> q;
        Ring<GRADIENT_STAGES> d_o;
        Ring<2> ds;
        while (walk.next(order, span)) {
            float dk[D / 2] = {}, dv[D / 2] = {}, scores[M / 2];
            const Task keys_of_item = order.keys(span.item);
            typename Order::QueryCursor cursor(order, span, keys_of_item);
            const typename Order::VisibleKeys visible(order, keys_of_item.tile * KEYS_AT_ONCE + group * 64);
            barrier_wait(shared + K_FULL, item.parity);
            barrier_wait(shared + Q_FULL + q.stage * 8, q.parity);
            multiply_keys(scores, keys, shared + Q + q.stage * QUERY_BYTES);
            wait_for_products<0>();
            products_are_ready(scores);
            barrier_wait(shared + V_FULL, item.parity);
            item.advance();
            for (uint32_t step = span.begin; step < span.end; step++, cursor.advance(order)) {
                const uint32_t q_stage = q.stage, q_tile = shared + Q + q_stage * QUERY_BYTES;
                const uint32_t do_tile = shared + DO + d_o.stage * QUERY_BYTES, ds_tile = shared + DS + ds.stage * SCORE_BYTES;
                barrier_wait(shared + DO_FULL + d_o.stage * 8, d_o.parity);
#pragma unroll
                for (int half = 0; half < M / 64; half++) {
                    const uint32_t do_rows = do_tile + half * 64 * ROW_BYTES;
                    // `p` is first P, then dS.
                    float p[32], dp[32];
                    multiply_keys(dp, values, do_rows);
                    // The products v doᵀ, which are dP, run while this loop computes P.
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        const float2 log_sums = statistic(q_stage, 0, half * 8 + n);
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            p[4 * n + i] =
                                fast_exp2(fmaf(scores[half * 32 + 4 * n + i], scale, i % 2 ? -log_sums.y : -log_sums.x));
                    }
                    const uint32_t query = cursor.tile * M + half * 64;
                    if (visible.hides(query)) visible.hide(p, query);
                    uint32_t weights[4][4];
                    narrow_sums<T>(weights, p);
                    begin_products();
                    add_weighted<T, M>(dv, weights, do_rows);
                    end_products();
                    wait_for_products<1>();
                    products_are_ready(dp);
                    // At most the products for dv are unfinished, so the products that read the previous tile of queries are done.
                    if (half == 0 && step > span.begin) release(Q_EMPTY + (q_stage == 0 ? QUERY_STAGES - 1 : q_stage - 1) * 8);
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        const float2 delta = statistic(q_stage, 1, half * 8 + n);
#pragma unroll
                        for (int i = 0; i < 4; i++) p[4 * n + i] *= dp[4 * n + i] - (i % 2 ? delta.y : delta.x);
                    }
                    uint32_t narrow[4][4];
                    narrow_sums<T>(narrow, p);
                    write_narrow<KEYS_AT_ONCE>(ds_tile + half * KEYS_AT_ONCE * ROW_BYTES + group * 64 * ROW_BYTES, narrow);
                }
                barrier_arrive(shared + DS_FULL + ds.stage * 8);
                // Starts the products for the scores of the next tile of queries. In the last step, it repeats those of the current tile:
                // their results are not used, but computing them costs less than a branch.
                const uint32_t parity = q.parity;
                q.advance();
                const bool is_end = step + 1 == span.end;
                const uint32_t next = is_end ? q_stage : q.stage;
                barrier_wait(shared + Q_FULL + next * 8, is_end ? parity : q.parity);
                multiply_keys(scores, keys, shared + Q + next * QUERY_BYTES);
                // Waits until both groups have written their rows of the tile of dS.
                barrier_wait(shared + DS_FULL + ds.stage * 8, ds.parity);
                publish_to_products();
                ds.advance();
                float dq[32];
                begin_products();
                multiply_queries(dq, ds_tile, group);
                end_products();
                multiply_scores(dk, ds_tile + group * 64 * ROW_BYTES, q_tile);
                end_products();
                // After this wait at most the products for dk are unfinished, so nothing reads the gradients of the result any more.
                wait_for_products<1>();
                products_are_ready(dq);
                products_are_ready(scores);
                release(DO_EMPTY + d_o.stage * 8);
                d_o.advance();
                barrier_wait(shared + DQ_EMPTY, dq_buffer.parity ^ 1);
                dq_buffer.advance();
                leave_sums(group, dq, shared + DQ_FULL + adder.stage * 8);
                adder.advance();
            }
            wait_for_products<0>();
            products_are_ready(dk);
            products_are_ready(dv);
            release(Q_EMPTY + (q.stage == 0 ? QUERY_STAGES - 1 : q.stage - 1) * 8);
            finish(span, group, dk, dv, parts);
        }
    }

    // dq = dS k for 64 queries and 64 columns: the group has one half of the queries if D = 64, one half of the columns if D = 128. Here
    // and below, a product's sum runs over the rows (`across_rows`) or the columns (`along_rows`) of an operand's tile. The template
    // arguments say the same of the left and the right operand: 1 for rows, 0 for columns. One instruction sums 16 products for each
    // result.
    __device__ __forceinline__ void multiply_queries(float (&dq)[32], uint32_t ds_tile, int group) const {
        constexpr int PANEL = KEYS_AT_ONCE * ROW_BYTES;
        const uint32_t left = across_rows(ds_tile + (D == 64 ? group * PANEL : 0), PANEL);
        const uint32_t right = across_rows(shared + K + (D == 64 ? 0 : group * PANEL), PANEL);
        multiply_first<1, 1>(T(), dq, left, right);
#pragma unroll
        for (int k = 1; k < KEYS_AT_ONCE / 16; k++)
            multiply_next<1, 1>(T(), dq, later(left, k * 16 * ROW_BYTES), later(right, k * 16 * ROW_BYTES));
    }

    // dk += dSᵀ q for the group's keys. 16 columns of the tile of dS have 32 bytes, and a panel has four times 16 columns.
    __device__ __forceinline__ void multiply_scores(float (&dk)[D / 2], uint32_t ds_rows, uint32_t q_tile) const {
        const uint32_t left = along_rows(ds_rows), right = across_rows(q_tile, M * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < M / 16; k++)
            multiply_next<0, 1>(T(), dk, later(left, k / 4 * KEYS_AT_ONCE * ROW_BYTES + k % 4 * 32),
                                        later(right, k * 16 * ROW_BYTES));
    }

    // Writes the group's sums of dq to shared memory for an adder: eight columns of all 64 rows, then the next eight columns. Then arrives
    // at barrier `full`.
    __device__ __forceinline__ void leave_sums(int group, const float (&sums)[32], uint32_t full) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        const uint32_t to = shared + DQ + group * SUM_BYTES + (warp * 16 + lane / 4) * 32 + lane % 4 * 8;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (n * 64 + r * 8) * 32), "f"(sums[4 * n + 2 * r]),
                             "f"(sums[4 * n + 2 * r + 1])
                             : "memory");
        barrier_arrive(full);
    }

    // Writes dk and dv of the group's keys, or the group's rows of a part if the item is split.
    __device__ __forceinline__ void finish(const Span &span, int group, float (&dk)[D / 2], float (&dv)[D / 2], float *parts) const {
        const bool is_first = threadIdx.x % WARPGROUP == 0;
        const float scale = static_cast<float>(shape.scale);
#pragma unroll
        for (int i = 0; i < D / 2; i++) dk[i] *= scale;
        if (span.is_part) {
            float *part = parts + uint64_t(span.slot) * (2 * KEYS_AT_ONCE * D) + group * 64 * D;
            write_sums(part, D, dk);
            write_sums(part + KEYS_AT_ONCE * D, D, dv);
            release(KV_EMPTY);
            return;
        }
        // Once the products of both groups have read the tiles of keys and values, the gradients overwrite them.
        const uint32_t k_rows = shared + K + group * 64 * ROW_BYTES, v_rows = shared + V + group * 64 * ROW_BYTES;
        group_sync(TOGETHER, GROUPS * WARPGROUP);
        uint32_t narrow[D / 16][4];
        narrow_sums<T>(narrow, dk);
        write_narrow<KEYS_AT_ONCE>(k_rows, narrow);
        narrow_sums<T>(narrow, dv);
        write_narrow<KEYS_AT_ONCE>(v_rows, narrow);
        publish_to_products();
        group_sync(ALONE + group, WARPGROUP);
        if (is_first) {
            const Task keys = order.keys(span.item);
            const uint32_t row = keys.tile * KEYS_AT_ONCE + group * 64;
            store_rows<D, KEYS_AT_ONCE>(maps.dk, k_rows, row, keys);
            store_rows<D, KEYS_AT_ONCE>(maps.dv, v_rows, row, keys);
            stores_commit();
            stores_have_read();
            barrier_arrive(shared + KV_EMPTY);
        }
    }

    // Divides the threads between the tasks. The adders and the copying thread's warp give up registers (the numbers are registers per
    // thread), which the two groups take.
    __device__ __forceinline__ void run(const float *statistics, float *sums, uint32_t *turns, float *parts) const {
        init();
        if (int(threadIdx.x) >= GROUPS * WARPGROUP) {
            registers_fewer<D == 64 ? 40 : 24>();
            const int warp = int(threadIdx.x) / WARP - GROUPS * 4;
            if (warp < ADDERS)
                add(warp, sums, turns);
            else if (threadIdx.x % WARP == 0)
                copy(statistics);
        } else {
            registers_more<D == 64 ? 232 : 240>();
            work(parts);
            if (threadIdx.x % WARPGROUP == 0) stores_are_done();
        }
    }
};
