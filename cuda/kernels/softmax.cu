// Softmax, log-softmax and log-sum-exp over the last dimension.
//
// x and its gradient dx are (rows, len). y and its gradient grad are (rows) for log-sum-exp, and (rows, len) for the other two functions.
// Launch of all kernels: over rows (rows.cuh), where a team of threads (a warp or a block) works on a row. N is the number of elements in
// one access: WIDE<T> (16 bytes) if the length and the addresses allow, otherwise 1. `LOG` selects log-softmax instead of softmax. `shared`
// is for sums over the team. `keep_narrow`, between two loops over a row, makes the compiler keep the row's 16-bit values in registers
// without widening them, because widened values take twice the registers. `Exponentials` has two numbers for the elements x that a thread
// adds: `largest`, the largest x, and `sum`, Σ e^(x - largest). `join` combines those of the team's threads.

#include "softmax.cuh"

namespace {

template <typename T, int N, bool LOG>
__device__ __forceinline__ void forward(const T *x, T *y, uint64_t rows, uint32_t len, Acc<T> *shared) {
    using A = Acc<T>;
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        Row<T, N> values(x + row * len, len);
        Exponentials<T> exponentials;
        values.for_each([&](uint64_t, const Pack<T, N> &pack) { exponentials.add(pack); });
        exponentials.join(shared);
        values.keep_narrow();
        const A largest = exponentials.largest;
        // Σ e^(x - largest), as its logarithm or as its inverse.
        const A normalizer = LOG ? log(exponentials.sum) : A(1) / exponentials.sum;
        T *out = y + row * len;
        values.for_each([&](uint64_t at, const Pack<T, N> &pack) {
            A result[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                const A d = widen(pack.values[i]) - largest;
                result[i] = LOG ? d - normalizer : exponential<T>(d) * normalizer;
            }
            store_pack(out + at, narrow_pack<T>(result));
        });
    }
}

template <typename T, int N, bool LOG>
__device__ __forceinline__ void backward(const T *y, const T *grad, T *dx, uint64_t rows, uint32_t len, Acc<T> *shared) {
    using A = Acc<T>;
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        Row<T, N> values(y + row * len, len), grads(grad + row * len, len);
        // Σ g for log-softmax, Σ g·y for softmax.
        A sum = 0;
        values.for_each(grads, [&](uint64_t, const Pack<T, N> &pack, const Pack<T, N> &g) {
#pragma unroll
            for (int i = 0; i < N; i++) sum += LOG ? widen(g.values[i]) : widen(g.values[i]) * widen(pack.values[i]);
        });
        sum = team_sum(sum, shared);
        values.keep_narrow();
        grads.keep_narrow();
        T *out = dx + row * len;
        values.for_each(grads, [&](uint64_t at, const Pack<T, N> &pack, const Pack<T, N> &g) {
            A result[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                const A y_i = widen(pack.values[i]), g_i = widen(g.values[i]);
                result[i] = LOG ? g_i - exponential<T>(y_i) * sum : y_i * (g_i - sum);
            }
            store_pack(out + at, narrow_pack<T>(result));
        });
    }
}

template <typename T, int N>
__device__ __forceinline__ void logsumexp(const T *x, T *y, Acc<T> *exact, uint64_t rows, uint32_t len, Acc<T> *shared) {
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        const T *start = x + row * len;
        // `true`: a positive infinity makes the sum infinite, not NaN.
        Exponentials<T, true> exponentials;
        for (uint64_t at = threadIdx.x * static_cast<uint64_t>(N); at < len; at += blockDim.x * N)
            exponentials.add(load_pack<N>(start + at));
        exponentials.join(shared);
        // `sum` is Σ e^(x - reference), where the reference is `largest`, or 0 if that is infinite.
        const Acc<T> result = log(exponentials.sum) + exponentials.reference(exponentials.largest);
        if (threadIdx.x > 0) continue;
        exact[row] = result;
        if (y != nullptr) y[row] = narrow<T>(result);
    }
}

