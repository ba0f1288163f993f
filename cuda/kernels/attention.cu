// Scaled dot-product attention, forward and backward, in two forms. No form stores the matrix of scores.
//
// The form on tensor cores, `attention_*_w64_*` for widths up to 64 and `attention_*_w128_*` up to 128, takes f16 and bf16; a
// width that is a multiple of 8 and equal to the width of values; pointers and strides that are multiples of 16 bytes; a scale
// above 0; no `Mask`. It can be causal. The plain form, `attention_plain_*`, has none of these limits. Both forms take any number
// of queries and keys, including 0 where this does not make the kernel's grid empty.
//
// q and dq are (batch, heads, queries, width), k and dk (batch, heads, keys, width), v and dv (batch, heads, keys, value_width),
// the result o and its gradient d_o (batch, heads, queries, value_width). Each has its `Strides`, in the order of the pointers.
// log_sums and delta are (batch, heads, queries), dense, of type Acc: f32, or f64 for f64 operands. `AttentionShape`, `Strides` and `Mask`
// (include/attention) are passed by value. `follow` waits for the kernels that were queued before (include/follow.cuh).
#include "../include/attention/forms.cuh"

#define BY_VALUE const __grid_constant__
#define ENTRY(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

// attention_forward_w{64,128}_{f16,bf16}: o = softmax(scale q kᵀ) v and log_sums = ln Σ e^(scale q kᵀ), both over the keys that a query
// sees.
// Grid (ceil(queries / 64) * batch * heads), 128 threads. Dynamic shared memory: w64 40960 bytes, 73728 on compute capability 9.0;
// w128 81920.
// `blocks` is the number of blocks that a multiprocessor must have room for; `keys` is the number of keys that a block copies at a time.
// The template arguments 4, 1 of the functions on tensor cores are a block's warps and the tiles of 16 rows of each warp: a block owns 64
// rows. The class of these rows says where products read them: in registers (`HeldRows`), in shared memory (`SharedRows`), or in the one
// of the two that suits the architecture (`OwnRows`). `Dense()` means that a query sees all keys that `shape` allows.
#define FORWARD(w, dtype, type, blocks, keys)                                                                                      \
    ENTRY(128, blocks)                                                                                                             \
    attention_forward_w##w##_##dtype(const type *q, const type *k, const type *v, type *o, float *log_sums,                        \
                                     BY_VALUE Strides q_strides, BY_VALUE Strides k_strides, BY_VALUE Strides v_strides,           \
                                     BY_VALUE Strides o_strides, BY_VALUE AttentionShape shape) {                                  \
        follow();                                                                                                                  \
        attention_forward<type, w, 4, 1, keys, OwnRows>(q, k, v, o, log_sums, q_strides, k_strides, v_strides, o_strides, shape,   \
                                                              Dense());                                                            \
    }

// attention_backward_w{64,128}_{f16,bf16}: dq, dk and dv, with log_sums of the forward kernel and delta of attention_delta_*. A gradient
// whose pointer is null is not computed. With parts = 1, the kernel writes dk and dv, and dk_parts and dv_parts are null. Otherwise it
// writes dk_parts and dv_parts, f32 (parts, batch, heads, keys, width), which attention_sum_parts_* then sums. Parts keep the
// multiprocessors busy when there are few keys: they save time as long as parts * ceil(keys / 64) * batch * heads is below the number of
// multiprocessors.
// Grid (K + Q), 128 threads: K = parts * ceil(keys / 64) * batch * heads blocks compute dk and dv (K = 0 if both are null), and
// Q = ceil(queries / 64) * batch * heads blocks compute dq (Q = 0 if it is null). Dynamic shared memory: w64 50176 bytes, w128 99328.
// A block for dk and dv owns 64 keys, with rows of the class `key_rows`; it copies 64 queries at a time, and works on `key_step` of them at
// a time. A block for dq owns 64 queries, with rows of the class `query_rows`; it copies 64 keys at a time, and works on `query_step` of
// them at a time. So the prefixes `key_` and `query_` name the rows that a block owns, not those that the steps count.
#define BACKWARD(w, dtype, type, blocks, key_step, key_rows, query_step, query_rows)                                               \
    ENTRY(128, blocks)                                                                                                             \
    attention_backward_w##w##_##dtype(const type *q, const type *k, const type *v, const type *d_o, const float *log_sums,         \
                                      const float *delta, type *dq, type *dk, type *dv, float *dk_parts, float *dv_parts,          \
                                      BY_VALUE Strides q_strides, BY_VALUE Strides k_strides, BY_VALUE Strides v_strides,          \
                                      BY_VALUE Strides do_strides, BY_VALUE Strides dq_strides, BY_VALUE Strides dk_strides,       \
                                      BY_VALUE Strides dv_strides, BY_VALUE AttentionShape shape) {                                \
        follow();                                                                                                                  \
        const bool has_key_blocks = dk != nullptr || dv != nullptr;                                                                \
        const uint32_t key_blocks = has_key_blocks ? shape.parts * ceil_divide(shape.keys, 64) * shape.batch * shape.heads : 0;    \
        if (blockIdx.x < key_blocks)                                                                                               \
            attention_backward_key_value<type, w, 4, 1, 64, key_step, key_rows>(                                                   \
                blockIdx.x, q, k, v, d_o, log_sums, delta, dk, dv, dk_parts, dv_parts, q_strides, k_strides, v_strides,            \
                do_strides, dk_strides, dv_strides, shape, Dense());                                                               \
        else                                                                                                                       \
            attention_backward_query<type, w, 4, 1, 64, query_step, query_rows>(blockIdx.x - key_blocks, q, k, v, d_o, log_sums,   \
                                                                                delta, dq, q_strides, k_strides, v_strides,        \
                                                                                do_strides, dq_strides, shape, Dense());           \
    }

