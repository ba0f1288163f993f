// Reductions of a dense tensor x (outer, n, inner) along its middle dimension: sum, max, min and argmax. Also cumulative sums along it.
//
// For sum, max and min there are two kernels: `<function>_rows_<from>_<to>` requires that inner is 1, and
// `<function>_columns_<from>_<to>` accepts any inner. <from> is the dtype of x, <to> that of y. Both kernels take the arguments
// (y, x, outer, n, inner, chunk, divisor). They split the middle dimension into chunks of at most `chunk` elements:
// chunks = max(1, ceil(n / chunk)). They reduce each chunk, divide each result by `divisor`, and write y (outer, chunks, inner). With
// several chunks, a second launch must reduce y along the chunks. `divisor` is the number of averaged elements in the last launch of a
// mean, else 1. The arithmetic is in `Acc`, the arithmetic type of the dtype of x.
#include "element.cuh"

struct Sum {
    template <typename R> static __device__ __forceinline__ R neutral() { return R(0); }
    template <typename R> static __device__ __forceinline__ R join(R a, R b) { return a + b; }
};
// `Max` gives the largest element and `Min` the smallest. Both give NaN if any element is NaN.
struct Max {
    template <typename R> static __device__ __forceinline__ R neutral() { return R(-INFINITY); }
    template <typename R> static __device__ __forceinline__ R join(R a, R b) { return a > b || a != a ? a : b; }
};
struct Min {
    template <typename R> static __device__ __forceinline__ R neutral() { return R(INFINITY); }
    template <typename R> static __device__ __forceinline__ R join(R a, R b) { return a < b || a != a ? a : b; }
};

template <typename F, typename R> __device__ __forceinline__ R join_warp(R value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        value = F::join(value, __shfl_xor_sync(ALL_LANES, value, offset));
    }
    return value;
}

// The threads of a block with the same threadIdx.y reduce one chunk: chunk number `task % chunks` of row number `task / chunks` of x.
// Launch: blocks of (32, 8) or (256, 1) threads, ceil(outer * chunks / blockDim.y) blocks, no dynamic shared memory.
template <typename F, typename S, typename D>
__device__ __forceinline__ void reduce_rows(D *y, const S *x, uint64_t outer, uint64_t n, uint64_t chunk, double divisor) {
    using R = Acc<S>;
    __shared__ R joined[WARP]; // The result of each warp.
    const uint64_t chunks = n == 0 ? 1 : (n + chunk - 1) / chunk;
    const uint64_t task = uint64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    // `task` is the same for all threads of a warp, and for all threads of a (256, 1) block. So either all of them return here or none, and
    // no thread is missing in the shuffles or at the barrier below.
    if (task >= outer * chunks) return;
    const uint64_t start = task % chunks * chunk, length = n - start < chunk ? n - start : chunk;
    const S *row = x + task / chunks * n + start;
    R value = F::template neutral<R>();
    constexpr int N = WIDE<S>; // The number of elements in 16 bytes.
    // The number of elements that are read 16 bytes at a time. A second loop reads the others one by one.
    uint64_t done = 0;
    if (is_wide(row)) {
        done = length / N * N;
        for (uint64_t i = uint64_t(threadIdx.x) * N; i < done; i += uint64_t(blockDim.x) * N) {
            const Pack<S, N> pack = *reinterpret_cast<const Pack<S, N> *>(row + i);
#pragma unroll
            for (int k = 0; k < N; ++k) value = F::join(value, R(widen(pack.values[k])));
        }
    }
    for (uint64_t i = done + threadIdx.x; i < length; i += blockDim.x) value = F::join(value, R(widen(row[i])));
    value = join_warp<F>(value);
    if (blockDim.x > WARP) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (lane == 0) joined[warp] = value;
        __syncthreads();
        value = join_warp<F>(lane < blockDim.x / WARP ? joined[lane] : F::template neutral<R>());
    }
    if (threadIdx.x == 0) y[task] = narrow<D>(Acc<D>(value / R(divisor)));
}

// The threads of a block with the same threadIdx.x reduce one chunk of one column: chunk number `task % chunks` of
// x[task / chunks, :, column].
// Launch: blocks of (32, 8) threads, grid (ceil(inner / 32), min(outer * chunks, 65535)), no dynamic shared memory.
template <typename F, typename S, typename D>
__device__ __forceinline__ void reduce_columns(D *y, const S *x, uint64_t outer, uint64_t n, uint64_t inner, uint64_t chunk,
                                               double divisor) {
    using R = Acc<S>;
    __shared__ R joined[8][WARP];
    const uint64_t chunks = n == 0 ? 1 : (n + chunk - 1) / chunk;
    const uint64_t column = uint64_t(blockIdx.x) * WARP + threadIdx.x;
    for (uint64_t task = blockIdx.y; task < outer * chunks; task += gridDim.y) {
        const uint64_t start = task % chunks * chunk, end = n - start < chunk ? n : start + chunk;
        R value = F::template neutral<R>();
        if (column < inner) {
            const S *from = x + task / chunks * n * inner + column;
#pragma unroll 4
            for (uint64_t i = start + threadIdx.y; i < end; i += 8) value = F::join(value, R(widen(from[i * inner])));
        }
        joined[threadIdx.y][threadIdx.x] = value;
        __syncthreads();
        if (threadIdx.y == 0 && column < inner) {
#pragma unroll
            for (int i = 1; i < 8; ++i) value = F::join(value, joined[i][threadIdx.x]);
            y[task * inner + column] = narrow<D>(Acc<D>(value / R(divisor)));
        }
        __syncthreads();
    }
}

