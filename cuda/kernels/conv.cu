// Two-dimensional convolution, channels last: x (batch, height, width, channels), weight (out_channels, kernel_height,
// kernel_width, channels / groups), bias (out_channels), y (batch, out_height, out_width, out_channels). `Conv2dShape` has the
// sizes and is passed by value.
//
// Which function to use for the forward pass and the gradient of the input (the gradient of the weight has rules of its own below):
// - f16 and bf16 with groups = 1 and a convolution kernel of at most 16 x 16 use the tensor cores. Where the conditions of
//   conv_hopper.cu hold, use its functions, otherwise those of this file: `m128n16` for at most 16 result channels, else
//   `m128n128`, but `m64n64` if `m128n128` would have fewer tiles than the device has multiprocessors. These functions copy
//   16 bytes at a time. Pointers must be multiples of 16 bytes, and input channels multiples of 8; for the gradient of the
//   input, output channels must be multiples of 8, too. `m64n64v4` copies 8 bytes at a time: for it, these multiples are 8 bytes
//   and 4 channels.
// - all other cases (f32 except as below, f64, larger convolution kernels, other numbers of channels, more than one group) use
//   `plain`, or `direct` for several groups that each have fewer than 8 input or output channels, as in depthwise convolutions.
//
// A sum can be split among gridDim.z blocks (the splits) if there are too few tiles for the device. Each block then writes its slice of
// `partials`, f32 (splits, elements of the result), and `conv2d_sum` adds the slices in order. With gridDim.z = 1,
// `partials` is null, unless a comment below says otherwise.
//
// The forward pass of f32 on tensor cores: `pairs_{left,right}` split each operand into x = hi + lo in bf16, and write three bf16 parts
// for each row, one after another, as three times as many channels: hi hi lo of the image (left), hi lo hi of the weight (right). The bf16
// forward pass over these channels sums all products but lo * lo. If its sums are not split, `partials` is the f32 result itself, and
// `sums_bias` is the f32 bias.
#include "conv/plain.cuh"
#include "conv/pairs.cuh"
#include "conv/tensor.cuh"
#include "conv/weight.cuh"

#define FOR_EACH_HALF(DEFINE, ...) DEFINE(f16, __half, __VA_ARGS__) DEFINE(bf16, __nv_bfloat16, __VA_ARGS__)

// y[p, o] = bias[o] + sum over (a, b, c) of x[window of p at (a, b), c] * weight[o, a, b, c]; `bias` may be null. Here and below, p is a
// pixel of y, and its window at (a, b) is the pixel of the (padded) input that kernel tap (a, b) multiplies to compute p.
// A tile has M pixels and N channels of the result. WARPS_M * WARPS_N warps compute it, in steps of 64 summed values. A step's operands lie
// in one of STAGES buffers of shared memory. A copy moves VEC values. BLOCKS is the number of blocks that should fit on a multiprocessor.
// Grid: ceil(pixels of y / M) * ceil(out_channels / N), 1, splits; block: 128.
// Dynamic shared memory: STAGES * (M + N) * 128 bytes: m128n128 98304, m64n64 and m64n64v4 65536, m128n16 73728.
// partials: (splits, pixels of y, out_channels). `bias` is not added to it. `sums_bias` (f32) is added to every slice, so it is null if
// there are several splits (`conv2d_sum` then adds the bias), or if there is no bias.
#define DEFINE_FORWARD(DTYPE, TYPE, TILE, M, N, WARPS_M, WARPS_N, VEC, STAGES, BLOCKS)                                 \
    extern "C" __global__ void __launch_bounds__(128, BLOCKS) conv2d_forward_##TILE##_##DTYPE(                         \
        TYPE *y, const TYPE *x, const TYPE *weight, const TYPE *bias, float *partials, const float *sums_bias,         \
        Conv2dShape shape) {                                                                                           \
        follow();                                                                                                      \
        conv2d_tensor<TYPE, Direction::FORWARD, M, N, WARPS_M, WARPS_N, VEC, STAGES>(                                  \
            {y, x, weight, bias, partials, sums_bias}, shape);                                                         \
    }
