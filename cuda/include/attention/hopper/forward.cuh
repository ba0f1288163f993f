// The forward pass of attention with the matrix instructions and the copy engine of compute capability 9.0. One thread of a block copies
// tiles. Each group of four warps computes the results of 64 queries. Within a group, the softmax of a tile of keys overlaps with the
// product of the previous tile's weights and values. The groups take turns, so that the products of a group also overlap with the softmax
// of another group (Shah et al. 2024, arXiv:2407.08608).
#pragma once

#include <cfloat>

#include "copies.cuh"
#include "queue.cuh"
#include "schedule.cuh"

// A score is the product of a query row and a key row, and its weight is 2^(score * scale / ln 2 - base), with one base for each query row.
// A warp raises the bases of its rows only if one of its exponents would exceed this number. So no weight exceeds 2^HEADROOM, and most
// tiles do not raise a base.
constexpr float HEADROOM = 8.0f;

// The state of the softmax of a thread's two rows: the base, and the sum of the weights in the columns of this thread.
struct RowWeights {
    // The initial base is below all scaled scores, but finite: if a tile hides all keys of a row, the scores of the row are negative
    // infinity, and their difference from a base of negative infinity would be NaN.
    float base[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0.0f, 0.0f};

    // Replaces the thread's scores of a tile of keys by weights 2^(score * scale - base). Element i belongs to row i / 2 % 2 of the
    // thread's two rows; four neighbouring lanes share the columns of these rows. `scale` includes the factor 1 / ln 2. Returns whether the
    // warp raised its bases; if so, sets `correction`, by which the caller must multiply earlier results.
    template <int N> __device__ __forceinline__ bool weigh(float (&scores)[N], float (&correction)[2], float scale) {
        float top[2] = {scores[0], scores[2]};
#pragma unroll
        for (int i = 1; i < N; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
        const bool raises =
            __any_sync(ALL_LANES, !(top[0] * scale <= base[0] + HEADROOM && top[1] * scale <= base[1] + HEADROOM));
        if (raises) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = fmaxf(top[r], __shfl_xor_sync(ALL_LANES, top[r], 1));
                x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
                const float raised = fmaxf(base[r], x * scale);
                correction[r] = fast_exp2(base[r] - raised);
                base[r] = raised;
                sum[r] *= correction[r];
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) scores[i] = fast_exp2(fmaf(scores[i], scale, -base[i / 2 % 2]));
        float more[2] = {scores[0] + scores[1], scores[2] + scores[3]};
#pragma unroll
        for (int i = 4; i < N; i++) more[i / 2 % 2] += scores[i];
        sum[0] += more[0], sum[1] += more[1];
        return raises;
    }
};

