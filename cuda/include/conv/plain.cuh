// Convolutions without tensor cores, for what the tensor-core functions do not support (see conv.cu): f32, f64, grouped
// channels and certain sizes. Each element of a result is a sum of products. In the `plain` functions, a block of 256 threads
// computes a tile of 64 by 64 elements, and adds 16 products to each of them at a time. The `direct` functions are for groups of
// few channels. In them, a thread computes a whole sum; but in the one for the gradient of the weight, eight threads, one in each warp
// of the block, share a partial sum.
//
// The forward pass and the gradient of the input are the same sum over a `source`, which is the input or the gradient of the output
// (`Direction`). `Gather` (geometry.cuh) has the sum's sizes: the numbers of channels of the source (`channels`) and of the result
// (`results`) in a group, and for each axis the numbers of taps and of source pixels. For the gradient of the input it describes one
// phase: the result pixels whose coordinates have the same remainders modulo the strides. On an axis, tap a of the sum is the kernel's
// tap `tap_first + tap_every * a`. Its source coordinate is that of tap 0 plus `move * a`. A `Window` has the image and the source
// coordinates of a result pixel's tap 0. Images are (batch, height, width, channels).
#pragma once

#include "geometry.cuh"

constexpr int PLAIN_TILE = 64, PLAIN_DEPTH = 16, PLAIN_THREADS = 256;

// The operands of a tile in shared memory: left[product][row], right[product][column]. A row is a pixel of the result and a column is a
// channel of it; for the gradient of the weight, they are an output channel and a pair (tap, input channel). The unused last column of
// each array puts the values that a block writes at the same time into different banks.
template <typename T> struct PlainTiles {
    Acc<T> left[PLAIN_DEPTH][PLAIN_TILE + 1], right[PLAIN_DEPTH][PLAIN_TILE + 1];
};

// A thread has four by four sums of the tile, in the rows `plain_row() + 16 i` and the columns `plain_column() + 16 j`.
__device__ __forceinline__ int plain_row() { return int(threadIdx.x) / 16; }
__device__ __forceinline__ int plain_column() { return int(threadIdx.x) % 16; }

template <typename T> __device__ __forceinline__ void multiply_plain(Acc<T> (&acc)[4][4], const PlainTiles<T> &tiles) {
#pragma unroll
    for (int k = 0; k < PLAIN_DEPTH; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                acc[i][j] += tiles.left[k][plain_row() + 16 * i] * tiles.right[k][plain_column() + 16 * j];
        }
    }
}

// Returns the index in the weight (out_channels, taps, channels / groups) for a channel of the source, a channel of the result and a
// tap (a, b). `channel` and `result` are counted from the first channel of group `group`.
template <Direction D> __device__ __forceinline__ int64_t weight_index(const Conv2dShape &s, const Gather &gather,
                                                                       int group, int channel, int result, int a,
                                                                       int b) {
    const int tap =
        (gather.y.tap_first + gather.y.tap_every * a) * s.kernel_width + gather.x.tap_first + gather.x.tap_every * b;
    const int out = D == Direction::FORWARD ? group * gather.results + result : group * gather.channels + channel;
    const int in = D == Direction::FORWARD ? channel : result;
    return (int64_t(out) * s.kernel_height * s.kernel_width + tap) * (s.channels / s.groups) + in;
}

// Returns the source value of a window at tap (a, b); zero outside the image. `channel` is counted over all groups.
template <typename T> __device__ __forceinline__ Acc<T> source_value(const T *source, const Conv2dShape &s,
                                                                     const Gather &gather, const Window &window, int a,
                                                                     int b, int channel) {
    const int y = window.y + a * gather.y.move, x = window.x + b * gather.x.move;
    if (unsigned(y) >= unsigned(gather.y.source) || unsigned(x) >= unsigned(gather.x.source)) return 0;
    const int64_t pixel = (int64_t(window.image) * gather.y.source + y) * gather.x.source + x;
    return widen(source[pixel * gather.channels * s.groups + channel]);
}

