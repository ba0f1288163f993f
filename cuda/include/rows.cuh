// Work on the rows of a matrix: access to up to 16 bytes of neighbouring values at once, rows that stay in registers, sums over the threads
// of a row. A pack is N neighbouring values (`Pack`). Values are widened to the type of arithmetic and narrowed back (`widen`, `narrow`).
#pragma once

#include <cstring>
#include <type_traits>

#include "element.cuh"

// Whether all these addresses are multiples of 16, as 16-byte accesses require. True for null pointers, too.
template <typename... P> __device__ __forceinline__ bool are_wide(const P *...pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// The type of one access to BYTES bytes: 1 (the general template), 2, 4, 8 or 16.
template <int BYTES> struct Words { using type = uint8_t; };
template <> struct Words<2> { using type = uint16_t; };
template <> struct Words<4> { using type = uint32_t; };
template <> struct Words<8> { using type = uint2; };
template <> struct Words<16> { using type = uint4; };

// Loads a pack in one access. Its address must be a multiple of its size.
template <int N, typename T> __device__ __forceinline__ Pack<T, N> load_pack(const T *from) {
    using Word = typename Words<sizeof(Pack<T, N>)>::type;
    const Word word = *reinterpret_cast<const Word *>(from);
    Pack<T, N> pack;
    memcpy(&pack, &word, sizeof(pack));
    return pack;
}

// Stores a pack to global memory in one access. The compiler does not know that `store_words`, which stores packs of 16 bytes, writes
// memory: if the same kernel loads the values again, put `one_at_a_time()` before the load.
template <typename T, int N> __device__ __forceinline__ void store_pack(T *to, const Pack<T, N> &pack) {
    typename Words<sizeof(pack)>::type word;
    memcpy(&word, &pack, sizeof(pack));
    if constexpr (sizeof(pack) == 16) store_words(to, word);
    else *reinterpret_cast<decltype(word) *>(to) = word;
}

// At this point, the compiler has only the 16-bit values of a pack in registers: it can neither widen a value earlier for use after this
// point, nor keep a value that it has widened before. Widened values take twice the registers.
template <typename T, int N> __device__ __forceinline__ void keep_narrow(Pack<T, N> &pack) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        auto *words = reinterpret_cast<uint32_t *>(pack.values);
#pragma unroll
        for (int i = 0; i < N / 2; i++) asm volatile("" : "+r"(words[i]));
    }
}

// Rounds `values` to T.
template <typename T, int N> __device__ __forceinline__ Pack<T, N> narrow_pack(const Acc<T> (&values)[N]) {
    Pack<T, N> pack;
    // For f16 and bf16, one instruction narrows two values.
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
        auto *pairs = reinterpret_cast<__nv_bfloat162 *>(pack.values);
#pragma unroll
        for (int i = 0; i < N; i += 2) pairs[i / 2] = __floats2bfloat162_rn(values[i], values[i + 1]);
    } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
        auto *pairs = reinterpret_cast<__half2 *>(pack.values);
#pragma unroll
        for (int i = 0; i < N; i += 2) pairs[i / 2] = __floats2half2_rn(values[i], values[i + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) pack.values[i] = narrow<T>(values[i]);
    }
    return pack;
}

// Loads `N` values of type S, widened to A, in accesses of up to 16 bytes. The address must be a multiple of the size of one access: for
// N = 1, it may be that of any element.
template <typename S, typename A, int N> __device__ __forceinline__ void load_values(const S *from, A (&values)[N]) {
    constexpr int STEP = N < WIDE<S> ? N : WIDE<S>; // WIDE values of S are 16 bytes
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
        const auto pack = load_pack<STEP>(from + i);
#pragma unroll
        for (int j = 0; j < STEP; j++) values[i + j] = widen(pack.values[j]);
    }
}

// The quotient and the remainder of a division. `divide` divides in 32 bits if the index fits, as most do: 64-bit division is slow.
struct Quotient {
    uint64_t quotient;
    uint32_t remainder;
};

__device__ __forceinline__ Quotient divide(uint64_t index, uint32_t by) {
    if (index >> 32 == 0) {
        const uint32_t quotient = static_cast<uint32_t>(index) / by;
        return {quotient, static_cast<uint32_t>(index) - quotient * by};
    }
    const uint64_t quotient = index / by;
    return {quotient, static_cast<uint32_t>(index - quotient * by)};
}

