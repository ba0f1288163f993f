// Stores the sums of a tile, which a block of a convolution kernel has computed: a tile of the result (or of a gradient), or of partial
// sums if several blocks share the work on one sum.
#pragma once

#include "../rows.cuh"
#include "mma.cuh"

// Stores two neighbouring values of a row of `columns` values, from the even index `column` on; values beyond the end of the row are
// not stored.
template <typename U> __device__ __forceinline__ void store_pair(U *row, int column, int columns, U first, U second) {
    if (column >= columns) return;
    if (columns % 2 == 0 && reinterpret_cast<uintptr_t>(row) % (2 * sizeof(U)) == 0) {
        *reinterpret_cast<Pack<U, 2> *>(row + column) = {first, second};
        return;
    }
    row[column] = first;
    if (column + 1 < columns) row[column + 1] = second;
}

// What is added to a result (pixels, channels) that has been rounded to T; the sum is then rounded to T again. `rows` is
// (pixels / sharing, channels): `sharing` consecutive pixels get the same row of it. If `rows` is null, nothing is added.
template <typename T> struct ConvAddend {
    const T *rows;
    uint32_t sharing;

    // Returns the row for a pixel.
    __device__ __forceinline__ const T *row(uint64_t pixel, uint32_t channels) const {
        return rows + (sharing == 1 ? pixel : divide(pixel, sharing).quotient) * channels;
    }
};

// Returns the sums of the values of a pack and `N` other values, rounded to T.
template <typename T, int N> __device__ __forceinline__ Pack<T, N> add_to_pack(const Pack<T, N> &pack, const T *values) {
    Acc<T> sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = widen(pack.values[i]) + widen(values[i]);
    return narrow_pack<T>(sums);
}

// The staged tile: a finished tile of ROWS by COUNT values in shared memory. Its rows are 16 bytes longer than COUNT values,
// against bank conflicts. STAGED_ROW is their length in values, STAGED_BYTES the size of the tile in bytes.
template <typename T, int COUNT> constexpr int STAGED_ROW = COUNT + 16 / int(sizeof(T));
template <typename T, int ROWS, int COUNT> constexpr int STAGED_BYTES = ROWS * STAGED_ROW<T, COUNT> * int(sizeof(T));

// Puts a 16-row strip of sums, in the layout of `mma`, into the staged tile, plus `bias` unless it is null. The strip has 8 NF columns:
// acc[j] are this lane's two columns of the eight from 8 j on, in row lane / 4 and then in row lane / 4 + 8. The strip begins at `row` and
// `column` of the tile, and the tile at column `first` of the result, whose rows have `columns` values.
template <typename T, int COUNT, int NF> __device__ __forceinline__ void
stage_strip(T *staged, const float (&acc)[NF][4], const T *bias, int row, int column, int first, int columns) {
    const int lane = int(threadIdx.x) % WARP;
#pragma unroll
    for (int j = 0; j < NF; ++j) {
        const int n = column + j * 8 + lane % 4 * 2;
        float b[2] = {0.f, 0.f};
        if (bias != nullptr) {
            if (first + n < columns) b[0] = widen(bias[first + n]);
            if (first + n + 1 < columns) b[1] = widen(bias[first + n + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            T *to = staged + (row + lane / 4 + half * 8) * STAGED_ROW<T, COUNT> + n;
            *reinterpret_cast<Pack<T, 2> *>(to) = {narrow<T>(acc[j][half * 2] + b[0]),
                                                   narrow<T>(acc[j][half * 2 + 1] + b[1])};
        }
    }
}

// Writes the staged tile, plus the addend, to the rows of the result: 16 bytes at a time where the addresses allow it. row_of(row) returns
// the result's row for a row of the tile, or a negative number if there is none. `first` and `columns` are as in `stage_strip`.
template <typename T, int ROWS, int COUNT, int THREADS, typename RowOf>
__device__ __forceinline__ void store_staged(T *result, const T *staged, int first, int columns, RowOf row_of,
                                             const ConvAddend<T> &addend = {}) {
    constexpr int PARTS = COUNT / 8; // packs of eight values in a row; T has 16 bits
    const bool wide = columns % 8 == 0 && is_wide(result);
    for (int index = threadIdx.x; index < ROWS * PARTS; index += THREADS) {
        const int row = index / PARTS, column = index % PARTS * 8, n = first + column;
        const int64_t to_row = row_of(row);
        if (to_row < 0 || n >= columns) continue;
        const T *from = staged + row * STAGED_ROW<T, COUNT> + column;
        T *to = result + to_row * columns + n;
        const T *more = addend.rows == nullptr ? nullptr : addend.row(to_row, columns) + n;
        if (wide && (more == nullptr || is_wide(more))) {
            auto pack = *reinterpret_cast<const Pack<T, 8> *>(from);
            if (more != nullptr) pack = add_to_pack(pack, load_pack<8>(more).values);
            *reinterpret_cast<Pack<T, 8> *>(to) = pack;
        } else {
            for (int i = 0; i < 8 && n + i < columns; ++i)
                to[i] = more == nullptr ? from[i] : narrow<T>(widen(from[i]) + widen(more[i]));
        }
    }
}

// Writes a 16-row strip of sums, plus `bias` unless it is null, to `partials`, this block's slice of the partial sums, which has the shape
// of the result and is f32. The sums are not staged. The other arguments are as in `stage_strip` and `store_staged`.
template <int NF, typename RowOf> __device__ __forceinline__ void
store_partials(float *partials, const float *bias, const float (&acc)[NF][4], int row, int column, int first,
               int columns, RowOf row_of) {
    const int lane = int(threadIdx.x) % WARP;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t to_row = row_of(row + lane / 4 + half * 8);
        if (to_row < 0) continue;
        float *to = partials + to_row * columns;
#pragma unroll
        for (int j = 0; j < NF; ++j) {
            const int n = first + column + j * 8 + lane % 4 * 2;
            const float b[2] = {bias != nullptr && n < columns ? bias[n] : 0.f,
                                bias != nullptr && n + 1 < columns ? bias[n + 1] : 0.f};
            store_pair(to, n, columns, acc[j][half * 2] + b[0], acc[j][half * 2 + 1] + b[1]);
        }
    }
}
