// Attention to at most 80 keys on compute capability 9.0, forward and backward (compiled for sm_90a only). It takes f16 and bf16; equal
// widths of queries and values, which are a multiple of 8 up to 64; pointers and strides that are multiples of 16 bytes; a scale above 0;
// at least one query and one key; no mask. It cannot be causal. Tensors, strides and log_sums are as in attention.cu.
//
// `Schedule` (include/attention/hopper/schedule.cuh) divides the work. There are items = batch * heads items, one for each head, of
// steps = ceil(queries / 128) steps each. Its field `whole`, the number of items that one block must do alone, is 0: blocks may share any
// item. The steps of all items form one sequence, and each block takes an equal stretch of it. `blocks` is the number of multiprocessors.
// items * steps * blocks must be below 2^32.
//
// `maps` have the format that attention_hopper.cu describes; include/attention/hopper/few_keys.cuh has the sizes of their boxes.
#include "../include/attention/hopper/few_keys_backward.cuh"

#define BY_VALUE const __grid_constant__
#define ENTRY(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

// attention_few_keys_forward_{f16,bf16}: o and log_sums, as attention_forward_* of attention.cu.
// Grid (blocks), 384 threads. Dynamic shared memory: 155776 bytes.
#define FORWARD(dtype, type)                                                                                                       \
    static_assert(FewKeysForward<type>::SHARED == 155776);                                                                         \
    ENTRY(FewKeysForward<type>::THREADS)                                                                                           \
    attention_few_keys_forward_##dtype(type *o, float *log_sums, BY_VALUE AttentionFewKeysMaps maps, BY_VALUE Strides o_strides,   \
                                       BY_VALUE AttentionShape shape, BY_VALUE Schedule schedule) {                                \
        follow();                                                                                                                  \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                  \
        const FewKeysForward<type> pass{{maps, shape, schedule, shared_address(shared)}};                                          \
        pass.run([&] { pass.work(o, o_strides, log_sums); });                                                                      \
    }

// attention_few_keys_backward_{f16,bf16}: dq, unless its pointer is null. Unless `parts` is null, each block also sums dk and dv over its
// queries of each head, and writes the two sums to parts[item + block]; parts is f32 (items + blocks - 1, 2, 80, 64). No two pairs of
// sums have the same index: along the sequence, the next pair belongs to the next item, to the next block, or to both, so item + block
// grows.
// Grid (blocks), 384 threads. Dynamic shared memory: 221264 bytes.
#define BACKWARD(dtype, type)                                                                                                      \
    static_assert(FewKeysBackward<type>::SHARED == 221264);                                                                        \
    ENTRY(FewKeysBackward<type>::THREADS)                                                                                          \
    attention_few_keys_backward_##dtype(type *dq, const float *log_sums, float *parts, BY_VALUE AttentionFewKeysMaps maps,         \
                                        BY_VALUE Strides dq_strides, BY_VALUE AttentionShape shape, BY_VALUE Schedule schedule) {  \
        follow();                                                                                                                  \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                  \
        const FewKeysBackward<type> pass{{maps, shape, schedule, shared_address(shared)}};                                         \
        pass.run([&] { pass.work(dq, dq_strides, log_sums, parts); });                                                             \
    }

// attention_few_keys_finish_{f16,bf16}: dk and dv, unless their pointers are null. Each is the sum of its parts.
// Grid (5 * items, 2), 256 threads: 5 * 256 threads sum the 80 * 64 values of an item, four each, and the second dimension selects dk or
// dv. No dynamic shared memory.
#define FINISH(dtype, type)                                                                                                        \
    ENTRY(256)                                                                                                                     \
    attention_few_keys_finish_##dtype(const float *parts, type *dk, type *dv, BY_VALUE Strides dk_strides,                         \
                                      BY_VALUE Strides dv_strides, BY_VALUE AttentionShape shape, BY_VALUE Schedule schedule) {    \
        follow();                                                                                                                  \
        few_keys_finish<type>(parts, dk, dv, dk_strides, dv_strides, shape, schedule);                                             \
    }

#define KERNELS(dtype, type) FORWARD(dtype, type) BACKWARD(dtype, type) FINISH(dtype, type)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
