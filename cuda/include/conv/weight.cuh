// Gradient of a convolution's weight on the tensor cores:
//   grad_weight[o, a, b, c] = sum over the pixels p of the output of grad_y[p, o] * x[window of p at (a, b), c]
// for the output channel o, the kernel tap at row a and column b, and the input channel c. This is a product of a left operand
// (out channels, pixels) and a right operand (pixels, taps * channels), whose columns are the pairs (tap, channel). The pixels can be
// split among gridDim.z blocks.
//
// A step adds the products of STEP (64) pixels. In shared memory, a tile (SQUARE_BYTES) has a row for each of these pixels, and also STEP
// columns: output channels (left) or pairs of tap and channel (right).
#pragma once

#include "store.cuh"

// The pixel of the output that a row of a step's tiles belongs to. After each step, the loader adds STEP pixels to it, without divisions.
struct StepPixel {
    int image, y, x;
};

// Copies tiles into the stages, one step after another: the left tiles from the gradient of the output, the right tiles from the
// windows of the input. The block takes ROWS output channels (left) and COUNT pairs of tap and channel (right).
template <typename T, int ROWS, int COUNT, int LEFT_VEC, int RIGHT_VEC, int THREADS> struct WeightGradLoader {
    // LEFT_COLUMNS and RIGHT_COLUMNS: the number of copies, of LEFT_VEC or RIGHT_VEC elements each, for a row of a tile. LEFT_PASS
    // and RIGHT_PASS: the number of rows that the block copies at once. PASSES: the number of rows of a right tile into which a
    // thread copies. A thread copies the same columns of every tile.
    static constexpr int LEFT_TILES = (ROWS + STEP - 1) / STEP, RIGHT_TILES = COUNT / STEP;
    static constexpr int LEFT_BYTES = LEFT_TILES * SQUARE_BYTES, STAGE_BYTES = LEFT_BYTES + RIGHT_TILES * SQUARE_BYTES;
    static constexpr int LEFT_COLUMNS = (ROWS < STEP ? ROWS : STEP) / LEFT_VEC, LEFT_PASS = THREADS / LEFT_COLUMNS;
    static constexpr int RIGHT_COLUMNS = STEP / RIGHT_VEC, RIGHT_PASS = THREADS / RIGHT_COLUMNS,
                         PASSES = STEP / RIGHT_PASS;

    // For this thread's first column in each right tile: the input channel (negative if there is none), and the pixel of the input that
    // the kernel tap reads for the output's pixel (0, 0). The number of channels is a multiple of RIGHT_VEC, so the columns of one copy
    // belong to one tap.
    int channel[RIGHT_TILES], dy[RIGHT_TILES], dx[RIGHT_TILES];
    // The pixels of the rows that this thread copies into right tiles, and the distance of STEP pixels as a `StepPixel`.
    StepPixel rows[PASSES], move;
    // The first pixel of the next step to load.
    int pixel;

    // The block's tiles begin at the pair of tap and channel (column of grad_weight) `first_value`, and the sum at the pixel `first_pixel`.
    __device__ __forceinline__ WeightGradLoader(const Conv2dShape &s, int first_value, int first_pixel)
        : pixel(first_pixel) {
        const int values = s.kernel_height * s.kernel_width * s.channels; // pairs of tap and channel
#pragma unroll
        for (int j = 0; j < RIGHT_TILES; ++j) {
            const int value = first_value + j * STEP + int(threadIdx.x) % RIGHT_COLUMNS * RIGHT_VEC;
            const int tap = value / int(s.channels), a = tap / int(s.kernel_width);
            channel[j] = value < values ? value - tap * int(s.channels) : -1;
            dy[j] = a * int(s.dilation_height) - int(s.padding_height);
            dx[j] = (tap - a * int(s.kernel_width)) * int(s.dilation_width) - int(s.padding_width);
        }
        move = split(s, STEP);
#pragma unroll
        for (int i = 0; i < PASSES; ++i)
            rows[i] = split(s, first_pixel + int(threadIdx.x) / RIGHT_COLUMNS + i * RIGHT_PASS);
    }

    // Returns the image and the coordinates of a pixel of the output.
    static __device__ __forceinline__ StepPixel split(const Conv2dShape &s, int pixel) {
        const int line = pixel / int(s.out_width), image = line / int(s.out_height);
        return {image, line - image * int(s.out_height), pixel - line * int(s.out_width)};
    }

    // Starts the copies of the next step into the stage at address `stage`. `grad` is grad_y. `first_out` is the block's first output
    // channel, and `pixels` the number of pixels of the output. Where a value does not exist, `copy_to_tile` writes zeros.
    // `Reuse::YES` lets the copied values stay in the L1 cache.
    __device__ __forceinline__ void load_next(uint32_t stage, const T *grad, const T *x, const Conv2dShape &s,
                                              int first_out, int pixels) {
        const int left_row = int(threadIdx.x) / LEFT_COLUMNS, left_column = int(threadIdx.x) % LEFT_COLUMNS * LEFT_VEC;
#pragma unroll
        for (int i = 0; i < (STEP + LEFT_PASS - 1) / LEFT_PASS; ++i) {
            const int row = left_row + i * LEFT_PASS;
            if (LEFT_PASS > STEP && row >= STEP) continue;
#pragma unroll
            for (int j = 0; j < LEFT_TILES; ++j) {
                const int out = first_out + j * STEP + left_column;
                const bool exists = pixel + row < pixels && out < int(s.out_channels);
                const T *from = exists ? grad + int64_t(pixel + row) * s.out_channels + out : grad;
                copy_to_tile<LEFT_VEC, Reuse::YES>(stage + j * SQUARE_BYTES + tile_offset(row, left_column), from, exists);
            }
        }
        const int right_row = int(threadIdx.x) / RIGHT_COLUMNS,
                  right_column = int(threadIdx.x) % RIGHT_COLUMNS * RIGHT_VEC;
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const int row = right_row + i * RIGHT_PASS;
            StepPixel &p = rows[i];
#pragma unroll
            for (int j = 0; j < RIGHT_TILES; ++j) {
                const int y = p.y * int(s.stride_height) + dy[j], x_ = p.x * int(s.stride_width) + dx[j];
                const bool exists =
                    pixel + row < pixels && channel[j] >= 0 && unsigned(y) < s.height && unsigned(x_) < s.width;
                const T *from =
                    exists ? x + ((int64_t(p.image) * s.height + y) * s.width + x_) * s.channels + channel[j] : x;
                copy_to_tile<RIGHT_VEC, Reuse::YES>(
                    stage + LEFT_BYTES + j * SQUARE_BYTES + tile_offset(row, right_column), from, exists);
            }
            // Each coordinate was below its size and grew by at most the size, so one carry is enough.
            p.x += move.x;
            p.y += move.y;
            p.image += move.image;
            if (p.x >= int(s.out_width)) p.x -= s.out_width, ++p.y;
            if (p.y >= int(s.out_height)) p.y -= s.out_height, ++p.image;
        }
        pixel += STEP;
    }
};