template <typename T, int N>
__device__ __forceinline__ void logsumexp_backward(const T *x, const Acc<T> *exact, const T *grad, T *dx, uint64_t rows,
                                                   uint32_t len) {
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        const T *start = x + row * len;
        // A row of -∞ has x - shift = -∞, and thus dx = 0, where x - exact would be NaN.
        const Acc<T> g = widen(grad[row]), shift = exact[row] == -infinity<Acc<T>>() ? Acc<T>(0) : exact[row];
        for (uint64_t at = threadIdx.x * static_cast<uint64_t>(N); at < len; at += blockDim.x * N) {
            const auto pack = load_pack<N>(start + at);
            Acc<T> result[N];
#pragma unroll
            for (int i = 0; i < N; i++) result[i] = g * exponential<T>(widen(pack.values[i]) - shift);
            store_pack(dx + row * len + at, narrow_pack<T>(result));
        }
    }
}

} // namespace

// y = e^x / Σ e^x (softmax) or y = x - log Σ e^x (log_softmax), with sums over the row. All results of a row are NaN if all elements of the
// row are -∞, or if any element is NaN or +∞.
#define DEFINE_FORWARD(NAME, LOG, SUFFIX, T)                                                                           \
    extern "C" __global__ void __launch_bounds__(TEAM, 1)                                                              \
        NAME##_forward_##SUFFIX(const T *x, T *y, uint64_t rows, uint32_t len) {                                       \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[WARP];                                                                                \
        if (len % WIDE<T> == 0 && are_wide(x, y)) forward<T, WIDE<T>, LOG>(x, y, rows, len, shared);                   \
        else forward<T, 1, LOG>(x, y, rows, len, shared);                                                              \
    }

// dx = y · (g - Σ g·y) for softmax and dx = g - e^y · Σ g for log_softmax, where y is the result of the forward pass and g = grad. dx may
// be the memory of grad.
#define DEFINE_BACKWARD(NAME, LOG, SUFFIX, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(TEAM, 1)                                                              \
        NAME##_backward_##SUFFIX(const T *y, const T *grad, T *dx, uint64_t rows, uint32_t len) {                      \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[WARP];                                                                                \
        if (len % WIDE<T> == 0 && are_wide(y, grad, dx)) backward<T, WIDE<T>, LOG>(y, grad, dx, rows, len, shared);    \
        else backward<T, 1, LOG>(y, grad, dx, rows, len, shared);                                                      \
    }

// log Σ e^x of each row. The kernel writes the result to exact (rows), in f32 (f64 for f64), for the backward pass. Unless y is null, it
// also writes the result, rounded to T, to y (rows). The row's result is NaN if any element is NaN. Otherwise, if the largest element of
// the row is infinite, the row's result is that element.
#define DEFINE_LOGSUMEXP(SUFFIX, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TEAM, 1)                                                              \
        logsumexp_forward_##SUFFIX(const T *x, T *y, Acc<T> *exact, uint64_t rows, uint32_t len) {                     \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[WARP];                                                                                \
        if (len % WIDE<T> == 0 && are_wide(x)) logsumexp<T, WIDE<T>>(x, y, exact, rows, len, shared);                  \
        else logsumexp<T, 1>(x, y, exact, rows, len, shared);                                                          \
    }

// dx = g · e^(x - exact), where g = grad has one value for each row. If a row's `exact` is -∞, the row's dx is 0 for a finite g.
#define DEFINE_LOGSUMEXP_BACKWARD(SUFFIX, T)                                                                           \
    extern "C" __global__ void __launch_bounds__(TEAM, 1)                                                              \
        logsumexp_backward_##SUFFIX(const T *x, const Acc<T> *exact, const T *grad, T *dx, uint64_t rows,              \
                                    uint32_t len) {                                                                    \
        follow();                                                                                                      \
        if (len % WIDE<T> == 0 && are_wide(x, dx)) logsumexp_backward<T, WIDE<T>>(x, exact, grad, dx, rows, len);      \
        else logsumexp_backward<T, 1>(x, exact, grad, dx, rows, len);                                                  \
    }

#define DEFINE_SOFTMAX(SUFFIX, T)                                                                                      \
    DEFINE_FORWARD(softmax, false, SUFFIX, T)                                                                          \
    DEFINE_FORWARD(log_softmax, true, SUFFIX, T)                                                                       \
    DEFINE_BACKWARD(softmax, false, SUFFIX, T)                                                                         \
    DEFINE_BACKWARD(log_softmax, true, SUFFIX, T)                                                                      \
    DEFINE_LOGSUMEXP(SUFFIX, T)                                                                                        \
    DEFINE_LOGSUMEXP_BACKWARD(SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SOFTMAX)
