// Sums of elementwise losses of two dense tensors a and b of `len` elements. With the difference d = a - b of two elements, the losses are:
// - square: d²;
// - absolute: |d|;
// - huber (Huber 1964) with `parameter` δ: d²/2 for |d| up to δ, δ (|d| - δ/2) beyond δ;
// - smooth_absolute (Girshick 2015, arXiv:1504.08083) with `parameter` β: huber with δ = β, divided by β.
//
// elementwise.cu has kernels with the names of the losses, which write the loss of each element, and kernels `<loss>_slope` for the
// gradients.

#include "rows.cuh"

namespace {

template <typename A> struct Square {
    explicit __device__ Square(double) {}
    __device__ A value(A d) const { return d * d; }
};

template <typename A> struct Absolute {
    explicit __device__ Absolute(double) {}
    __device__ A value(A d) const { return fabs(d); }
};

template <typename A> struct Huber {
    A delta;
    explicit __device__ Huber(double delta) : delta(static_cast<A>(delta)) {}
    __device__ A value(A d) const {
        const A magnitude = fabs(d);
        return magnitude > delta ? delta * (magnitude - A(0.5) * delta) : A(0.5) * d * d;
    }
};

template <typename A> struct SmoothAbsolute {
    A beta;
    explicit __device__ SmoothAbsolute(double beta) : beta(static_cast<A>(beta)) {}
    __device__ A value(A d) const {
        const A magnitude = fabs(d);
        return magnitude > beta ? magnitude - A(0.5) * beta : A(0.5) * d * d / beta;
    }
};

// Calls f(start, count) for this thread's share of the tensors: for packs of WIDE<T> neighbouring elements if `wide`, then for each element
// that is in no pack. A pack of WIDE<T> elements has 16 bytes and is read in one access; `are_wide` says whether the addresses permit this.
// `start` is the index of the first element; `count`, the number of elements, is an integral constant.
template <typename T, typename F> __device__ __forceinline__ void for_each_pack(uint64_t len, bool wide, F f) {
    const uint64_t packs = wide ? len / WIDE<T> : 0;
    for (uint64_t index = flat_index(); index < packs; index += flat_stride())
        f(index * WIDE<T>, std::integral_constant<int, WIDE<T>>());
    for (uint64_t index = packs * WIDE<T> + flat_index(); index < len; index += flat_stride())
        f(index, std::integral_constant<int, 1>());
}

template <typename T, typename F>
__device__ __forceinline__ void sum(const T *a, const T *b, double *partials, uint64_t len, F function) {
    __shared__ double shared[WARP];
    double total = 0;
    for_each_pack<T>(len, are_wide(a, b), [&](uint64_t at, auto count) {
        constexpr int N = decltype(count)::value;
        const auto first = load_pack<N>(a + at), second = load_pack<N>(b + at);
        Acc<T> pack_sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) pack_sum += function.value(widen(first.values[i]) - widen(second.values[i]));
        total += pack_sum;
    });
    total = block_sum(total, shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

} // namespace

// First stage: partials[k] = the sum of the losses of the elements that thread block k reads. Losses, and their sum over a pack, are
// computed in Acc<T>; all further sums in f64. Launch: block 256, no dynamic shared memory. The grid determines the order of the additions,
// so it must depend only on `len` and T, for instance clamp(ceil(len / (2048 · WIDE<T>)), 1, 1024), with which each
// thread reads about 8 packs. Second stage: loss_total.
#define DEFINE_SUM(NAME, FUNCTION, SUFFIX, T)                                                                          \
    extern "C" __global__ void NAME##_sum_##SUFFIX(const T *a, const T *b, double *partials, uint64_t len,             \
                                                   double parameter) {                                                 \
        follow();                                                                                                      \
        sum(a, b, partials, len, FUNCTION<Acc<T>>(parameter));                                                         \
    }
#define DEFINE_SUMS(SUFFIX, T)                                                                                         \
    DEFINE_SUM(square, Square, SUFFIX, T)                                                                              \
    DEFINE_SUM(absolute, Absolute, SUFFIX, T)                                                                          \
    DEFINE_SUM(huber, Huber, SUFFIX, T)                                                                                \
    DEFINE_SUM(smooth_absolute, SmoothAbsolute, SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SUMS)

// *result = factor · Σ_k partials[k] over k < count; factor is 1 / len for the mean loss, 1 for the sum. Launch: block 256, grid 1,
// no dynamic shared memory.
#define DEFINE_TOTAL(SUFFIX, T)                                                                                        \
    extern "C" __global__ void loss_total_##SUFFIX(const double *partials, T *result, uint32_t count, double factor) { \
        follow();                                                                                                      \
        __shared__ double shared[WARP];                                                                                \
        double total = 0;                                                                                              \
        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) total += partials[i];                               \
        total = block_sum(total, shared);                                                                              \
        if (threadIdx.x == 0) *result = narrow<T>(static_cast<Acc<T>>(factor * total));                                \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_TOTAL)