// The first index of a thread in a loop over elements (or packs) that all threads of the grid share, and the distance to its next index.
__device__ __forceinline__ uint64_t flat_index() { return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint64_t flat_stride() { return static_cast<uint64_t>(gridDim.x) * blockDim.x; }

// A team of blockDim.x threads works on a row: either one of the block's blockDim.y warps, or a whole block of several warps with
// blockDim.y = 1. If each thread is to hold up to HELD packs of a row of `len` elements, a team has
//     threads = clamp(32 ceil(len / (32 HELD WIDE)), 32, TEAM)    with WIDE = 8 (f16, bf16), 4 (f32), 2 (f64)
// and the launch of a kernel over rows is, unless the kernel's comment says otherwise,
//     block (threads, threads == 32 ? 4 : 1), grid min(ceil(rows / blockDim.y), 2^31 - 1), no dynamic shared memory.
// Any other grid gives the same results. TEAM is the largest number of threads of a team.
constexpr int TEAM = 512;
// How many packs of a row each thread keeps in registers, unless a kernel's comment says otherwise. Each pass over a longer row reads the
// remaining packs from memory again.
constexpr int HELD = 4;

// The first row of a team, and the distance to its next row.
__device__ __forceinline__ uint64_t first_row() { return static_cast<uint64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }
__device__ __forceinline__ uint64_t row_stride() { return static_cast<uint64_t>(gridDim.x) * blockDim.y; }

// The sum over the team, returned to all its threads. `shared` has room for one value of each of the block's warps.
template <typename A> __device__ __forceinline__ A team_sum(A value, A *shared) {
    return blockDim.x == WARP ? warp_sum(value) : block_sum(value, shared);
}

// Replaces `first` and `second` by their sums over the team. `shared` has room for 2 WARP values.
template <typename A> __device__ __forceinline__ void team_sums(A &first, A &second, A *shared) {
    first = warp_sum(first);
    second = warp_sum(second);
    if (blockDim.x == WARP) return;
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (lane == 0) {
        shared[threadIdx.x / WARP] = first;
        shared[WARP + threadIdx.x / WARP] = second;
    }
    __syncthreads();
    first = warp_sum(lane < warps ? shared[lane] : A(0));
    second = warp_sum(lane < warps ? shared[WARP + lane] : A(0));
    __syncthreads();
}

// The maximum over the team, as `team_sum`.
template <typename A> __device__ __forceinline__ A team_max(A value, A *shared) {
    value = warp_max(value);
    if (blockDim.x == WARP) return value;
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (lane == 0) shared[threadIdx.x / WARP] = value;
    __syncthreads();
    value = warp_max(shared[lane < warps ? lane : 0]);
    __syncthreads();
    return value;
}

// Keeps the compiler from moving accesses to memory past this point: for example from moving the loads of several steps of an unrolled
// loop together, which would take registers for all of them.
__device__ __forceinline__ void one_at_a_time() { asm volatile("" ::: "memory"); }

// A row of `packs` packs of `N` values, which the team's threads take in turn. Each thread has its first `COUNT` packs in registers.
template <typename T, int N, int COUNT = HELD> struct Row {
    const T *start;
    uint32_t packs;
    Pack<T, N> held[COUNT];

    __device__ __forceinline__ Row(const T *start, uint32_t len) : start(start), packs(len / N) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const uint32_t pack = threadIdx.x + i * blockDim.x;
            if (pack < packs) held[i] = load_pack<N>(start + static_cast<uint64_t>(pack) * N);
        }
    }

    // Call this between passes over the row, so that no widened values stay in registers.
    __device__ __forceinline__ void keep_narrow() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) ::keep_narrow(held[i]);
    }

    // Calls f(place, index of the pack's first element) for each pack of this thread. The place is the pack's index in the
    // registers, or COUNT if the pack is not in registers.
    template <typename F> __device__ __forceinline__ void for_each_place(F f) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const uint32_t pack = threadIdx.x + i * blockDim.x;
            if (pack < packs) f(i, static_cast<uint64_t>(pack) * N);
        }
        for (uint64_t pack = threadIdx.x + COUNT * blockDim.x; pack < packs; pack += blockDim.x) f(COUNT, pack * N);
    }

    // This thread's pack at place `place`. The first element of the pack has the index `at` in the row.
    __device__ __forceinline__ Pack<T, N> get(int place, uint64_t at) const {
        return place < COUNT ? held[place] : load_pack<N>(start + at);
    }

    // Calls f(index of the pack's first element, pack) for each pack of this thread.
    template <typename F> __device__ __forceinline__ void for_each(F f) const {
        for_each_place([&](int place, uint64_t at) { f(at, get(place, at)); });
    }

    // Calls f(index of the pack's first element, pack, pack of `other`) for each pack of this thread. `other` is a row of the same
    // length.
    template <typename F> __device__ __forceinline__ void for_each(const Row &other, F f) const {
        for_each_place([&](int place, uint64_t at) { f(at, get(place, at), other.get(place, at)); });
    }
};
