// For convolutions on the tensor cores: tiles in shared memory, and the copies that fill them.
//
// A tile's rows hold 64 values of 16 bits (128 bytes). A row has eight chunks of 16 bytes; chunk c of row r is stored
// as chunk c ^ (r mod 8) of the row. This is the 128-byte swizzle of `wgmma`, which also lets `ldmatrix` read eight
// rows without bank conflicts.
// Tiles begin at multiples of 1024 bytes.
//
// The tiles are operands of the sum that `Gather` (geometry.cuh) describes:
//   result[pixel, n] = sum over kernel taps (a, b) and source channels c of source[the pixel that tap (a, b) meets, c] * weight
// `gather.channels` is the number of source channels c, and `gather.results` that of result channels n. For the gradient of the
// input, the source is the gradient of the output, so c is an output channel of the convolution and n an input channel.
// Of an axis, `gather.y` or `gather.x`: `taps` is the number of taps, `source` the number of source pixels, `move` the distance
// between the source pixels that neighbouring taps read. Tap a is tap `tap_first + tap_every * a` of the convolution kernel.
#pragma once

#include "geometry.cuh"

// The number of values of the summed dimension that one step of the main loops takes. It is also the number of values in a
// tile's row.
constexpr int STEP = 64;
constexpr int ROW_BYTES = 128;
// The size of a tile of 64 rows.
constexpr int SQUARE_BYTES = 64 * ROW_BYTES;
// The tensor-core kernels support convolution kernels of at most this height and width: a 32-bit number holds two masks of
// this many bits, one for each axis, which mark the taps of a window that are inside the image.
constexpr int MAX_KERNEL = 16;

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns the offset, in bytes, of a value in a tile.
__device__ __forceinline__ uint32_t tile_offset(int row, int column) {
    return row * ROW_BYTES + (((column / 8) ^ (row % 8)) * 16) + column % 8 * 2;
}

// Whether copied data stays in the L1 cache. The next kernel taps read the same pixels of an image again, but other values
// of the weight.
enum class Reuse { YES, NO };

// Starts the copy of VEC values to shared memory; writes zeros unless `inside`. With VEC = 8 and 4, the copy is asynchronous,
// and addresses must be multiples of its size; only VEC = 8 obeys Reuse::NO. With VEC = 1, it is an ordinary copy between any
// addresses. In the PTX, %0 is the address in shared memory, %1 the address in global memory, and %2 the number of bytes to
// read; `cp.async` writes zeros for the bytes that it does not read.
template <int VEC, Reuse REUSE, typename T>
__device__ __forceinline__ void copy_to_tile(uint32_t to, const T *from, bool inside) {
    static_assert(VEC == 8 || VEC == 4 || VEC == 1);
    const int bytes = inside ? VEC * 2 : 0;
    if constexpr (VEC == 8 && REUSE == Reuse::NO) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    } else if constexpr (VEC == 8) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    } else if constexpr (VEC == 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    } else {
        const uint16_t value = inside ? *reinterpret_cast<const uint16_t *>(from) : uint16_t(0);
        asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(to), "h"(value) : "memory");
    }
}

// Makes a group of this thread's copies since the last call.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most the latest PENDING of this thread's groups of copies are unfinished.
template <int PENDING> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// An index of the summed dimension, split into `block`, a block of channels; (a, b), a kernel tap; and `channel`, a channel in
// the block. The dimension is ordered by block, then by tap, then by channel. `Work` chooses `block_channels`, the number of channels
// of a block: STEP where possible, because consecutive taps then find their pixels in the L1 cache; otherwise all channels.
struct Place {
    int a, b, channel, block;

    __device__ __forceinline__ Place(const Gather &gather, int block_channels, int index) {
        // A sum for the gradient of the input may have no taps; 1 avoids a division by 0.
        const int length = max(gather.taps(), 1) * block_channels;
        block = index / length;
        const int tap = (index - block * length) / block_channels;
        channel = index - block * length - tap * block_channels;
        a = gather.x.taps > 0 ? tap / gather.x.taps : 0;
        b = tap - a * gather.x.taps;
    }

    // Moves on by `count` values.
    __device__ __forceinline__ void advance(const Gather &gather, int block_channels, int count) {
        channel += count;
        while (channel >= block_channels) {
            channel -= block_channels;
            if (++b < gather.x.taps) continue;
            b = 0;
            if (++a < gather.y.taps) continue;
            a = 0;
            ++block;
        }
    }
};

