// Forward pass and gradient of the input with the matrix instructions of compute capability 9.0 (code for sm_90a alone): two groups
// of four warps multiply straight from the tiles in shared memory while the next tiles are copied.
#pragma once

#include "tensor.cuh"

constexpr int WARPGROUP = 128;

// Describes a tile to `wgmma`: 128-byte swizzle, eight rows every 1024 bytes. Where the summed values stand across the rows, the
// next 64 columns begin a tile later; along the rows that distance has no meaning.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62;
    return (address & 0x3ffff) >> 4 | uint64_t(SQUARE_BYTES >> 4) << 16 | uint64_t((8 * ROW_BYTES) >> 4) << 32 | SWIZZLE_128;
}

// D (64 rows, N columns) += left (64, 16) * right (16, N); of each 16 rows a warp holds what `mma` would give it.
#define CONV_WGMMA_128(D, TYPE, TRANSPOSED)                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"                                     \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                              \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                      \
                 "}, %64, %65, 1, 1, 1, 0, %66;\n"                                                                     \
                 : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3]), "+f"(D[4]), "+f"(D[5]), "+f"(D[6]), "+f"(D[7]),     \
                   "+f"(D[8]), "+f"(D[9]), "+f"(D[10]), "+f"(D[11]), "+f"(D[12]), "+f"(D[13]), "+f"(D[14]), "+f"(D[15]), \
                   "+f"(D[16]), "+f"(D[17]), "+f"(D[18]), "+f"(D[19]), "+f"(D[20]), "+f"(D[21]), "+f"(D[22]), "+f"(D[23]), \
                   "+f"(D[24]), "+f"(D[25]), "+f"(D[26]), "+f"(D[27]), "+f"(D[28]), "+f"(D[29]), "+f"(D[30]), "+f"(D[31]), \
                   "+f"(D[32]), "+f"(D[33]), "+f"(D[34]), "+f"(D[35]), "+f"(D[36]), "+f"(D[37]), "+f"(D[38]), "+f"(D[39]), \
                   "+f"(D[40]), "+f"(D[41]), "+f"(D[42]), "+f"(D[43]), "+f"(D[44]), "+f"(D[45]), "+f"(D[46]), "+f"(D[47]), \
                   "+f"(D[48]), "+f"(D[49]), "+f"(D[50]), "+f"(D[51]), "+f"(D[52]), "+f"(D[53]), "+f"(D[54]), "+f"(D[55]), \
                   "+f"(D[56]), "+f"(D[57]), "+f"(D[58]), "+f"(D[59]), "+f"(D[60]), "+f"(D[61]), "+f"(D[62]), "+f"(D[63]) \
                 : "l"(left), "l"(right), "n"(TRANSPOSED))

#define CONV_WGMMA_160(D, TYPE, TRANSPOSED)                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n160k16.f32." TYPE "." TYPE " {"                                     \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                              \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                    \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                      \
                 "}, %80, %81, 1, 1, 1, 0, %82;\n"                                                                     \
                 : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3]), "+f"(D[4]), "+f"(D[5]), "+f"(D[6]), "+f"(D[7]),     \
                   "+f"(D[8]), "+f"(D[9]), "+f"(D[10]), "+f"(D[11]), "+f"(D[12]), "+f"(D[13]), "+f"(D[14]), "+f"(D[15]), \
                   "+f"(D[16]), "+f"(D[17]), "+f"(D[18]), "+f"(D[19]), "+f"(D[20]), "+f"(D[21]), "+f"(D[22]), "+f"(D[23]), \
                   "+f"(D[24]), "+f"(D[25]), "+f"(D[26]), "+f"(D[27]), "+f"(D[28]), "+f"(D[29]), "+f"(D[30]), "+f"(D[31]), \
                   "+f"(D[32]), "+f"(D[33]), "+f"(D[34]), "+f"(D[35]), "+f"(D[36]), "+f"(D[37]), "+f"(D[38]), "+f"(D[39]), \
                   "+f"(D[40]), "+f"(D[41]), "+f"(D[42]), "+f"(D[43]), "+f"(D[44]), "+f"(D[45]), "+f"(D[46]), "+f"(D[47]), \
                   "+f"(D[48]), "+f"(D[49]), "+f"(D[50]), "+f"(D[51]), "+f"(D[52]), "+f"(D[53]), "+f"(D[54]), "+f"(D[55]), \
                   "+f"(D[56]), "+f"(D[57]), "+f"(D[58]), "+f"(D[59]), "+f"(D[60]), "+f"(D[61]), "+f"(D[62]), "+f"(D[63]), \
                   "+f"(D[64]), "+f"(D[65]), "+f"(D[66]), "+f"(D[67]), "+f"(D[68]), "+f"(D[69]), "+f"(D[70]), "+f"(D[71]), \
                   "+f"(D[72]), "+f"(D[73]), "+f"(D[74]), "+f"(D[75]), "+f"(D[76]), "+f"(D[77]), "+f"(D[78]), "+f"(D[79]) \
                 : "l"(left), "l"(right), "n"(TRANSPOSED))

