// The attention of attention_varlen.cu on compute capability 9.0, forward (for sm_90a alone), with the same operands and spans: for f16
// and bf16, widths that are a multiple of 8 up to 64 (w64) or 128 (w128), and pointers and strides that are multiples of 16 bytes.
//
// `maps` as in attention_hopper.cu, with the heads of each tensor.
#include "../include/attention/hopper/forward.cuh"

#define BY_VALUE const __grid_constant__

// attention_varlen_hopper_forward_w{64,128}_{f16,bf16}: o (through its map) and log_sums. `taken`, one number, is zero before and
// after.
// Grid (at most ceil(rows / R) heads, with R = 192 (w64) or 128 (w128)), 512 threads (w64) or 384 (w128). Dynamic shared memory: w64 139392
// bytes, w128 229504.
#define FORWARD(w, dtype, type, groups)                                                                                            \
    static_assert(HopperForward<type, w, 128, groups, Queue>::SHARED == (w == 64 ? 139392 : 229504));                              \
    extern "C" __global__ void __launch_bounds__((groups + 1) * WARPGROUP, 1)                                                      \
        attention_varlen_hopper_forward_w##w##_##dtype(float *log_sums, const uint32_t *spans, uint32_t *taken,                    \
                                                       BY_VALUE AttentionForwardMaps maps, BY_VALUE AttentionShape shape,          \
                                                       uint32_t group) {                                                           \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                  \
        const Queue queue{Spans{spans, shape.queries, group}, taken, shape.heads, 64 * groups, 128};                               \
        HopperForward<type, w, 128, groups, Queue>{maps, shape, queue, shared_address(shared)}.run(log_sums, nullptr);             \
    }

FORWARD(64, f16, __half, 3)
FORWARD(64, bf16, __nv_bfloat16, 3)
FORWARD(128, f16, __half, 2)
FORWARD(128, bf16, __nv_bfloat16, 2)
