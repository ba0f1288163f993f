// Attention of many queries to few keys, such as those of a text, with the matrix instructions and the copy engine of compute
// capability 9.0. One tile has all keys of a head, so the maximum and the sum of each softmax are known at once, and no later tile of keys
// changes them. The backward pass reads the queries and the gradients of the result once: it computes the gradients of queries, keys and
// values together. With the attention weights P and their gradients dP, it computes delta = rowsum(do ∘ o) as the sum of P ∘ dP over the
// keys, without o.
//
// A block has two groups of four warps that compute, and a third group, of which one thread starts the copies. A step is the work on 128
// queries of one head; each of the two computing groups takes 64 of them. The steps of all heads, in order, form one sequence, of which
// the blocks take equal parts. So a block's part consists of spans: consecutive steps of one head. After the backward pass, a later kernel
// adds the dk and dv of the blocks that share a head.
#pragma once

#include "copies.cuh"
#include "schedule.cuh"

// The largest number of keys: the 77 tokens of a text in CLIP, rounded up to a multiple of the 16 rows that a product sums over.
constexpr int FEW_KEYS = 80;

// Boxes have 128 rows of q and d_o, and FEW_KEYS rows of k and v. The forward pass has no d_o.
struct AttentionFewKeysMaps {
    TensorMap q, k, v, d_o;
};