FOR_EACH_HALF(DEFINE_FORWARD, m128n128, 128, 128, 2, 2, 8, 3, 2)
FOR_EACH_HALF(DEFINE_FORWARD, m64n64, 64, 64, 2, 2, 8, 4, 3)
FOR_EACH_HALF(DEFINE_FORWARD, m128n16, 128, 16, 4, 1, 8, 4, 3)
FOR_EACH_HALF(DEFINE_FORWARD, m64n64v4, 64, 64, 2, 2, 4, 4, 3)

// grad_x[q, c] = sum over o, and over all (p, a, b) such that q is the window of p at (a, b), of grad_y[p, o] * weight[o, a, b, c]. The
// input's pixels are grouped by phase (their coordinates modulo the stride), because pixels of one phase use the same kernel taps.
// The grid's y is the phase. The parameters of the macro are those of DEFINE_FORWARD.
// Grid: ceil(batch * ceil(height / stride_height) * ceil(width / stride_width) / M) * ceil(channels / N),
//       stride_height * stride_width, splits; block: 128.
// Dynamic shared memory: STAGES * (M * 128 + ceil(N / 64) * 8192) bytes: m128n128 98304, m64n64 and m64n64v4 65536,
// m128n16 98304.
// partials: (splits, pixels of x, channels).
#define DEFINE_GRAD_INPUT(DTYPE, TYPE, TILE, M, N, WARPS_M, WARPS_N, VEC, STAGES, BLOCKS)                              \
    extern "C" __global__ void __launch_bounds__(128, BLOCKS) conv2d_grad_input_##TILE##_##DTYPE(                      \
        TYPE *grad_x, const TYPE *grad_y, const TYPE *weight, float *partials, Conv2dShape shape) {                    \
        follow();                                                                                                      \
        conv2d_tensor<TYPE, Direction::GRAD_INPUT, M, N, WARPS_M, WARPS_N, VEC, STAGES>(                               \
            {grad_x, grad_y, weight, nullptr, partials, nullptr}, shape);                                              \
    }
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m128n128, 128, 128, 2, 2, 8, 3, 2)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m64n64, 64, 64, 2, 2, 8, 4, 3)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m128n16, 128, 16, 4, 1, 8, 4, 2)
FOR_EACH_HALF(DEFINE_GRAD_INPUT, m64n64v4, 64, 64, 2, 2, 4, 4, 3)

// grad_weight[o, a, b, c] = sum over the pixels p of grad_y[p, o] * x[window of p at (a, b), c].
// For f16 and bf16 with groups = 1 and a convolution kernel of at most 16 x 16: `m16` for at most 16 output channels (adapters), `m64`
// for at most 64, `m128` for more. Input and output channels are multiples of 8. `m16v1` takes any number of output channels, and input
// channels in multiples of 4. A copy moves LEFT_VEC values of grad_y, which are neighbouring output channels, or RIGHT_VEC values of x,
// which are neighbouring input channels. The other parameters of the macro are those of DEFINE_FORWARD.
// Grid: ceil(out_channels / M) * ceil(kernel_height * kernel_width * channels / 128), 1, splits; block: 128. A step
// sums over 64 pixels; there should not be more splits than steps.
// Dynamic shared memory: STAGES * (ceil(M / 64) + 2) * 8192 bytes: 98304 for each of the functions.
// partials: (splits, elements of the weight). With one split, the caller may also pass `partials`, to get the sum in f32 (for
// `conv2d_sum_accumulate_f32`).
#define DEFINE_GRAD_WEIGHT(DTYPE, TYPE, TILE, M, WARPS_M, WARPS_N, LEFT_VEC, RIGHT_VEC, STAGES)                        \
    extern "C" __global__ void __launch_bounds__(128, 2) conv2d_grad_weight_##TILE##_##DTYPE(                          \
        TYPE *grad_weight, const TYPE *grad_y, const TYPE *x, float *partials, Conv2dShape shape) {                    \
        follow();                                                                                                      \
        conv2d_grad_weight<TYPE, M, 128, WARPS_M, WARPS_N, LEFT_VEC, RIGHT_VEC, STAGES>(grad_weight, grad_y, x,        \
                                                                                        partials, shape);              \
    }
