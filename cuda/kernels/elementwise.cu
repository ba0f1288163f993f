// Elementwise functions of one, two or three tensors. Each function is one line (UNARY, BINARY or TERNARY) in the lower part of this
// file.
//
// `<function>_<dtype>(y, a[, b[, c]], tensors, p, q)`: y = f(a[, b[, c]]) for each element. `tensors` has the strides of y and of the
// operands. p and q are parameters; most functions use neither. In the expressions, a, b and c are elements in the arithmetic type R.
// A thread computes `tensors.width` elements: 1 or WIDE, the number in 16 bytes. `follow` waits for the kernels that
// were queued before this one.
// Launch: `tensors.count / tensors.width` threads in blocks of 256, no shared memory.
#include "strided.cuh"

// Apply1, Apply2 and Apply3 compute y = F of one, two or three operands. `for_each` calls `run` for N neighbouring elements; `offsets` and
// `strides` say where these elements are: first in y, then in a, b and c. x has the elements of a, then those of y.
template <typename F, typename T> struct Apply1 {
    T *y;
    const T *a;
    Acc<T> p, q;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *strides) const {
        Pack<T, N> x = load<N>(a + offsets[1], strides[1]);
#pragma unroll
        for (int i = 0; i < N; ++i) x.values[i] = narrow<T>(F::apply(widen(x.values[i]), p, q));
        *reinterpret_cast<Pack<T, N> *>(y + offsets[0]) = x;
    }
};

template <typename F, typename T> struct Apply2 {
    T *y;
    const T *a, *b;
    Acc<T> p, q;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *strides) const {
        Pack<T, N> x = load<N>(a + offsets[1], strides[1]);
        const Pack<T, N> other = load<N>(b + offsets[2], strides[2]);
#pragma unroll
        for (int i = 0; i < N; ++i) x.values[i] = narrow<T>(F::apply(widen(x.values[i]), widen(other.values[i]), p, q));
        *reinterpret_cast<Pack<T, N> *>(y + offsets[0]) = x;
    }
};

template <typename F, typename T> struct Apply3 {
    T *y;
    const T *a, *b, *c;
    Acc<T> p, q;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *strides) const {
        Pack<T, N> x = load<N>(a + offsets[1], strides[1]);
        const Pack<T, N> second = load<N>(b + offsets[2], strides[2]), third = load<N>(c + offsets[3], strides[3]);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            x.values[i] = narrow<T>(
                F::apply(widen(x.values[i]), widen(second.values[i]), widen(third.values[i]), p, q));
        }
        *reinterpret_cast<Pack<T, N> *>(y + offsets[0]) = x;
    }
};

#define KERNEL1(NAME, DTYPE, T)                                                                                        \
    extern "C" __global__ void NAME##_##DTYPE(T *y, const T *a, Strided<2> tensors, double p, double q) {              \
        follow();                                                                                                      \
        for_each<WIDE<T>>(tensors, Apply1<NAME##_function, T>{y, a, Acc<T>(p), Acc<T>(q)});                            \
    }
#define KERNEL2(NAME, DTYPE, T)                                                                                        \
    extern "C" __global__ void NAME##_##DTYPE(T *y, const T *a, const T *b, Strided<3> tensors, double p, double q) {  \
        follow();                                                                                                      \
        for_each<WIDE<T>>(tensors, Apply2<NAME##_function, T>{y, a, b, Acc<T>(p), Acc<T>(q)});                         \
    }
#define KERNEL3(NAME, DTYPE, T)                                                                                        \
    extern "C" __global__ void NAME##_##DTYPE(T *y, const T *a, const T *b, const T *c, Strided<4> tensors, double p,  \
                                              double q) {                                                              \
        follow();                                                                                                      \
        for_each<WIDE<T>>(tensors, Apply3<NAME##_function, T>{y, a, b, c, Acc<T>(p), Acc<T>(q)});                      \
    }
#define EVERY_DTYPE(KERNEL, NAME)                                                                                      \
    KERNEL(NAME, f32, float)                                                                                           \
    KERNEL(NAME, f16, __half)                                                                                          \
    KERNEL(NAME, bf16, __nv_bfloat16)                                                                                  \
    KERNEL(NAME, f64, double)

#define UNARY(NAME, ...)                                                                                               \
    struct NAME##_function {                                                                                           \
        template <typename R> static __device__ __forceinline__ R apply(R a, R p, R q) { return __VA_ARGS__; }         \
    };                                                                                                                 \
    EVERY_DTYPE(KERNEL1, NAME)
#define BINARY(NAME, ...)                                                                                              \
    struct NAME##_function {                                                                                           \
        template <typename R> static __device__ __forceinline__ R apply(R a, R b, R p, R q) { return __VA_ARGS__; }    \
    };                                                                                                                 \
    EVERY_DTYPE(KERNEL2, NAME)
