// Sums the exponentials of a row, for softmax and log-sum-exp, in one pass over the row: whenever the maximum grows, the sum so far is
// rescaled.
#pragma once

#include "functions.cuh"
#include "rows.cuh"

// `largest` is the largest element x added so far, and `sum` is Σ e^(x - largest) over these elements. An element of
// negative infinity adds 0, and NaN makes the sum NaN. A positive infinity makes the sum infinite if `INFINITE`, and
// otherwise NaN.
template <typename T, bool INFINITE = false> struct Exponentials {
    using A = Acc<T>;
    A largest = -infinity<A>();
    A sum = 0;

    // The number that is subtracted from the elements: `largest`, but 0 instead of an infinity, whose difference from itself would be NaN.
    // Without `INFINITE`, positive infinity is subtracted all the same, so that the sum becomes NaN.
    static __device__ __forceinline__ A reference(A largest) {
        return largest == -infinity<A>() || (INFINITE && largest == infinity<A>()) ? A(0) : largest;
    }

    // The sum of e^(x - by) over the elements so far. If all of them are negative infinity or NaN, the sum is 0 or NaN for every `by`.
    __device__ __forceinline__ A rescaled(A by) const {
        return largest == -infinity<A>() ? sum : sum * exponential<T>(reference(largest) - by);
    }

    template <int N> __device__ __forceinline__ void add(const Pack<T, N> &pack) {
        A next = largest;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const A x = widen(pack.values[i]);
            next = x > next ? x : next;
        }
        const A by = reference(next);
        sum = rescaled(by);
#pragma unroll
        for (int i = 0; i < N; i++) sum += exponential<T>(widen(pack.values[i]) - by);
        largest = next;
    }

    // Adds up the sums of the threads that share the row (a team, see rows.cuh): afterwards each thread has the maximum and the sum of the
    // row. `shared` is shared memory for one value of each of the block's warps.
    __device__ __forceinline__ void join(A *shared) {
        const A all = team_max(largest, shared);
        sum = team_sum(rescaled(reference(all)), shared);
        largest = all;
    }
};
