// Optimizers whose update of an element depends on other elements of its variable: one block of threads updates a whole variable.
//
// Sums are in f64 and in another order than on the CPU, so results agree with those of the CPU up to rounding. A step launches
// whole_prepare and then the kernels of the optimizer, `<optimizer>_step_*` last. Each of these kernels has one launch for every set of
// variables with the same dtypes.
#pragma once

#include "../optim.cuh"

// The number of threads of a block.
constexpr int WHOLE_THREADS = 512;

// A variable, its gradient, and the 16-bit copy of its parameters, which may be null.
struct Whole {
    float *params;
    void *grads;
    void *copy;
    float *scratch; // its size depends on the optimizer; its contents are not kept between steps
    uint64_t count; // the number of elements, at least 1
    // The sizes of the first dimension, of the last but one and of the last; 1 for a dimension that does not exist.
    uint32_t first;
    uint32_t rows;
    uint32_t columns;
    uint32_t group;     // the index of the variable's settings and coefficients
    uint32_t states[5]; // where the variable's values of each state begin in the buffer of that state, in units of STATE_BLOCK elements
    uint32_t unused; // stands where the structure would have padding
};

// What the update of a variable reads besides the variable: the settings and the coefficients of its group.
struct WholeStep {
    const Settings &settings;
    const Coefficients &coefficients;
    double *shared; // numbers that all variables of the optimizer share (see `ProdigyShared`), or null
};

// Access to the elements of a variable: parameters, and gradients multiplied by `gain` (see `Coefficients`). G is the dtype of the
// gradients, C that of the copy.
template <typename G, typename C> struct Elements {
    const Whole &variable;
    const G *grads;
    float gain;
    bool zero_grads;

    __device__ __forceinline__ Elements(const Whole &variable, float gain, bool zero_grads)
        : variable(variable), grads(static_cast<const G *>(variable.grads)), gain(gain), zero_grads(zero_grads) {}

    __device__ __forceinline__ float grad(uint64_t i) const { return __fmul_rn(widen(grads[i]), gain); }

    __device__ __forceinline__ float param(uint64_t i) const { return variable.params[i]; }

    // Sets a parameter and its copy.
    __device__ __forceinline__ void set(uint64_t i, float value) const {
        variable.params[i] = value;
        if (variable.copy != nullptr) static_cast<C *>(variable.copy)[i] = narrow<C>(value);
    }

    // Clears a gradient if the step is to clear gradients. Call this after the last use of the gradient.
    __device__ __forceinline__ void clear(uint64_t i) const {
        if (zero_grads) static_cast<G *>(variable.grads)[i] = narrow<G>(0.0f);
    }

    // The variable's values in `buffer`, the buffer of state `number` (from 0).
    __device__ __forceinline__ float *state(float *buffer, int number) const {
        return buffer + static_cast<uint64_t>(variable.states[number]) * STATE_BLOCK;
    }
};

// Returns the sum of f(i) over all i < count to every thread of the block.
template <typename F> __device__ __forceinline__ double sum_over(uint64_t count, F f) {
    __shared__ double warp_sums[WARP];
    double sum = 0.0;
    for (uint64_t i = threadIdx.x; i < count; i += blockDim.x) sum += f(i);
    return block_sum(sum, warp_sums);
}

// Calls f(i) for every i < count. Afterwards every thread of the block can read what f has written.
template <typename F> __device__ __forceinline__ void for_each(uint64_t count, F f) {
    for (uint64_t i = threadIdx.x; i < count; i += blockDim.x) f(i);
    __syncthreads();
}
