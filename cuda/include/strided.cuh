// Elementwise functions over strided tensors: `Strided` describes the tensors, and `for_each` calls a function on their elements.
#pragma once

#include "element.cuh"

constexpr int MAX_AXES = 8;

// `K` tensors of the same shape, of which the first is the result. A kernel takes this structure by value. The host has already merged
// neighbouring axes where the strides allow it.
template <int K> struct Strided {
    uint64_t count;                 // number of elements of each tensor
    uint32_t axes;                  // number of axes, at least 1; the first is the outermost
    uint32_t width;                 // elements for each thread: 1, or as many elements of the tensors' largest type as 16 bytes hold
    uint64_t sizes[MAX_AXES];
    uint64_t strides[K][MAX_AXES];  // in elements; 0 along an axis that the tensor is broadcast along. If `width` is above 1, the size of
                                    // the last axis is a multiple of `width`, and the strides of this axis are 0 or 1
};

// Writes to `offsets[k]` the offset, in elements, in tensor k of the element whose index in row-major order is `index`.
template <typename Index, int K>
__device__ __forceinline__ void locate(const Strided<K> &tensors, Index index, uint64_t (&offsets)[K]) {
#pragma unroll
    for (int k = 0; k < K; ++k) offsets[k] = 0;
#pragma unroll 1
    for (int axis = int(tensors.axes) - 1; axis > 0; --axis) {
        const Index size = Index(tensors.sizes[axis]), outer = index / size, position = index - outer * size;
#pragma unroll
        for (int k = 0; k < K; ++k) offsets[k] += uint64_t(position) * tensors.strides[k][axis];
        index = outer;  // the index of the element among the axes before this one
    }
#pragma unroll
    for (int k = 0; k < K; ++k) offsets[k] += uint64_t(index) * tensors.strides[k][0];
}

// Returns `N` neighbouring elements from `x` on if `stride` is 1, or `N` copies of the element at `x` if it is 0. For N = 1, `stride` has
// no effect.
template <int N, typename T> __device__ __forceinline__ Pack<T, N> load(const T *x, uint64_t stride) {
    Pack<T, N> pack;
    if (N > 1 && stride == 1) return *reinterpret_cast<const Pack<T, N> *>(x);
    const T value = *x;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.values[i] = value;
    return pack;
}

// If `tensors.width` is 1, calls `body.template run<1>(offsets, strides)` for each element. Otherwise `tensors.width` must be WIDTH, and
// each call of `run<WIDTH>` is for WIDTH neighbouring elements. For each tensor, `offsets` has the offset of the first of these elements,
// and `strides` the stride of the last axis, as `load` takes it. Launch: one-dimensional blocks of any size, with a thread for each call,
// that is for each `tensors.width` elements; more threads do nothing.
template <int WIDTH, int K, typename Body> __device__ __forceinline__ void for_each(const Strided<K> &tensors, Body body) {
    const uint64_t start = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * tensors.width;
    if (start >= tensors.count) return;
    uint64_t offsets[K], strides[K];
    if (tensors.count <= 0xffffffffu) {  // indices fit in 32 bits, whose divisions are faster
        locate<uint32_t>(tensors, uint32_t(start), offsets);
    } else {
        locate<uint64_t>(tensors, start, offsets);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) strides[k] = tensors.strides[k][tensors.axes - 1];
    if (tensors.width == 1) {
        body.template run<1>(offsets, strides);
    } else {
        body.template run<WIDTH>(offsets, strides);
    }
}