// What both passes have in common. A stage has a tile of q and, if `INPUTS` is 2 (the backward pass), a tile of d_o for the same queries.
// Tiles have D columns. Heads may be narrower (`shape.width`); the copies fill the other columns with zeros.
template <int INPUTS, int STAGES> struct FewKeys {
    static constexpr int STAGE_COUNT = STAGES, D = 64, GROUPS = 2, ROWS = 64 * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr int KEY_BYTES = tile_bytes<D>(FEW_KEYS), ROWS_BYTES = tile_bytes<D>(ROWS), STAGE_BYTES = INPUTS * ROWS_BYTES;
    // Offsets in shared memory. KEYS: two pairs of a tile of keys and a tile of values; QUERIES: the stages; OWN: each group's own tiles.
    static constexpr int KEYS = 0, QUERIES = KEYS + 2 * 2 * KEY_BYTES, OWN = QUERIES + STAGES * STAGE_BYTES;
    // Bytes of a group's tile of results, and of each of its two other tiles in the backward pass, for weights and for gradients of scores.
    // Their FEW_KEYS columns take two panels of 64 columns.
    static constexpr int RESULT_BYTES = tile_bytes<D>(64), SCORE_BYTES = tile_bytes<128>(64);
    static constexpr int OWN_BYTES = RESULT_BYTES + (INPUTS > 1 ? 2 * SCORE_BYTES : 0);
    // Offsets of the barriers of the two pairs of tiles of keys and values, and of the stages; a barrier has 8 bytes. FULL: the data has
    // arrived; EMPTY: the memory may be overwritten.
    static constexpr int KEYS_FULL = OWN + GROUPS * OWN_BYTES, KEYS_EMPTY = KEYS_FULL + 2 * 8, FULL = KEYS_EMPTY + 2 * 8,
                         EMPTY = FULL + STAGES * 8, SHARED = EMPTY + STAGES * 8;
    // Named barriers: one for both groups together, and the first of those for a group alone.
    static constexpr int TOGETHER = 1, ALONE = 2;

    const AttentionFewKeysMaps &maps;
    const AttentionShape &shape;
    const Schedule &schedule;
    uint32_t shared; // the address of the block's shared memory

    // The task of a span. An item of the schedule is a whole head, which counts here as one tile.
    __device__ __forceinline__ Task head(const Span &span) const { return Task(span.item, /*tiles=*/1, shape.heads); }

    // A FULL barrier waits for one arrival, that of the copying thread, and for the bytes; an EMPTY barrier for one arrival of each group.

    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < 2; i++) barrier_init(shared + KEYS_FULL + i * 8, 1), barrier_init(shared + KEYS_EMPTY + i * 8, GROUPS);
            for (int i = 0; i < STAGES; i++) barrier_init(shared + FULL + i * 8, 1), barrier_init(shared + EMPTY + i * 8, GROUPS);
            barriers_publish();
        }
        __syncthreads();
    }

    // Starts all copies of the block's work, in the order in which the groups read the tiles. The template arguments of `fetch_rows` are
    // the width, the number of rows to copy and the number of rows of the tile, here the same number. In the first round through a ring,
    // the waits for EMPTY return at once: the parity is that of the phase before the barrier's first one, which counts as ended.
    __device__ __forceinline__ void copy() const {
        ScheduleWalk walk(schedule);
        Span span;
        Ring<2> keys;
        Ring<STAGES> queries;
        while (walk.next(schedule, span)) {
            const Task task = head(span);
            const uint32_t keys_full = shared + KEYS_FULL + keys.stage * 8, to = shared + KEYS + keys.stage * 2 * KEY_BYTES;
            barrier_wait(shared + KEYS_EMPTY + keys.stage * 8, keys.parity ^ 1);
            barrier_expect(keys_full, 2 * KEY_BYTES);
            fetch_rows<D, FEW_KEYS, FEW_KEYS>(to, maps.k, keys_full, /*row=*/0, task);
            fetch_rows<D, FEW_KEYS, FEW_KEYS>(to + KEY_BYTES, maps.v, keys_full, /*row=*/0, task);
            keys.advance();
            for (uint32_t step = span.begin; step < span.end; step++, queries.advance()) {
                const uint32_t full = shared + FULL + queries.stage * 8, stage = shared + QUERIES + queries.stage * STAGE_BYTES;
                barrier_wait(shared + EMPTY + queries.stage * 8, queries.parity ^ 1);
                barrier_expect(full, STAGE_BYTES);
                fetch_rows<D, ROWS, ROWS>(stage, maps.q, full, step * ROWS, task);
                if constexpr (INPUTS > 1) fetch_rows<D, ROWS, ROWS>(stage + ROWS_BYTES, maps.d_o, full, step * ROWS, task);
            }
        }
    }

    // Signals to the copying thread that the group no longer reads a tile. `barrier` is the offset of the tile's EMPTY barrier.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (threadIdx.x % WARPGROUP == 0) barrier_arrive(shared + barrier);
    }

    // Writes `result`, the rows for the 64 queries of a head from query `first` on, to `matrix`, whose rows are `stride` elements apart.
    // The rows pass through shared memory, so that each thread can write 16 consecutive bytes. `staged` is the address of a tile of the
    // group. Each warp uses 16 rows of this tile, so it need not wait for the other warps.
    template <typename T>
    __device__ __forceinline__ void store(T *matrix, uint64_t stride, uint32_t first, const float (&result)[D / 2], uint32_t staged) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, chunk = lane % 8;
        uint32_t narrow[D / 16][4];
        narrow_sums<T>(narrow, result);
        write_narrow<64>(staged, narrow);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = warp * 16 + i * 4 + lane / 8;
            uint4 words;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                         : "r"(staged + chunk_offset<64>(row, chunk))
                         : "memory");
            if (first + row < shape.queries && chunk * CHUNK < shape.width)
                store_words(matrix + uint64_t(first + row) * stride + chunk * CHUNK, words);
        }
        __syncwarp();
    }

    // Sets the scores (or weights) of columns beyond the last key to `value`. `scores[4 * n + i]` of a thread is in the column
    // 8 * n + 2 * (lane % 4) + i % 2, and in the first (i / 2 == 0) or the second of the thread's two rows.
    __device__ __forceinline__ void set_beyond_keys(float (&scores)[FEW_KEYS / 2], float value) const {
#pragma unroll
        for (int n = 0; n < FEW_KEYS / 8; n++) {
            if (n * 8 + 8 <= shape.keys) continue;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (n * 8 + threadIdx.x % 4 * 2 + i % 2 >= shape.keys) scores[4 * n + i] = value;
        }
    }

    // Runs `work` in the two computing groups, and `copy` in a thread of the third group. The third group leaves most of its
    // registers to the others; the numbers are registers of a thread.
    template <typename Work> __device__ __forceinline__ void run(Work work) const {
        init();
        if (int(threadIdx.x) >= GROUPS * WARPGROUP) {
            registers_fewer<40>();
            if (int(threadIdx.x) == GROUPS * WARPGROUP) copy();
        } else {
            registers_more<232>();
            work();
        }
    }
};

