// Causal attention inside the segments of a packed row, forward and backward, in two forms, as in attention.cu. The form on tensor cores,
// `attention_varlen_*_w64_*` for widths up to 64 and `attention_varlen_*_w128_*` up to 128, takes f16 and bf16; a width that is a multiple
// of 8; pointers and strides that are multiples of 16 bytes; and a scale above 0. The plain form, `attention_varlen_plain_*`, has none of
// these limits.
//
// A packed row has `rows` positions, each with a query and a key. q, o, d_o and dq are (heads, rows, width), k, v, dk and dv
// (heads / group, rows, width). Each has its `Strides`, in the order of the pointers. Head h of q sees head h / group of k and v. log_sums
// and delta are (heads, rows), dense. `shape` has a batch of 1, `heads` heads, as many keys as queries (`rows`), and is causal.
//
// spans (2, rows) has two numbers for each position p: spans[0][p] is the first key that query p sees, and spans[1][p] the end (exclusive)
// of the queries that see key p. The counter `taken` of attention_varlen_hopper.cu's forward kernel follows the spans in memory. Grids and
// arguments depend only on sizes; only the contents of spans depend on the segments. So a graph can be replayed with other segments.
//
// attention_delta_* of attention.cu computes delta, the sum of o ∘ d_o over each row, and attention_sum_parts_* of attention.cu sums the
// parts of dk and dv.
#include "../include/attention/forms.cuh"
#include "../include/ids.cuh"

#define BY_VALUE const __grid_constant__
#define ENTRY(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

// attention_varlen_spans: computes spans and sets `taken` to zero. `bounds` has `count` ids (include/ids.cuh): segment i is the positions
// from bounds[i] up to but not including bounds[i + 1]. Bounds must ascend from 0 to at most `rows`; otherwise *out_of_range becomes the
// lowest index of a wrong bound, and spans are undefined but within the row. Of the keys of its segment up to its own position, a query
// sees the last `window`, or all if they are fewer. A query after the last segment gets the next position as its first key, so it sees no
// key.
// Grid (ceil(max(rows, count) / 256)), 256 threads. No dynamic shared memory.
ENTRY(256, 1)
attention_varlen_spans(const void *bounds, uint32_t *spans, Counter *out_of_range, uint32_t id_bytes, uint32_t count, uint32_t rows,
                       uint32_t window) {
    follow();
    // A thread checks the bound with the index `position`, and computes the spans of this position.
    const uint32_t position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position < count) {
        const int64_t bound = load_id(bounds, id_bytes, position), before = position == 0 ? 0 : load_id(bounds, id_bytes, position - 1);
        if (bound < before || bound > rows || (position == 0 && bound != 0)) report_id(out_of_range, position);
    }
    if (position == 0) spans[2 * rows] = 0;
    if (position >= rows) return;
    // `low` becomes the number of bounds that are at most `position`. The position is then in segment low - 1, unless low is 0 or `count`.
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (load_id(bounds, id_bytes, middle) <= position)
            low = middle + 1;
        else
            high = middle;
    }
    uint32_t first = position + 1, end = position;
    if (low > 0 && low < count) {
        // With wrong bounds, `start` may be negative. `position` + `window` could exceed 32 bits, so `window` is limited to the rest of the
        // row before the sum.
        const int64_t start = load_id(bounds, id_bytes, low - 1);
        first = max(static_cast<uint32_t>(max(start, int64_t(0))), position - min(position, window - 1));
        end = static_cast<uint32_t>(min(load_id(bounds, id_bytes, low), int64_t(min(rows - position, window)) + position));
    }
    spans[position] = first;
    spans[rows + position] = end;
}

