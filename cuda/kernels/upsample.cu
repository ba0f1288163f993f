// Nearest-neighbour resize: along an axis with m input pixels and n output pixels, output pixel i copies input pixel
// min(⌊i · (m / n)⌋, m - 1). This index is computed in f32, as in torch, but in integers if n = m or n = 2m. The gradient of an input pixel
// is the sum of the gradients of its copies.
//
// x and its gradient dx are (batch, height, width, channels), y and its gradient grad are (batch, out_height, out_width, channels).
// A thread moves packs of neighbouring channels of a pixel: WIDE channels (16 bytes) if the number of channels is a multiple of WIDE and
// both addresses are multiples of 16 bytes, otherwise one channel.
// Launch: block 256, grid clamp(rows · ceil(row_len / (1024 · WIDE)), 1, 2^31 - 1), no dynamic shared memory. 1024 is BATCH (below) packs
// for each of 256 threads. Here, rows = batch · height and row_len = width · channels, with height and width of the tensor that the kernel
// writes (y in the forward pass, dx in the backward pass). Any grid gives the same results.

#include "rows.cuh"

namespace {

// The numbers of input and output pixels along an axis.
struct Axis {
    uint32_t input, output;

    // The input pixel that output pixel `i` copies.
    __device__ __forceinline__ uint32_t source(uint32_t i) const {
        if (output == input) return i;
        if (output == 2 * static_cast<uint64_t>(input)) return i / 2;
        const float scale = __fdiv_rn(static_cast<float>(input), static_cast<float>(output));
        return min(static_cast<uint32_t>(static_cast<float>(i) * scale), input - 1);
    }

    // The first output pixel whose `source` is at least `i`; `output` if there is none. So the output pixels from first_copy(i) up to, but
    // not including, first_copy(i + 1) copy input pixel `i`.
    __device__ __forceinline__ uint32_t first_copy(uint32_t i) const {
        if (output == input) return i;
        if (output == 2 * static_cast<uint64_t>(input)) return 2 * i;
        uint32_t low = 0, high = output;
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            if (source(middle) < i) low = middle + 1;
            else high = middle;
        }
        return low;
    }
};

// The number of packs that a thread handles in each stretch (see `for_each_pack`).
constexpr int BATCH = 4;

// Calls f(image, line, column, pack, index) for each pack of channels of a tensor (batch, height, width, packs). A line is a row of an
// image's pixels, `column` is the pixel in the line, `pack` the pack in the pixel, and `index` the pack's index in the tensor. Each line is
// divided into stretches of BATCH · blockDim.x packs, and a block handles whole stretches. So `image` and `line` need divisions only once
// per stretch, and each pack needs one division, for its column. UNROLL is how many of a thread's packs the compiler handles in one
// iteration of the loop.
template <int UNROLL, typename F>
__device__ __forceinline__ void for_each_pack(uint64_t batch, uint32_t height, uint32_t width, uint32_t packs, F f) {
    const uint64_t len = static_cast<uint64_t>(width) * packs; // packs of a line
    const uint32_t stretch = BATCH * blockDim.x, stretches = static_cast<uint32_t>((len + stretch - 1) / stretch);
    for (uint64_t number = blockIdx.x; number < batch * height * stretches; number += gridDim.x) {
        // `row` is the index of the line among the lines of all images, `stretch_in_line` that of the stretch in its line.
        const auto [row, stretch_in_line] = divide(number, stretches);
        const auto [image, line] = divide(row, height);
#pragma unroll UNROLL
        for (int k = 0; k < BATCH; k++) {
            const uint64_t at = stretch_in_line * static_cast<uint64_t>(stretch) + k * blockDim.x + threadIdx.x;
            if (at >= len) break;
            const auto [column, pack] = divide(at, packs);
            f(image, line, static_cast<uint32_t>(column), pack, row * len + at);
        }
    }
}

template <typename T, int N>
__device__ __forceinline__ void forward(const T *__restrict__ x, T *__restrict__ y, uint64_t batch, Axis lines, Axis columns,
                                        uint32_t channels) {
    const uint32_t packs = channels / N;
    for_each_pack<BATCH>(batch, lines.output, columns.output, packs,
                  [&](uint64_t image, uint32_t line, uint32_t column, uint32_t pack, uint64_t index) {
                      const uint64_t pixel = (image * lines.input + lines.source(line)) * columns.input + columns.source(column);
                      store_pack(y + index * N, load_pack<N>(x + (pixel * packs + pack) * N));
                  });
}

template <typename T, int N>
__device__ __forceinline__ void backward(const T *__restrict__ grad, T *__restrict__ dx, uint64_t batch, Axis lines, Axis columns,
                                         uint32_t channels) {
    const uint32_t packs = channels / N;
    for_each_pack<1>(batch, lines.input, columns.input, packs,
                  [&](uint64_t image, uint32_t line, uint32_t column, uint32_t pack, uint64_t index) {
                      // The copies of the pixel are in the output columns from `first_column` up to, but not including, `end_column`,
                      // and in the output lines from first_copy(line) up to, but not including, `end_line`.
                      const uint32_t first_column = columns.first_copy(column), end_column = columns.first_copy(column + 1);
                      const uint32_t end_line = lines.first_copy(line + 1);
                      Acc<T> sum[N] = {};
                      for (uint32_t out_line = lines.first_copy(line); out_line < end_line; out_line++) {
                          // The index of the first pixel of the output line.
                          const uint64_t line_start = (image * lines.output + out_line) * columns.output;
                          for (uint32_t out_column = first_column; out_column < end_column; out_column++) {
                              const auto g = load_pack<N>(grad + ((line_start + out_column) * packs + pack) * N);
#pragma unroll
                              for (int i = 0; i < N; i++) sum[i] += widen(g.values[i]);
                          }
                      }
                      store_pack(dx + index * N, narrow_pack<T>(sum));
                  });
}

} // namespace

#define DEFINE_UPSAMPLE(SUFFIX, T)                                                                                     \
    extern "C" __global__ void upsample_nearest2d_forward_##SUFFIX(const T *x, T *y, uint64_t batch, uint32_t height,  \
                                                                   uint32_t width, uint32_t out_height,                \
                                                                   uint32_t out_width, uint32_t channels) {            \
        follow();                                                                                                      \
        const Axis lines{height, out_height}, columns{width, out_width};                                               \
        if (channels % WIDE<T> == 0 && are_wide(x, y)) forward<T, WIDE<T>>(x, y, batch, lines, columns, channels);     \
        else forward<T, 1>(x, y, batch, lines, columns, channels);                                                     \
    }                                                                                                                  \
    extern "C" __global__ void upsample_nearest2d_backward_##SUFFIX(const T *grad, T *dx, uint64_t batch,              \
                                                                    uint32_t height, uint32_t width,                   \
                                                                    uint32_t out_height, uint32_t out_width,           \
                                                                    uint32_t channels) {                               \
        follow();                                                                                                      \
        const Axis lines{height, out_height}, columns{width, out_width};                                               \
        if (channels % WIDE<T> == 0 && are_wide(grad, dx))                                                             \
            backward<T, WIDE<T>>(grad, dx, batch, lines, columns, channels);                                           \
        else backward<T, 1>(grad, dx, batch, lines, columns, channels);                                                \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_UPSAMPLE)
