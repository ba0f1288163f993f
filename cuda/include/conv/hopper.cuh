// Convolution: the forward pass and the gradient of the input, with the matrix instructions and the copy engine of compute
// capability 9.0 (code for sm_90a alone). One thread starts the copies; the copy engine gathers a tile's windows by itself.
// Two warpgroups, of four warps each, multiply directly from the tiles in shared memory. Two blocks form a cluster: each
// fetches half of the weights that both need.
#pragma once

#include "../stages.cuh"
#include "engine.cuh"
#include "tensor.cuh"

// Returns the descriptor of a tile for `wgmma`: 128-byte swizzle, eight rows every 1024 bytes. A row of a tile is ROW_BYTES (128)
// bytes, 64 values; SQUARE_BYTES is the size of a tile of 64 rows. In this file, "summed values" are an operand's values along k,
// the dimension over which the product sums. For an operand whose summed values run across the rows of its tiles, the tile of
// the next 64 columns begins SQUARE_BYTES later. This distance is unused if the summed values run along the rows.
//
// The descriptor has the address (18 bits, without the last 4) from bit 0 on, the distance between tiles from bit 16 on, the
// distance between groups of eight rows from bit 32 on, and the kind of swizzle in the highest bits. The address and the
// distances are in units of 16 bytes, hence the shifts by 4.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62;
    return (address & 0x3ffff) >> 4 | uint64_t(SQUARE_BYTES >> 4) << 16 | uint64_t((8 * ROW_BYTES) >> 4) << 32 |
           SWIZZLE_128;
}

// D (64, N) += left (64, 16) * right (16, N), with N = 128 or 160; each warp has 16 rows, distributed as by `mma`. `left` and
// `right` are the caller's variables of these names, which hold the operands' descriptors. LEFT_ACROSS and RIGHT_ACROSS are 1
// if the operand's summed values run across the rows of its tile. The three ones after the descriptors mean: add to D, and
// negate neither operand.
#define CONV_WGMMA_128(D, TYPE, LEFT_ACROSS, RIGHT_ACROSS)                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"                                     \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                              \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                      \
                 "}, %64, %65, 1, 1, 1, %66, %67;\n"                                                                   \
                 : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3]), "+f"(D[4]), "+f"(D[5]), "+f"(D[6]), "+f"(D[7]),     \
                   "+f"(D[8]), "+f"(D[9]), "+f"(D[10]), "+f"(D[11]), "+f"(D[12]), "+f"(D[13]), "+f"(D[14]),            \
                   "+f"(D[15]), "+f"(D[16]), "+f"(D[17]), "+f"(D[18]), "+f"(D[19]), "+f"(D[20]), "+f"(D[21]),          \
                   "+f"(D[22]), "+f"(D[23]), "+f"(D[24]), "+f"(D[25]), "+f"(D[26]), "+f"(D[27]), "+f"(D[28]),          \
                   "+f"(D[29]), "+f"(D[30]), "+f"(D[31]), "+f"(D[32]), "+f"(D[33]), "+f"(D[34]), "+f"(D[35]),          \
                   "+f"(D[36]), "+f"(D[37]), "+f"(D[38]), "+f"(D[39]), "+f"(D[40]), "+f"(D[41]), "+f"(D[42]),          \
                   "+f"(D[43]), "+f"(D[44]), "+f"(D[45]), "+f"(D[46]), "+f"(D[47]), "+f"(D[48]), "+f"(D[49]),          \
                   "+f"(D[50]), "+f"(D[51]), "+f"(D[52]), "+f"(D[53]), "+f"(D[54]), "+f"(D[55]), "+f"(D[56]),          \
                   "+f"(D[57]), "+f"(D[58]), "+f"(D[59]), "+f"(D[60]), "+f"(D[61]), "+f"(D[62]), "+f"(D[63])           \
                 : "l"(left), "l"(right), "n"(LEFT_ACROSS), "n"(RIGHT_ACROSS))