// Computes tile blockIdx.x, pixels by channels of the result, for every gridDim.z-th group from blockIdx.z on. blockIdx.y is the phase (see
// `Gather`).
template <typename T, Direction D> __device__ __forceinline__ void
conv2d_plain(T *result, const T *source, const T *weight, const T *bias, const Conv2dShape &s) {
    __shared__ PlainTiles<T> tiles;
    const Gather gather = Gather::of<D>(s, blockIdx.y);
    // The tiles of the result are numbered in row-major order, `tiles_across` in a row.
    const int tiles_across = (gather.results + PLAIN_TILE - 1) / PLAIN_TILE, pixels = gather.pixels();
    const int first_row = int(blockIdx.x) / tiles_across * PLAIN_TILE,
              first_column = int(blockIdx.x) % tiles_across * PLAIN_TILE;
    const int length = gather.taps() * gather.channels; // The number of products in each sum.
    if (first_row >= pixels) return; // The grid is that of the largest phase.

    for (int group = blockIdx.z; group < int(s.groups); group += gridDim.z) {
        Acc<T> acc[4][4] = {};
        for (int start = 0; start < length; start += PLAIN_DEPTH) {
            // `at` is the index of a product in the sum. This thread fills left[k][i] and right[k][i] for one `k`, and some `i`.
            const int k = int(threadIdx.x) % PLAIN_DEPTH, at = start + k, tap = at / gather.channels;
            const int channel = at - tap * gather.channels, a = tap / gather.x.taps, b = tap - a * gather.x.taps;
            __syncthreads();
            for (int i = int(threadIdx.x) / PLAIN_DEPTH; i < PLAIN_TILE; i += PLAIN_THREADS / PLAIN_DEPTH) {
                const int row = first_row + i, column = first_column + i;
                tiles.left[k][i] = at < length && row < pixels ? source_value(source, s, gather, Window(gather, row), a,
                                                                              b, group * gather.channels + channel)
                                                               : Acc<T>(0);
                tiles.right[k][i] = at < length && column < gather.results
                                        ? widen(weight[weight_index<D>(s, gather, group, channel, column, a, b)])
                                        : Acc<T>(0);
            }
            __syncthreads();
            multiply_plain(acc, tiles);
        }
        for (int i = 0; i < 4; ++i) {
            const int row = first_row + plain_row() + 16 * i;
            if (row >= pixels) continue;
            T *to =
                result + gather.template result_pixel<D>(s, row) * gather.results * s.groups + group * gather.results;
            for (int j = 0; j < 4; ++j) {
                const int column = first_column + plain_column() + 16 * j;
                if (column >= gather.results) continue;
                const Acc<T> offset = bias != nullptr ? widen(bias[group * gather.results + column]) : Acc<T>(0);
                to[column] = narrow<T>(acc[i][j] + offset);
            }
        }
    }
}

// Each thread computes one value of the result after another. `column` is the value's channel, counted over all groups.
// blockIdx.y is the phase (see `Gather`).
template <typename T, Direction D> __device__ __forceinline__ void
conv2d_direct(T *result, const T *source, const T *weight, const T *bias, const Conv2dShape &s) {
    const Gather gather = Gather::of<D>(s, blockIdx.y);
    const int results = gather.results * s.groups;
    const uint64_t count = uint64_t(gather.pixels()) * results;
    for (uint64_t index = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < count;
         index += uint64_t(gridDim.x) * blockDim.x) {
        const int pixel = int(index / results), column = int(index - uint64_t(pixel) * results);
        const int group = column / gather.results, channels = gather.channels;
        const Window window(gather, pixel);
        Acc<T> sum = bias != nullptr ? widen(bias[column]) : Acc<T>(0);
        for (int a = 0; a < gather.y.taps; ++a) {
            for (int b = 0; b < gather.x.taps; ++b) {
                for (int c = 0; c < channels; ++c) {
                    const int64_t at = weight_index<D>(s, gather, group, c, column - group * gather.results, a, b);
                    sum += source_value(source, s, gather, window, a, b, group * channels + c) * widen(weight[at]);
                }
            }
        }
        result[gather.template result_pixel<D>(s, pixel) * results + column] = narrow<T>(sum);
    }
}

// Returns the value of the input that tap (a, b) multiplies for pixel `pixel` of the output; zero outside the image. `channel` is
// counted over all groups.
template <typename T>
__device__ __forceinline__ Acc<T> input_value(const T *x, const Conv2dShape &s, int pixel, int a, int b, int channel) {
    const int line = pixel / int(s.out_width), image = line / int(s.out_height);
    const int y =
        (line - image * int(s.out_height)) * int(s.stride_height) - int(s.padding_height) + a * int(s.dilation_height);
    const int x_ =
        (pixel - line * int(s.out_width)) * int(s.stride_width) - int(s.padding_width) + b * int(s.dilation_width);
    if (unsigned(y) >= s.height || unsigned(x_) >= s.width) return 0;
    return widen(x[((int64_t(image) * s.height + y) * s.width + x_) * s.channels + channel]);
}

