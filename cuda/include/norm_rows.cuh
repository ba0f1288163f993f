// Rows of the input of layer norm and RMS norm: their statistics and their normalized values.
#pragma once

#include "affine.cuh"

// A team of threads (rows.cuh) works on a row, which consists of packs of N neighbouring elements. A team is the threads of a block with
// the same threadIdx.y; its thread t = threadIdx.x has the packs t, t + blockDim.x, t + 2 · blockDim.x and so on.

// The largest number of packs of a row that a thread keeps in registers. With this number, 32 warps of a forward kernel can run on a
// multiprocessor. At a launch, the host chooses how many packs each thread of a team holds, in place of HELD in the formula for the size of
// a team (rows.cuh): the smallest number from 1 to NORM_HELD with which all rows together need at most 2^17 threads in a forward pass or
// 2^16 in a backward pass (about as many as an H100 runs at once). If even NORM_HELD needs more threads, the host chooses NORM_HELD.
constexpr int NORM_HELD = 3;

// MODULATED is layer norm with a scale and a shift (`weight` and `bias` of `Affine`) for every `sharing` consecutive rows: both have the
// shape (rows / sharing, len). It multiplies the normalized x by 1 + scale. The other two kinds have one scale and one shift (len) for all
// rows, and multiply by the scale itself.
enum class Kind { LAYER, RMS, MODULATED };

// Whether the norm subtracts the mean.
template <Kind KIND> constexpr bool CENTERS = KIND != Kind::RMS;

// A row of elements of type T in packs of N. `for_each_place` calls its function with the `place` of each pack of the thread (the pack's
// index in registers, or NORM_HELD if the pack is in memory only) and with `at`, the index of the pack's first element in the row.
// `keep_narrow` keeps values in registers as T instead of widened.
template <typename T, int N> using NormRow = Row<T, N, NORM_HELD>;

// Adds the row `other` to `row` and rounds the result to T. The result replaces the values of `row` and is written to `sum`.
template <typename T, int N> __device__ __forceinline__ void add_row(NormRow<T, N> &row, const T *other, T *sum) {
    const NormRow<T, N> others(other, row.packs * N);
    row.for_each_place([&](int place, uint64_t at) {
        auto a = row.get(place, at), b = others.get(place, at);
        keep_narrow(a);
        keep_narrow(b);
        Acc<T> values[N];
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = widen(a.values[i]) + widen(b.values[i]);
        const auto pack = narrow_pack<T>(values);
        if (place < NORM_HELD) row.held[place] = pack;
        store_pack(sum + at, pack);
    });
    row.keep_narrow();
    // Later loops read the packs that are not in registers from `sum`. A thread reads only packs that it wrote itself, so the team need not
    // wait. But the compiler must not move these loads before the stores: wide stores are inline assembly (`store_words`), and the compiler
    // does not know that the assembly writes memory.
    row.start = sum;
    one_at_a_time(); // keeps the compiler from moving loads and stores across this line
}

// The index at which the row's scale begins in `weight`, and its shift in `bias`.
template <Kind KIND> __device__ __forceinline__ uint64_t first_parameter(uint64_t row, uint32_t sharing, uint32_t len) {
    return KIND == Kind::MODULATED ? divide(row, sharing).quotient * len : 0;
}

// The factors of the normalized x, from element `at` of `weight` on. Without a weight, the factors are 1; MODULATED always has a weight.
template <typename T, Kind KIND, int N>
__device__ __forceinline__ void load_scale(Affine affine, uint64_t at, Acc<T> (&values)[N]) {
    load_parameter<T>(affine.weight, affine.is_f32, at, Acc<T>(1), values);
#pragma unroll
    for (int i = 0; i < N; i++) values[i] += KIND == Kind::MODULATED ? Acc<T>(1) : Acc<T>(0);
}

// Normalizes the rows of x. Unless `residual` is null, it first adds `residual` to x, rounds the sum to T, writes it to `sum`, and
// normalizes its rows instead. Writes each row's mean (if the norm subtracts it) and `rstd`, the reciprocal of its root mean square or
// standard deviation (with eps).
// Then calls write(row, values, normalized) for each row: `values` is the NormRow, and normalized(place, at, result) computes the results
// of its pack at `place`, whose first element has the index `at`. All threads of the team call `write`. `shared` is shared memory for
// `team_sum`.
template <typename T, int N, Kind KIND, typename Write>
__device__ __forceinline__ void normalize(const T *x, const T *residual, T *sum, Affine affine, Acc<T> *mean, Acc<T> *rstd, uint64_t rows,
                                          uint32_t len, uint32_t sharing, Acc<T> eps, Acc<T> *shared, Write write) {
    using A = Acc<T>;
    constexpr bool CENTER = CENTERS<KIND>;
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        NormRow<T, N> values(x + row * len, len);
        if (residual != nullptr) add_row(values, residual + row * len, sum + row * len);
        A center = 0, squares = 0;
        if (CENTER) {
            values.for_each([&](uint64_t, const Pack<T, N> &pack) {
#pragma unroll
                for (int i = 0; i < N; i++) center += widen(pack.values[i]);
            });
            center = team_sum(center, shared) / len;
            if (threadIdx.x == 0) mean[row] = center;
            values.keep_narrow();
        }
        values.for_each([&](uint64_t, const Pack<T, N> &pack) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const A d = widen(pack.values[i]) - center;
                squares += d * d;
            }
        });
        values.keep_narrow();
        const A reciprocal = A(1) / sqrt(team_sum(squares, shared) / len + eps);
        if (threadIdx.x == 0) rstd[row] = reciprocal;
        const uint64_t parameters = first_parameter<KIND>(row, sharing, len);
        write(row, values, [&](int place, uint64_t at, A(&result)[N]) {
            const auto pack = values.get(place, at);
            A parameter[N];
            load_scale<T, KIND>(affine, parameters + at, parameter);
#pragma unroll
            for (int i = 0; i < N; i++) result[i] = (widen(pack.values[i]) - center) * reciprocal * parameter[i];
            load_parameter<T>(affine.bias, affine.is_f32, parameters + at, A(0), parameter);
#pragma unroll
            for (int i = 0; i < N; i++) result[i] += parameter[i];
        });
    }
}