FOR_EACH_HALF(DEFINE_GRAD_WEIGHT, m16, 16, 1, 4, 8, 8, 4)
FOR_EACH_HALF(DEFINE_GRAD_WEIGHT, m16v1, 16, 1, 4, 1, 4, 4)
FOR_EACH_HALF(DEFINE_GRAD_WEIGHT, m64, 64, 2, 2, 8, 8, 4)
FOR_EACH_HALF(DEFINE_GRAD_WEIGHT, m128, 128, 2, 2, 8, 8, 3)

// Adds the slices of `partials`, f32 (f64 for f64). For `count` elements in rows of `columns`,
// y[i] = round(round(bias[i mod columns] + sum over the splits s of partials[s, i]) + addend). Here round rounds to T, and the addend of
// row r = i / columns is row r / `addend.sharing` of the matrix `addend.rows`, at column i mod columns. With ACCUMULATE,
// the inner sum includes the old y[i]. `bias` and `addend.rows` may be null, and then add nothing.
// Grid: any (a thread takes every gridDim.x * blockDim.x-th group of four elements); block: at most 256.
template <typename T, bool ACCUMULATE> __device__ __forceinline__ void
sum_partials(T *y, const Acc<T> *partials, const T *bias, const ConvAddend<T> &addend, uint64_t count, uint32_t columns, uint32_t splits) {
    constexpr int GROUP = 4;
    // Whether groups can be read and written as packs.
    const bool wide = count % GROUP == 0 && columns % GROUP == 0 && is_wide(partials) &&
                      reinterpret_cast<uintptr_t>(y) % (GROUP * sizeof(T)) == 0;
    const uint64_t groups = (count + GROUP - 1) / GROUP;
    for (uint64_t group = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; group < groups;
         group += uint64_t(gridDim.x) * blockDim.x) {
        const uint64_t first = group * GROUP;
        const int size = int(min(uint64_t(GROUP), count - first));
        Acc<T> sum[GROUP] = {};
        for (uint32_t split = 0; split < splits; ++split) {
            const Acc<T> *from = partials + split * count + first;
            if (wide) {
                // For f64, four values take two accesses.
                using Part = Pack<Acc<T>, 16 / sizeof(Acc<T>)>;
#pragma unroll
                for (int i = 0; i < GROUP; i += 16 / sizeof(Acc<T>)) {
                    const Part part = *reinterpret_cast<const Part *>(from + i);
#pragma unroll
                    for (int j = 0; j < int(16 / sizeof(Acc<T>)); ++j) sum[i + j] += part.values[j];
                }
            } else {
                for (int i = 0; i < GROUP; ++i) sum[i] += i < size ? from[i] : Acc<T>(0);
            }
        }
        Pack<T, GROUP> result;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (bias != nullptr && i < size) sum[i] += widen(bias[(first + i) % columns]);
            if (ACCUMULATE && i < size) sum[i] += widen(y[first + i]);
            result.values[i] = narrow<T>(sum[i]);
            if (addend.rows == nullptr || i >= size) continue;
            // The quotient is the element's row, the remainder its column.
            const Quotient place = divide(first + i, columns);
            result.values[i] = narrow<T>(widen(result.values[i]) + widen(addend.row(place.quotient, columns)[place.remainder]));
        }
        if (wide) {
            *reinterpret_cast<Pack<T, GROUP> *>(y + first) = result;
        } else {
            for (int i = 0; i < GROUP; ++i) {
                if (i < size) y[first + i] = result.values[i];
            }
        }
    }
}

// Writes the bf16 parts of the f32 operand `from` (rows, channels) to `to` (rows, 3 * padded). `padded` is a multiple of 8 and at least
// `channels`; each part has zeros after its `channels` numbers. LOW is the index of the part with lo. `to` is a multiple of 16 bytes.
// Grid: any (a thread takes every gridDim.x * blockDim.x-th group of eight channels); block: 256.
#define DEFINE_PAIRS(NAME, LOW)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        pairs_##NAME##_f32(__nv_bfloat16 *to, const float *from, uint64_t rows, uint32_t channels, uint32_t padded) {  \
        follow();                                                                                                      \
        write_pairs<LOW>(to, from, rows, channels, padded);                                                            \
    }
DEFINE_PAIRS(left, 2)
DEFINE_PAIRS(right, 1)