#define CONV_WGMMA_160(D, TYPE, LEFT_ACROSS, RIGHT_ACROSS)                                                             \
    asm volatile(                                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n160k16.f32." TYPE "." TYPE " {"                                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                             \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                               \
        "}, %80, %81, 1, 1, 1, %82, %83;\n"                                                                            \
        : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3]), "+f"(D[4]), "+f"(D[5]), "+f"(D[6]), "+f"(D[7]), "+f"(D[8]),  \
          "+f"(D[9]), "+f"(D[10]), "+f"(D[11]), "+f"(D[12]), "+f"(D[13]), "+f"(D[14]), "+f"(D[15]), "+f"(D[16]),       \
          "+f"(D[17]), "+f"(D[18]), "+f"(D[19]), "+f"(D[20]), "+f"(D[21]), "+f"(D[22]), "+f"(D[23]), "+f"(D[24]),      \
          "+f"(D[25]), "+f"(D[26]), "+f"(D[27]), "+f"(D[28]), "+f"(D[29]), "+f"(D[30]), "+f"(D[31]), "+f"(D[32]),      \
          "+f"(D[33]), "+f"(D[34]), "+f"(D[35]), "+f"(D[36]), "+f"(D[37]), "+f"(D[38]), "+f"(D[39]), "+f"(D[40]),      \
          "+f"(D[41]), "+f"(D[42]), "+f"(D[43]), "+f"(D[44]), "+f"(D[45]), "+f"(D[46]), "+f"(D[47]), "+f"(D[48]),      \
          "+f"(D[49]), "+f"(D[50]), "+f"(D[51]), "+f"(D[52]), "+f"(D[53]), "+f"(D[54]), "+f"(D[55]), "+f"(D[56]),      \
          "+f"(D[57]), "+f"(D[58]), "+f"(D[59]), "+f"(D[60]), "+f"(D[61]), "+f"(D[62]), "+f"(D[63]), "+f"(D[64]),      \
          "+f"(D[65]), "+f"(D[66]), "+f"(D[67]), "+f"(D[68]), "+f"(D[69]), "+f"(D[70]), "+f"(D[71]), "+f"(D[72]),      \
          "+f"(D[73]), "+f"(D[74]), "+f"(D[75]), "+f"(D[76]), "+f"(D[77]), "+f"(D[78]), "+f"(D[79])                    \
        : "l"(left), "l"(right), "n"(LEFT_ACROSS), "n"(RIGHT_ACROSS))

// Starts acc (64 rows, COUNT columns) += left * right, for 16 summed values.
template <typename T, Summed LEFT, Summed RIGHT, int COUNT>
__device__ __forceinline__ void multiply_async(float (&acc)[COUNT / 2], uint64_t left, uint64_t right) {
    static_assert(COUNT == 128 || COUNT == 160);
    constexpr int LEFT_ACROSS = LEFT == Summed::ACROSS_ROWS, RIGHT_ACROSS = RIGHT == Summed::ACROSS_ROWS;
    if constexpr (std::is_same_v<T, __half>) {
        if constexpr (COUNT == 128) CONV_WGMMA_128(acc, "f16", LEFT_ACROSS, RIGHT_ACROSS);
        else CONV_WGMMA_160(acc, "f16", LEFT_ACROSS, RIGHT_ACROSS);
    } else {
        if constexpr (COUNT == 128) CONV_WGMMA_128(acc, "bf16", LEFT_ACROSS, RIGHT_ACROSS);
        else CONV_WGMMA_160(acc, "bf16", LEFT_ACROSS, RIGHT_ACROSS);
    }
}

// The stages in a block's shared memory, and the loop in which a warpgroup multiplies their tiles.
template <int STAGES, int STAGE_BYTES, int CLUSTER> struct Pipeline : Stages<STAGES, STAGE_BYTES, CLUSTER> {
    using Base = Stages<STAGES, STAGE_BYTES, CLUSTER>;
    using Base::address, Base::advance, Base::barrier, Base::emptied, Base::round, Base::stage;

    // Adds the products of `steps` steps, of STEP (64) summed values each, to a warpgroup's sums. The warpgroup's STRIPS * 64
    // rows begin `left` bytes into a stage, and its COUNT columns `right` bytes into the stage. LEFT_SLICE and RIGHT_SLICE are
    // the distances, in bytes, to the next 16 summed values.
    template <typename T, Summed LEFT, Summed RIGHT, int STRIPS, int COUNT>
    __device__ __forceinline__ void multiply_steps(float (&acc)[STRIPS][COUNT / 2], int steps, int left, int right) {
        constexpr int LEFT_SLICE = LEFT == Summed::ALONG_ROWS ? 32 : 16 * ROW_BYTES;
        constexpr int RIGHT_SLICE = RIGHT == Summed::ALONG_ROWS ? 32 : 16 * ROW_BYTES;
        for (int step = 0; step < steps; ++step) {
            // Waits until the copies of this stage have arrived. Each round through the ring of stages is a phase of the barrier.
            barrier_wait(barrier(), round & 1);
            multiply_fence();
#pragma unroll
            for (int k = 0; k < STEP / 16; ++k) {
#pragma unroll
                for (int i = 0; i < STRIPS; ++i) {
                    multiply_async<T, LEFT, RIGHT, COUNT>(
                        acc[i], matrix_descriptor(address() + left + i * SQUARE_BYTES + k * LEFT_SLICE),
                        matrix_descriptor(address() + right + k * RIGHT_SLICE));
                }
            }
            multiply_commit();
            // After this wait, the products of the previous step are done. `leave_last` then signals that the stage of that step,
            // the one before the current stage, is free.
            multiply_wait<1>();
            if (step > 0) this->leave_last();
            advance();
        }
        multiply_wait<0>();
        // Keeps the compiler from reading sums before this point; if it did, the products would wait for one another.
#pragma unroll
        for (int i = 0; i < STRIPS; ++i)
#pragma unroll
            for (int j = 0; j < COUNT / 2; ++j) asm volatile("" : "+f"(acc[i][j])::"memory");
    }
};

// Calls store(sums, row, column) with each 16-row strip of this warp's sums, in the layout of `mma`. The warp has a strip in each
// 64 rows of its warpgroup. The arguments `row` and `column` are where the warpgroup's sums begin in the block's tile. COUNT is a
// thread's number of sums in a strip.
template <int STRIPS, int COUNT, typename Store>
__device__ __forceinline__ void each_strip(const float (&acc)[STRIPS][COUNT], int row, int column, Store store) {
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
        float fragments[COUNT / 4][4];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) fragments[j / 4][j % 4] = acc[i][j];
        store(fragments, row + i * 64 + int(threadIdx.x) % WARPGROUP / WARP * 16, column);
    }
}