// `*_rows_*` takes `inner` only so that both kernels have the same arguments. Its value must be 1; the kernel does not read it.
// S and D are the types of the dtypes FROM (of x) and TO (of y).
#define REDUCTION(NAME, F, FROM, S, TO, D)                                                                             \
    extern "C" __global__ void NAME##_rows_##FROM##_##TO(D *y, const S *x, uint64_t outer, uint64_t n, uint64_t inner, \
                                                         uint64_t chunk, double divisor) {                             \
        follow();                                                                                                      \
        reduce_rows<F>(y, x, outer, n, chunk, divisor);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void NAME##_columns_##FROM##_##TO(D *y, const S *x, uint64_t outer, uint64_t n,              \
                                                            uint64_t inner, uint64_t chunk, double divisor) {          \
        follow();                                                                                                      \
        reduce_columns<F>(y, x, outer, n, inner, chunk, divisor);                                                      \
    }
#define REDUCTIONS(FROM, S, TO, D)                                                                                     \
    REDUCTION(sum, Sum, FROM, S, TO, D) REDUCTION(max, Max, FROM, S, TO, D) REDUCTION(min, Min, FROM, S, TO, D)
// With several launches, all but the last write f32 (f64 for f64), so that f16 and bf16 results are rounded only once: the first launch
// converts f16 to f32, for example, and the last one f32 to f16.
REDUCTIONS(f32, float, f32, float)
REDUCTIONS(f64, double, f64, double)
REDUCTIONS(f16, __half, f16, __half)
REDUCTIONS(f16, __half, f32, float)
REDUCTIONS(f32, float, f16, __half)
REDUCTIONS(bf16, __nv_bfloat16, bf16, __nv_bfloat16)
REDUCTIONS(bf16, __nv_bfloat16, f32, float)
REDUCTIONS(f32, float, bf16, __nv_bfloat16)

// Whether `argmax` prefers element b at index j to element a at index i. It prefers NaN to numbers, and a larger number to a smaller one.
// Of two equal numbers or two NaN, it prefers the one with the smaller index.
template <typename R> __device__ __forceinline__ bool is_preferred(R b, uint32_t j, R a, uint32_t i) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan || b_nan) return a_nan == b_nan ? j < i : b_nan;
    return b > a || (b == a && j < i);
}

// `argmax_<dtype>(y, x, outer, n, inner)` writes y (outer, inner), u32: the index, along the middle dimension, of the element that
// `is_preferred` prefers to all others. n must be at least 1.
// Launch: one warp for each element of y, blocks of 256 threads, no dynamic shared memory.
template <typename T>
__device__ __forceinline__ void find_largest(uint32_t *y, const T *x, uint64_t outer, uint64_t n, uint64_t inner) {
    const uint64_t task = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    const uint32_t lane = threadIdx.x % WARP;
    if (task >= outer * inner) return;
    const T *line = x + task / inner * n * inner + task % inner;
    // A lane without an element of its own starts with element 0, which does not change the result.
    uint32_t best = lane < n ? lane : 0;
    Acc<T> value = widen(line[best * inner]);
    for (uint64_t i = lane + WARP; i < n; i += WARP) {
        const Acc<T> other = widen(line[i * inner]);
        if (is_preferred(other, uint32_t(i), value, best)) value = other, best = uint32_t(i);
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const Acc<T> other = __shfl_xor_sync(ALL_LANES, value, offset);
        const uint32_t at = __shfl_xor_sync(ALL_LANES, best, offset);
        if (is_preferred(other, at, value, best)) value = other, best = at;
    }
    if (lane == 0) y[task] = best;
}

// `cumsum_<dtype>(y, x, outer, n, inner)` writes y (outer, n, inner): y[o, j, i] = Σ x[o, k, i] over k = 0 to j.
// Launch: one warp for each pair (o, i), blocks of 256 threads, no dynamic shared memory.
template <typename T>
__device__ __forceinline__ void add_up(T *y, const T *x, uint64_t outer, uint64_t n, uint64_t inner) {
    const uint64_t task = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    const uint32_t lane = threadIdx.x % WARP;
    if (task >= outer * inner) return;
    const uint64_t first = task / inner * n * inner + task % inner;
    // The sum of the elements ahead of `start`.
    Acc<T> before = 0;
    for (uint64_t start = 0; start < n; start += WARP) {
        const uint64_t i = start + lane;
        Acc<T> sum = i < n ? Acc<T>(widen(x[first + i * inner])) : Acc<T>(0);
        // After this loop, `sum` of a lane is the sum of the elements of all lanes up to and including this one.
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const Acc<T> other = __shfl_up_sync(ALL_LANES, sum, offset);
            if (lane >= offset) sum += other;
        }
        sum += before;
        if (i < n) y[first + i * inner] = narrow<T>(sum);
        before = __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
}

// The kernels `argmax_<dtype>` and `cumsum_<dtype>`.
#define ALONG(DTYPE, T)                                                                                                \
    extern "C" __global__ void argmax_##DTYPE(uint32_t *y, const T *x, uint64_t outer, uint64_t n, uint64_t inner) {   \
        follow();                                                                                                      \
        find_largest(y, x, outer, n, inner);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void cumsum_##DTYPE(T *y, const T *x, uint64_t outer, uint64_t n, uint64_t inner) {          \
        follow();                                                                                                      \
        add_up(y, x, outer, n, inner);                                                                                 \
    }
FOR_EACH_FLOAT_AND_DOUBLE(ALONG)
