// Forward pass and gradient of the input of conv.cu's convolution on compute capability 9.0 (for sm_90a alone).
//
// For f16 and bf16, groups = 1, a kernel of at most 16 x 16, pointers of 16 bytes, input channels in multiples of 8 and for the gradient of
// the input also output channels. Names as in conv.cu; parameters, grids, partials and the sum of a split too. Block: 256.
#include "conv/hopper.cuh"

#define FOR_EACH_HALF(DEFINE, ...) DEFINE(f16, __half, __VA_ARGS__) DEFINE(bf16, __nv_bfloat16, __VA_ARGS__)

#define DEFINE_FORWARD(DTYPE, TYPE, TILE, M, N, STAGES)                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 1) conv2d_forward_hopper_##TILE##_##DTYPE(                            \
        TYPE *y, const TYPE *x, const TYPE *weight, const TYPE *bias, float *partials, Conv2dShape shape) {                 \
        conv2d_hopper<TYPE, Direction::FORWARD, M, N, STAGES>({y, x, weight, bias, partials}, shape);                       \
    }
FOR_EACH_HALF(DEFINE_FORWARD, m128n128, 128, 128, 5)
FOR_EACH_HALF(DEFINE_FORWARD, m128n160, 128, 160, 5)
FOR_EACH_HALF(DEFINE_FORWARD, m256n128, 256, 128, 4)
FOR_EACH_HALF(DEFINE_FORWARD, m256n160, 256, 160, 4)

#define DEFINE_GRAD_INPUT(DTYPE, TYPE, TILE, M, N, STAGES)                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 1) conv2d_grad_input_hopper_##TILE##_##DTYPE(                         \
        TYPE *grad_x, const TYPE *grad_y, const TYPE *weight, float *partials, Conv2dShape shape) {                         \
        conv2d_hopper<TYPE, Direction::GRAD_INPUT, M, N, STAGES>({grad_x, grad_y, weight, nullptr, partials}, shape);       \
    }
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m128n128, 128, 128, 5)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m128n160, 128, 160, 5)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m256n128, 256, 128, 4)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m256n160, 256, 160, 4)
