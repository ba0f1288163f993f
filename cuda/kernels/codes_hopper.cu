// Products of 8-bit codes on compute capability 9.0 (for sm_90a alone), scaled: see include/codes/hopper.cuh.
//
// product_of_codes_int8_{f16,bf16}: out (rows, stride) from x (rows, inner) and the parts of w (Σ rows, inner). Row r of a part
// gives column `start` + r of out. A part without scales has scales of one; bias may be null. Row lengths must be multiples of 16
// elements, and addresses multiples of 16 bytes.
// There is no such kernel for e4m3 codes: the instructions keep only about 14 bits of sums of e4m3, so cuBLASLt multiplies them.
// Grid (blocks), an even number, in clusters of two; 384 threads. Dynamic shared memory: 196672 bytes.
#include "../include/codes/hopper.cuh"

#define PRODUCT(dtype, type)                                                                                                           \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) product_of_codes_int8_##dtype(                      \
        type *out, const type *bias, const float *row_scales, const __grid_constant__ CodeMaps maps,                                   \
        const __grid_constant__ CodeParts parts, uint32_t rows, uint32_t inner, uint32_t stride, uint32_t count) {                     \
        follow();                                                                                                                      \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                      \
        CodesProduct<type>{out, bias, row_scales, maps, parts, rows, inner, stride, count}.run(                                        \
            static_cast<uint32_t>(__cvta_generic_to_shared(shared)));                                                                  \
    }
PRODUCT(f16, __half)
PRODUCT(bf16, __nv_bfloat16)
