// Elementary functions as accurate as the storage type T needs: for f16 and bf16 they use the hardware's approximate exponential and
// reciprocal. Arguments and results have the type Acc<T>: f64 if T is f64, otherwise f32.
#pragma once

#include <type_traits>

#include "element.cuh"

// Whether `T` is f16 or bf16.
template <typename T> constexpr bool IS_HALF = sizeof(T) == 2;
template <typename A> __device__ __forceinline__ A infinity() { return static_cast<A>(__int_as_float(0x7f800000)); }

// The hardware's approximations of 2^x and 1 / x, with errors of at most 2 ulp. They treat subnormal arguments as 0, return 0 instead
// of subnormal results, and need fewer instructions than CUDA's functions.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <typename T> __device__ __forceinline__ Acc<T> exponential(Acc<T> x) {
    constexpr float LOG2_E = 1.44269504f;
    if constexpr (IS_HALF<T>) return fast_exp2(x * LOG2_E);
    else if constexpr (std::is_same_v<T, double>) return exp(x);
    else return expf(x);
}

template <typename T> __device__ __forceinline__ Acc<T> sigmoid(Acc<T> x) {
    const Acc<T> denominator = Acc<T>(1) + exponential<T>(-x);
    if constexpr (IS_HALF<T>) return fast_reciprocal(denominator);
    else return Acc<T>(1) / denominator;
}

// The standard normal distribution at x: the probability of a value below x, and the density.
template <typename A> struct Normal {
    A below;
    A density;
};

template <typename T> __device__ __forceinline__ Normal<Acc<T>> normal(Acc<T> x) {
    // 1 / √(2π)
    constexpr Acc<T> INV_SQRT_TAU = static_cast<Acc<T>>(0.39894228040143267794);
    const Acc<T> bell = exponential<T>(Acc<T>(-0.5) * x * x);
    if constexpr (IS_HALF<T>) {
        // `tail` is the probability of a value above |x|: erfc(|x| / sqrt(2)) / 2. Abramowitz & Stegun, "Handbook of Mathematical
        // Functions", 7.1.26, approximate erfc with an absolute error below 1.5e-7. The formula has the same exponential as the density,
        // `bell`. P is the formula's constant p, divided by sqrt(2) because the argument of erfc is |x| / sqrt(2).
        constexpr float P = 0.3275911f * 0.70710678118f;
        const float t = fast_reciprocal(fmaf(P, fabsf(x), 1.0f));
        float polynomial = 1.061405429f;
        polynomial = fmaf(polynomial, t, -1.453152027f);
        polynomial = fmaf(polynomial, t, 1.421413741f);
        polynomial = fmaf(polynomial, t, -0.284496736f);
        polynomial = fmaf(polynomial, t, 0.254829592f);
        const float tail = 0.5f * polynomial * t * bell;
        return {x < 0.0f ? tail : 1.0f - tail, INV_SQRT_TAU * bell};
    } else {
        if constexpr (std::is_same_v<T, double>) return {normcdf(x), INV_SQRT_TAU * bell};
        else return {normcdff(x), INV_SQRT_TAU * bell};
    }
}

// Activations: `value` is f(x), `slope` is the derivative f'(x), and `both` sets its last two arguments to them. Each
// activation defines only the functions that kernels call.
struct Silu {
    template <typename T> static __device__ __forceinline__ Acc<T> value(Acc<T> x) { return x * sigmoid<T>(x); }
    template <typename T> static __device__ __forceinline__ Acc<T> slope(Acc<T> x) {
        const Acc<T> s = sigmoid<T>(x);
        return s * (Acc<T>(1) + x * (Acc<T>(1) - s));
    }
    template <typename T> static __device__ __forceinline__ void both(Acc<T> x, Acc<T> &value, Acc<T> &slope) {
        const Acc<T> s = sigmoid<T>(x);
        value = x * s;
        slope = s * (Acc<T>(1) + x * (Acc<T>(1) - s));
    }
};

// GELU with the error function.
struct GeluExact {
    template <typename T> static __device__ __forceinline__ Acc<T> value(Acc<T> x) { return x * normal<T>(x).below; }
    template <typename T> static __device__ __forceinline__ void both(Acc<T> x, Acc<T> &value, Acc<T> &slope) {
        const Normal<Acc<T>> at = normal<T>(x);
        value = x * at.below;
        slope = at.below + x * at.density;
    }
};