// The gradient of the weight sums over the pixels of the output, which are divided into gridDim.z ranges. Returns the range (first,
// end) of this block, number blockIdx.z.
__device__ __forceinline__ int2 slice_pixels(const Conv2dShape &s) {
    const int64_t pixels = int64_t(s.batch) * s.out_height * s.out_width;
    return {int(pixels * blockIdx.z / gridDim.z), int(pixels * (blockIdx.z + 1) / gridDim.z)};
}

// Sums over the pixels of `slice_pixels` and writes the sums to slice blockIdx.z of `partials` (gridDim.z, elements of the weight). A
// block computes tile blockIdx.x, output channels by (tap, input channel) columns, of this slice for every gridDim.y-th group.
template <typename T> __device__ __forceinline__ void conv2d_grad_weight_plain(Acc<T> *partials, const T *grad,
                                                                               const T *x, const Conv2dShape &s) {
    __shared__ PlainTiles<T> tiles;
    // Per group: input channels, output channels, and values of the weight for one output channel.
    const int in = s.channels / s.groups, outs = s.out_channels / s.groups,
              values = s.kernel_height * s.kernel_width * in;
    const int tiles_across = (values + PLAIN_TILE - 1) / PLAIN_TILE;
    const int first_row = int(blockIdx.x) / tiles_across * PLAIN_TILE,
              first_column = int(blockIdx.x) % tiles_across * PLAIN_TILE;
    const int2 range = slice_pixels(s);
    Acc<T> *slice = partials + int64_t(blockIdx.z) * s.out_channels * values;
    // This thread fills left[k][i] and right[k][i] for one `i`, and some `k`.
    const int i = int(threadIdx.x) % PLAIN_TILE, row = first_row + i, column = first_column + i;
    const int tap = column / in, channel = column - tap * in, a = tap / int(s.kernel_width),
              b = tap - a * int(s.kernel_width);

    for (int group = blockIdx.y; group < int(s.groups); group += gridDim.y) {
        Acc<T> acc[4][4] = {};
        for (int start = range.x; start < range.y; start += PLAIN_DEPTH) {
            __syncthreads();
            for (int k = int(threadIdx.x) / PLAIN_TILE; k < PLAIN_DEPTH; k += PLAIN_THREADS / PLAIN_TILE) {
                const int pixel = start + k;
                tiles.left[k][i] = pixel < range.y && row < outs
                                       ? widen(grad[int64_t(pixel) * s.out_channels + group * outs + row])
                                       : Acc<T>(0);
                tiles.right[k][i] =
                    pixel < range.y && column < values ? input_value(x, s, pixel, a, b, group * in + channel) : Acc<T>(0);
            }
            __syncthreads();
            multiply_plain(acc, tiles);
        }
        for (int r = 0; r < 4; ++r) {
            const int out = first_row + plain_row() + 16 * r;
            for (int c = 0; c < 4; ++c) {
                const int value = first_column + plain_column() + 16 * c;
                if (out < outs && value < values) slice[(int64_t(group) * outs + out) * values + value] = acc[r][c];
            }
        }
    }
}

// Like `conv2d_grad_weight_plain`, with other work for a block: its tile is 32 output channels, one for each lane of a warp, by one
// (tap, input channel) after another. Each of the eight warps takes every eighth pixel, and the first warp adds the sums of all eight.
template <typename T> __device__ __forceinline__ void conv2d_grad_weight_direct(Acc<T> *partials, const T *grad,
                                                                                const T *x, const Conv2dShape &s) {
    __shared__ Acc<T> sums[PLAIN_THREADS / WARP][WARP];
    const int in = s.channels / s.groups, outs = s.out_channels / s.groups,
              values = s.kernel_height * s.kernel_width * in;
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP, out = int(blockIdx.x) * WARP + lane;
    const int2 range = slice_pixels(s);
    for (int value = blockIdx.y; value < values; value += gridDim.y) {
        const int tap = value / in, a = tap / int(s.kernel_width), b = tap - a * int(s.kernel_width);
        Acc<T> sum = 0;
        if (out < int(s.out_channels)) {
            // The first input channel of the group of `out`, plus the channel in the group.
            const int channel = out / outs * in + value - tap * in;
            for (int pixel = range.x + warp; pixel < range.y; pixel += PLAIN_THREADS / WARP) {
                sum += widen(grad[int64_t(pixel) * s.out_channels + out]) * input_value(x, s, pixel, a, b, channel);
            }
        }
        __syncthreads();
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp != 0 || out >= int(s.out_channels)) continue;
        for (int w = 1; w < PLAIN_THREADS / WARP; ++w) sum += sums[w][lane];
        partials[(int64_t(blockIdx.z) * s.out_channels + out) * values + value] = sum;
    }
}
