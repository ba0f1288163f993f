// Sizes of a convolution, and the sum that computes the forward pass and the gradient of the input:
//   result[pixel, n] = sum over kernel taps (a, b) and source channels c of
//                      source[the source pixel that tap (a, b) meets, c] * the weight of (a, b, c, n)
// For the forward pass, the source is the convolution's input, and the result its output. For the gradient of the input, the
// source is the gradient of the output, and the result the gradient of the input. n is a channel of the result.
#pragma once

#include "../element.cuh"

// The sizes of the convolution: input (batch, height, width, channels), weight (out_channels, kernel_height, kernel_width,
// channels / groups), output (batch, out_height, out_width, out_channels), all dense. Every size is at least 1. Input and
// output have fewer than 2^30 pixels (they may have more elements), the weight of one output channel has fewer than 2^30
// values, and all coordinates fit in 31 bits. Passed by value.
struct Conv2dShape {
    uint32_t batch, height, width, channels;
    uint32_t kernel_height, kernel_width;
    uint32_t out_height, out_width, out_channels;
    uint32_t stride_height, stride_width, padding_height, padding_width, dilation_height, dilation_width;
    uint32_t groups;
};

// One axis (height or width) of the sum, with `pixels` result pixels, `taps` taps and `source` source pixels. The result pixels
// are every `every`-th pixel of the result, from the coordinate `first` on: all pixels in the forward pass (first = 0, every =
// 1), those of one phase in the gradient of the input. A phase is the pixels whose coordinates have the same remainder modulo the
// stride (first = the remainder, every = the stride). So result pixel number i has the coordinate `first + every * i`. Tap a has
// the coordinate `tap_first + tap_every * a` in the convolution kernel. For result pixel i, tap a reads the source at the
// coordinate `origin + step * i + move * a`, which may be outside the source; such taps add nothing.
struct Axis {
    int pixels, first, every;
    int taps, tap_first, tap_every;
    int origin, step, move;
    int source;
};

__device__ __forceinline__ Axis forward_axis(int size, int kernel, int out, int stride, int padding, int dilation) {
    return {
        out,      0,      1,        // pixels, first, every
        kernel,   0,      1,        // taps, tap_first, tap_every
        -padding, stride, dilation, // origin, step, move
        size,                       // source
    };
}

// The axis of one phase of the gradient of the input: of the pixels whose coordinate is `phase` modulo the stride. All these
// pixels use the same kernel taps, and neighbours among them read neighbouring pixels of the gradient of the output. A
// convolution over the gradient of the output with zeros inserted between its pixels would give the same sums. Here no
// products with such zeros are computed.
__device__ __forceinline__ Axis grad_input_axis(int size, int kernel, int out, int stride, int padding, int dilation,
                                                int phase) {
    // The zeros for `pixels`, `taps`, `tap_first`, `origin` and `move` are replaced below; `tap_every` begins at 1, `step` is 1.
    Axis axis = {0, phase, stride, 0, 0, 1, 0, 1, 0, out};
    axis.pixels = phase < size ? (size - phase + stride - 1) / stride : 0;
    // Pixel p of the input, with p modulo the stride = phase, meets at tap t the pixel (p + padding - t * dilation) / stride of the
    // output, if this division leaves no remainder. Of `tap_every` consecutive taps, at most one meets pixels of the gradient of the
    // output; the others would meet inserted zeros. `tap_first` is the first tap that meets pixels. If the kernel has no such tap,
    // `taps` stays 0.
    while (axis.tap_every * dilation % stride != 0) ++axis.tap_every;
    while (axis.tap_first < axis.tap_every && (phase + padding - axis.tap_first * dilation) % stride != 0)
        ++axis.tap_first;
    if (axis.tap_first < axis.tap_every && axis.tap_first < kernel) {
        axis.taps = (kernel - axis.tap_first + axis.tap_every - 1) / axis.tap_every;
        axis.origin = (phase + padding - axis.tap_first * dilation) / stride;
        axis.move = -(axis.tap_every * dilation / stride);
    }
    return axis;
}

enum class Direction { FORWARD, GRAD_INPUT };

// The sizes of the whole sum or, for the gradient of the input, of the sum for one of the `stride_height * stride_width`
// phases: `phase` is (height phase) * stride_width + (width phase).
struct Gather {
    Axis y, x;
    int batch;
    // In one group: the number of channels of the source, and the number of channels of the result.
    int channels, results;

    template <Direction D> static __device__ __forceinline__ Gather of(const Conv2dShape &s, int phase) {
        const int in = s.channels / s.groups, out = s.out_channels / s.groups;
        if constexpr (D == Direction::FORWARD) {
            return {
                forward_axis(s.height, s.kernel_height, s.out_height, s.stride_height, s.padding_height,
                             s.dilation_height),
                forward_axis(s.width, s.kernel_width, s.out_width, s.stride_width, s.padding_width, s.dilation_width),
                int(s.batch), in, out};
        } else {
            return {grad_input_axis(s.height, s.kernel_height, s.out_height, s.stride_height, s.padding_height,
                                    s.dilation_height, phase / int(s.stride_width)),
                    grad_input_axis(s.width, s.kernel_width, s.out_width, s.stride_width, s.padding_width,
                                    s.dilation_width, phase % int(s.stride_width)),
                    int(s.batch), out, in};
        }
    }

    __device__ __forceinline__ int pixels() const { return batch * y.pixels * x.pixels; }
    __device__ __forceinline__ int taps() const { return y.taps * x.taps; }

    // Returns the index, in the result, of result pixel number `pixel` of this sum.
    template <Direction D> __device__ __forceinline__ int64_t result_pixel(const Conv2dShape &s, int pixel) const {
        if (D == Direction::FORWARD || (y.every == 1 && x.every == 1)) return pixel;
        // Pixels are numbered image by image and row by row: `line` is the row, counted over all images.
        const int line = pixel / x.pixels, j = pixel - line * x.pixels, image = line / y.pixels,
                  i = line - image * y.pixels;
        return (int64_t(image) * s.height + y.first + y.every * i) * s.width + x.first + x.every * j;
    }
};

// The window of result pixel number `pixel` of a sum: the index of the image in the batch, and the source coordinates of the
// first tap, which may be outside the source.
struct Window {
    int image, y, x;

    __device__ __forceinline__ Window(const Gather &gather, int pixel) {
        const int line = pixel / gather.x.pixels, j = pixel - line * gather.x.pixels;
        image = line / gather.y.pixels;
        y = gather.y.origin + gather.y.step * (line - image * gather.y.pixels);
        x = gather.x.origin + gather.x.step * j;
    }
};
