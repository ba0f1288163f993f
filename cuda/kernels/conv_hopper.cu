// The convolution of conv.cu on compute capability 9.0 (for sm_90a alone): forward pass, gradient of the input and gradient
// of the weight. The comment at the end of this file has the tiles and grids for the gradient of the weight.
//
// The functions take f16 and bf16; groups = 1; a convolution kernel of at most 16 x 16; pointers that are multiples of
// 16 bytes; input channels in multiples of 8; and strides of at most 8. For the gradient of the input, output channels are
// multiples of 8, too, and strides are at most 2.
//
// A tile mMnN of the forward pass or of the gradient of the input is M pixels by N channels of the result. The gradient of the
// input has a phase for each pair of coordinates modulo the strides. Splits are the parts into which the sum over kernel taps
// and channels is divided; different blocks compute them. A step adds 64 channels of one tap.
//
// For the forward pass and the gradient of the input, choose the tile and the number of splits that take the least time:
//   ceil(blocks * splits / multiprocessors) * ceil(steps / splits) * cost, plus the time of the sum if splits > 1,
// with blocks = the grid's x times y and steps = taps * ceil(channels summed over / 64), where taps is the number of kernel
// taps that a result pixel uses (the largest of all phases). The cost of a step (measured on an H200, in microseconds) is
// 1.0 for m256n160, 0.97 for m256n128, 0.82 for m128n160 and 0.75 for m128n128. The sum of the splits moves
// (splits + 1) * 4 bytes for each value of the result, at about 3 TB/s. For SDXL at 1024 x 1024 and batch 1 the choice is
// m256n160 nearly everywhere, with one split for 320 channels, two for 640 and four for 1280. Results of at most 16 channels
// are faster with conv.cu's `m128n16`.
//
// Grid: ceil(pixels / (2 M)) * 2 * ceil(result channels / N), phases, splits; block: 384; clusters of two blocks (compiled in).
// For the forward pass, pixels are those of y, and phases = 1. For the gradient of the input, phases = stride_height *
// stride_width, and pixels = batch * ceil(height / stride_height) * ceil(width / stride_width).
//
// partials: f32 (splits, pixels of the result, channels of the result); null if the sums are not split and the result is not
// wanted in f32. `bias` is not added to partials, but `sums_bias` (f32), if not null, is added to each of their `splits`
// slices. So pass it only with one split, where partials are the f32 result.
//
// Dynamic shared memory, in bytes: STAGES buffers for the operands of a step, and 128 for barriers (two of 8 bytes for each stage).
//   forward pass, buffers of (M + N) * 128 bytes:
//     m128n128 196736, m128n160 221312, m256n128 196736, m256n160 213120
//   gradient of the input, buffers of M * 128 + ceil(N / 64) * 8192 bytes:
//     m128n128 196736, m128n160 204928, m256n128 196736, m256n160 229504
//
// addend: null, or what the forward pass adds to y: (pixels / sharing, out_channels), of which `sharing` consecutive pixels get the
// same row; see ConvAddend. The kernel does not add it to partials; `conv2d_sum` must.
//
// `maps` (see Conv2dMaps): 16-bit elements, no interleave, 128-byte swizzle, zeros for elements outside the tensor
// (FLOAT_OOB_FILL_NONE).
// - dense: cuTensorMapEncodeTiled, element strides 1.
//   Forward pass and gradient of the input: the weight, dimensions (channels, kernel_height * kernel_width,
//   out_channels), box (64, 1, N / 2) for the forward pass and (64, 1, 32) for the gradient of the input.
//   Gradient of the weight: grad_y, dimensions (out_channels, 1, pixels of y), box (64, 1, 64).
// - windows: cuTensorMapEncodeIm2col, dimensions (channels, width, height, batch) of the image, 64 channels per pixel;
//   corners as (width, height).
//   Forward pass and gradient of the weight: x, with M pixels per column for the forward pass or 64 for the gradient of the
//   weight, element strides (1, stride_width, stride_height, 1), lower corner = -padding, upper corner =
//   padding - dilation * (kernel - 1), where kernel is kernel_width or kernel_height.
//   Gradient of the input: grad_y, one map for each phase, M pixels per column, element strides 1, lower corner =
//   origin + (taps - 1) * move, upper corner = lower corner + pixels - source. `grad_input_axis` (conv/geometry.cuh) gives
//   these values for each axis of a phase: `pixels` and `source` are the sizes of the result and of grad_y along this axis, and
//   tap a reads grad_y at `origin + move * a` for the first result pixel. A phase without pixels or taps needs no map.
//   Both coordinates of each corner must be from -128 to 127, and dilation * (kernel - 1), the distance from the first to the
//   last kernel tap, at most 255. For other sizes use conv.cu's functions.
#include "conv/hopper_weight.cuh"

