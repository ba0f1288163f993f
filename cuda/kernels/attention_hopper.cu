// The attention of attention.cu on compute capability 9.0, forward and backward (compiled for sm_90a only). It takes f16 and bf16; equal
// widths of queries and values, which are a multiple of 8 up to 64 (w64) or 128 (w128); pointers and strides that are multiples of 16
// bytes; a scale above 0; at least one query and one key; no mask. It cannot be causal. Tensors, strides and log_sums are as in
// attention.cu.
//
// `Schedule` (include/attention/hopper/schedule.cuh) divides the work among the blocks. An item is a tile of queries (forward) or of keys
// (backward) of a head. Each step of an item combines its tile with one tile of the head's keys (forward) or queries (backward). One block
// does all steps of an item, or the host splits the item: then several blocks share its steps, and a later kernel (sum or finish) adds up
// what they computed, the parts of the item. With R queries in a tile of the forward pass, and M in a tile of the backward pass, there are
//   forward: ceil(queries / R) * batch * heads items of ceil(keys / 128) steps, with R = 192 (w64) or 128 (w128);
//   backward: ceil(keys / 128) * batch * heads items of ceil(queries / M) steps, with M = 128 (w64) or 64 (w128).
// The host sets the fields `blocks` and `whole` of `Schedule`. `blocks` is the number of multiprocessors. If the host splits no item,
// `whole` is the number of items. Otherwise `whole` is the largest multiple of `blocks` below the number of items, and the later items are
// split. The host splits items only if that saves more than five steps, about the time that it takes to add up the parts.
// steps * blocks * blocks must be below 2^32, because `Schedule` computes such products in 32 bits.
//
// `maps` have 16-bit elements; dimensions (width, rows, heads, batch), where rows are queries or keys; boxes of (64, B, 1, 1), where the
// comments of the structures (include/attention/hopper/copies.cuh) name the number B of rows; element strides of 1; no interleave; 128-byte
// swizzle; zeros for elements outside the tensor (FLOAT_OOB_FILL_NONE).
#include "../include/attention/hopper/finish.cuh"

#define BY_VALUE const __grid_constant__
#define ENTRY(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

// attention_hopper_forward_w{64,128}_{f16,bf16}: o (through its map) and log_sums of items that are not split. For each part of a split
// item, writes a row of parts, f32 (2 * blocks, R * (width + 2)) with width = 64 or 128: for R queries the sums of the softmax's weights,
// then the bases (what was subtracted in the exponents), then the results before their division by the sums. A block does parts of at most
// two items, and writes them to its two rows, 2 * block and 2 * block + 1. parts may be null if no item is split. `groups` is R / 64: each
// of these warpgroups computes 64 queries, and one more warpgroup copies. The argument 128 of the template is the keys in a tile.
// Grid (blocks), 512 threads (w64) or 384 (w128). Dynamic shared memory: w64 139360 bytes, w128 229472.
#define FORWARD(w, dtype, type, groups)                                                                                            \
    ENTRY((groups + 1) * WARPGROUP)                                                                                                \
    attention_hopper_forward_w##w##_##dtype(float *log_sums, float *parts, BY_VALUE AttentionForwardMaps maps,                     \
                                            BY_VALUE AttentionShape shape, BY_VALUE Schedule schedule) {                           \
        follow();                                                                                                                  \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                  \
        HopperForward<type, w, 128, groups, Schedule>{maps, shape, schedule, shared_address(shared)}.run(log_sums, parts);         \
    }

// attention_hopper_sum_w{64,128}_{f16,bf16}: o and log_sums of split items from their parts.
// Grid ((items - whole) * R * width / 2048) with width = 64 or 128: a block for 2048 values of o; 256 threads. No dynamic shared memory.
#define SUM(w, dtype, type, groups)                                                                                                \
    ENTRY(FINISH_THREADS)                                                                                                          \
    attention_hopper_sum_w##w##_##dtype(type *o, float *log_sums, const float *parts, BY_VALUE Strides o_strides,                  \
                                        BY_VALUE AttentionShape shape, BY_VALUE Schedule schedule) {                               \
        follow();                                                                                                                  \
        sum_results<type, w, 64 * groups>(o, log_sums, parts, o_strides, shape, schedule);                                         \
    }