// The windows that ROWS result pixels sum over, as a tile (result pixels, summed values). VEC values are copied at a time.
// In this and the next two structures, COLUMNS is the number of copies for a row of a tile, PASS the number of rows that the
// thread block copies at once, and PASSES the number of rows into which a thread copies. Thread t copies the VEC values from column
// t % COLUMNS * VEC on, in the rows t / COLUMNS + i * PASS for i < PASSES.
template <typename T, int ROWS, int VEC, int THREADS> struct WindowTile {
    static constexpr int COLUMNS = STEP / VEC, PASS = THREADS / COLUMNS, PASSES = ROWS / PASS;
    static_assert(ROWS % PASS == 0);
    // For each of the thread's rows: the index of the source pixel at the first tap, even if this tap is outside the image; and
    // which taps are inside. Bit a of `inside` says whether the y of the taps (a, b) is inside, bit MAX_KERNEL + b whether their x is.
    int pixel[PASSES];
    uint32_t inside[PASSES];

    // `first` is the result pixel of the tile's first row.
    __device__ __forceinline__ WindowTile(const Gather &gather, int first) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const int row = first + int(threadIdx.x) / COLUMNS + i * PASS;
            pixel[i] = 0;
            inside[i] = 0;
            if (row >= gather.pixels()) continue;
            const Window window(gather, row);
            pixel[i] = (window.image * gather.y.source + window.y) * gather.x.source + window.x;
            for (int a = 0; a < gather.y.taps; ++a) {
                inside[i] |= uint32_t(unsigned(window.y + a * gather.y.move) < unsigned(gather.y.source)) << a;
            }
            for (int b = 0; b < gather.x.taps; ++b) {
                inside[i] |= uint32_t(unsigned(window.x + b * gather.x.move) < unsigned(gather.x.source))
                             << (MAX_KERNEL + b);
            }
        }
    }

    // Starts the copies of one step. `place` is the index, in the summed dimension, of the first value that this thread copies
    // in each of its rows.
    __device__ __forceinline__ void load(uint32_t tile, const T *source, const Gather &gather, const Place &place,
                                         int block_channels) const {
        const int channel = place.block * block_channels + place.channel;
        const int shift = place.a * gather.y.move * gather.x.source + place.b * gather.x.move;
        const uint32_t needed = (1u << place.a) | (1u << (MAX_KERNEL + place.b));
        const bool has_channel = channel < gather.channels;
        const int row = int(threadIdx.x) / COLUMNS, column = int(threadIdx.x) % COLUMNS * VEC;
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const bool exists = has_channel && (inside[i] & needed) == needed;
            const T *from = exists ? source + int64_t(pixel[i] + shift) * gather.channels + channel : source;
            copy_to_tile<VEC, Reuse::YES>(tile + tile_offset(row + i * PASS, column), from, exists);
        }
    }
};

// The weights (output channels, kernel height, kernel width, input channels) of the forward pass, as a tile (output channels,
// summed values). `first` is the first output channel; `place` is the index, in the summed dimension, of the first value that
// this thread copies in each of its rows. The Conv2dShape is unused; it is there because `Loader` calls
// `WeightColumns::load` with the same arguments.
template <typename T, int ROWS, int VEC, int THREADS> struct WeightRows {
    static constexpr int COLUMNS = STEP / VEC, PASS = THREADS / COLUMNS, PASSES = ROWS / PASS;
    static_assert(ROWS % PASS == 0);
    static constexpr int BYTES = ROWS * ROW_BYTES;

    static __device__ __forceinline__ void load(uint32_t tile, const T *weight, const Gather &gather,
                                                const Conv2dShape &, const Place &place, int block_channels,
                                                int first) {
        const int channel = place.block * block_channels + place.channel;
        const int64_t length = int64_t(gather.taps()) * gather.channels;
        const int row = int(threadIdx.x) / COLUMNS, column = int(threadIdx.x) % COLUMNS * VEC;
        const T *start =
            weight + (first + row) * length + (place.a * gather.x.taps + place.b) * gather.channels + channel;
        const bool has_channel = channel < gather.channels;
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const bool exists = has_channel && first + row + i * PASS < gather.results;
            copy_to_tile<VEC, Reuse::NO>(tile + tile_offset(row + i * PASS, column),
                                         exists ? start + i * PASS * length : weight, exists);
        }
    }
};

// The same weights for the gradient of the input, as tiles (64 summed values, 64 input channels). COUNT is the number of input
// channels of all tiles together, so the last tile may be narrower. `first` is the first input channel.
template <typename T, int COUNT, int VEC, int THREADS> struct WeightColumns {
    static constexpr int COLUMNS = STEP / VEC, PASS = THREADS / COLUMNS, PASSES = STEP / PASS,
                         TILES = (COUNT + STEP - 1) / STEP;
    static constexpr int BYTES = TILES * SQUARE_BYTES;

    // `start` is the index, in the summed dimension, of the step's first value.
    static __device__ __forceinline__ void load(uint32_t tile, const T *weight, const Gather &gather,
                                                const Conv2dShape &s, const Place &start, int block_channels,
                                                int first) {
        const int row = int(threadIdx.x) / COLUMNS, column = int(threadIdx.x) % COLUMNS * VEC;
        Place place = start;
        place.advance(gather, block_channels, row);
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            if (i > 0) place.advance(gather, block_channels, PASS);
            const int out = place.block * block_channels + place.channel;
            const int tap = (gather.y.tap_first + gather.y.tap_every * place.a) * s.kernel_width + gather.x.tap_first +
                            gather.x.tap_every * place.b;
            const T *line = weight + (int64_t(out) * s.kernel_height * s.kernel_width + tap) * gather.results;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                if (COUNT - j * STEP < STEP && column >= COUNT - j * STEP) continue;
                const int channel = first + j * STEP + column;
                const bool exists = out < gather.channels && channel < gather.results;
                copy_to_tile<VEC, Reuse::NO>(tile + j * SQUARE_BYTES + tile_offset(row + i * PASS, column),
                                             exists ? line + channel : weight, exists);
            }
        }
    }
};
