// Forward pass of a 2-D convolution and gradient of its input, on the tensor cores of compute capability 8.0 and newer. Both compute
// sums of the same form (geometry.cuh):
//   result[pixel, n] = sum over kernel taps and source channels c of source[the pixel that the tap meets, c] * the weight for (tap, c, n)
// For the gradient of the input, the source is the gradient of the output. With a stride, the gradient of the input has such a sum for
// each phase, that is, for the pixels whose coordinates have the same remainders modulo the strides.
//
// A block computes a tile of ROWS pixels and COUNT channels n. It takes the summed values, one for each pair (tap, c), in steps of
// STEP = 64: for each step it copies a tile of the source (left operand) and one of the weight (right operand) to a stage, which is a
// buffer in shared memory, and multiplies the two. copy.cuh describes the tiles; VEC is the number of values that one copy moves.
#pragma once

#include <type_traits>

#include "store.cuh"

// The operands of one launch. Forward: result = y, source = x. Gradient of the input: result = grad_x, source = grad_y,
// no bias. If `partials` is not null, the sums go there in f32 instead of `result`, with `sums_bias` added instead of `bias` and `addend`.
// `sums_bias` is the bias in f32, or null if the sums are split, because each block would add it to its part. A null bias is not added.
template <typename T> struct Conv2dOperands {
    T *__restrict__ result;
    const T *__restrict__ source;
    const T *__restrict__ weight;
    const T *__restrict__ bias;
    float *__restrict__ partials;
    const float *__restrict__ sums_bias;
    ConvAddend<T> addend;
};

// Which part of the sum a block computes: a tile of the result and, if the sum is split (gridDim.z > 1), some of its steps.
// With PAIRED, two consecutive blocks (a cluster) take neighbouring tiles of pixels and the same channels, and all summed
// values of a step belong to one kernel tap.
template <Direction D, int ROWS, int COUNT, bool PAIRED = false> struct Work {
    Gather gather;
    // The tile's first pixel (`row`) and first channel (`column`); the number of source channels after which the summed dimension goes on
    // to the next tap (`block_channels`: the dimension has all taps of the first `block_channels` channels, then all taps of the next
    // ones; see `Place` in copy.cuh); and the steps from `begin` to `end` (exclusive).
    int row, column, block_channels, begin, end;

    // blockIdx.y is the phase of a strided gradient.
    __device__ __forceinline__ explicit Work(const Conv2dShape &s) : gather(Gather::of<D>(s, blockIdx.y)) {
        // The number of tiles over the channels of the result.
        const int channel_tiles = (gather.results + COUNT - 1) / COUNT;
        if constexpr (PAIRED) {
            // Pair number `blockIdx.x / 2` has one tile of channels and two tiles of pixels, one for each of its blocks.
            row = (int(blockIdx.x) / 2 / channel_tiles * 2 + int(blockIdx.x) % 2) * ROWS;
            column = int(blockIdx.x) / 2 % channel_tiles * COUNT;
        } else {
            row = int(blockIdx.x) / channel_tiles * ROWS;
            column = int(blockIdx.x) % channel_tiles * COUNT;
        }
        block_channels = PAIRED || gather.channels % STEP == 0 ? STEP : gather.channels;
        const int steps = PAIRED ? gather.taps() * ((gather.channels + STEP - 1) / STEP)
                                 : (gather.taps() * gather.channels + STEP - 1) / STEP;
        begin = int(int64_t(steps) * blockIdx.z / gridDim.z);
        end = int(int64_t(steps) * (blockIdx.z + 1) / gridDim.z);
    }

    // Returns whether the tile has no pixels. The grid has the tiles of the largest phase of a strided gradient, so smaller
    // phases have empty tiles. Both blocks of a pair get the answer for the first block's tile.
    __device__ __forceinline__ bool is_empty() const {
        return (PAIRED ? row - row % (2 * ROWS) : row) >= gather.pixels();
    }
};

// Copies tiles into the stages, one step after another.
template <typename T, Direction D, int ROWS, int COUNT, int VEC, int THREADS> struct Loader {
    using Left = WindowTile<T, ROWS, VEC, THREADS>;
    static constexpr bool FORWARD = D == Direction::FORWARD;
    using Right =
        std::conditional_t<FORWARD, WeightRows<T, COUNT, VEC, THREADS>, WeightColumns<T, COUNT, VEC, THREADS>>;
    static constexpr int LEFT_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = LEFT_BYTES + Right::BYTES;
    // Whether the summed values run along the rows of the weight's tile, or across them.
    static constexpr Summed RIGHT = FORWARD ? Summed::ALONG_ROWS : Summed::ACROSS_ROWS;

    Left windows;
    // Indices in the summed dimension (`Place`), for the next step to load. `place` is the index of the first value that this thread
    // copies in each of its rows. `start` is the index of the step's first value; only the gradient of the input uses it.
    Place place, start;

    __device__ __forceinline__ explicit Loader(const Work<D, ROWS, COUNT> &work)
        : windows(work.gather, work.row),
          place(work.gather, work.block_channels, work.begin * STEP + int(threadIdx.x) % Left::COLUMNS * VEC),
          start(work.gather, work.block_channels, work.begin * STEP) {}

    // Starts the copies of the next step into the stage at address `stage`, and moves the indices on to the step after it.
    __device__ __forceinline__ void load_next(uint32_t stage, const Conv2dOperands<T> &operands, const Conv2dShape &s,
                                              const Work<D, ROWS, COUNT> &work) {
        windows.load(stage, operands.source, work.gather, place, work.block_channels);
        Right::load(stage + LEFT_BYTES, operands.weight, work.gather, s, FORWARD ? place : start, work.block_channels,
                    work.column);
        place.advance(work.gather, work.block_channels, STEP);
        if constexpr (!FORWARD) start.advance(work.gather, work.block_channels, STEP);
    }
};

