// Compile-time parameters of dense attention (kernels/attention.cu) and of attention inside the segments of packed rows
// (kernels/attention_varlen.cu).
#pragma once

#include <type_traits>

#include "../architecture.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "plain.cuh"

// All of these parameters but the last depend on whether four warps multiply tiles together, as a warpgroup (warpgroup.cuh), or each warp
// multiplies alone.

// The class of the rows of a block's own tile, which the block keeps while it loops over other tiles. In the gradient of keys and values,
// the own rows are keys, and the loop is over queries; otherwise the own rows are queries, and the loop is over keys. The own rows are the
// left operand of the block's products: `ROWS` rows of `D` elements, the width of a head, with 16 * `M` rows for each warp. With
// warpgroups, products read these rows from shared memory; otherwise registers hold them.
template <int D, int M, int ROWS> using OwnRows = std::conditional_t<BY_WARPGROUP<M>, SharedRows<D, M, ROWS>, HeldRows<D, M, ROWS>>;
// The forward pass for widths up to 64: the number of keys in a tile, and the number of blocks that a multiprocessor must have room for
// (the second argument of `__launch_bounds__`, which limits the registers of a thread).
constexpr int FORWARD_KEYS_64 = WARPGROUP_PRODUCTS ? 128 : 64, FORWARD_BLOCKS_64 = WARPGROUP_PRODUCTS ? 3 : 4;
// The gradient of queries for widths up to 64: the number of keys that a block works on at a time.
constexpr int QUERY_STEP_64 = WARPGROUP_PRODUCTS ? 64 : 32;
// The backward pass for widths up to 64: the number of blocks that a multiprocessor must have room for. If `HAS_SMALL_SHARED_MEMORY`, the
// shared memory of a multiprocessor suffices for only two.
constexpr int BACKWARD_BLOCKS_64 = HAS_SMALL_SHARED_MEMORY ? 2 : 3;
