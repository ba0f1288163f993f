// Conversions from integers to other types, and from floating-point types to integers. `copy.cu` has those between floating-point types.
//
// `cast_<from>_<to>(y, x, tensors)`: y = x. `tensors` has the shape and the strides of y and x, in this order, and `width`, the number of
// elements that each thread converts. The rules are those of Rust's `as`:
// - to a floating-point type: rounds to the nearest number, ties to even; for f16 and bf16, rounds to f32 first;
// - from a floating-point type to an integer type: rounds toward zero. A number out of the integer type's range becomes the nearest integer
//   of the type, and NaN becomes 0;
// - between integer types: the value modulo 2^bits, where the type of the result has so many bits.
// Launch: tensors.count / tensors.width threads in blocks of 256, no dynamic shared memory.
#include <limits>
#include <type_traits>

#include "strided.cuh"

// The smallest and the largest integer of type `D`.
template <typename D> constexpr D LOW = std::numeric_limits<D>::min();
template <typename D> constexpr D HIGH = std::numeric_limits<D>::max();

// Converts a floating-point number to the integer type D by the rule above. R is f32 or f64: f16 and bf16 are widened to f32 before.
template <typename D, typename R> __device__ __forceinline__ D saturated(R x) {
    // R(HIGH) may be rounded up, to a number above HIGH. But the next smaller number of type R is at most HIGH, so the last conversion gets
    // only numbers within the range of D. R(LOW) is exact.
    return x != x ? D(0) : x <= R(LOW<D>) ? LOW<D> : x >= R(HIGH<D>) ? HIGH<D> : static_cast<D>(x);
}

// Converts any x from its type S to the type D of the result. `widen` converts 16-bit floating-point types to the type Acc of their
// arithmetic, f32; `narrow` rounds to D.
template <typename D, typename S> __device__ __forceinline__ D cast(S x) {
    if constexpr (!std::is_integral_v<D>) return narrow<D>(static_cast<Acc<D>>(x));
    else if constexpr (std::is_integral_v<S>) return static_cast<D>(x);
    else return saturated<D>(widen(x));
}

// `tensors.width`, unless it is 1: how many elements of the larger of the two types 16 bytes hold.
template <typename D, typename S> constexpr int WIDTH = 16 / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));

template <typename D, typename S> struct Cast {
    D *y;
    const S *x;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *strides) const {
        const Pack<S, N> from = load<N>(x + offsets[1], strides[1]);
        Pack<D, N> to;
#pragma unroll
        for (int i = 0; i < N; ++i) to.values[i] = cast<D>(from.values[i]);
        // If N > 1, neighbouring elements of the last axis of y are neighbours in memory.
        *reinterpret_cast<Pack<D, N> *>(y + offsets[0]) = to;
    }
};

// FROM and TO are the dtypes in the kernel's name; S and D are their types in CUDA. INTEGER and I, OTHER and T are such pairs, too.
#define CAST(FROM, S, TO, D)                                                                                           \
    extern "C" __global__ void cast_##FROM##_##TO(D *y, const S *x, Strided<2> tensors) {                              \
        follow();                                                                                                      \
        for_each<WIDTH<D, S>>(tensors, Cast<D, S>{y, x});                                                              \
    }
#define BOTH_WAYS(INTEGER, I, OTHER, T)                                                                                \
    CAST(INTEGER, I, OTHER, T)                                                                                         \
    CAST(OTHER, T, INTEGER, I)
#define WITH_FLOATS(INTEGER, I)                                                                                        \
    BOTH_WAYS(INTEGER, I, f32, float)                                                                                  \
    BOTH_WAYS(INTEGER, I, f16, __half)                                                                                 \
    BOTH_WAYS(INTEGER, I, bf16, __nv_bfloat16)                                                                         \
    BOTH_WAYS(INTEGER, I, f64, double)
WITH_FLOATS(u8, uint8_t)
WITH_FLOATS(u32, uint32_t)
WITH_FLOATS(i64, int64_t)
BOTH_WAYS(u8, uint8_t, u32, uint32_t)
BOTH_WAYS(u8, uint8_t, i64, int64_t)
BOTH_WAYS(u32, uint32_t, i64, int64_t)
