// The forms that attention is compiled in, of all heads (kernels/attention.cu) and of segments (kernels/attention_varlen.cu).
#pragma once

#include <type_traits>

#include "backward.cuh"
#include "forward.cuh"
#include "plain.cuh"

// What suits warpgroups and what suits warps: keys in a tile, rows worked on at a time, blocks on a multiprocessor, and whether a
// block's own rows are held in registers.
template <int D, int M, int ROWS> using OwnRows = std::conditional_t<BY_WARPGROUP<M>, SharedRows<D, M, ROWS>, HeldRows<D, M, ROWS>>;
constexpr int FORWARD_KEYS_64 = WARPGROUP_PRODUCTS ? 128 : 64, FORWARD_BLOCKS_64 = WARPGROUP_PRODUCTS ? 3 : 4;
constexpr int QUERY_STEP_64 = WARPGROUP_PRODUCTS ? 64 : 32;
