// Sums of exponentials of rows in one pass: a new maximum rescales the sum so far.
#pragma once

#include "functions.cuh"
#include "rows.cuh"

// `sum` is Σ e^(x - largest) over the elements x added so far, and `largest` is the largest of them. An element of
// negative infinity adds 0, and NaN makes the sum NaN. A positive infinity makes the sum NaN too, or infinity if
// `INFINITE`.
template <typename T, bool INFINITE = false> struct Exponentials {
    using A = Acc<T>;
    A largest = -infinity<A>();
    A sum = 0;

    // The number subtracted from the elements; never infinite, because inf - inf is NaN.
    static __device__ __forceinline__ A reference(A largest) {
        return largest == -infinity<A>() || (INFINITE && largest == infinity<A>()) ? A(0) : largest;
    }

    // The sum of e^(x - by). If all elements are negative infinity or NaN, the sum is 0 or NaN and remains so.
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

    // Joins the sums of the team's threads.
    __device__ __forceinline__ void join(A *shared) {
        const A all = team_max(largest, shared);
        sum = team_sum(rescaled(reference(all)), shared);
        largest = all;
    }
};
