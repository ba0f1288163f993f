// Losses of the difference d = a - b of two dense tensors of `len` elements: mse_loss d², l1_loss |d|, huber_loss (Huber 1964)
// with `parameter` δ: d²/2 up to δ, δ (|d| - δ/2) beyond, smooth_l1_loss (Girshick 2015, arXiv:1504.08083) with β: Huber's over
// β.
//
// Launch of forward and backward: block 256, grid clamp(ceil(len / (256 WIDE)), 1, 2^31 - 1), no dynamic shared memory. Any
// grid is right.

#include "rows.cuh"

namespace {

template <typename A> struct Square {
    explicit __device__ Square(double) {}
    __device__ A value(A d) const { return d * d; }
    __device__ A slope(A d) const { return d + d; }
};

template <typename A> struct Absolute {
    explicit __device__ Absolute(double) {}
    __device__ A value(A d) const { return fabs(d); }
    // 0 at 0; NaN stays NaN.
    __device__ A slope(A d) const { return d > 0 ? A(1) : d < 0 ? A(-1) : d; }
};

template <typename A> struct Huber {
    A delta;
    explicit __device__ Huber(double delta) : delta(static_cast<A>(delta)) {}
    __device__ A value(A d) const {
        const A size = fabs(d);
        return size > delta ? delta * (size - A(0.5) * delta) : A(0.5) * d * d;
    }
    __device__ A slope(A d) const { return d > delta ? delta : d < -delta ? -delta : d; }
};

template <typename A> struct SmoothAbsolute {
    A beta;
    explicit __device__ SmoothAbsolute(double beta) : beta(static_cast<A>(beta)) {}
    __device__ A value(A d) const {
        const A size = fabs(d);
        return size > beta ? size - A(0.5) * beta : A(0.5) * d * d / beta;
    }
    __device__ A slope(A d) const {
        const A scaled = d / beta;
        return scaled > A(1) ? A(1) : scaled < A(-1) ? A(-1) : scaled;
    }
};

// f(first element, number of elements as a constant) over all packs of the tensors, then over the rest.
template <typename T, typename F> __device__ __forceinline__ void for_each_pack(uint64_t len, bool wide, F f) {
    const uint64_t packs = wide ? len / WIDE<T> : 0;
    for (uint64_t index = flat_index(); index < packs; index += flat_stride())
        f(index * WIDE<T>, std::integral_constant<int, WIDE<T>>());
    for (uint64_t index = packs * WIDE<T> + flat_index(); index < len; index += flat_stride())
        f(index, std::integral_constant<int, 1>());
}

template <typename T, typename F>
__device__ __forceinline__ void forward(const T *a, const T *b, T *y, uint64_t len, F function) {
    for_each_pack<T>(len, are_wide(a, b, y), [&](uint64_t at, auto count) {
        constexpr int N = decltype(count)::value;
        const auto first = load_pack<N>(a + at), second = load_pack<N>(b + at);
        Acc<T> result[N];
#pragma unroll
        for (int i = 0; i < N; i++) result[i] = function.value(widen(first.values[i]) - widen(second.values[i]));
        store_pack(y + at, narrow_pack<T>(result));
    });
}

template <typename T, typename F>
__device__ __forceinline__ void sum(const T *a, const T *b, double *partials, uint64_t len, F function) {
    __shared__ double shared[WARP];
    double total = 0;
    for_each_pack<T>(len, are_wide(a, b), [&](uint64_t at, auto count) {
        constexpr int N = decltype(count)::value;
        const auto first = load_pack<N>(a + at), second = load_pack<N>(b + at);
        Acc<T> part = 0;
#pragma unroll
        for (int i = 0; i < N; i++) part += function.value(widen(first.values[i]) - widen(second.values[i]));
        total += part;
    });
    total = block_sum(total, shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

template <typename T, typename F>
__device__ __forceinline__ void backward(const T *grad, bool of_elements, const T *a, const T *b, T *da, T *db, uint64_t len,
                                         Acc<T> factor, F function) {
    using A = Acc<T>;
    const A whole = of_elements ? A(0) : widen(*grad) * factor;
    const bool wide = are_wide(a, b) && are_wide(da, db) && (!of_elements || are_wide(grad));
    for_each_pack<T>(len, wide, [&](uint64_t at, auto count) {
        constexpr int N = decltype(count)::value;
        const auto first = load_pack<N>(a + at), second = load_pack<N>(b + at);
        A g[N], result[N];
        if (of_elements) load_values(grad + at, g);
#pragma unroll
        for (int i = 0; i < N; i++)
            result[i] = (of_elements ? g[i] * factor : whole) * function.slope(widen(first.values[i]) - widen(second.values[i]));
        if (da != nullptr) store_pack(da + at, narrow_pack<T>(result));
        if (db == nullptr) return;
#pragma unroll
        for (int i = 0; i < N; i++) result[i] = -result[i];
        store_pack(db + at, narrow_pack<T>(result));
    });
}

} // namespace

// forward: the loss of each pair, y (len).
// sum: the sums of the losses over the blocks, partials (grid) of f64. Launch: block 256, grid at the caller's choice by `len`
//     alone, say clamp(ceil(len / (2048 WIDE)), 1, 1024); loss_total follows.
// backward: da = g factor f'(d) and db = -da, each unless null, with g of each element (of_elements = 1: grad (len)) or of the
//     number (of_elements = 0).
#define DEFINE_LOSS(NAME, FUNCTION, SUFFIX, T)                                                                         \
    extern "C" __global__ void NAME##_forward_##SUFFIX(const T *a, const T *b, T *y, uint64_t len, double parameter) { \
        forward(a, b, y, len, FUNCTION<Acc<T>>(parameter));                                                            \
    }                                                                                                                  \
    extern "C" __global__ void NAME##_sum_##SUFFIX(const T *a, const T *b, double *partials, uint64_t len,             \
                                                   double parameter) {                                                 \
        sum(a, b, partials, len, FUNCTION<Acc<T>>(parameter));                                                         \
    }                                                                                                                  \
    extern "C" __global__ void NAME##_backward_##SUFFIX(const T *grad, const T *a, const T *b, T *da, T *db,           \
                                                        uint64_t len, double parameter, double factor,                 \
                                                        uint32_t of_elements) {                                        \
        backward(grad, of_elements != 0, a, b, da, db, len, static_cast<Acc<T>>(factor),                               \
                 FUNCTION<Acc<T>>(parameter));                                                                         \
    }
#define DEFINE_LOSSES(SUFFIX, T)                                                                                       \
    DEFINE_LOSS(mse_loss, Square, SUFFIX, T)                                                                           \
    DEFINE_LOSS(l1_loss, Absolute, SUFFIX, T)                                                                          \
    DEFINE_LOSS(huber_loss, Huber, SUFFIX, T)                                                                          \
    DEFINE_LOSS(smooth_l1_loss, SmoothAbsolute, SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_LOSSES)

// *result = factor Σ partials (count). Launch: block 256, grid 1, no dynamic shared memory.
#define DEFINE_TOTAL(SUFFIX, T)                                                                                        \
    extern "C" __global__ void loss_total_##SUFFIX(const double *partials, T *result, uint32_t count, double factor) { \
        __shared__ double shared[WARP];                                                                                \
        double total = 0;                                                                                              \
        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) total += partials[i];                               \
        total = block_sum(total, shared);                                                                              \
        if (threadIdx.x == 0) *result = narrow<T>(static_cast<Acc<T>>(factor * total));                                \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_TOTAL)
