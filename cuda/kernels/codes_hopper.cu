// Products of int8 codes on compute capability 9.0 (for sm_90a alone), scaled: see include/codes/hopper.cuh.
//
// product_of_codes_int8_{n128,n256}_{f16,bf16}: out (rows, stride) from x (rows, inner) and the parts of w (Σ rows, inner).
// Row j of a part gives column `start` + j of out. A block computes tiles of 128 rows by 128 or 256 columns. A part without
// scales has scales of one; bias may be null. Row lengths are multiples of 16 elements. Addresses are multiples of 16 bytes.
// There is no such kernel for e4m3 codes: the instructions keep only about 14 bits of sums of e4m3, so cuBLASLt multiplies them.
// Grid (blocks), an even number, in clusters of two; 384 threads. Dynamic shared memory: 196704 bytes (n128) or 196672 (n256).
#include "../include/codes/hopper.cuh"

#define PRODUCT(dtype, type, columns, stages)                                                                                          \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) product_of_codes_int8_n##columns##_##dtype(         \
        type *out, const type *bias, const float *row_scales, const __grid_constant__ CodeMaps maps,                                   \
        const __grid_constant__ CodeParts parts, uint32_t rows, uint32_t inner, uint32_t stride, uint32_t count) {                     \
        follow();                                                                                                                      \
        extern __shared__ __align__(1024) unsigned char shared[];                                                                      \
        CodesProduct<type, columns, stages>{out, bias, row_scales, maps, parts, rows, inner, stride, count}.run(                       \
            static_cast<uint32_t>(__cvta_generic_to_shared(shared)));                                                                  \
    }
PRODUCT(f16, __half, 128, 6)
PRODUCT(bf16, __nv_bfloat16, 128, 6)
PRODUCT(f16, __half, 256, 4)
PRODUCT(bf16, __nv_bfloat16, 256, 4)
