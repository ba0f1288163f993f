// Gradient of a convolution's weight with the matrix instructions and the copy engine of compute capability 9.0 (code for
// sm_90a alone). Computes the product of weight.cuh: the sum, over the pixels of the output, of the gradient of the output
// (left; rows are output channels) times the pixels that each kernel tap reads from the input (right; columns are pairs of a
// tap and an input channel). A step adds the products of STEP = 64 pixels of the output. In shared memory, a tile has STEP
// pixels (its rows) of STEP channels. The number of input channels is a multiple of 64, so the 64 columns of a tile belong to
// one tap. The right tiles are gathered from windows: the window of an output pixel is the pixels of the input that it reads.
#pragma once

#include "hopper.cuh"

// A block computes ROWS output channels by 256 (tap, channel) columns; each of the first two warpgroups computes 128 of the
// columns, and one other thread starts the copies. The blocks along the grid's z axis share the steps. With PAIRED, the two
// blocks of a cluster take neighbouring ranges of output channels and the same columns, and each block fetches half of the
// windows for both.
template <typename T, int ROWS, int STAGES, bool PAIRED> struct WeightGrad {
    // COUNT is the number of columns of a block.
    static constexpr int COUNT = 256, LEFT_TILES = ROWS / STEP, RIGHT_TILES = COUNT / STEP, CLUSTER = PAIRED ? 2 : 1;
    static constexpr int LEFT_BYTES = LEFT_TILES * SQUARE_BYTES, STAGE_BYTES = LEFT_BYTES + RIGHT_TILES * SQUARE_BYTES;
    using Ring = Pipeline<STAGES, STAGE_BYTES, CLUSTER>;

    // The block's first output channel, its first column, the indices of its steps (`end` is exclusive), and the number of
    // columns of the whole product. A column is one value of an output channel's weight, so the names have `value`.
    int first_out, first_value, begin, end, values;

    __device__ __forceinline__ explicit WeightGrad(const Conv2dShape &s)
        : values(s.kernel_height * s.kernel_width * s.channels) {
        // The number of ranges of COUNT columns, and the index of this block's cluster (a pair of blocks with PAIRED).
        const int ranges = (values + COUNT - 1) / COUNT, cluster = int(blockIdx.x) / CLUSTER;
        first_out = (cluster / ranges * CLUSTER + int(blockIdx.x) % CLUSTER) * ROWS;
        first_value = cluster % ranges * COUNT;
        const int64_t steps = (int64_t(s.batch) * s.out_height * s.out_width + STEP - 1) / STEP;
        begin = int(steps * blockIdx.z / gridDim.z);
        end = int(steps * (blockIdx.z + 1) / gridDim.z);
    }

    // Starts the copies of all steps; one thread calls this.
    __device__ __forceinline__ void copy(const Conv2dShape &s, const Conv2dMaps &maps, Ring pipeline) const {
        // Only the gradient of the input has several phases; here, the phase is 0.
        const Gather gather = Gather::of<Direction::FORWARD>(s, 0);
        // The first tile of windows that this block fetches.
        const int own = PAIRED ? int(cluster_rank()) * RIGHT_TILES / 2 : 0;
        for (int step = begin; step < end; ++step) {
            pipeline.begin_copies();
            const uint32_t barrier = pipeline.barrier();
            // The map `dense` has the dimensions (out channels, 1, pixels of the output). `false`: only this block gets the
            // tile, even with PAIRED.
            for (int i = 0; i < LEFT_TILES; ++i) {
                copy_box<false>(pipeline.address() + i * SQUARE_BYTES, maps.dense, barrier, first_out + i * STEP, 0,
                                step * STEP);
            }
            // The window of the input that the step's first output pixel reads.
            const Window window(gather, step * STEP);
            for (int j = own; j < own + RIGHT_TILES / CLUSTER; ++j) {
                // Columns after the last one get a channel outside the tensor map, so the copy engine writes zeros.
                const int value = first_value + j * STEP, tap = value < values ? value / int(s.channels) : 0;
                // The tap's row and column in the kernel.
                const int a = tap / int(s.kernel_width), b = tap - a * int(s.kernel_width);
                copy_windows<PAIRED>(pipeline.address() + LEFT_BYTES + j * SQUARE_BYTES, maps.windows[0], barrier,
                                     value - tap * int(s.channels), window.x, window.y, window.image,
                                     uint16_t(b * s.dilation_width), uint16_t(a * s.dilation_height));
            }
            pipeline.advance();
        }
    }

    // Writes the sums to the slice of `partials` (gridDim.z, out channels, values) for the block's share of the steps or, if
    // `partials` is null, to `grad_weight`.
    __device__ __forceinline__ void run(T *grad_weight, float *partials, const Conv2dShape &s,
                                        const Conv2dMaps &maps) const {
        constexpr int WORKERS = Ring::WORKERS, HALF = COUNT / 2;
        extern __shared__ __align__(1024) unsigned char shared[];
        Ring pipeline{shared_address(shared)};
        pipeline.init();
        if (int(threadIdx.x) >= WORKERS) {
            // The copying thread's warpgroup gives registers to the two warpgroups that multiply. All 384 threads have at most
            // 65536 registers: 128 * 40 + 256 * 232 = 64512.
            registers_fewer<40>();
            if (int(threadIdx.x) == WORKERS) copy(s, maps, pipeline);
            __syncwarp();
            cluster_wait();
        } else {
            registers_more<232>();
            // This warpgroup's first column in the block's tile.
            const int column = int(threadIdx.x) / WARPGROUP * HALF, outs = s.out_channels;
            // For each tile of 64 output channels, a thread's share of the 64 x HALF sums: the warpgroup has 128 threads.
            float acc[LEFT_TILES][HALF / 2] = {};
            // ACROSS_ROWS: the product sums over the rows of both tiles, which are pixels. `each_strip` calls its function with
            // each 16 rows (a strip) of a warp's sums, and with the strip's first row and first column in the block's tile.
            // The rows of the sums are output channels. Each warpgroup has all of the block's: they begin at byte 0 of a stage,
            // and at row 0 in `each_strip` below.
            pipeline.template multiply_steps<T, Summed::ACROSS_ROWS, Summed::ACROSS_ROWS, LEFT_TILES, HALF>(
                acc, end - begin, 0, LEFT_BYTES + column / STEP * SQUARE_BYTES);
            // The output channel of a row of the block's tile, or -1 if there is none.
            const auto row_of = [&](int row) -> int64_t { return first_out + row < outs ? first_out + row : -1; };
            if (partials != nullptr) {
                float *slice = partials + int64_t(blockIdx.z) * outs * values;
                each_strip(acc, 0, column, [&](const auto &strip, int row, int first) {
                    store_partials(slice, /* bias */ nullptr, strip, row, first, first_value, values, row_of);
                });
            } else {
                // The finished tile replaces the stages, so first both warpgroups must have read them.
                T *staged = reinterpret_cast<T *>(shared);
                workers_wait<WORKERS>();
                each_strip(acc, 0, column, [&](const auto &strip, int row, int first) {
                    // The null pointer: a gradient has no bias.
                    stage_strip<T, COUNT>(staged, strip, static_cast<const T *>(nullptr), row, first, first_value,
                                          values);
                });
                workers_wait<WORKERS>();
                store_staged<T, ROWS, COUNT, WORKERS>(grad_weight, staged, first_value, values, row_of);
            }
            // The other block of the cluster may still write to this block's shared memory or signal its barriers, so this
            // block must not end before the other.
            cluster_wait();
        }
    }
};