// The copies of one block for all its steps, which one thread starts.
template <Direction D, int ROWS, int COUNT, int STAGES> struct Copies {
    static constexpr bool FORWARD = D == Direction::FORWARD;
    static constexpr Summed RIGHT = FORWARD ? Summed::ALONG_ROWS : Summed::ACROSS_ROWS;
    // A stage begins with the tile of the windows, (ROWS pixels, 64 summed values); the weights follow.
    static constexpr int LEFT_BYTES = ROWS * ROW_BYTES;
    // For the forward pass, a stage has one tile of weights, with a row for each of COUNT output channels. For the gradient of
    // the input, it has tiles of (64 output channels, 64 input channels).
    static constexpr int RIGHT_TILES = FORWARD ? 1 : (COUNT + STEP - 1) / STEP,
                         RIGHT_TILE_BYTES = FORWARD ? COUNT * ROW_BYTES : SQUARE_BYTES;
    static constexpr int STAGE_BYTES = LEFT_BYTES + RIGHT_TILES * RIGHT_TILE_BYTES;
    // The number of rows of each tile of weights that one block of the cluster fetches for both.
    static constexpr int RIGHT_HALF = (FORWARD ? COUNT : STEP) / 2;

    // A cluster has 2 blocks.
    using Ring = Pipeline<STAGES, STAGE_BYTES, 2>;

    // `true` in `Work`: the blocks of a cluster take neighbouring tiles of pixels and the same channels.
    static __device__ __forceinline__ void run(const Work<D, ROWS, COUNT, true> &work, const Conv2dShape &s,
                                               const Conv2dMaps &maps, Ring pipeline) {
        const Gather &gather = work.gather;
        const Window window(gather, work.row);
        // The copy engine takes the window's pixel with the lowest coordinates, and an offset of at least 0 from this pixel. If
        // `move`, the distance between neighbouring taps in pixels, is negative, the last tap has the lowest coordinate.
        const int low_y = min(0, (gather.y.taps - 1) * gather.y.move),
                  low_x = min(0, (gather.x.taps - 1) * gather.x.move);
        // The first row of the half of the weights that this block fetches.
        const int first_row = int(cluster_rank()) * RIGHT_HALF;
        // The step's block of 64 channels, and its kernel tap (a, b).
        Place place(gather, STEP, work.begin * STEP);
        for (int step = work.begin; step < work.end; ++step) {
            pipeline.begin_copies();
            const uint32_t barrier = pipeline.barrier(), right = pipeline.address() + LEFT_BYTES;
            // The windows go only to this block (`false`), the weights to both blocks of the cluster (`true`). blockIdx.y is the
            // phase of the gradient of the input: the remainders of its pixels' coordinates modulo the stride. It is 0 in the
            // forward pass.
            copy_windows<false>(pipeline.address(), maps.windows[blockIdx.y], barrier, place.block * STEP,
                                window.x + low_x, window.y + low_y, window.image,
                                uint16_t(place.b * gather.x.move - low_x), uint16_t(place.a * gather.y.move - low_y));
            const int tap = (gather.y.tap_first + gather.y.tap_every * place.a) * s.kernel_width + gather.x.tap_first +
                            gather.x.tap_every * place.b;
            // The weights' coordinates, the last three arguments, are: input channel, tap, output channel.
            for (int j = 0; j < RIGHT_TILES; ++j) {
                const uint32_t to = right + j * RIGHT_TILE_BYTES + first_row * ROW_BYTES;
                if constexpr (FORWARD) {
                    copy_box<true>(to, maps.dense, barrier, place.block * STEP, tap, work.column + first_row);
                } else {
                    copy_box<true>(to, maps.dense, barrier, work.column + j * STEP, tap, place.block * STEP + first_row);
                }
            }
            // A block has STEP channels, and a step moves on by STEP summed values.
            place.advance(gather, STEP, STEP);
            pipeline.advance();
        }
    }
};