// The sum and the maximum of `x` over the four threads that share a row. Each thread has a quarter of the columns of two rows.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// The forward pass, with six stages. Writes the result to `o`, and the logarithm of each query's sum of exponentials to
// `log_sums (batch, heads, queries)`.
template <typename T> struct FewKeysForward : FewKeys<1, 6> {
    __device__ __forceinline__ void work(T *o, const Strides &o_strides, float *log_sums) const {
        const int group = warpgroup(), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        const uint32_t staged = shared + OWN + group * OWN_BYTES;
        const float scale = static_cast<float>(shape.scale) * LOG2_E;
        ScheduleWalk walk(schedule);
        Span span;
        Ring<2> keys;
        Ring<STAGE_COUNT> queries;
        while (walk.next(schedule, span)) {
            const Task task = head(span);
            const uint32_t k = shared + KEYS + keys.stage * 2 * KEY_BYTES, v = k + KEY_BYTES;
            T *const matrix = o_strides.matrix(o, task.batch, task.head);
            barrier_wait(shared + KEYS_FULL + keys.stage * 8, keys.parity);
            for (uint32_t step = span.begin; step < span.end; step++) {
                const uint32_t first = step * ROWS + group * 64, row = first + warp * 16 + lane / 4;
                float weights[FEW_KEYS / 2], result[D / 2] = {}, base[2], sum[2] = {};
                // `weights` are first the scores q kᵀ, then the exponentials. `base` and `sum` are for the two rows of this thread: the
                // largest score times `scale`, which is subtracted from the exponents, and the sum of the exponentials.
                barrier_wait(shared + FULL + queries.stage * 8, queries.parity);
                // Between `begin_products` and `end_products`, a set of asynchronous products starts. `wait_for_products<0>` waits until
                // no set is unfinished.
                begin_products();
                // The group's 64 rows of the tile of queries take RESULT_BYTES, as a tile of its results does.
                multiply_rows<T, D, ROWS, FEW_KEYS>(weights, shared + QUERIES + queries.stage * STAGE_BYTES + group * RESULT_BYTES, k);
                end_products();
                wait_for_products<0>();
                products_are_ready(weights);
                release(EMPTY + queries.stage * 8);
                queries.advance();
                set_beyond_keys(weights, -INFINITY);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    base[r] = weights[2 * r];
#pragma unroll
                    for (int n = 0; n < FEW_KEYS / 8; n++)
                        base[r] = fmaxf(base[r], fmaxf(weights[4 * n + 2 * r], weights[4 * n + 2 * r + 1]));
                    base[r] = row_max(base[r]) * scale;
                }
#pragma unroll
                for (int i = 0; i < FEW_KEYS / 2; i++) {
                    weights[i] = fast_exp2(fmaf(weights[i], scale, -base[i / 2 % 2]));
                    sum[i / 2 % 2] += weights[i];
                }
                uint32_t narrow[FEW_KEYS / 16][4];
                narrow_sums<T>(narrow, weights);
                begin_products();
                add_weighted<T, FEW_KEYS>(result, narrow, v);
                end_products();
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    sum[r] = row_sum(sum[r]);
                    if (lane % 4 == 0 && row + 8 * r < shape.queries)
                        log_sums[uint64_t(task.index) * shape.queries + row + 8 * r] = base[r] * LN_2 + logf(sum[r]);
                    sum[r] = 1.0f / sum[r]; // from here on the reciprocal, which multiplies the result
                }
                wait_for_products<0>();
                products_are_ready(result);
#pragma unroll
                for (int i = 0; i < D / 2; i++) result[i] *= sum[i / 2 % 2];
                store(matrix, o_strides.row, first, result, staged);
            }
            release(KEYS_EMPTY + keys.stage * 8);
            keys.advance();
        }
    }
};
