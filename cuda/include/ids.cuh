// Integer ids in device memory: u32 if `id_bytes` is 4, i64 if it is 8.
//
// A kernel cannot raise an error for an id out of range. For such an id, the kernel reads nothing and writes the value that
// the kernel's comment names. Unless out_of_range is null, *out_of_range becomes the lowest index in `ids` of such an id. The host
// first sets *out_of_range to 2^64 - 1. If the value is lower at the next synchronization of the device, the host raises an error that
// names the index.
#pragma once

#include <cstdint>

// The type of *out_of_range, as `atomicMin` takes it.
using Counter = unsigned long long;

// The id with the index `at`.
__device__ __forceinline__ int64_t load_id(const void *ids, uint32_t id_bytes, uint64_t at) {
    return id_bytes == 8 ? static_cast<const int64_t *>(ids)[at] : static_cast<int64_t>(static_cast<const uint32_t *>(ids)[at]);
}

// Whether 0 <= id < size: a negative id becomes a number above every size.
__device__ __forceinline__ bool is_id(int64_t id, uint64_t size) { return static_cast<uint64_t>(id) < size; }

// Reports that the id with the index `at` is out of range.
__device__ __forceinline__ void report_id(Counter *out_of_range, uint64_t at) {
    if (out_of_range != nullptr) atomicMin(out_of_range, static_cast<Counter>(at));
}
