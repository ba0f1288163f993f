// Compile-time parameters that kernels/attention.cu and kernels/attention_varlen.cu (segments of packed rows) share.
#pragma once

#include <type_traits>

#include "backward.cuh"
#include "forward.cuh"
#include "plain.cuh"

// These parameters depend on whether a warpgroup or a single warp multiplies tiles.
//
// The rows of a block that computes results or gradients for queries: in shared memory or in registers.
template <int D, int M, int ROWS> using OwnRows = std::conditional_t<BY_WARPGROUP<M>, SharedRows<D, M, ROWS>, HeldRows<D, M, ROWS>>;
// The forward pass for widths up to 64: the keys of a tile, and the blocks per multiprocessor.
constexpr int FORWARD_KEYS_64 = WARPGROUP_PRODUCTS ? 128 : 64, FORWARD_BLOCKS_64 = WARPGROUP_PRODUCTS ? 3 : 4;
// The gradient of queries for widths up to 64: the number of keys that a block works on at a time.
constexpr int QUERY_STEP_64 = WARPGROUP_PRODUCTS ? 64 : 32;
