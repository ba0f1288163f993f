// The backward pass of attention to few keys, for compute capability 9.0. few_keys.cuh says how blocks and their two groups of warps share
// the work, and defines the tiles, offsets and barriers. ../backward.cuh has the formulas and defines P, dP and dS.
#pragma once

#include "few_keys.cuh"

// The backward pass. `FewKeys<2, 3>`: three stages in shared memory, each with two inputs: a tile of q and, for the same queries, a tile of
// the gradients of attention's result (d_o).
template <typename T> struct FewKeysBackward : FewKeys<2, 3> {
    // The sums of a group, dk and dv, are transposed, (D columns, FEW_KEYS keys), and distributed over the group's 128 threads. `SUM` is
    // the number of values of one sum in a thread: 64 * FEW_KEYS / 128. A group's scores (64 queries, FEW_KEYS keys) have the same size,
    // because D is also 64, so `SUM` is their number in a thread, too. `PART` is the number of values of a part, which has the block's dk
    // and dv of a head.
    static constexpr int SUM = FEW_KEYS / 2, PART = 2 * FEW_KEYS * D;
    static_assert(OWN_BYTES >= SUM * WARPGROUP * 4, "the group's tiles have room for a sum");

    // sum += rowsᵀ @ tile, where sum is (columns, keys). `rows` and `tile` are addresses in shared memory: of 64 rows of a tile of q or
    // d_o, and of the group's tile of dS or P, (queries, keys). dk takes q and dS, dv takes d_o and P.
    static __device__ __forceinline__ void add_across(float (&sum)[SUM], uint32_t rows, uint32_t tile) {
        // Descriptors of the two operands, whose rows the product sums over. The second argument is the distance from panel to panel of
        // the operand's tile; a tile of `rows` has only one panel.
        const uint32_t left = across_rows(rows, RESULT_BYTES), right = across_rows(tile, 64 * ROW_BYTES);
        // An instruction sums over 16 of the 64 rows. The two template arguments 1 say that it sums over the rows of both operands.
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_next<1, 1>(T(), sum, later(left, k * 16 * ROW_BYTES), later(right, k * 16 * ROW_BYTES));
    }

    // The work of a group. `log_sums`, from the forward pass, has the logarithm of the sum of the exponentials of each query's scores:
    // (heads of all samples, queries). `parts` gets the parts of dk and dv that `few_keys_finish` adds. `dq` and `parts` may be null; what
    // is null is not written.
    //
    // A thread has elements of two rows of the scores, `row` and `row` + 8: element i is in row + 8 * r, where r = i / 2 % 2. Numbers for
    // each row (`base`, `delta`) are arrays over r. `wait_for_products<n>` waits until at most the n latest groups of products, each ended
    // by `end_products`, are unfinished. A barrier has 8 bytes.
    __device__ __forceinline__ void work(T *dq, const Strides &dq_strides, const float *log_sums, float *parts) const {
        const int group = warpgroup(), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        const uint32_t weight_tile = shared + OWN + group * OWN_BYTES, ds_tile = weight_tile + SCORE_BYTES,
                       staged = ds_tile + SCORE_BYTES;
        const float factor = static_cast<float>(shape.scale), scale = factor * LOG2_E;
        ScheduleWalk walk(schedule);
        Span span;
        Ring<2> keys;
        Ring<STAGE_COUNT> queries;
        while (walk.next(schedule, span)) {
            const Task task = head(span);
            const uint32_t k = shared + KEYS + keys.stage * 2 * KEY_BYTES, v = k + KEY_BYTES;
            const float *const bases = log_sums + uint64_t(task.index) * shape.queries;
            float dk[SUM] = {}, dv[SUM] = {};
            // The stage of the previous step.
            uint32_t last = 0;
            barrier_wait(shared + KEYS_FULL + keys.stage * 8, keys.parity);
            for (uint32_t step = span.begin; step < span.end; step++) {
                const uint32_t first = step * ROWS + group * 64, row = first + warp * 16 + lane / 4;
                // The group reads its own 64 rows of the stage's tiles; RESULT_BYTES is the size of 64 rows.
                const uint32_t q = shared + QUERIES + queries.stage * STAGE_BYTES + group * RESULT_BYTES, d_o = q + ROWS_BYTES;
                // What is subtracted from the exponents of a row; INFINITY makes the weights of rows beyond the queries 0.
                float base[2];
#pragma unroll
                for (int r = 0; r < 2; r++) base[r] = row + 8 * r < shape.queries ? bases[row + 8 * r] * LOG2_E : INFINITY;
                // `weights` are first the scores, then P. `ds` is first dP, then dS.
                float weights[SUM], ds[SUM];
                barrier_wait(shared + FULL + queries.stage * 8, queries.parity);
                begin_products();
                multiply_rows<T, D, ROWS, FEW_KEYS>(weights, q, k);
                end_products();
                multiply_rows<T, D, ROWS, FEW_KEYS>(ds, d_o, v);
                end_products();
                wait_for_products<1>();
                products_are_ready(weights);
#pragma unroll
                for (int i = 0; i < SUM; i++) weights[i] = fast_exp2(fmaf(weights[i], scale, -base[i / 2 % 2]));
                set_beyond_keys(weights, 0.0f);
                wait_for_products<0>();
                products_are_ready(ds);
                // `delta` becomes rowsum(P ∘ dP).
                float delta[2] = {};
#pragma unroll
                for (int i = 0; i < SUM; i++) delta[i / 2 % 2] += weights[i] * ds[i];
#pragma unroll
                for (int r = 0; r < 2; r++) delta[r] = row_sum(delta[r]);
#pragma unroll
                for (int i = 0; i < SUM; i++) ds[i] = weights[i] * (ds[i] - delta[i / 2 % 2]);
                // After this barrier, all warps of the group have waited for the products of the previous step, which read that step's
                // stage and the group's tiles.
                group_sync(ALONE + group, WARPGROUP);
                if (step > span.begin) release(EMPTY + last * 8);
                last = queries.stage;
                queries.advance();
                uint32_t narrow[FEW_KEYS / 16][4];
                narrow_sums<T>(narrow, weights);
                write_narrow<64>(weight_tile, narrow);
                narrow_sums<T>(narrow, ds);
                write_narrow<64>(ds_tile, narrow);
                publish_to_products();
                group_sync(ALONE + group, WARPGROUP);
                // `result` becomes the rows of dq.
                float result[D / 2] = {};
                begin_products();
                // `narrow` is dS.
                add_weighted<T, FEW_KEYS>(result, narrow, k);
                end_products();
                add_across(dv, d_o, weight_tile);
                add_across(dk, q, ds_tile);
                end_products();
                wait_for_products<1>();
                products_are_ready(result);
                if (dq == nullptr) continue;
#pragma unroll
                for (int i = 0; i < D / 2; i++) result[i] *= factor;
                store(dq_strides.matrix(dq, task.batch, task.head), dq_strides.row, first, result, staged);
            }
            wait_for_products<0>();
            products_are_ready(dk);
            products_are_ready(dv);
            group_sync(ALONE + group, WARPGROUP);
            release(EMPTY + last * 8);
            release(KEYS_EMPTY + keys.stage * 8);
            keys.advance();
#pragma unroll
            for (int i = 0; i < SUM; i++) dk[i] *= factor;
            // Each pair of a head and a block that has steps of the head has its own part. Its number is the index of the head plus that of
            // the block. From one pair to the next along the sequence of steps, at least one of the two indices rises and none falls, so no
            // two pairs have the same number.
            add_groups(group, dk, dv, parts == nullptr ? nullptr : parts + uint64_t(span.item + blockIdx.x) * PART);
        }
    }

    // Writes the total of both groups' sums to `part`, unless it is null: dk, then dv, (keys, columns) each. The first group adds the two
    // dk, the second the two dv; each gets the sum of the other group through shared memory.
    __device__ __forceinline__ void add_groups(int group, const float (&dk)[SUM], const float (&dv)[SUM], float *part) const {
        const uint32_t own = shared + OWN + group * OWN_BYTES + threadIdx.x % WARPGROUP * 4;
        const uint32_t of_other_group = own + (group == 0 ? OWN_BYTES : -OWN_BYTES);
#pragma unroll
        for (int i = 0; i < SUM; i++)
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(own + i * WARPGROUP * 4), "f"(group == 0 ? dv[i] : dk[i]) : "memory");
        group_sync(TOGETHER, GROUPS * WARPGROUP);
        if (part != nullptr) {
            // Element i of a thread belongs to the key i / 4 * 8 + lane % 4 * 2 + i % 2, and to the column that is i / 2 % 2 * 8 after the
            // thread's first column. `key` includes the FEW_KEYS rows of dk that precede those of dv.
            const int lane = threadIdx.x % WARP, column = threadIdx.x / WARP % 4 * 16 + lane / 4, key = group * FEW_KEYS + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < SUM; i++) {
                float other;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(of_other_group + i * WARPGROUP * 4) : "memory");
                part[(key + i / 4 * 8 + i % 2) * D + column + i / 2 % 2 * 8] = (group == 0 ? dk[i] : dv[i]) + other;
            }
        }
        group_sync(TOGETHER, GROUPS * WARPGROUP);
    }
};

