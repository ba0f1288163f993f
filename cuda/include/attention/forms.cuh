// Compile-time parameters of attention over whole heads (kernels/attention.cu) and over segments (kernels/attention_varlen.cu).
#pragma once

#include <type_traits>

#include "backward.cuh"
#include "forward.cuh"
#include "plain.cuh"

// These parameters differ between products of warpgroups and of single warps: whether a block's own rows are held in registers;
// how many keys a tile has, how many blocks a multiprocessor runs, and how many queries a block works on at a time.
template <int D, int M, int ROWS> using OwnRows = std::conditional_t<BY_WARPGROUP<M>, SharedRows<D, M, ROWS>, HeldRows<D, M, ROWS>>;
constexpr int FORWARD_KEYS_64 = WARPGROUP_PRODUCTS ? 128 : 64, FORWARD_BLOCKS_64 = WARPGROUP_PRODUCTS ? 3 : 4;
constexpr int QUERY_STEP_64 = WARPGROUP_PRODUCTS ? 64 : 32;
