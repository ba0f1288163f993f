// Matrix products of whole tiles by a warpgroup, four warps with 16 rows each (PTX `wgmma`, sm_90a). The left operand is in registers
// or in shared memory, the right operand in shared memory. The permuted rows of 128 bytes in shared memory (mma.cuh) have the
// layout that the PTX manual calls 128-byte swizzle. In each warp, accumulators and left operands in registers are distributed as
// those of `mma.sync`. Products are asynchronous: a warp continues until it calls `wait_for_products`.
#pragma once

#include "../element.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUP_PRODUCTS 1
#else
#define WARPGROUP_PRODUCTS 0
#endif

// Whether warpgroups multiply tiles in which each warp has 16 * `M` rows; otherwise warps do, with `mma.sync`. Warpgroups
// do so only if `M` is 1, because a `wgmma` has 64 rows, 16 for each of the four warps.
template <int M> constexpr bool BY_WARPGROUP = WARPGROUP_PRODUCTS && M == 1;

// Call this before the first product, and before products whose registers (accumulators or a left operand) other instructions have
// accessed.
__device__ __forceinline__ void begin_products() {
#if WARPGROUP_PRODUCTS
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Makes a group of the products since the last call. A warp waits for all products of a group together.
__device__ __forceinline__ void end_products() {
#if WARPGROUP_PRODUCTS
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most the latest `PENDING` groups of products are unfinished.
template <int PENDING> __device__ __forceinline__ void wait_for_products() {
#if WARPGROUP_PRODUCTS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// Keeps the compiler from moving uses of accumulators to before the wait for the products that write them.
template <int M, int N> __device__ __forceinline__ void products_are_ready(float (&sum)[M][N][4]) {
#if WARPGROUP_PRODUCTS
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sum[m][n][i])::"memory");
#endif
}

// Call this between writes to shared memory and a barrier: products after the barrier see what this thread wrote.
__device__ __forceinline__ void publish_to_products() {
#if WARPGROUP_PRODUCTS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if WARPGROUP_PRODUCTS

// Returns the 64-bit descriptor (PTX manual, `wgmma`) of an operand that begins at `address`, a multiple of 32 bytes, in a tile with rows
// of 64 values (128 bytes): 128-byte swizzle (a field of value 1, bits 62 and 63), groups of eight rows 1024 bytes apart (bits 32 to
// 45, in units of 16 bytes), and the lower 18 bits of the address (bits 0 to 13, also in units of 16 bytes). The hardware ignores bits 16
// to 29 in these products; here this field is 1.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
    return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | (address & 0x3ffff) >> 4;
}

// The accumulators as operands of `asm`: ACCUMULATORS has those of the 8 columns from column 8 * n on, ACCUMULATORS_16 those of 16 columns.
// The others have those of all 32, 64 or 128 columns. `sum[n]` has a thread's four accumulators in columns 8 * n to 8 * n + 7.
#define ACCUMULATORS(sum, n) "+f"(sum[n][0]), "+f"(sum[n][1]), "+f"(sum[n][2]), "+f"(sum[n][3])
#define ACCUMULATORS_16(sum, n) ACCUMULATORS(sum, n), ACCUMULATORS(sum, n + 1)
#define ACCUMULATORS_32(sum) ACCUMULATORS_16(sum, 0), ACCUMULATORS_16(sum, 2)
#define ACCUMULATORS_64(sum) ACCUMULATORS_32(sum), ACCUMULATORS_16(sum, 4), ACCUMULATORS_16(sum, 6)
#define ACCUMULATORS_128(sum)                                                                                                      \
    ACCUMULATORS_64(sum), ACCUMULATORS_16(sum, 8), ACCUMULATORS_16(sum, 10), ACCUMULATORS_16(sum, 12), ACCUMULATORS_16(sum, 14)

// warpgroup_multiply starts sum = a bᵀ, or sum += a bᵀ if `add` is not 0. `a` is (64, 16), in shared memory or in registers. `b` is
// (32, 16), (64, 16) or, if `a` is in shared memory, (128, 16); it is in shared memory.
// warpgroup_multiply_add starts sum += a b, with `a` (64, 16) in registers and `b` (16, 64) in shared memory.
// Operands in shared memory are descriptors. The first argument only selects the dtype of the operands.
// The operands of each `asm` are numbered in this order: the accumulators from %0 on, `a` (one descriptor or four registers), `b`, `add`.
// After the matrices, an instruction has whether it adds to `sum` (the predicate `add`; 1 in warpgroup_multiply_add), then the signs of
// `a` and `b` (1: not negated), and then, for each operand in shared memory, whether the product sums over the rows of its tile.
//
// If the left operand is in registers, a loop must load it in the iteration that uses it, and must wait for the product in the same
// iteration: ptxas 13.0 reuses these registers for other values between iterations.
#define WARPGROUP_PRODUCTS_OF(type, dtype)                                                                                         \
    __device__ __forceinline__ void warpgroup_multiply(type, float (&sum)[4][4], uint64_t a, uint64_t b, int add) {                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32." dtype "." dtype " {%0, %1, %2, %3, %4, %5, %6, %7, %8, "        \
                     "%9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1, 0, 0;\n}"                                            \
                     : ACCUMULATORS_32(sum)                                                                                        \
                     : "l"(a), "l"(b), "r"(add));                                                                                  \
    }                                                                                                                              \
    __device__ __forceinline__ void warpgroup_multiply(type, float (&sum)[8][4], uint64_t a, uint64_t b, int add) {                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." dtype "." dtype " {%0, %1, %2, %3, %4, %5, %6, %7, %8, "        \
                     "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "         \
                     "%29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n}"                                                               \
                     : ACCUMULATORS_64(sum)                                                                                        \
                     : "l"(a), "l"(b), "r"(add));                                                                                  \
    }                                                                                                                              \
    __device__ __forceinline__ void warpgroup_multiply(type, float (&sum)[16][4], uint64_t a, uint64_t b, int add) {               \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." dtype "." dtype " {%0, %1, %2, %3, %4, %5, %6, %7, "           \
                     "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "          \
                     "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, add, 1, "         \
                     "1, 0, 0;\n}"                                                                                                 \
                     : ACCUMULATORS_128(sum)                                                                                       \
                     : "l"(a), "l"(b), "r"(add));                                                                                  \
    }                                                                                                                              \
    __device__ __forceinline__ void warpgroup_multiply(type, float (&sum)[4][4], const uint32_t (&a)[4], uint64_t b, int add) {    \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32." dtype "." dtype " {%0, %1, %2, %3, %4, %5, %6, %7, %8, "        \
                     "%9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"                              \
                     : ACCUMULATORS_32(sum)                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                              \
    }                                                                                                                              \
    __device__ __forceinline__ void warpgroup_multiply(type, float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b, int add) {    \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." dtype "." dtype " {%0, %1, %2, %3, %4, %5, %6, %7, %8, "        \
                     "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "         \
                     "%29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"                                                 \
                     : ACCUMULATORS_64(sum)                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                              \
    }                                                                                                                              \
    __device__ __forceinline__ void warpgroup_multiply_add(type, float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b) {         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." dtype "." dtype " {%0, %1, %2, %3, %4, %5, %6, %7, %8, "        \
                     "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "         \
                     "%29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                                      \
                     : ACCUMULATORS_64(sum)                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                        \
    }

WARPGROUP_PRODUCTS_OF(__half, "f16")
WARPGROUP_PRODUCTS_OF(__nv_bfloat16, "bf16")

#endif