#define TERNARY(NAME, ...)                                                                                             \
    struct NAME##_function {                                                                                           \
        template <typename R> static __device__ __forceinline__ R apply(R a, R b, R c, R p, R q) {                     \
            return __VA_ARGS__;                                                                                        \
        }                                                                                                              \
    };                                                                                                                 \
    EVERY_DTYPE(KERNEL3, NAME)

template <typename R> __device__ __forceinline__ R sign(R x) { return x > R(0) ? R(1) : x < R(0) ? R(-1) : x; }
// The logistic function, and the cumulative distribution function of the standard normal distribution.
template <typename R> __device__ __forceinline__ R logistic(R x) { return R(1) / (R(1) + exp(-x)); }
__device__ __forceinline__ float cumulative(float x) { return normcdff(x); }
__device__ __forceinline__ double cumulative(double x) { return normcdf(x); }
// The larger and the smaller of two numbers; NaN if either is NaN.
template <typename R> __device__ __forceinline__ R larger(R a, R b) { return a > b || a != a ? a : b; }
template <typename R> __device__ __forceinline__ R smaller(R a, R b) { return a < b || a != a ? a : b; }

// GELU's constants here and below: 0.797... is sqrt(2 / pi), and 0.044715 is the factor of x^3 in the tanh form; 0.398... is
// 1 / sqrt(2 pi); 1.702 is the factor of x in the sigmoid form (quick_gelu).
// gelu_inner is the tanh in the tanh form; gelu_tanh_slope is the derivative of this form.
template <typename R> __device__ __forceinline__ R gelu_inner(R x) {
    return tanh(R(0.7978845608028654) * (x + R(0.044715) * x * x * x));
}
template <typename R> __device__ __forceinline__ R gelu_tanh_slope(R x) {
    const R t = gelu_inner(x), inner = R(0.7978845608028654) * (R(1) + R(3 * 0.044715) * x * x);
    return R(0.5) + R(0.5) * t + R(0.5) * x * (R(1) - t * t) * inner;
}
// The derivative of x logistic(scale x).
template <typename R> __device__ __forceinline__ R silu_slope(R x, R scale) {
    const R s = logistic(scale * x);
    return s * (R(1) + scale * x * (R(1) - s));
}
template <typename R> __device__ __forceinline__ R huber_value(R d, R delta) {
    const R size = fabs(d);
    return size > delta ? delta * (size - R(0.5) * delta) : R(0.5) * d * d;
}
// x limited to `low` to `high`; NaN stays NaN.
template <typename R> __device__ __forceinline__ R clamped(R x, R low, R high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

// The value of e4m3 nearest to x: of two equally near, the even one, and at most 448 in magnitude. `step` is the distance between
// neighbouring values that have x's exponent, or between subnormal values if x is that small: e4m3 has 3 bits of mantissa, and -6 is the
// smallest exponent.
template <typename R> __device__ __forceinline__ R nearest_e4m3(R x) {
    const R value = clamped(x, R(-448), R(448));
    const R step = ldexp(R(1), max(value == R(0) ? -6 : ilogb(value), -6) - 3);
    return rint(value / step) * step;
}
// The value of NF4 nearest to x, the lower one if two are equally near. NaN stays NaN.
template <typename R> __device__ __forceinline__ R nearest_nf4(R x) {
    constexpr float values[16] = {-1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
                                  -0.091050036f, 0.0f, 0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f,
                                  0.44070983f, 0.562617f, 0.72295684f, 1.0f};
    R nearest = R(values[0]);
#pragma unroll
    for (int i = 0; i < 15; ++i) nearest = x > R((values[i] + values[i + 1]) / 2.0f) ? R(values[i + 1]) : nearest;
    return x == x ? nearest : x;
}

// Functions of one number; `<name>_backward(a, b)` is a, the gradient of the result, times the derivative. The forward pass saved b: its
// result for exp, sqrt, recip, tanh and sigmoid, and its input for the other functions.
UNARY(affine, a * p + q)
UNARY(scale, a * p)
UNARY(negative, -a)
// For logsumexp: an infinity becomes 0; finite numbers and NaN stay what they are.
UNARY(finite, isinf(a) ? R(0) : a)
UNARY(exp, exp(a))
BINARY(exp_backward, a * b)
UNARY(log, log(a))
BINARY(log_backward, a / b)
UNARY(sqrt, sqrt(a))
BINARY(sqrt_backward, a * R(0.5) / b)
UNARY(sqr, a * a)
BINARY(sqr_backward, a * (b + b))
UNARY(recip, R(1) / a)
BINARY(recip_backward, -a * b * b)
UNARY(abs, fabs(a))
BINARY(abs_backward, a * sign(b))
UNARY(sin, sin(a))
BINARY(sin_backward, a * cos(b))
UNARY(cos, cos(a))
BINARY(cos_backward, -a * sin(b))
UNARY(tanh, tanh(a))
BINARY(tanh_backward, a * (R(1) - b * b))
UNARY(sigmoid, logistic(a))
BINARY(sigmoid_backward, a * b * (R(1) - b))
UNARY(relu, a < R(0) ? R(0) : a)
BINARY(relu_backward, b > R(0) ? a : R(0))
UNARY(gelu, a * cumulative(a))
BINARY(gelu_backward, a * (cumulative(b) + b * R(0.3989422804014327) * exp(R(-0.5) * b * b)))
UNARY(gelu_tanh, R(0.5) * a + R(0.5) * a * gelu_inner(a))
BINARY(gelu_tanh_backward, a * gelu_tanh_slope(b))
UNARY(quick_gelu, a * logistic(R(1.702) * a))
BINARY(quick_gelu_backward, a * silu_slope(b, R(1.702)))
UNARY(silu, a * logistic(a))
BINARY(silu_backward, a * silu_slope(b, R(1)))
UNARY(pow_scalar, pow(a, p))
BINARY(pow_scalar_backward, p == R(0) ? R(0) : a * p * pow(b, p - R(1)))
UNARY(clamp, clamped(a, p, q))
BINARY(clamp_backward, b < p || b > q ? R(0) : a)

// Arithmetic.
BINARY(add, a + b)
BINARY(sub, a - b)
BINARY(mul, a * b)
BINARY(div, a / b)
BINARY(pow, pow(a, b))
BINARY(maximum, larger(a, b))
BINARY(minimum, smaller(a, b))
// The derivatives of maximum and minimum with respect to a; 1/2 if a and b are equal.
BINARY(takes_maximum, a > b ? R(1) : a == b ? R(0.5) : R(0))
BINARY(takes_minimum, a < b ? R(1) : a == b ? R(0.5) : R(0))
// The derivatives of pow with respect to a (`power_slope`) and to b (`power_log`).
BINARY(power_slope, b == R(0) ? R(0) : b * pow(a, b - R(1)))
BINARY(power_log, a == R(0) && b >= R(0) ? R(0) : pow(a, b) * log(a))
TERNARY(plus_product, a + b * c)

// Functions for reductions and their backward passes. In `times_exp_difference`, c is the log-sum-exp of elements b. If c is -inf, all
// of these are -inf; the result is then 0, not NaN. `share` is the part of the gradient b of a maximum or minimum that an element gets: a
// is 1 if the element equals the maximum, else 0, and c is the number of elements that equal it.
BINARY(equal, a == b ? R(1) : R(0))
BINARY(squared_difference, (a - b) * (a - b))
BINARY(exp_difference, exp(a - b))
BINARY(log_plus, log(a) + b)
TERNARY(times_difference, a * (b - c))
TERNARY(times_exp_difference, a * exp(b - (isinf(c) && c < R(0) ? R(0) : c)))
TERNARY(share, a * b / c)
// Fake quantization: the value a, rounded to a number that a code with the scale b can represent. Codes of int8 are from -127 to 127,
// codes of int4 from -8 to 7. In `fake_int4_backward`, a is the gradient, b the value and c the scale; the result is 0 where the value
// rounds to a number beyond the codes. (Scales of the other formats are such that codes cover every value.) int4 and NF4 multiply by the
// rounded reciprocal of the scale, as torchao and bitsandbytes do; int8 and e4m3 divide.
BINARY(fake_int8, clamped(rint(a / b), R(-127), R(127)) * b)
BINARY(fake_int4, clamped(rint(a * (R(1) / b)), R(-8), R(7)) * b)
TERNARY(fake_int4_backward, rint(b * (R(1) / c)) < R(-8) || rint(b * (R(1) / c)) > R(7) ? R(0) : a)
BINARY(fake_e4m3, nearest_e4m3(a / b) * b)
BINARY(fake_nf4, nearest_nf4(a * (R(1) / b)) * b)

// Losses of the difference a - b; p is the threshold of `huber` and `smooth_absolute`. `<name>_slope(a, b, c)` is the product of the
// gradient a, the factor q and the derivative of the loss at the difference b - c.
BINARY(square, (a - b) * (a - b))
TERNARY(square_slope, a * q * R(2) * (b - c))
BINARY(absolute, fabs(a - b))
TERNARY(absolute_slope, a * q * sign(b - c))
BINARY(huber, huber_value(a - b, p))
TERNARY(huber_slope, a * q * clamped(b - c, -p, p))
BINARY(smooth_absolute, huber_value(a - b, p) / p)
TERNARY(smooth_absolute_slope, a * q * clamped((b - c) / p, R(-1), R(1)))