// attention_sum_parts_{f16,bf16}: dk and dv, unless their pointers are null. Each is the sum of its parts, added in the order of the parts.
// Grid (ceil(batch * heads * keys * width / 1024), 2), 256 threads; a thread sums four columns. No dynamic shared memory.
#define SUM_PARTS(dtype, type)                                                                                                     \
    ENTRY(256, 1)                                                                                                                  \
    attention_sum_parts_##dtype(const float *dk_parts, const float *dv_parts, type *dk, type *dv, BY_VALUE Strides dk_strides,     \
                                BY_VALUE Strides dv_strides, BY_VALUE AttentionShape shape) {                                      \
        follow();                                                                                                                  \
        if (blockIdx.y == 0)                                                                                                       \
            attention_sum_parts<type>(dk_parts, dk, dk_strides, shape);                                                            \
        else                                                                                                                       \
            attention_sum_parts<type>(dv_parts, dv, dv_strides, shape);                                                            \
    }

// The constants whose names end in _64 depend on the architecture (include/attention/forms.cuh).
#define ON_TENSOR_CORES(dtype, type)                                                                                               \
    FORWARD(64, dtype, type, FORWARD_BLOCKS_64, FORWARD_KEYS_64)                                                                   \
    FORWARD(128, dtype, type, 2, 64)                                                                                               \
    BACKWARD(64, dtype, type, BACKWARD_BLOCKS_64, 32, HeldRows, QUERY_STEP_64, OwnRows)                                            \
    BACKWARD(128, dtype, type, 2, 64, SharedRows, 64, SharedRows)                                                                  \
    SUM_PARTS(dtype, type)

ON_TENSOR_CORES(f16, __half)
ON_TENSOR_CORES(bf16, __nv_bfloat16)

// attention_delta_{f32,f64,f16,bf16}: delta = the sum of o ∘ d_o over each row. The backward kernels here and in attention_varlen.cu take
// delta as an argument.
// Grid (ceil(batch * heads * queries / 32)), 256 threads: eight for each row. No dynamic shared memory.
#define DELTA(dtype, type)                                                                                                         \
    ENTRY(256, 1)                                                                                                                  \
    attention_delta_##dtype(const type *o, const type *d_o, Acc<type> *delta, BY_VALUE Strides o_strides,                          \
                            BY_VALUE Strides do_strides, BY_VALUE AttentionShape shape) {                                          \
        follow();                                                                                                                  \
        attention_delta<type>(o, d_o, delta, o_strides, do_strides, shape);                                                        \
    }

// attention_plain_forward_{f32,f64,f16,bf16}: o = softmax(scale q kᵀ + mask) v and log_sums; a query that sees no key gets a result
// of zeros and a log-sum of negative infinity.
// Grid (ceil(queries / 32) * batch * heads, max(ceil(value_width / 64), 1)), 256 threads: a block computes 32 rows and 64 columns of o.
// No dynamic shared memory.
#define PLAIN_FORWARD(dtype, type)                                                                                                 \
    ENTRY(PLAIN_THREADS, 1)                                                                                                        \
    attention_plain_forward_##dtype(const type *q, const type *k, const type *v, type *o, Acc<type> *log_sums,                     \
                                    BY_VALUE Strides q_strides, BY_VALUE Strides k_strides, BY_VALUE Strides v_strides,            \
                                    BY_VALUE Strides o_strides, BY_VALUE Mask<Acc<type>> mask, BY_VALUE AttentionShape shape) {    \
        follow();                                                                                                                  \
        attention_plain_forward<type>(q, k, v, o, log_sums, q_strides, k_strides, v_strides, o_strides, mask, shape, Dense());     \
    }

// attention_plain_backward_{query,key,value}_{f32,f64,f16,bf16}: grad is dq, dk or dv; log_sums and delta are as in attention_backward_*.
// Grid (ceil(rows / 32) * batch * heads, ceil(columns / 64)), where grad is (batch, heads, rows, columns), 256 threads. No dynamic shared
// memory.
#define PLAIN_BACKWARD(part, dtype, type)                                                                                          \
    ENTRY(PLAIN_THREADS, 1)                                                                                                        \
    attention_plain_backward_##part##_##dtype(const type *q, const type *k, const type *v, const type *d_o,                        \
                                              const Acc<type> *log_sums, const Acc<type> *delta, type *grad,                       \
                                              BY_VALUE Strides q_strides, BY_VALUE Strides k_strides, BY_VALUE Strides v_strides,  \
                                              BY_VALUE Strides do_strides, BY_VALUE Strides grad_strides,                          \
                                              BY_VALUE Mask<Acc<type>> mask, BY_VALUE AttentionShape shape) {                      \
        follow();                                                                                                                  \
        attention_plain_backward<type, GradientOf::part>(q, k, v, d_o, log_sums, delta, grad, q_strides, k_strides, v_strides,     \
                                                         do_strides, grad_strides, mask, shape, Dense());                          \
    }

#define PLAIN(dtype, type)                                                                                                         \
    DELTA(dtype, type)                                                                                                             \
    PLAIN_FORWARD(dtype, type)                                                                                                     \
    PLAIN_BACKWARD(query, dtype, type)                                                                                             \
    PLAIN_BACKWARD(key, dtype, type)                                                                                               \
    PLAIN_BACKWARD(value, dtype, type)

FOR_EACH_FLOAT_AND_DOUBLE(PLAIN)
