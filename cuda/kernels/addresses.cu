// Tables of addresses for batched products. The addresses are arguments of the launch, so that nothing is copied from the host and a
// captured graph keeps its own addresses.
#include <cstdint>

#include "follow.cuh"

// The number of addresses of a launch. They take 3840 of the 4096 bytes that all arguments of a launch may have.
constexpr uint32_t ADDRESSES = 480;

struct Addresses {
    uint64_t values[ADDRESSES];
};

// table[i] = addresses.values[i] for i < count.
//   table [count], count <= 480.
// Grid: 1; block: 480; no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(ADDRESSES)
    write_addresses(uint64_t *table, uint32_t count, const __grid_constant__ Addresses addresses) {
    follow();
    if (threadIdx.x < count) table[threadIdx.x] = addresses.values[threadIdx.x];
}
