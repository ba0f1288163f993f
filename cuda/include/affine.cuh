// Scale (weight) and shift (bias) of the norms: functions that load their values and store their gradients.
//
// If the kernel's argument `affine_f32` is 1, scale, shift and their gradients are f32; otherwise they have the dtype of the input. A null
// pointer means a scale of ones, a shift of zeros, or a gradient that is not needed and must not be stored.
#pragma once

#include "rows.cuh"

// Whether parameters may be f32 beside inputs of type T: if inputs are f64, parameters are f64 too.
template <typename T> constexpr bool IS_F32_ALLOWED = sizeof(T) < 8;

struct Affine {
    const void *weight;
    const void *bias;
    bool is_f32;
};

// Loads `N` values of a parameter from element `at`, widened to Acc<T>, the type of arithmetic. If the pointer is null, each value is
// `neutral`: 1 for the scale, 0 for the shift.
template <typename T, int N>
__device__ __forceinline__ void load_parameter(const void *parameter, bool is_f32, uint64_t at, Acc<T> neutral,
                                               Acc<T> (&values)[N]) {
    if (parameter == nullptr) {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = neutral;
    } else if (IS_F32_ALLOWED<T> && is_f32) {
        load_values(static_cast<const float *>(parameter) + at, values);
    } else {
        load_values(static_cast<const T *>(parameter) + at, values);
    }
}

// Stores element `at` of a parameter's gradient, rounded to the dtype of the parameter. The pointer must not be null.
template <typename T>
__device__ __forceinline__ void store_parameter(void *parameter, bool is_f32, uint64_t at, Acc<T> value) {
    if (IS_F32_ALLOWED<T> && is_f32) static_cast<float *>(parameter)[at] = static_cast<float>(value);
    else static_cast<T *>(parameter)[at] = narrow<T>(value);
}
