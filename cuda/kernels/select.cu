// Selection by a mask.
//
// `select_<size>(y, mask, a, b, tensors)`: y = a where the mask (u8) is not 0, else b. An element of y, a or b has <size> bytes (1, 2, 4,
// 8). `tensors` has the strides of y, mask, a and b, in this order.
// `run` computes N neighbouring elements of y. `offsets` has, for each of the tensors, the offset of the first of its N elements, and
// `strides` the stride of its last axis: 1, or 0 to repeat the first element N times. For N = 1, the stride has no effect.
// Launch: `tensors.count / tensors.width` threads in blocks of 256, no shared memory; each calls `run` once, with N = `tensors.width`,
// which is 1 or WIDE<T>, the number of elements of T in 16 bytes.
#include "strided.cuh"

template <typename T> struct Select {
    T *y;
    const uint8_t *mask;
    const T *a, *b;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *strides) const {
        const Pack<uint8_t, N> takes_a = load<N>(mask + offsets[1], strides[1]);
        Pack<T, N> x = load<N>(a + offsets[2], strides[2]);
        const Pack<T, N> other = load<N>(b + offsets[3], strides[3]);
#pragma unroll
        for (int i = 0; i < N; ++i) x.values[i] = takes_a.values[i] ? x.values[i] : other.values[i];
        *reinterpret_cast<Pack<T, N> *>(y + offsets[0]) = x;
    }
};

#define SELECT(SIZE, T)                                                                                                \
    extern "C" __global__ void select_##SIZE(T *y, const uint8_t *mask, const T *a, const T *b, Strided<4> tensors) {  \
        follow();                                                                                                      \
        for_each<WIDE<T>>(tensors, Select<T>{y, mask, a, b});                                                          \
    }
SELECT(1, uint8_t)
SELECT(2, uint16_t)
SELECT(4, uint32_t)
SELECT(8, uint64_t)