// attention_hopper_statistics_w{64,128}_{f16,bf16}: prepares the backward pass. statistics (batch, heads, steps, 2, M) has, for each tile
// of M queries, log_sums / ln 2 and then delta, the sums of o ∘ d_o over each row. turns (batch, heads, steps) become zero: they are
// counters by which blocks take turns to add to a tile of dq. steps is that of the backward pass.
// Grid (batch * heads * steps), 256 threads. No dynamic shared memory.
#define STATISTICS(w, dtype, type, m)                                                                                              \
    ENTRY(FINISH_THREADS)                                                                                                          \
    attention_hopper_statistics_w##w##_##dtype(const type *o, const type *d_o, const float *log_sums, float *statistics,           \
                                               uint32_t *turns, BY_VALUE Strides o_strides, BY_VALUE Strides do_strides,           \
                                               BY_VALUE AttentionShape shape) {                                                    \
        follow();                                                                                                                  \
        backward_statistics<type, w, m>(blockIdx.x, o, d_o, log_sums, statistics, turns, o_strides, do_strides, shape);            \
    }

// attention_hopper_backward_w{64,128}_{f16,bf16}: dk and dv (through their maps) of items that are not split. Writes dk and dv of each part
// of a split item to parts, f32 (2 * blocks, 2, 128, width) with width = 64 or 128, and dq / scale to sums, f32
// (batch * heads * steps, M * width). parts may be null if no item is split. The blocks wait for one another, so all of them must run at
// the same time. `Order` (include/attention/hopper/order.cuh) adds to `Schedule` the sequence in which they add to a tile of dq.
// Grid (blocks), 384 threads. Dynamic shared memory: w64 216216 bytes, w128 214680.
#define BACKWARD(w, dtype, type, m)                                                                                                \
    ENTRY(3 * WARPGROUP)                                                                                                           \
    attention_hopper_backward_w##w##_##dtype(const float *statistics, float *sums, uint32_t *turns, float *parts,                  \
                                             BY_VALUE AttentionBackwardMaps maps, BY_VALUE AttentionShape shape,                   \
                                             BY_VALUE Schedule schedule) {                                                         \
        follow();                                                                                                                  \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                  \
        const Order<m> order(schedule, shape);                                                                                     \
        HopperBackward<type, w, m, Order<m>>{maps, shape, order, shared_address(shared)}.run(statistics, sums, turns, parts);      \
    }

// attention_hopper_finish_w{64,128}_{f16,bf16}: dq from sums, and dk and dv of split items from their parts. A gradient whose pointer is
// null is not written. items and steps are those of the backward pass.
// Grid (batch * heads * steps + (items - whole) * width / 8) with width = 64 or 128: a block for each tile of dq, then a block for each
// 2048 of the 2 * 128 * width values of an item's dk and dv; 256 threads. No dynamic shared memory.
#define FINISH(w, dtype, type, m)                                                                                                  \
    ENTRY(FINISH_THREADS)                                                                                                          \
    attention_hopper_finish_w##w##_##dtype(const float *sums, const float *parts, type *dq, type *dk, type *dv,                    \
                                           BY_VALUE Strides dq_strides, BY_VALUE Strides dk_strides, BY_VALUE Strides dv_strides,  \
                                           BY_VALUE AttentionShape shape, BY_VALUE Schedule schedule) {                            \
        follow();                                                                                                                  \
        backward_finish<type, w, m>(sums, parts, dq, dk, dv, dq_strides, dk_strides, dv_strides, shape,                            \
                                    Order<m>(schedule, shape));                                                                    \
    }

#define KERNELS(w, dtype, type, groups, m)                                                                                         \
    static_assert(HopperForward<type, w, 128, groups, Schedule>::SHARED == (w == 64 ? 139360 : 229472));                           \
    static_assert(HopperBackward<type, w, m, Order<m>>::SHARED == (w == 64 ? 216216 : 214680));                                    \
    FORWARD(w, dtype, type, groups)                                                                                                \
    SUM(w, dtype, type, groups)                                                                                                    \
    STATISTICS(w, dtype, type, m)                                                                                                  \
    BACKWARD(w, dtype, type, m)                                                                                                    \
    FINISH(w, dtype, type, m)

// The last two numbers are R / 64, the number of warpgroups that share an item's queries in the forward pass, and M.
KERNELS(64, f16, __half, 3, 128)
KERNELS(64, bf16, __nv_bfloat16, 3, 128)
KERNELS(128, f16, __half, 2, 64)
KERNELS(128, bf16, __nv_bfloat16, 2, 64)