// A tile of queries has 64 * GROUPS rows, a tile of keys or values KEYS rows. Shared memory holds two tiles of queries, two of keys and two
// of values, and one of results. Blocks take their work from a `Source`: a `Schedule`, or for packed rows a `Queue`. Both give a
// `Span`: an item (a tile of queries of one head, which `Task` locates), and the range `begin` to `end` (exclusive) of the tiles of keys to
// multiply it with.
template <typename T, int D, int KEYS, int GROUPS, typename Source> struct HopperForward {
    static constexpr int ROWS = 64 * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr int GROUP_BYTES = tile_bytes<D>(64), TILE_BYTES = tile_bytes<D>(KEYS);
    // Offsets in shared memory; the tiles of queries are at offset 0. O: results; ITEMS: with a `Queue`, the span of each tile of queries.
    static constexpr int Q_BYTES = GROUPS * GROUP_BYTES, K = 2 * Q_BYTES, V = K + 2 * TILE_BYTES, O = V + 2 * TILE_BYTES,
                         BARRIERS = O + Q_BYTES, ITEMS = BARRIERS + 12 * 8,
                         SHARED = ITEMS + (Source::IS_QUEUE ? 2 * QUEUED_BYTES : 0);
    // The 12 barriers, of 8 bytes each: each of the two tiles of queries, of keys and of values has two. FULL: the data has arrived (the
    // copying thread arrives); EMPTY: the memory may be overwritten (each group arrives).
    static constexpr int Q_FULL = BARRIERS, K_FULL = Q_FULL + 16, V_FULL = K_FULL + 16, Q_EMPTY = V_FULL + 16,
                         K_EMPTY = Q_EMPTY + 16, V_EMPTY = K_EMPTY + 16;
    // Each group has two named barriers: one for its turns (the first of these is TURN), and one for the group alone (the first is ALONE).
    // Named barrier 0 is that of __syncthreads.
    static constexpr int TURN = 1, ALONE = 1 + GROUPS;

    const AttentionForwardMaps &maps;
    const AttentionShape &shape;
    const Source &source;
    uint32_t shared; // the address of the block's shared memory

    __device__ __forceinline__ Task task(const Span &span) const {
        return Task(span.item, ceil_divide(shape.queries, ROWS), shape.heads);
    }

    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < 6; i++) barrier_init(shared + BARRIERS + i * 8, 1), barrier_init(shared + Q_EMPTY + i * 8, GROUPS);
            barriers_publish();
        }
        __syncthreads();
    }

    // Gets the groups' next item, and waits for the item's queries. Returns false if no item is left. `tile` is the position among the two
    // tiles of queries in shared memory.
    __device__ __forceinline__ bool next(typename Source::Walk &walk, Span &span, const Ring<2> &tile) const {
        const uint32_t full = shared + Q_FULL + tile.stage * 8;
        if constexpr (Source::IS_QUEUE) {
            barrier_wait(full, tile.parity);
            return read_span(span, shared + ITEMS + tile.stage * QUEUED_BYTES);
        } else {
            if (!walk.next(source, span)) return false;
            barrier_wait(full, tile.parity);
            return true;
        }
    }

    // Copies the tiles of all items of the block; one thread calls this. `tile` is the position among the two tiles of queries in shared
    // memory, `ring` the position among the two tiles of keys and the two of values. A position has a `stage`, which of the two tiles is in
    // use, and the `parity` of its barriers' current phase. Before the first use of a tile, a wait with `parity ^ 1` passes
    // at once: the tile is empty although no group has released it.
    __device__ __forceinline__ void copy() const {
        typename Source::Walk walk(source);
        Span span;
        Ring<2> tile, ring;
        while (true) {
            const bool is_item = walk.next(source, span);
            if (!Source::IS_QUEUE && !is_item) return;
            const uint32_t q_full = shared + Q_FULL + tile.stage * 8, q = shared + tile.stage * Q_BYTES;
            barrier_wait(shared + Q_EMPTY + tile.stage * 8, tile.parity ^ 1);
            if constexpr (Source::IS_QUEUE) {
                write_span(shared + ITEMS + tile.stage * QUEUED_BYTES, span);
                if (!is_item) {
                    barrier_arrive(q_full);
                    return;
                }
            }
            const Task task = this->task(span);
            // The head of keys and values, which several heads of queries may share.
            const Task of_keys = source.of_keys(task);
            barrier_expect(q_full, Q_BYTES);
            // A tile of queries is stored as a tile of 64 rows for each group. The last two template arguments of `fetch_rows` are the
            // number of rows to copy and the number of rows of the tile in shared memory.
            for (int group = 0; group < GROUPS; group++)
                fetch_rows<D, 64, 64>(q + group * GROUP_BYTES, maps.q, q_full, task.tile * ROWS + group * 64, task);
            tile.advance();
            // `step` is the index of a tile of keys. The last tile comes first: it alone may be incomplete, and the groups mask it before
            // they loop over the other tiles.
            for (uint32_t step = span.end; step-- > span.begin; ring.advance()) {
                const uint32_t at = ring.stage * TILE_BYTES, barrier = ring.stage * 8;
                barrier_wait(shared + K_EMPTY + barrier, ring.parity ^ 1);
                barrier_expect(shared + K_FULL + barrier, TILE_BYTES);
                fetch_rows<D, KEYS, KEYS>(shared + K + at, maps.k, shared + K_FULL + barrier, step * KEYS, of_keys);
                barrier_wait(shared + V_EMPTY + barrier, ring.parity ^ 1);
                barrier_expect(shared + V_FULL + barrier, TILE_BYTES);
                fetch_rows<D, KEYS, KEYS>(shared + V + at, maps.v, shared + V_FULL + barrier, step * KEYS, of_keys);
            }
        }
    }

    // Signals to the copying thread that the group no longer reads a tile. `barrier` is the offset of the tile's EMPTY barrier.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (threadIdx.x % WARPGROUP == 0) barrier_arrive(shared + barrier);
    }

    // The groups multiply in turns, so that one computes weights while another multiplies. `take_turn` waits for the turn of `group`;
    // `give_turn` gives the turn to the group after `group`. Two groups arrive at each barrier: the one that gives the turn and the one
    // that takes it.
    __device__ __forceinline__ void take_turn(int group) const { group_sync(TURN + group, 2 * WARPGROUP); }
    __device__ __forceinline__ void give_turn(int group) const {
        group_arrive(TURN + (group + 1 == GROUPS ? 0 : group + 1), 2 * WARPGROUP);
    }

    // Computes the group's rows of all items of the block. `log_sums` is (batch * heads, queries); `finish` says what `parts` holds.
    // The products run asynchronously: `end_products` closes a batch of them, and `wait_for_products<N>` waits until at most the latest N
    // batches are unfinished. `narrow_sums` rounds results in registers to T, as the left operand of the next product.
    __device__ __forceinline__ void work(float *log_sums, float *parts) const {
        const int group = warpgroup();
        const float scale = static_cast<float>(shape.scale) * LOG2_E;
        typename Source::Walk walk(source);
        Span span;
        // The scores of a tile are computed while the values of the previous tile are multiplied, so `keys` is one tile ahead of
        // `values`.
        Ring<2> tile, keys, values;
        // The first turn is that of group 0.
        if (group == GROUPS - 1) give_turn(group);
        while (next(walk, span, tile)) {
            float scores[KEYS / 2], result[D / 2] = {};
            RowWeights rows;
            float correction[2];
            const uint32_t q = shared + tile.stage * Q_BYTES + group * GROUP_BYTES;
            const typename Source::VisibleKeys visible(source, task(span).tile * ROWS + group * 64);
            // The scores of tile span.end - 1, the last tile of keys, which comes first.
            barrier_wait(shared + K_FULL + keys.stage * 8, keys.parity);
            begin_products();
            multiply_rows<T, D, 64, KEYS>(scores, q, shared + K + keys.stage * TILE_BYTES);
            end_products();
            wait_for_products<0>();
            products_are_ready(scores);
            release(K_EMPTY + keys.stage * 8);
            keys.advance();
            if constexpr (Source::IS_QUEUE) {
                visible.hide(scores, (span.end - 1) * KEYS);
            } else if (span.end * KEYS > shape.keys) {
                // The key of this thread's first score. Of every 8 keys, the thread has two neighbouring ones, each for its two rows.
                const uint32_t key = (span.end - 1) * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++)
                    if (key + i / 4 * 8 + i % 2 >= shape.keys) scores[i] = -INFINITY;
            }
            // There are no earlier results to correct.
            rows.weigh(scores, correction, scale);
            for (uint32_t step = span.end - 1; step-- > span.begin;) {
                uint32_t weights[KEYS / 16][4];
                narrow_sums<T>(weights, scores);
                barrier_wait(shared + K_FULL + keys.stage * 8, keys.parity);
                take_turn(group);
                begin_products();
                multiply_rows<T, D, 64, KEYS>(scores, q, shared + K + keys.stage * TILE_BYTES);
                end_products();
                barrier_wait(shared + V_FULL + values.stage * 8, values.parity);
                add_weighted<T, KEYS>(result, weights, shared + V + values.stage * TILE_BYTES);
                end_products();
                give_turn(group);
                wait_for_products<1>();
                products_are_ready(scores);
                release(K_EMPTY + keys.stage * 8);
                keys.advance();
                if (visible.template hides<KEYS>(step * KEYS)) visible.hide(scores, step * KEYS);
                const bool raises = rows.weigh(scores, correction, scale);
                wait_for_products<0>();
                products_are_ready(result);
                release(V_EMPTY + values.stage * 8);
                values.advance();
                if (raises) {
#pragma unroll
                    for (int i = 0; i < D / 2; i++) result[i] *= correction[i / 2 % 2];
                }
            }
            release(Q_EMPTY + tile.stage * 8);
            tile.advance();
            // The product of the weights and the values of the tile with the lowest index, span.begin. Its scores were computed last.
            uint32_t weights[KEYS / 16][4];
            narrow_sums<T>(weights, scores);
            barrier_wait(shared + V_FULL + values.stage * 8, values.parity);
            begin_products();
            add_weighted<T, KEYS>(result, weights, shared + V + values.stage * TILE_BYTES);
            end_products();
            wait_for_products<0>();
            products_are_ready(result);
            release(V_EMPTY + values.stage * 8);
            values.advance();
            finish(span, group, rows, result, log_sums, parts);
        }
        if (threadIdx.x % WARPGROUP == 0) stores_are_done();
    }

    // Writes the group's results and log-sums of an item; if the item is split, writes the group's rows of a part instead.
    __device__ __forceinline__ void finish(const Span &span, int group, RowWeights &rows, float (&result)[D / 2], float *log_sums,
                                           float *parts) const {
        // The thread's two rows within the item's tile of queries are `row` and `row` + 8. Each warp of the group has 16 rows.
        const int lane = threadIdx.x % WARP, row = group * 64 + threadIdx.x / WARP % 4 * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            rows.sum[r] += __shfl_xor_sync(ALL_LANES, rows.sum[r], 1);
            rows.sum[r] += __shfl_xor_sync(ALL_LANES, rows.sum[r], 2);
        }
        if (span.is_part) {
            // A part has the sums of weights of all rows, then the bases of all rows, then the rows of results before their division by
            // the sums.
            float *part = parts + uint64_t(span.slot) * (ROWS * (D + 2));
            if (lane % 4 == 0) {
#pragma unroll
                for (int r = 0; r < 2; r++) part[row + 8 * r] = rows.sum[r], part[ROWS + row + 8 * r] = rows.base[r];
            }
            write_sums(part + 2 * ROWS + group * 64 * D, D, result);
            return;
        }
        const Task task = this->task(span);
        const uint32_t first = task.tile * ROWS;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (lane % 4 == 0 && first + row + 8 * r < shape.queries)
                log_sums[uint64_t(task.index) * shape.queries + first + row + 8 * r] = rows.base[r] * LN_2 + logf(rows.sum[r]);
            // If no key is visible, the result is zero, not zero divided by zero.
            const float share = rows.sum[r] == 0.0f ? 0.0f : 1.0f / rows.sum[r];
            // The elements of row r: two of every four.
