// Statistics of groups of neighbouring channels, with channels last: how the work on a tensor (batch, positions, channels) is
// split, and how a block sums over its positions.
//
// The channels are divided into tiles, and the positions into pieces. A block has one tile and one piece of one sample. Its threads form
// `lines` lines of `columns` threads. A thread has WIDE neighbouring channels (a pack, 16 bytes) and every `lines`-th position of the
// piece. The split depends only on the sizes:
//     packs = ceil(channels / WIDE), tiles = ceil(packs / 320), columns = ceil(packs / tiles), lines = max(1, floor(320 / columns)),
//     pieces = clamp(ceil(positions / (8 lines)), 1, max(1, floor(256 / (batch tiles)))),
// where 320 is the maximum number of threads of a block. A thread gets about 8 positions, or more where the grid would otherwise have more
// than 256 blocks. The launch of a kernel over the tensor is
//     block 32 ceil(columns lines / 32), grid (batch * pieces, tiles), no dynamic shared memory.
// Any number of pieces from 1 to positions, and any number of lines from 1 to 320 / columns, gives correct results.
#pragma once

#include "affine.cuh"

constexpr int MAX_THREADS = 320;

struct ChannelSize {
    uint32_t positions, channels, groups, pieces;

    // The number of channels of a group.
    __device__ __forceinline__ uint32_t width() const { return channels / groups; }
    // The first position of a piece, and the number of its positions.
    __device__ __forceinline__ uint32_t first(uint32_t piece) const { return min(piece * length(), positions); }
    __device__ __forceinline__ uint32_t count(uint32_t piece) const { return min(length(), positions - first(piece)); }

  private:
    // The number of positions of each piece except the last ones, which may be shorter or empty.
    __device__ __forceinline__ uint32_t length() const { return (positions + pieces - 1) / pieces; }
};

// The channels of tile number `tile` of `tiles`: `low` to `high` (exclusive), in at most `columns` packs of WIDE channels.
template <typename T> struct Tile {
    uint32_t columns, low, high;

    __device__ __forceinline__ Tile(const ChannelSize &size, uint32_t tile, uint32_t tiles) {
        const uint32_t packs = (size.channels + WIDE<T> - 1) / WIDE<T>;
        columns = (packs + tiles - 1) / tiles;
        low = min(tile * columns * WIDE<T>, size.channels);
        high = min(low + columns * WIDE<T>, size.channels);
    }
};

// The work of a thread. With `ALIGNED`, addresses must be multiples of 16 bytes, and the number of channels a multiple of WIDE. Without
// it, neither needs to be.
template <typename T, bool ALIGNED> struct Part {
    static constexpr int N = WIDE<T>;

    ChannelSize size;
    Tile<T> tile;
    // `line` is the thread's line, `channel` its first channel.
    uint32_t sample, piece, lines, line, channel;
    // How many channels the thread has: 0 for a surplus thread, which has no line or no channel in the tile.
    uint32_t valid;

    __device__ __forceinline__ explicit Part(ChannelSize size)
        : size(size), tile(size, blockIdx.y, gridDim.y), sample(blockIdx.x / size.pieces), piece(blockIdx.x % size.pieces) {
        lines = blockDim.x / tile.columns;
        line = threadIdx.x / tile.columns;
        channel = tile.low + threadIdx.x % tile.columns * N;
        valid = line < lines && channel < tile.high ? min(static_cast<uint32_t>(N), tile.high - channel) : 0;
    }

    // The index of the thread's first element at a position.
    __device__ __forceinline__ uint64_t offset(uint32_t position) const {
        return (static_cast<uint64_t>(sample) * size.positions + position) * size.channels + channel;
    }

    // Loads the values of the thread's channels at a position; 0 for channels that the thread does not have. With `ALIGNED`, a thread has
    // all N channels or none; a thread without channels must not call this function or `store`.
    __device__ __forceinline__ Pack<T, N> load(const T *from, uint32_t position) const {
        const T *at = from + offset(position);
        if constexpr (ALIGNED) {
            return load_pack<N>(at);
        } else {
            Pack<T, N> pack;
            for (int i = 0; i < N; i++) pack.values[i] = i < valid ? at[i] : narrow<T>(0);
            return pack;
        }
    }

    // Rounds the values of the thread's channels at a position, and stores them.
    __device__ __forceinline__ void store(T *to, uint32_t position, const Acc<T> (&values)[N]) const {
        T *at = to + offset(position);
        if constexpr (ALIGNED) {
            store_pack(at, narrow_pack<T>(values));
        } else {
            for (int i = 0; i < N; i++)
                if (i < valid) at[i] = narrow<T>(values[i]);
        }
    }

    // Calls f(at, exists) for the thread's positions at[0] to at[BATCH - 1], BATCH at a time, so that their loads overlap. In the last
    // call, exists[k] is false if at[k] is beyond the piece.
    template <int BATCH, typename F> __device__ __forceinline__ void for_each(F f) const {
        if (valid == 0) return;
        const uint32_t end = size.first(piece) + size.count(piece);
        for (uint32_t position = size.first(piece) + line; position < end; position += BATCH * lines) {
            uint32_t at[BATCH];
            bool exists[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                at[k] = position + k * lines;
                exists[k] = at[k] < end;
            }
            f(at, exists);
        }
    }

    // Calls f(i, group) for the thread's channels i = 0 to N - 1; `group` is the index of the channel's group over (batch, groups).
    // For a channel that does not exist, `group` is some existing group.
    template <typename F> __device__ __forceinline__ void for_each_channel(F f) const {
        const uint32_t width = size.width(), first = min(channel, size.channels - 1);
        uint32_t group = first / width, index_in_group = first % width;
#pragma unroll
        for (int i = 0; i < N; i++) {
            f(i, static_cast<uint64_t>(sample) * size.groups + group);
            if (++index_in_group == width && group + 1 < size.groups) {
                index_in_group = 0;
                group++;
            }
        }
    }

    // Loads the values of a parameter (channels) for the thread's channels; `neutral` if the pointer is null. The other arguments are those
    // of `load_parameter`. The values of channels that the thread does not have are arbitrary.
    __device__ __forceinline__ void parameter(const void *parameter, bool is_f32, Acc<T> neutral, Acc<T> (&values)[N]) const {
        if constexpr (ALIGNED) {
            if (valid > 0) load_parameter<T>(parameter, is_f32, channel, neutral, values);
        } else {
            for (int i = 0; i < N; i++) {
                Acc<T> value[1] = {neutral};
                if (i < valid) load_parameter<T>(parameter, is_f32, channel + i, neutral, value);
                values[i] = value[0];
            }
        }
    }
};