// attention_varlen_forward_w{64,128}_{f16,bf16}: o = softmax(scale q kᵀ) v and log_sums = ln Σ e^(scale q kᵀ), both over the keys that a
// query sees.
// Grid (ceil(rows / 64) * heads), 128 threads. Dynamic shared memory: w64 40960 bytes, 73728 on compute capability 9.0; w128 81920.
// `blocks` is the number of blocks that a multiprocessor must have room for; `keys` is the number of keys that a block copies at a time.
// The template arguments 4, 1 of the functions on tensor cores are a block's warps and the tiles of 16 rows of each warp: a block owns 64
// rows. The class of these rows says where products read them: in registers (`HeldRows`), in shared memory (`SharedRows`), or in the one
// of the two that suits the architecture (`OwnRows`).
#define FORWARD(w, dtype, type, blocks, keys)                                                                                      \
    ENTRY(128, blocks)                                                                                                             \
    attention_varlen_forward_w##w##_##dtype(const type *q, const type *k, const type *v, type *o, float *log_sums,                 \
                                            const uint32_t *spans, BY_VALUE Strides q_strides, BY_VALUE Strides k_strides,         \
                                            BY_VALUE Strides v_strides, BY_VALUE Strides o_strides, BY_VALUE AttentionShape shape, \
                                            uint32_t group) {                                                                      \
        follow();                                                                                                                  \
        attention_forward<type, w, 4, 1, keys, OwnRows>(q, k, v, o, log_sums, q_strides, k_strides, v_strides, o_strides, shape,   \
                                                        Spans{spans, shape.queries, group});                                       \
    }

// attention_varlen_backward_w{64,128}_{f16,bf16}: dq, dk and dv, with log_sums and delta. A gradient whose pointer is null is not computed.
// With parts = 1, the kernel writes dk and dv, and dk_parts and dv_parts are null. Otherwise dk and dv only say, by
// being null or not, which gradients to compute; the kernel writes these to dk_parts and dv_parts, f32 (parts, heads / group, rows, width),
// where a part is the sum over at most ceil(group / parts) of the `group` heads of queries.
// Grid (K + Q), 128 threads: K = parts * ceil(rows / 64) * heads / group blocks compute dk and dv (K = 0 if both are null), and
// Q = ceil(rows / 64) * heads blocks compute dq (Q = 0 if it is null). Dynamic shared memory: w64 50176 bytes, w128 99328.
// A block for dk and dv owns 64 keys, with rows of the class `key_rows`; it copies 64 queries at a time, and works on `key_step` of them at
// a time. A block for dq owns 64 queries, with rows of the class `query_rows`; it copies 64 keys at a time, and works on `query_step` of
// them at a time.
#define BACKWARD(w, dtype, type, blocks, key_step, key_rows, query_step, query_rows)                                               \
    ENTRY(128, blocks)                                                                                                             \
    attention_varlen_backward_w##w##_##dtype(                                                                                      \
        const type *q, const type *k, const type *v, const type *d_o, const float *log_sums, const float *delta, type *dq, type *dk,\
        type *dv, float *dk_parts, float *dv_parts, const uint32_t *spans, BY_VALUE Strides q_strides, BY_VALUE Strides k_strides, \
        BY_VALUE Strides v_strides, BY_VALUE Strides do_strides, BY_VALUE Strides dq_strides, BY_VALUE Strides dk_strides,         \
        BY_VALUE Strides dv_strides, BY_VALUE AttentionShape shape, uint32_t group) {                                              \
        follow();                                                                                                                  \
        const Spans visible{spans, shape.queries, group};                                                                          \
        const bool has_key_blocks = dk != nullptr || dv != nullptr;                                                                \
        const uint32_t key_blocks = has_key_blocks ? shape.parts * ceil_divide(shape.keys, 64) * (shape.heads / group) : 0;        \
        if (blockIdx.x < key_blocks)                                                                                               \
            attention_backward_key_value<type, w, 4, 1, 64, key_step, key_rows>(                                                   \
                blockIdx.x, q, k, v, d_o, log_sums, delta, dk, dv, dk_parts, dv_parts, q_strides, k_strides, v_strides,            \
                do_strides, dk_strides, dv_strides, shape, visible);                                                               \
        else                                                                                                                       \
            attention_backward_query<type, w, 4, 1, 64, query_step, query_rows>(                                                   \
                blockIdx.x - key_blocks, q, k, v, d_o, log_sums, delta, dq, q_strides, k_strides, v_strides, do_strides,           \
                dq_strides, shape, visible);                                                                                       \
    }

