// Compile-time parameters of dense attention (kernels/attention.cu) and of attention inside the segments of packed rows
// (kernels/attention_varlen.cu).
#pragma once

#include <type_traits>

#include "backward.cuh"
#include "forward.cuh"
#include "plain.cuh"

// These parameters have one value where warpgroups multiply tiles (warpgroup.cuh) and another where single warps do. `OwnRows`: whether
// a block reads its own rows from shared memory or holds them in registers. `FORWARD_*`: how many keys a tile has, and how many blocks a
// multiprocessor must be able to run. `QUERY_STEP_64`: how many keys a block works on at a time for the gradients of its queries.
template <int D, int M, int ROWS> using OwnRows = std::conditional_t<BY_WARPGROUP<M>, SharedRows<D, M, ROWS>, HeldRows<D, M, ROWS>>;
// The forward pass for widths up to 64: the keys of a tile, and the blocks per multiprocessor.
constexpr int FORWARD_KEYS_64 = WARPGROUP_PRODUCTS ? 128 : 64, FORWARD_BLOCKS_64 = WARPGROUP_PRODUCTS ? 3 : 4;
// The gradient of queries for widths up to 64: the number of keys that a block works on at a time.
constexpr int QUERY_STEP_64 = WARPGROUP_PRODUCTS ? 64 : 32;