// Computes the block's tile of ROWS output channels by COUNT (tap, channel) columns with WARPS_M by WARPS_N warps. `grad` is grad_y. Writes
// the sums to the block's slice of `partials`, (gridDim.z, out channels, taps * channels), or, if `partials` is null, to `grad_weight`.
// While a step's tiles are multiplied, the copies of the next STAGES - 1 steps are under way.
template <typename T, int ROWS, int COUNT, int WARPS_M, int WARPS_N, int LEFT_VEC, int RIGHT_VEC, int STAGES>
__device__ __forceinline__ void conv2d_grad_weight(T *grad_weight, const T *grad, const T *x, float *partials,
                                                   const Conv2dShape &s) {
    // A warp computes MF by NF fragments of 16 rows and 8 columns.
    constexpr int THREADS = WARPS_M * WARPS_N * WARP, MF = ROWS / WARPS_M / 16, NF = COUNT / WARPS_N / 8;
    using Loads = WeightGradLoader<T, ROWS, COUNT, LEFT_VEC, RIGHT_VEC, THREADS>;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t stages = shared_address(shared);

    // `values` is the number of pairs of tap and channel, and `tiles` the number of blocks that share them.
    const int values = s.kernel_height * s.kernel_width * s.channels, outs = s.out_channels;
    const int tiles = (values + COUNT - 1) / COUNT;
    const int first_out = int(blockIdx.x) / tiles * ROWS, first_value = int(blockIdx.x) % tiles * COUNT;
    const int pixels = s.batch * s.out_height * s.out_width, all_steps = (pixels + STEP - 1) / STEP;
    // The share of this block: steps from `begin` on.
    const int begin = int(int64_t(all_steps) * blockIdx.z / gridDim.z);
    const int steps = int(int64_t(all_steps) * (blockIdx.z + 1) / gridDim.z) - begin;

    Loads loads(s, first_value, begin * STEP);
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < steps) loads.load_next(stages + i * Loads::STAGE_BYTES, grad, x, s, first_out, pixels);
        copies_commit();
    }
    const int warp = int(threadIdx.x) / WARP, row = warp / WARPS_N * MF * 16, column = warp % WARPS_N * NF * 8;
    float acc[MF][NF][4] = {};
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
        // Each step has a group of copies, even if it is empty. Only the latest STAGES - 2 groups may be unfinished after this wait, so the
        // copies of step number `step` are finished.
        copies_wait<STAGES - 2>();
        __syncthreads();
        // The stage of the previous step, which all threads have left.
        const int ahead = stage == 0 ? STAGES - 1 : stage - 1;
        if (step + STAGES - 1 < steps)
            loads.load_next(stages + ahead * Loads::STAGE_BYTES, grad, x, s, first_out, pixels);
        copies_commit();
        const uint32_t left = stages + stage * Loads::STAGE_BYTES;
        // In both operands' tiles, each row belongs to a pixel, and the sum is over the pixels.
        multiply_step<T, Summed::ACROSS_ROWS, Summed::ACROSS_ROWS>(acc, left, left + Loads::LEFT_BYTES, row, column);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copies_wait<0>();

    // Returns the output channel for a row of the tile; -1 if there is none.
    const auto row_of = [&](int r) -> int64_t { return first_out + r < outs ? first_out + r : -1; };
    // The gradient has no bias, so the arguments for one are null.
    if (partials != nullptr) {
        float *slice = partials + int64_t(blockIdx.z) * outs * values;
#pragma unroll
        for (int i = 0; i < MF; ++i)
            store_partials(slice, nullptr, acc[i], row + i * 16, column, first_value, values, row_of);
        return;
    }
    // The tile is collected in shared memory, so that it is stored in wide accesses.
    T *staged = reinterpret_cast<T *>(shared);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MF; ++i)
        stage_strip<T, COUNT>(staged, acc[i], (const T *)nullptr, row + i * 16, column, first_value, values);
    __syncthreads();
    store_staged<T, ROWS, COUNT, THREADS>(grad_weight, staged, first_value, values, row_of);
}
