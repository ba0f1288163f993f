// Compile-time parameters of the attention kernels: kernels/attention.cu and, for packed rows, kernels/attention_varlen.cu.
#pragma once

#include <type_traits>

#include "backward.cuh"
#include "forward.cuh"
#include "plain.cuh"

// They depend on whether a warpgroup or a single warp multiplies matrices (warpgroup.cuh). A block holds its own rows in shared memory
// for warpgroups, in registers for single warps. For widths up to 64 the forward kernel has tiles of FORWARD_KEYS_64 keys, and
// FORWARD_BLOCKS_64 blocks of it fit on a multiprocessor; the gradient of the queries works on QUERY_STEP_64 keys at a time.
template <int D, int M, int ROWS> using OwnRows = std::conditional_t<BY_WARPGROUP<M>, SharedRows<D, M, ROWS>, HeldRows<D, M, ROWS>>;
// The forward pass for widths up to 64: the keys of a tile, and the blocks per multiprocessor.
constexpr int FORWARD_KEYS_64 = WARPGROUP_PRODUCTS ? 128 : 64, FORWARD_BLOCKS_64 = WARPGROUP_PRODUCTS ? 3 : 4;
// The gradient of queries for widths up to 64: the number of keys that a block works on at a time.
constexpr int QUERY_STEP_64 = WARPGROUP_PRODUCTS ? 64 : 32;
