// The attention of attention_varlen.cu, causal attention inside the segments of a packed row, on compute capability 9.0, forward and
// backward (compiled for sm_90a only), with the same operands and spans. spans is (2, rows): row 0 has the first key that each query sees,
// row 1 the end (exclusive) of the queries that see each key. A query sees no key after its own position. The kernels take f16 and bf16,
// widths that are a multiple of 8 up to 64 (w64) or 128 (w128), pointers and strides that are multiples of 16 bytes, and a scale above 0.
//
// The packed row has rows = shape.queries positions, each with a query and a key, and heads = shape.heads heads of queries. `group` is the
// number of heads of queries that share a head of keys. `maps` are the tensor maps through which the kernels copy tiles of q, k, v and the
// other matrices; they are as in attention_hopper.cu, with a batch of 1, and each map has the number of heads of its tensor. log_sums
// (heads, rows) is ln Σ e^score over the keys that a query sees. `Queue` (include/attention/hopper/queue.cuh) divides the work of the
// forward pass.
//
// In the backward pass, a tile has M = 128 (w64) or 64 (w128) queries, and `blocks` is the number of multiprocessors. An item is a tile of
// 128 keys of one head of keys. Its steps are the tiles of queries that see some of these keys, of all heads that share them. `Shares`
// (include/attention/hopper/shares.cuh) divides the steps of all items among the blocks by means of `plan`, which has
// ceil(rows / 128) + 1 + blocks numbers. If several blocks take steps of an item, the item is split, and each of these blocks computes a
// part of its dk and dv. heads * ceil(rows / M) * ceil(rows / 128) must be below 2^31.
#include "../include/attention/hopper/finish.cuh"
#include "../include/attention/hopper/shares.cuh"

#define BY_VALUE const __grid_constant__
#define ENTRY(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
// Makes `shares` from the parameters of a kernel.
#define SHARES(m) const Shares<m> shares(Spans{spans, shape.queries, group}, plan, shape.heads / group, blocks)

// attention_varlen_hopper_forward_w{64,128}_{f16,bf16}: o (through its map) and log_sums. *taken counts how often
// blocks have asked the queue for a tile after their first one. It must be zero before the launch, and is zero after it. `groups`
// warpgroups multiply, for 64 queries each; a tile of keys has 128. A tile of queries is never split among blocks, so the argument of
// `run` for parts is null.
// Grid (at most ceil(rows / R) * heads, with R = 192 (w64) or 128 (w128)), 512 threads (w64) or 384 (w128). Dynamic shared memory:
// w64 139392 bytes, w128 229504.
#define FORWARD(w, dtype, type, groups)                                                                                            \
    ENTRY((groups + 1) * WARPGROUP)                                                                                                \
    attention_varlen_hopper_forward_w##w##_##dtype(float *log_sums, const uint32_t *spans, uint32_t *taken,                        \
                                                   BY_VALUE AttentionForwardMaps maps, BY_VALUE AttentionShape shape,              \
                                                   uint32_t group) {                                                               \
        follow();                                                                                                                  \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                  \
        const Queue queue{Spans{spans, shape.queries, group}, taken, shape.heads, 64 * groups, 128};                               \
        HopperForward<type, w, 128, groups, Queue>{maps, shape, queue, shared_address(shared)}.run(log_sums, nullptr);             \
    }

// attention_varlen_hopper_statistics_w{64,128}_{f16,bf16}: prepares the backward pass. Writes plan, and statistics (heads, ceil(rows / M),
// 2, M): for each tile, log_sums / ln 2 of its M queries, then the sum of o ∘ d_o over the columns of each. Sets turns (heads,
// ceil(rows / M)) to zero: these are the counters by which blocks take turns to add to a tile of dq.
// Grid (1 + heads * ceil(rows / M)), 256 threads. No dynamic shared memory.
#define STATISTICS(w, dtype, type, m)                                                                                              \
    ENTRY(FINISH_THREADS)                                                                                                          \
    attention_varlen_hopper_statistics_w##w##_##dtype(                                                                             \
        const type *o, const type *d_o, const float *log_sums, const uint32_t *spans, uint32_t *plan, float *statistics,           \
        uint32_t *turns, BY_VALUE Strides o_strides, BY_VALUE Strides do_strides, BY_VALUE AttentionShape shape, uint32_t group,   \
        uint32_t blocks) {                                                                                                         \
        follow();                                                                                                                  \
        SHARES(m);                                                                                                                 \
        if (blockIdx.x == 0)                                                                                                       \
            shares.template make_plan<FINISH_THREADS>(plan);                                                                       \
        else                                                                                                                       \
            backward_statistics<type, w, m>(blockIdx.x - 1, o, d_o, log_sums, statistics, turns, o_strides, do_strides, shape);    \
    }