#define ON_TENSOR_CORES(dtype, type)                                                                                               \
    FORWARD(64, dtype, type, FORWARD_BLOCKS_64, FORWARD_KEYS_64)                                                                   \
    FORWARD(128, dtype, type, 2, 64)                                                                                               \
    BACKWARD(64, dtype, type, BACKWARD_BLOCKS_64, 32, HeldRows, QUERY_STEP_64, OwnRows)                                            \
    BACKWARD(128, dtype, type, 2, 64, SharedRows, 64, SharedRows)

ON_TENSOR_CORES(f16, __half)
ON_TENSOR_CORES(bf16, __nv_bfloat16)

// attention_varlen_plain_forward_{f32,f64,f16,bf16}: o and log_sums, as attention_varlen_forward_*. `Mask<...>{}` stands for no mask.
// Grid (ceil(rows / 32) * heads, max(1, ceil(width / 64))), 256 threads. No dynamic shared memory.
#define PLAIN_FORWARD(dtype, type)                                                                                                 \
    ENTRY(PLAIN_THREADS, 1)                                                                                                        \
    attention_varlen_plain_forward_##dtype(const type *q, const type *k, const type *v, type *o, Acc<type> *log_sums,              \
                                           const uint32_t *spans, BY_VALUE Strides q_strides, BY_VALUE Strides k_strides,          \
                                           BY_VALUE Strides v_strides, BY_VALUE Strides o_strides, BY_VALUE AttentionShape shape,  \
                                           uint32_t group) {                                                                       \
        follow();                                                                                                                  \
        attention_plain_forward<type>(q, k, v, o, log_sums, q_strides, k_strides, v_strides, o_strides, Mask<Acc<type>>{}, shape,  \
                                      Spans{spans, shape.queries, group});                                                         \
    }

// attention_varlen_plain_backward_{query,key,value}_{f32,f64,f16,bf16}: grad is dq, dk or dv.
// Grid (ceil(rows / 32) * H, ceil(width / 64)), where H is the number of heads of grad, 256 threads. No dynamic shared memory.
#define PLAIN_BACKWARD(part, dtype, type)                                                                                          \
    ENTRY(PLAIN_THREADS, 1)                                                                                                        \
    attention_varlen_plain_backward_##part##_##dtype(                                                                              \
        const type *q, const type *k, const type *v, const type *d_o, const Acc<type> *log_sums, const Acc<type> *delta, type *grad,\
        const uint32_t *spans, BY_VALUE Strides q_strides, BY_VALUE Strides k_strides, BY_VALUE Strides v_strides,                 \
        BY_VALUE Strides do_strides, BY_VALUE Strides grad_strides, BY_VALUE AttentionShape shape, uint32_t group) {               \
        follow();                                                                                                                  \
        attention_plain_backward<type, GradientOf::part>(q, k, v, d_o, log_sums, delta, grad, q_strides, k_strides, v_strides,     \
                                                         do_strides, grad_strides, Mask<Acc<type>>{}, shape,                       \
                                                         Spans{spans, shape.queries, group});                                      \
    }

#define PLAIN(dtype, type)                                                                                                         \
    PLAIN_FORWARD(dtype, type)                                                                                                     \
    PLAIN_BACKWARD(query, dtype, type)                                                                                             \
    PLAIN_BACKWARD(key, dtype, type)                                                                                               \
    PLAIN_BACKWARD(value, dtype, type)

FOR_EACH_FLOAT_AND_DOUBLE(PLAIN)
