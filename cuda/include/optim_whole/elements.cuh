// Optimizers whose update of an element depends on other elements of its variable: one block of threads updates a whole variable.
//
// Sums are in f64 and in another order than on the CPU, so results agree with those of the CPU up to rounding. A step launches
// whole_prepare and then, for every set of variables with the same dtypes, the kernels of the optimizer one after the other,
// `<optimizer>_step_*` last.
#pragma once

#include "../optim.cuh"

// The threads of a block.
constexpr int WHOLE_THREADS = 512;

// A variable, its gradient, and its 16-bit copy, which may be null.
struct Whole {
    float *params;
    void *grads;
    void *copy;
    float *scratch; // its size depends on the optimizer; its contents are not kept between steps
    uint64_t count; // the number of elements, at least 1
    // The sizes of the first dimension and of the last two; 1 for a dimension that does not exist.
    uint32_t first;
    uint32_t rows;
    uint32_t columns;
    uint32_t group;     // which settings and coefficients apply
    uint32_t states[5]; // where each state begins in its buffer, in units of STATE_BLOCK
    uint32_t unused;
};

// The arguments of a step's kernels other than the variables.
struct WholeStep {
    const Settings &at;
    const Coefficients &with;
    double *shared; // numbers that the variables of an optimizer share, or null
};

// The elements of a variable: parameters in f32, and gradients multiplied by `gain` (see `Coefficients`).
template <typename G, typename C> struct Elements {
    const Whole &of;
    const G *grads;
    float gain;
    bool zero_grads;

    __device__ __forceinline__ Elements(const Whole &of, float gain, bool zero_grads)
        : of(of), grads(static_cast<const G *>(of.grads)), gain(gain), zero_grads(zero_grads) {}

    __device__ __forceinline__ float grad(uint64_t i) const { return __fmul_rn(widen(grads[i]), gain); }

    __device__ __forceinline__ float param(uint64_t i) const { return of.params[i]; }

    __device__ __forceinline__ void set(uint64_t i, float value) const {
        of.params[i] = value;
        if (of.copy != nullptr) static_cast<C *>(of.copy)[i] = narrow<C>(value);
    }

    // Clears a gradient if the step is to clear gradients. Call this after the last use of the gradient.
    __device__ __forceinline__ void clear(uint64_t i) const {
        if (zero_grads) static_cast<G *>(of.grads)[i] = narrow<G>(0.0f);
    }

    __device__ __forceinline__ float *state(float *buffer, int number) const {
        return buffer + static_cast<uint64_t>(of.states[number]) * STATE_BLOCK;
    }
};

// The sum of f(i) over the elements, returned to every thread.
template <typename F> __device__ __forceinline__ double sum_over(uint64_t count, F f) {
    __shared__ double warps[WARP];
    double sum = 0.0;
    for (uint64_t i = threadIdx.x; i < count; i += blockDim.x) sum += f(i);
    return block_sum(sum, warps);
}

// Calls f(i) for every element. Afterwards every thread of the block can read what f has written.
template <typename F> __device__ __forceinline__ void for_each(uint64_t count, F f) {
    for (uint64_t i = threadIdx.x; i < count; i += blockDim.x) f(i);
    __syncthreads();
}