// Computes the block's tile of ROWS pixels by COUNT channels. Each of the first two warpgroups computes ROWS / 2 of the pixels; a
// thread of the third starts the copies.
template <typename T, Direction D, int ROWS, int COUNT, int STAGES> __device__ __forceinline__ void
conv2d_hopper(const Conv2dOperands<T> &operands, const Conv2dShape &s, const Conv2dMaps &maps) {
    using Loads = Copies<D, ROWS, COUNT, STAGES>;
    constexpr int STRIPS = ROWS / 128, WORKERS = Loads::Ring::WORKERS;
    extern __shared__ __align__(1024) unsigned char shared[];

    const Work<D, ROWS, COUNT, true> work(s);
    if (work.is_empty()) return;
    typename Loads::Ring pipeline{shared_address(shared)};
    pipeline.init();
    if (int(threadIdx.x) >= WORKERS) {
        // The thread that copies needs few registers. The warpgroups that multiply take those that it gives up.
        registers_fewer<40>();
        if (int(threadIdx.x) == WORKERS) Loads::run(work, s, maps, pipeline);
        __syncwarp();
        cluster_wait();
    } else {
        registers_more<232>();
        const int group = int(threadIdx.x) / WARPGROUP;
        float acc[STRIPS][COUNT / 2] = {};
        pipeline.template multiply_steps<T, Summed::ALONG_ROWS, Loads::RIGHT, STRIPS, COUNT>(
            acc, work.end - work.begin, group * STRIPS * SQUARE_BYTES, Loads::LEFT_BYTES);
        finish<T, D, ROWS, COUNT, WORKERS>(work, s, operands, shared,
                                           [&](auto store) { each_strip(acc, group * STRIPS * 64, 0, store); });
        // The other block of the cluster may still write to this block's shared memory or signal its barriers, so this block
        // must not end before the other.
        cluster_wait();
    }
}