#pragma unroll
            for (int i = 0; i < D / 4; i++) result[i / 2 * 4 + i % 2 + 2 * r] *= share;
        }
        const uint32_t staged = shared + O + group * GROUP_BYTES;
        const bool stores = threadIdx.x % WARPGROUP == 0;
        // The copy engine must have read the group's previous results from `staged` before the group overwrites them.
        if (stores) stores_have_read();
        group_sync(ALONE + group, WARPGROUP);
        uint32_t narrow[D / 16][4];
        narrow_sums<T>(narrow, result);
        write_narrow<64>(staged, narrow);
        publish_to_products();
        group_sync(ALONE + group, WARPGROUP);
        if (stores) {
            store_rows<D, 64>(maps.o, staged, first + group * 64, task);
            stores_commit();
        }
    }

    __device__ __forceinline__ void run(float *log_sums, float *parts) const {
        init();
        if (int(threadIdx.x) >= GROUPS * WARPGROUP) {
            // The copying warps give registers to the groups. All threads of the block then have at most the 65,536 of a multiprocessor.
            registers_fewer<GROUPS == 2 ? 40 : 32>();
            if (int(threadIdx.x) == GROUPS * WARPGROUP) copy();
        } else {
            registers_more<GROUPS == 2 ? 232 : 160>();
            work(log_sums, parts);
        }
    }
};
