// Shared code of all kernels: element types with their arithmetic type, wide loads and stores, sums over a warp and a block.
//
// Conventions of this folder:
// - a kernel begins with `follow()` or `follow_after(...)` (follow.cuh), which wait until earlier work of the stream is complete;
// - a kernel is `extern "C"` and named `<operation>_<part>_<dtype>`, with one or several dtypes such as f32, f64, f16 and bf16;
// - f16 and bf16 are storage formats: arithmetic and accumulation are in f32 (f64 for f64);
// - tensors are dense and row-major unless a function takes strides; sizes of one dimension are `uint32_t`, counts of elements
//   `uint64_t`; a result overwrites its destination, unless the kernel's name or comment says otherwise;
// - only the launch, sizes and the segments of packed rows decide how sums are split, and parts are added in a fixed order, never
//   by floating-point atomics in an order that depends on timing: the same launch gives the same results.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "follow.cuh"

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The type of arithmetic with values of type `T`.
template <typename T> struct Arithmetic { using type = float; };
template <> struct Arithmetic<double> { using type = double; };
template <typename T> using Acc = typename Arithmetic<T>::type;

// `widen` converts a value to its arithmetic type. `narrow` converts it back and rounds to the nearest value of `T`.
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T narrow(Acc<T> x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ double narrow<double>(double x) { return x; }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// `N` values whose address must be a multiple of their size, so that one instruction can load or store up to 16 bytes of them.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack {
    T values[N];
};

// How many values of `T` one 16-byte access holds.
template <typename T> constexpr int WIDE = 16 / sizeof(T);

// Writes 16 or 8 bytes of global memory in one instruction. It is in assembly, because nvcc 13.0 may store words one by one if they were
// computed one by one; a kernel that mainly moves memory would then take twice as long. The compiler does not know that the assembly writes
// memory. If the same kernel later loads the written values, put `one_at_a_time()` (rows.cuh) before the load.
__device__ __forceinline__ void store_words(void *to, uint4 words) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w));
}
__device__ __forceinline__ void store_words(void *to, uint2 words) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y));
}

// Returns whether the address allows 16-byte access.
template <typename T> __device__ __forceinline__ bool is_wide(const T *pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// `warp_sum` and `warp_max` return the sum and the maximum over the warp to every lane. All lanes must call them.
template <typename T> __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

template <typename T> __device__ __forceinline__ T warp_max(T value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        T other = __shfl_xor_sync(ALL_LANES, value, offset);
        value = other > value ? other : value;
    }
    return value;
}

// Returns the sum over a one-dimensional block to every thread. All threads must call it. `shared` must have room for one value of each
// warp. The caller may use `shared` again at once.
template <typename T> __device__ __forceinline__ T block_sum(T value, T *shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = (blockDim.x + WARP - 1) / WARP;
    value = warp_sum(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = warp_sum(lane < warps ? shared[lane] : T(0));
    __syncthreads();
    return value;
}

// Expands DEFINE(name, type), a macro of the including file, for each dtype: f32, f16 and bf16, and f64 with `_AND_DOUBLE`.
#define FOR_EACH_FLOAT(DEFINE)                                                                                         \
    DEFINE(f32, float)                                                                                                 \
    DEFINE(f16, __half)                                                                                                \
    DEFINE(bf16, __nv_bfloat16)
#define FOR_EACH_FLOAT_AND_DOUBLE(DEFINE) FOR_EACH_FLOAT(DEFINE) DEFINE(f64, double)
