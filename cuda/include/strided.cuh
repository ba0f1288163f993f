// Elementwise functions over strided tensors: the description of the tensors, and the loop.
#pragma once

#include "element.cuh"

constexpr int MAX_AXES = 8;

// `K` tensors of one shape, the first of which is written. Passed by value; the host has merged neighbouring axes.
template <int K> struct Strided {
    uint64_t count;                 // elements
    uint32_t axes;                  // at least 1, outermost first
    uint32_t width;                 // elements that a thread takes: 1, or as many as one 16-byte access of the largest type holds
    uint64_t sizes[MAX_AXES];
    uint64_t strides[K][MAX_AXES];  // in elements; the last one is 0 or 1 where `width` is above 1
};

// The offset of element `index` in each tensor.
template <typename Index, int K>
__device__ __forceinline__ void locate(const Strided<K> &tensors, Index index, uint64_t (&offsets)[K]) {
#pragma unroll
    for (int k = 0; k < K; ++k) offsets[k] = 0;
#pragma unroll 1
    for (int axis = int(tensors.axes) - 1; axis > 0; --axis) {
        const Index size = Index(tensors.sizes[axis]), rest = index / size, at = index - rest * size;
#pragma unroll
        for (int k = 0; k < K; ++k) offsets[k] += uint64_t(at) * tensors.strides[k][axis];
        index = rest;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) offsets[k] += uint64_t(index) * tensors.strides[k][0];
}

// `N` neighbouring elements, or one element `N` times.
template <int N, typename T> __device__ __forceinline__ Pack<T, N> load(const T *x, uint64_t stride) {
    Pack<T, N> pack;
    if (N > 1 && stride == 1) return *reinterpret_cast<const Pack<T, N> *>(x);
    const T value = *x;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.values[i] = value;
    return pack;
}

// Calls `body.template run<N>(offsets, strides)` for each element (N = 1) or each `N` neighbouring ones.
// Launch: one thread an item of `width` elements, any one-dimensional block.
template <int WIDTH, int K, typename Body> __device__ __forceinline__ void for_each(const Strided<K> &tensors, Body body) {
    const uint64_t start = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * tensors.width;
    if (start >= tensors.count) return;
    uint64_t offsets[K], strides[K];
    if (tensors.count <= 0xffffffffu) {
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