// `sum_partials` for a result of any dtype. `addend` and `sharing` are its `addend.rows` and `addend.sharing`.
#define DEFINE_SUM(DTYPE, TYPE)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 4) conv2d_sum_##DTYPE(                                           \
        TYPE *y, const Acc<TYPE> *partials, const TYPE *bias, const TYPE *addend, uint64_t count, uint32_t columns,    \
        uint32_t splits, uint32_t sharing) {                                                                           \
        follow();                                                                                                      \
        sum_partials<TYPE, false>(y, partials, bias, {addend, sharing}, count, columns, splits);                       \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SUM)

// Like `conv2d_sum_f32`, but adds to y, and takes no addend.
extern "C" __global__ void __launch_bounds__(256, 4)
    conv2d_sum_accumulate_f32(float *y, const float *partials, const float *bias, uint64_t count, uint32_t columns,
                              uint32_t splits) {
    follow();
    sum_partials<float, true>(y, partials, bias, {}, count, columns, splits);
}

// These kernels compute y and grad_x by the formulas above, for every size and dtype, without splits. Block: 256; no dynamic shared
// memory.
// Grid of `plain`: gridDim.x and gridDim.y as for the tensor cores, with M = N = 64 and only the result channels of one group;
// gridDim.z: min(groups, 65535).
// Grid of `direct`: any gridDim.x (a thread takes every gridDim.x * 256-th element of y or of a phase of grad_x); gridDim.y as for
// the tensor cores; gridDim.z = 1.
#define DEFINE_PLAIN(DTYPE, TYPE)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 2) conv2d_forward_plain_##DTYPE(                                 \
        TYPE *y, const TYPE *x, const TYPE *weight, const TYPE *bias, Conv2dShape shape) {                             \
        follow();                                                                                                      \
        conv2d_plain<TYPE, Direction::FORWARD>(y, x, weight, bias, shape);                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) conv2d_forward_direct_##DTYPE(                                   \
        TYPE *y, const TYPE *x, const TYPE *weight, const TYPE *bias, Conv2dShape shape) {                             \
        follow();                                                                                                      \
        conv2d_direct<TYPE, Direction::FORWARD>(y, x, weight, bias, shape);                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
        conv2d_grad_input_plain_##DTYPE(TYPE *grad_x, const TYPE *grad_y, const TYPE *weight, Conv2dShape shape) {     \
        follow();                                                                                                      \
        conv2d_plain<TYPE, Direction::GRAD_INPUT>(grad_x, grad_y, weight, nullptr, shape);                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 5)                                                               \
        conv2d_grad_input_direct_##DTYPE(TYPE *grad_x, const TYPE *grad_y, const TYPE *weight, Conv2dShape shape) {    \
        follow();                                                                                                      \
        conv2d_direct<TYPE, Direction::GRAD_INPUT>(grad_x, grad_y, weight, nullptr, shape);                            \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_PLAIN)

// These kernels compute partial sums of the gradient of the weight, which `conv2d_sum` must then add, even with one split. They take
// every size and dtype. `partials` is (splits, elements of the weight), f32 (f64 for f64). Block: 256; no dynamic shared memory.
// With values = kernel_height * kernel_width * channels / groups, the number of weights of an output channel:
// Grid of `plain`: ceil(out_channels / groups / 64) * ceil(values / 64), min(groups, 65535), splits.
// Grid of `direct`: ceil(out_channels / 32), min(values, 65535), splits.
#define DEFINE_GRAD_WEIGHT_PLAIN(DTYPE, TYPE)                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
        conv2d_grad_weight_plain_##DTYPE(Acc<TYPE> *partials, const TYPE *grad_y, const TYPE *x, Conv2dShape shape) {  \
        follow();                                                                                                      \
        conv2d_grad_weight_plain<TYPE>(partials, grad_y, x, shape);                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        conv2d_grad_weight_direct_##DTYPE(Acc<TYPE> *partials, const TYPE *grad_y, const TYPE *x, Conv2dShape shape) { \
        follow();                                                                                                      \
        conv2d_grad_weight_direct<TYPE>(partials, grad_y, x, shape);                                                   \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_GRAD_WEIGHT_PLAIN)
