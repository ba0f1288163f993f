// Comparisons of two tensors.
//
// `compare_<dtype>(y, a, b, tensors, relations)`: for each element, y = 1 if the relation of a to b is among `relations`, else 0.
// `relations` is the sum of any of LESS, EQUAL, GREATER and UNORDERED. a and b are UNORDERED if either is NaN. 0 and -0 are EQUAL.
// `tensors` has the shape of y, a and b, their strides (in this order), the number of elements of each (`count`), and the number of
// elements for each thread (`width`).
// Launch: `tensors.count / tensors.width` threads in blocks of 256, no shared memory.
#include "strided.cuh"

constexpr uint32_t LESS = 1, EQUAL = 2, GREATER = 4, UNORDERED = 8;

// x in a type that has the operators of comparison: f16 and bf16 become f32.
template <typename T> __device__ __forceinline__ T number(T x) { return x; }
__device__ __forceinline__ float number(__half x) { return widen(x); }
__device__ __forceinline__ float number(__nv_bfloat16 x) { return widen(x); }

template <typename R> __device__ __forceinline__ uint32_t relation(R a, R b) {
    return a < b ? LESS : a == b ? EQUAL : a > b ? GREATER : UNORDERED;
}

template <typename T> struct Compare {
    uint8_t *y;
    const T *a, *b;
    uint32_t relations;

    // Compares N neighbouring elements of the last axis: those from `offsets` on, of y, a and b.
    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *strides) const {
        const Pack<T, N> x = load<N>(a + offsets[1], strides[1]), other = load<N>(b + offsets[2], strides[2]);
        Pack<uint8_t, N> holds;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            holds.values[i] = (relation(number(x.values[i]), number(other.values[i])) & relations) != 0;
        }
        *reinterpret_cast<Pack<uint8_t, N> *>(y + offsets[0]) = holds;
    }
};

#define COMPARE(DTYPE, T)                                                                                              \
    extern "C" __global__ void compare_##DTYPE(uint8_t *y, const T *a, const T *b, Strided<3> tensors,                 \
                                               uint32_t relations) {                                                   \
        follow();                                                                                                      \
        for_each<WIDE<T>>(tensors, Compare<T>{y, a, b, relations});                                                    \
    }
FOR_EACH_FLOAT_AND_DOUBLE(COMPARE)
COMPARE(u8, uint8_t)
COMPARE(u32, uint32_t)
COMPARE(i64, int64_t)