// attention_varlen_hopper_backward_w{64,128}_{f16,bf16}: dk and dv (through their maps) of items that are not split. Writes dk and dv of
// each part of a split item to parts, f32 (2 * blocks, 2, 128, width) with width = 64 or 128: a block has at most two parts, of its first
// and of its last item, and a part is dk, then dv. Writes dq / scale to sums, f32 (heads * ceil(rows / M), M * width). The blocks wait for
// one another, so all of them must run at the same time.
// Grid (blocks), 384 threads. Dynamic shared memory: w64 216216 bytes, w128 214680.
#define BACKWARD(w, dtype, type, m)                                                                                                \
    ENTRY(3 * WARPGROUP)                                                                                                           \
    attention_varlen_hopper_backward_w##w##_##dtype(const float *statistics, const uint32_t *spans, const uint32_t *plan,          \
                                                    float *sums, uint32_t *turns, float *parts,                                    \
                                                    BY_VALUE AttentionBackwardMaps maps, BY_VALUE AttentionShape shape,            \
                                                    uint32_t group, uint32_t blocks) {                                             \
        follow();                                                                                                                  \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                  \
        SHARES(m);                                                                                                                 \
        HopperBackward<type, w, m, Shares<m>>{maps, shape, shares, shared_address(shared)}.run(statistics, sums, turns, parts);    \
    }

// attention_varlen_hopper_finish_w{64,128}_{f16,bf16}: dq from sums, and dk and dv of split items from their parts. A gradient whose
// pointer is null is not written.
// Grid (heads * ceil(rows / M) + (blocks - 1) * width / 8) with width = 64 or 128, 256 threads. No dynamic shared memory. A split item
// takes width / 8 blocks of the grid; at most blocks - 1 items are split, one where the share of a block ends and the next share begins.
#define FINISH(w, dtype, type, m)                                                                                                  \
    ENTRY(FINISH_THREADS)                                                                                                          \
    attention_varlen_hopper_finish_w##w##_##dtype(const float *sums, const float *parts, const uint32_t *spans,                    \
                                                  const uint32_t *plan, type *dq, type *dk, type *dv,                              \
                                                  BY_VALUE Strides dq_strides, BY_VALUE Strides dk_strides,                        \
                                                  BY_VALUE Strides dv_strides, BY_VALUE AttentionShape shape, uint32_t group,      \
                                                  uint32_t blocks) {                                                               \
        follow();                                                                                                                  \
        SHARES(m);                                                                                                                 \
        backward_finish<type, w, m>(sums, parts, dq, dk, dv, dq_strides, dk_strides, dv_strides, shape, shares);                   \
    }

#define KERNELS(w, dtype, type, groups, m)                                                                                         \
    static_assert(HopperForward<type, w, 128, groups, Queue>::SHARED == (w == 64 ? 139392 : 229504));                              \
    static_assert(HopperBackward<type, w, m, Shares<m>>::SHARED == (w == 64 ? 216216 : 214680));                                   \
    FORWARD(w, dtype, type, groups)                                                                                                \
    STATISTICS(w, dtype, type, m)                                                                                                  \
    BACKWARD(w, dtype, type, m)                                                                                                    \
    FINISH(w, dtype, type, m)

KERNELS(64, f16, __half, 3, 128)
KERNELS(64, bf16, __nv_bfloat16, 3, 128)
KERNELS(128, f16, __half, 2, 64)
KERNELS(128, bf16, __nv_bfloat16, 2, 64)
