// Writes tables of addresses for batched matrix products. The addresses are arguments of the launch, so the host copies no table to the
// device, and a captured graph contains its own addresses.
#include <cstdint>

#include "follow.cuh"

// The most addresses that a launch takes: 3840 bytes of the 4096 that the arguments of a launch may have together.
constexpr uint32_t ADDRESSES = 480;

struct Addresses {
    uint64_t values[ADDRESSES];
};

// table[i] = addresses.values[i] for i < count. count must be at most 480.
// Grid: 1; block: 480; no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(ADDRESSES)
    write_addresses(uint64_t *table, uint32_t count, const __grid_constant__ Addresses addresses) {
    follow();
    if (threadIdx.x < count) table[threadIdx.x] = addresses.values[threadIdx.x];
}
