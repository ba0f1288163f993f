// Products of int8 codes on compute capability 9.0 (for sm_90a alone), scaled: see include/codes/hopper.cuh.
//
// product_of_codes_int8_{n80,n128,n256}_{f16,bf16}: out (rows, stride) from x (rows, inner) and the parts of w (Σ rows, inner),
// whose rows are the columns of out that begin at their `start`. A block computes tiles of 128 rows by 80, 128 or 256 columns. A
// part without scales has scales of one. The bias may be null, and so may the residual, which has the layout of out. Row lengths are
// multiples of 16 elements, addresses of 16 bytes.
// There is no such kernel for e4m3 codes: the instructions keep only about 14 bits of sums of e4m3, so that sums of stages must be added
// in f32. The registers for this allow at most 160 columns, and such a kernel was slower than cuBLASLt.
// Grid (blocks), an even number, in clusters of two; 384 threads. Dynamic shared memory: CodesProduct::STAGE_BYTES + 16 bytes for each
// stage, and 16 bytes for each column.
#include "../include/codes/hopper.cuh"

#define PRODUCT(dtype, type, columns, stages)                                                                                          \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) product_of_codes_int8_n##columns##_##dtype(         \
        type *out, const type *bias, const type *residual, const float *row_scales, const __grid_constant__ CodeMaps maps,             \
        const __grid_constant__ CodeParts parts, uint32_t rows, uint32_t inner, uint32_t stride, uint32_t count) {                     \
        follow_after([&] { CodesProduct<type, columns, stages>::prepare(maps, parts, count); });                                       \
        CodesProduct<type, columns, stages>{out, bias, residual, row_scales, maps, parts, rows, inner, stride, count}.run();           \
    }
#define PRODUCTS(dtype, type)                                                                                                          \
    PRODUCT(dtype, type, 80, 8)                                                                                                        \
    PRODUCT(dtype, type, 128, 6)                                                                                                       \
    PRODUCT(dtype, type, 256, 4)
PRODUCTS(f16, __half)
PRODUCTS(bf16, __nv_bfloat16)