// Writes dk and dv, unless they are null, from the parts of the blocks. A thread computes four columns of a key, of dk if blockIdx.y is 0
// and of dv if it is 1.
template <typename T>
__device__ __forceinline__ void few_keys_finish(const float *parts, T *dk, T *dv, const Strides &dk_strides, const Strides &dv_strides,
                                                const AttentionShape &shape, const Schedule &schedule) {
    constexpr int D = FewKeysBackward<T>::D;
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, column = index % (D / 4) * 4, key = index / (D / 4) % FEW_KEYS;
    // An item is a head of a sample, and all keys of a head are one tile.
    const uint32_t item = index / (D / 4) / FEW_KEYS;
    T *const to = blockIdx.y == 0 ? dk : dv;
    if (to == nullptr || item >= schedule.items || key >= shape.keys || column >= shape.width) return;
    const Strides &strides = blockIdx.y == 0 ? dk_strides : dv_strides;
    const Task task(item, /*tiles=*/1, shape.heads);
    // The first and the last block that have steps of the head.
    const uint32_t first = schedule.owner(item * schedule.steps), last = schedule.owner((item + 1) * schedule.steps - 1);
    parts += (blockIdx.y * FEW_KEYS + key) * D + column;
    float4 sum = {};
    for (uint32_t block = first; block <= last; block++) {
        // The part of a head and a block has the sum of their indices as its number.
        const float4 x = *reinterpret_cast<const float4 *>(parts + uint64_t(item + block) * FewKeysBackward<T>::PART);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    store_words(strides.matrix(to, task.batch, task.head) + key * strides.row + column,
                make_uint2(pair<T>(sum.x, sum.y), pair<T>(sum.z, sum.w)));
}
