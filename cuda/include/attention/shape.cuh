// The shapes and strides that the attention kernels receive.
#pragma once

#include "../element.cuh"

// Sizes of an attention: q (batch, heads, queries, width), k (batch, heads, keys, width), v (batch, heads, keys, value_width),
// result and its gradient (batch, heads, queries, value_width). Query i sees the keys up to i if `is_causal`. Passed by value.
struct AttentionShape {
    uint32_t batch, heads, queries, keys, width, value_width, is_causal;
    // The number of ranges of queries over which gradients of keys and values are split.
    uint32_t parts;
    double scale;
};

// Where the matrices of the heads lie: distances in elements. The elements of a row lie one after another. Passed by value.
struct Strides {
    uint64_t batch, head, row;

    template <typename T> __device__ __forceinline__ T *matrix(T *tensor, uint32_t b, uint32_t h) const {
        return tensor + b * batch + h * head;
    }
};

// The work of a block. Blocks of one head are consecutive, so that they share its keys and values in the cache.
struct Task {
    // The tile within the head, and the head: an index over (batch, heads).
    uint32_t tile, index;
    uint32_t batch, head;

    __device__ __forceinline__ Task(uint32_t block, uint32_t tiles, const AttentionShape &shape)
        : tile(block % tiles), index(block / tiles), batch(index / shape.heads), head(index % shape.heads) {}
};

__host__ __device__ constexpr uint32_t ceil_divide(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