template <typename T, Summed RIGHT, int COUNT>
__device__ __forceinline__ void multiply_async(float (&acc)[COUNT / 2], uint64_t left, uint64_t right) {
    static_assert(COUNT == 128 || COUNT == 160);
    constexpr int TRANSPOSED = RIGHT == Summed::ACROSS_ROWS;
    if constexpr (std::is_same_v<T, __half>) {
        if constexpr (COUNT == 128) CONV_WGMMA_128(acc, "f16", TRANSPOSED);
        else CONV_WGMMA_160(acc, "f16", TRANSPOSED);
    } else {
        if constexpr (COUNT == 128) CONV_WGMMA_128(acc, "bf16", TRANSPOSED);
        else CONV_WGMMA_160(acc, "bf16", TRANSPOSED);
    }
}

__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}
// What this thread wrote to shared memory, its finished asynchronous copies included, becomes visible to `wgmma`.
__device__ __forceinline__ void fence_for_multiply() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Tiles of ROWS pixels by COUNT channels, ROWS / 2 for each of the two warpgroups.
template <typename T, Direction D, int ROWS, int COUNT, int STAGES>
__device__ __forceinline__ void conv2d_hopper(const Conv2dOperands<T> &operands, const Conv2dShape &s) {
    constexpr int THREADS = 2 * WARPGROUP, STRIPS = ROWS / 128;
    // Copies run this many steps ahead: the stage they fill was read two steps ago, by multiplications that all have waited for.
    constexpr int AHEAD = STAGES - 2;
    using Loads = Loader<T, D, ROWS, COUNT, 8, THREADS>;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t stages = shared_address(shared);

    const Work<D, ROWS, COUNT> work(s);
    if (work.is_empty()) return;
    Loads loads(work);
    const int steps = work.end - work.begin;
    for (int i = 0; i < AHEAD; ++i) {
        if (i < steps) loads.load_next(stages + i * Loads::STAGE_BYTES, operands, s, work);
        copies_commit();
    }

    const int group = int(threadIdx.x) / WARPGROUP;
    float acc[STRIPS][COUNT / 2] = {};
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
        copies_wait<AHEAD - 1>();
        fence_for_multiply();
        __syncthreads();
        const uint32_t left = stages + stage * Loads::STAGE_BYTES + group * STRIPS * SQUARE_BYTES;
        const uint32_t right = stages + stage * Loads::STAGE_BYTES + Loads::LEFT_BYTES;
        constexpr int RIGHT_SLICE = Loads::RIGHT == Summed::ALONG_ROWS ? 32 : 16 * ROW_BYTES;
        multiply_fence();
#pragma unroll
        for (int k = 0; k < STEP / 16; ++k) {
#pragma unroll
            for (int i = 0; i < STRIPS; ++i) {
                multiply_async<T, Loads::RIGHT, COUNT>(acc[i], matrix_descriptor(left + i * SQUARE_BYTES + k * 32),
                                                       matrix_descriptor(right + k * RIGHT_SLICE));
            }
        }
        multiply_commit();
        const int ahead = stage + AHEAD >= STAGES ? stage + AHEAD - STAGES : stage + AHEAD;
        if (step + AHEAD < steps) loads.load_next(stages + ahead * Loads::STAGE_BYTES, operands, s, work);
        copies_commit();
        multiply_wait<1>();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    multiply_wait<0>();
    copies_wait<0>();
    const int warp = int(threadIdx.x) / WARP % 4;
    finish<T, D, ROWS, COUNT, THREADS>(work, s, operands, shared, [&](auto store) {
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) {
            float fragments[COUNT / 8][4];
#pragma unroll
            for (int j = 0; j < COUNT / 2; ++j) fragments[j / 4][j % 4] = acc[i][j];
            store(fragments, (group * STRIPS + i) * 64 + warp * 16, 0);
        }
    });
}
