// Scaled products of 8-bit codes, out = x wᵀ, on compute capability 9.0 (code for sm_90a alone). include/codes/hopper.cuh has the code.
//
// out[i, j] = round((Σ_k x[i, k] w[j, k]) row_scales[i] scales[j] + bias[j]) + residual[i, j], where round() rounds to the dtype of out
//
// product_of_codes_int8_{n80,n128,n160,n256}_{f16,bf16}, product_of_codes_e4m3_n80_{f16,bf16}: out (rows, stride) from x (rows, inner) and
// w (rows of all parts, inner). w consists of `count` parts, one below the other. The rows of a part give the columns of out from the
// part's `start` on. `maps` are the tensor maps of x and of the parts. A block computes tiles of 128 rows by 80, 128, 160 or 256 columns. A
// part without scales has scales of one. The bias may be null, and so may the residual, which has the layout of out. Row lengths are
// multiples of 16 elements, addresses of 16 bytes.
// For e4m3 codes there are only 80 columns. These kernels need three registers for each sum: one for the total in f32, and one each for the
// sums of the stage that is being computed and of the stage before it. The registers suffice for at most 128 columns, and with 128 columns
// the kernels were slower than cuBLASLt.
// `sum` is the type of the sums (uint32_t has the bits of an int32_t), and `stages` the number of stages (tiles of x and w in shared
// memory).
// Grid (blocks), an even number, in clusters of two; 384 threads. Dynamic shared memory: CodesProduct::STAGE_BYTES + 16 bytes for each
// stage, and 16 bytes for each column.
#include "../include/codes/hopper.cuh"

#define PRODUCT(dtype, type, codes, sum, columns, stages)                                                                              \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) product_of_codes_##codes##_n##columns##_##dtype(    \
        type *out, const type *bias, const type *residual, const float *row_scales, const __grid_constant__ CodeMaps maps,             \
        const __grid_constant__ CodeParts parts, uint32_t rows, uint32_t inner, uint32_t stride, uint32_t count) {                     \
        follow_after([&] { CodesProduct<type, sum, columns, stages>::prepare(maps, parts, count); });                                  \
        CodesProduct<type, sum, columns, stages>{out, bias, residual, row_scales, maps, parts, rows, inner, stride, count}.run();      \
    }
#define PRODUCTS(dtype, type)                                                                                                          \
    PRODUCT(dtype, type, int8, uint32_t, 80, 8)                                                                                        \
    PRODUCT(dtype, type, int8, uint32_t, 128, 6)                                                                                       \
    PRODUCT(dtype, type, int8, uint32_t, 160, 6)                                                                                       \
    PRODUCT(dtype, type, int8, uint32_t, 256, 4)                                                                                       \
    PRODUCT(dtype, type, e4m3, float, 80, 8)
PRODUCTS(f16, __half)
PRODUCTS(bf16, __nv_bfloat16)