// Waits for the block's first THREADS threads, which share the work on the sums. `__syncthreads` would also wait for threads that
// only copy.
template <int THREADS> __device__ __forceinline__ void workers_wait() {
    asm volatile("bar.sync 1, %0;\n" ::"n"(THREADS) : "memory");
}

// Writes the sums plus `sums_bias` to the block's slice of `partials` or, if `partials` is null, the sums plus `bias` and `addend` to the
// result. strips(store) calls store(sums, row, column) for each 16-row strip of the warp; `row` and `column` are where the strip begins
// in the block's tile.
template <typename T, Direction D, int ROWS, int COUNT, int THREADS, bool PAIRED, typename Strips>
__device__ __forceinline__ void finish(const Work<D, ROWS, COUNT, PAIRED> &work, const Conv2dShape &s,
                                       const Conv2dOperands<T> &operands, unsigned char *shared, Strips strips) {
    const int results = work.gather.results;
    // The index in the result of the pixel in a row of the tile; -1 if the tile has no such pixel.
    const auto row_of = [&](int row) -> int64_t {
        return work.row + row < work.gather.pixels() ? work.gather.template result_pixel<D>(s, work.row + row) : -1;
    };
    if (operands.partials != nullptr) {
        const int64_t pixels = D == Direction::FORWARD ? int64_t(s.batch) * s.out_height * s.out_width
                                                       : int64_t(s.batch) * s.height * s.width;
        float *slice = operands.partials + blockIdx.z * pixels * results;
        strips([&](const auto &acc, int row, int column) {
            store_partials(slice, operands.sums_bias, acc, row, column, work.column, results, row_of);
        });
        return;
    }
    // The finished tile replaces the stages, so first all threads must have read them.
    T *staged = reinterpret_cast<T *>(shared);
    workers_wait<THREADS>();
    strips([&](const auto &acc, int row, int column) {
        stage_strip<T, COUNT>(staged, acc, operands.bias, row, column, work.column, results);
    });
    workers_wait<THREADS>();
    store_staged<T, ROWS, COUNT, THREADS>(operands.result, staged, work.column, results, row_of, operands.addend);
}

// Computes the block's tile of ROWS pixels by COUNT channels with WARPS_M by WARPS_N warps. While a step's tiles are multiplied, the
// copies of the next STAGES - 1 steps are under way.
template <typename T, Direction D, int ROWS, int COUNT, int WARPS_M, int WARPS_N, int VEC, int STAGES>
__device__ __forceinline__ void conv2d_tensor(const Conv2dOperands<T> &operands, const Conv2dShape &s) {
    // A warp computes MF strips of 16 pixels, each of NF times 8 channels.
    constexpr int THREADS = WARPS_M * WARPS_N * WARP, MF = ROWS / WARPS_M / 16, NF = COUNT / WARPS_N / 8;
    using Loads = Loader<T, D, ROWS, COUNT, VEC, THREADS>;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t stages = shared_address(shared);

    const Work<D, ROWS, COUNT> work(s);
    if (work.is_empty()) return;
    Loads loads(work);
    const int steps = work.end - work.begin;
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < steps) loads.load_next(stages + i * Loads::STAGE_BYTES, operands, s, work);
        copies_commit();
    }

    const int warp = int(threadIdx.x) / WARP, row = warp / WARPS_N * MF * 16, column = warp % WARPS_N * NF * 8;
    float acc[MF][NF][4] = {};
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
        // There is a group of copies for each step, even if it is empty, so this waits for the copies of step number `step`.
        copies_wait<STAGES - 2>();
        __syncthreads();
        // The stage of the previous step, which all threads have left, takes the tiles of the step that is STAGES - 1 ahead.
        const int ahead = stage == 0 ? STAGES - 1 : stage - 1;
        if (step + STAGES - 1 < steps) loads.load_next(stages + ahead * Loads::STAGE_BYTES, operands, s, work);
        copies_commit();
        const uint32_t left = stages + stage * Loads::STAGE_BYTES;
        multiply_step<T, Summed::ALONG_ROWS, Loads::RIGHT>(acc, left, left + Loads::LEFT_BYTES, row, column);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copies_wait<0>();
    finish<T, D, ROWS, COUNT, THREADS>(work, s, operands, shared, [&](auto store) {
#pragma unroll
        for (int i = 0; i < MF; ++i) store(acc[i], row + i * 16, column);
    });
}