// Two numbers in shared memory for each line and channel of a block. `join_lines` later replaces the numbers of a channel's lines by two
// results, values[0][i] and values[1][i] for channel i of the tile.
template <typename T> struct Slots {
    Acc<T> values[2][MAX_THREADS * WIDE<T>];

    // Stores this thread's numbers for its channels, and waits for the block.
    __device__ __forceinline__ void put(const Acc<T> (&first)[WIDE<T>], const Acc<T> (&second)[WIDE<T>]) {
#pragma unroll
        for (int i = 0; i < WIDE<T>; i++) {
            values[0][threadIdx.x * WIDE<T> + i] = first[i];
            values[1][threadIdx.x * WIDE<T> + i] = second[i];
        }
        __syncthreads();
    }

    // Calls join(channel, of_line, results) for each channel of the tile, and waits for the block. `join` sets the two results from the
    // numbers of the lines: of_line(line, 0) is the first number of a line, of_line(line, 1) the second.
    template <typename F> __device__ __forceinline__ void join_lines(const Tile<T> &tile, F join) {
        const uint32_t stride = tile.columns * WIDE<T>;
        for (uint32_t at = threadIdx.x; at < tile.high - tile.low; at += blockDim.x) {
            // No other thread reads or writes the numbers of this channel, so the results can replace them at once.
            Acc<T> results[2];
            join(tile.low + at, [&](uint32_t line, int kind) { return values[kind][line * stride + at]; }, results);
            values[0][at] = results[0];
            values[1][at] = results[1];
        }
        __syncthreads();
    }

    // Calls f(group, low, high, lane, lanes) for each group of the tile, in `lanes` neighbouring threads, of which this is number `lane`.
    // The group's channels in the tile have the indices `low` to `high` (exclusive) of `values`. All threads of a block call f equally
    // often, so f may shuffle; a thread without a group calls it with low = high = 0.
    template <typename F>
    __device__ __forceinline__ void for_each_group(const ChannelSize &size, const Tile<T> &tile, F f) const {
        const uint32_t width = size.width(), first = tile.low / width, end = (tile.high - 1) / width + 1;
        // Several lanes only if each has more than two channels of a whole group.
        uint32_t lanes = 1;
        while (lanes < WARP && 4 * lanes < width) lanes *= 2;
        const uint32_t teams = blockDim.x / lanes, team = threadIdx.x / lanes;
        for (uint32_t base = first; base < end; base += teams) {
            const uint32_t group = base + team;
            if (group < end)
                f(group, max(group * width, tile.low) - tile.low, min((group + 1) * width, tile.high) - tile.low,
                  threadIdx.x % lanes, lanes);
            else f(group, 0u, 0u, threadIdx.x % lanes, lanes);
        }
    }
};

// Returns to each of `lanes` neighbouring threads the sum of their values. `lanes` is a power of two and at most a warp.
template <typename A> __device__ __forceinline__ A lanes_sum(A value, uint32_t lanes) {
    for (uint32_t offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

// A pair of numbers for each sample, tile, group and piece, stored as (batch, tiles, groups, pieces, 2). If a tile has no channel of a
// group, the pairs of this tile and group are neither written nor read.
template <typename A> struct Partials {
    A *pairs;
    uint32_t tiles;

    // The address of a pair.
    __device__ __forceinline__ A *at(const ChannelSize &size, uint64_t sample, uint32_t tile, uint32_t group, uint32_t piece) const {
        return pairs + (((sample * tiles + tile) * size.groups + group) * size.pieces + piece) * 2;
    }

    // Calls f(pair, count) for this thread's share of a group's pairs, which the threads of the block divide among themselves. `count` is
    // the number of elements of the group in the pair's tile and piece.
    template <typename T, typename F>
    __device__ __forceinline__ void for_each(const ChannelSize &size, uint64_t sample, uint32_t group, F f) const {
        const uint32_t low = group * size.width(), high = low + size.width();
        for (uint32_t index = 0; index < tiles; index++) {
            const Tile<T> tile(size, index, tiles);
            if (tile.high <= low || tile.low >= high) continue;
            const uint32_t common_channels = min(high, tile.high) - max(low, tile.low);
            const A *start = at(size, sample, index, group, 0);
#pragma unroll 4
            for (uint32_t piece = threadIdx.x; piece < size.pieces; piece += blockDim.x)
                f(load_pack<2>(start + piece * 2ull), static_cast<A>(size.count(piece)) * common_channels);
        }
    }
};