// The DEFINE macros below take the tile's sizes M and N, and STAGES, the number of buffers for the operands of a step. The kernels
// read the source and the weight through `maps`, so these operands are null; the gradient of the input has no bias.
#define FOR_EACH_HALF(DEFINE, ...) DEFINE(f16, __half, __VA_ARGS__) DEFINE(bf16, __nv_bfloat16, __VA_ARGS__)

#define DEFINE_FORWARD(DTYPE, TYPE, TILE, M, N, STAGES)                                                                \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)                                     \
        conv2d_forward_hopper_##TILE##_##DTYPE(TYPE *y, const TYPE *bias, const TYPE *addend, float *partials,         \
                                               const float *sums_bias, uint32_t sharing, Conv2dShape shape,            \
                                               const __grid_constant__ Conv2dMaps maps) {                              \
        follow();                                                                                                      \
        conv2d_hopper<TYPE, Direction::FORWARD, M, N, STAGES>(                                                         \
            {y, nullptr, nullptr, bias, partials, sums_bias, {addend, sharing}}, shape, maps);                         \
    }
FOR_EACH_HALF(DEFINE_FORWARD, m128n128, 128, 128, 6)
FOR_EACH_HALF(DEFINE_FORWARD, m128n160, 128, 160, 6)
FOR_EACH_HALF(DEFINE_FORWARD, m256n128, 256, 128, 4)
FOR_EACH_HALF(DEFINE_FORWARD, m256n160, 256, 160, 4)

#define DEFINE_GRAD_INPUT(DTYPE, TYPE, TILE, M, N, STAGES)                                                             \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)                                     \
        conv2d_grad_input_hopper_##TILE##_##DTYPE(TYPE *grad_x, float *partials, Conv2dShape shape,                    \
                                                  const __grid_constant__ Conv2dMaps maps) {                           \
        follow();                                                                                                      \
        conv2d_hopper<TYPE, Direction::GRAD_INPUT, M, N, STAGES>(                                                      \
            {grad_x, nullptr, nullptr, nullptr, partials, nullptr}, shape, maps);                                      \
    }
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m128n128, 128, 128, 6)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m128n160, 128, 160, 5)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m256n128, 256, 128, 4)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m256n160, 256, 160, 4)

// Gradient of the weight: input channels are multiples of 64, output channels of 8. `m64` is for at most 64 output channels,
// `m128` for 65 to 256, `m192` for more; for at most 16 (adapters) conv.cu's `m16` is faster. Choose as many splits as fill
// the multiprocessors once. M is the number of output channels of a tile.
// Grid, with values = kernel_height * kernel_width * channels: m64: ceil(out_channels / 64) * ceil(values / 256), 1,
// splits; m128, m192: ceil(out_channels / (2 M)) * 2 * ceil(values / 256), 1, splits, in clusters of two; block: 384.
// Dynamic shared memory, STAGES * (M + 256) * 128 bytes and 128 for barriers: m64 204928, m128 196736, m192 229504 bytes.
// partials: f32 (splits, elements of the weight), or null. With PAIRED, the two blocks of a cluster take neighbouring output
// channels, and each fetches half of the windows for both.
#define DEFINE_GRAD_WEIGHT(DTYPE, TYPE, TILE, M, STAGES, PAIRED, CLUSTER)                                              \
    extern "C" __global__ void CLUSTER __launch_bounds__(384, 1) conv2d_grad_weight_hopper_##TILE##_##DTYPE(           \
        TYPE *grad_weight, float *partials, Conv2dShape shape, const __grid_constant__ Conv2dMaps maps) {              \
        follow();                                                                                                      \
        WeightGrad<TYPE, M, STAGES, PAIRED>(shape).run(grad_weight, partials, shape, maps);                            \
    }
FOR_EACH_HALF(DEFINE_GRAD_WEIGHT, m64, 64, 5, false, )
FOR_EACH_HALF(DEFINE_GRAD_WEIGHT, m128, 128, 4, true, __cluster_dims__(2, 1, 1))
FOR_EACH_HALF(DEFINE_GRAD_WEIGHT, m192, 192, 4, true, __cluster_dims__(2, 1, 1))
