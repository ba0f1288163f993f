// Cross-entropy of logits and class ids. Besides logits and ids, the backward pass needs only the log-sum-exp of each row, not the
// probabilities or their logarithms.
//
// With ε the label smoothing (Szegedy et al. 2016, arXiv:1512.00567), C classes, target t and the log-sum-exp lse(x) = log Σ e^x, the
// loss of a row x is lse(x) - (1 - ε) x_t - ε/C Σ x. The gradient of this loss is softmax(x) - (1 - ε) 1_t - ε/C, where 1_t is 1 for
// class t and 0 for all other classes.
//
// Row r of the logits begins at element (r / inner) * outer_stride + (r % inner) * inner_stride, with integer division. The logits of a
// row are contiguous. For dense logits inner = rows and inner_stride = classes. targets (rows) are u32 if id_bytes is 4, i64 if it is 8. A
// row whose target is ignore_index has the loss 0 and the gradient 0; any other row whose target is out of range has the loss NaN and the
// gradient 0.

#include "ids.cuh"
#include "softmax.cuh"

struct Logits {
    uint64_t rows, inner, outer_stride, inner_stride;
    uint32_t classes;

    __device__ uint64_t start(uint64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }

};

struct Targets {
    const void *ids;
    int64_t ignore_index;
    uint32_t id_bytes;

    __device__ int64_t operator[](uint64_t row) const { return load_id(ids, id_bytes, row); }
};

namespace {

// Divides a row among its team, the blockDim.x threads that work on the row (rows.cuh), and calls f(index of the first element, number of
// elements as a constant) for each part. Parts are packs of 16 bytes, which are WIDE<T> elements, between the first and the last 16-byte
// boundary, and single elements before and after these packs. Without `wide`, all parts are single elements.
template <typename T, typename F> __device__ __forceinline__ void for_each_pack(const T *row, uint32_t len, bool wide, F f) {
    const auto single = std::integral_constant<int, 1>();
    // The number of elements before the first 16-byte boundary: -address % 16 is the distance to it in bytes.
    const uint32_t before = wide ? min(static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)), len) : len;
    for (uint32_t at = threadIdx.x; at < before; at += blockDim.x) f(at, single);
    const uint32_t packs = (len - before) / WIDE<T>;
#pragma unroll 2
    for (uint32_t pack = threadIdx.x; pack < packs; pack += blockDim.x)
        f(before + pack * WIDE<T>, std::integral_constant<int, WIDE<T>>());
    for (uint32_t at = before + packs * WIDE<T> + threadIdx.x; at < len; at += blockDim.x) f(at, single);
}

template <typename T>
__device__ __forceinline__ void forward(const T *x, Targets targets, Acc<T> *losses, Acc<T> *lse, Counter *out_of_range,
                                        Logits logits, double smoothing, Acc<T> *shared) {
    using A = Acc<T>;
    for (uint64_t row = first_row(); row < logits.rows; row += row_stride()) {
        const int64_t target = targets[row];
        if (target == targets.ignore_index || !is_id(target, logits.classes)) {
            if (threadIdx.x > 0) continue;
            const bool ignored = target == targets.ignore_index;
            if (!ignored) report_id(out_of_range, row);
            // 0x7fc00000 is NaN.
            losses[row] = ignored ? A(0) : A(__int_as_float(0x7fc00000));
            lse[row] = 0;
            continue;
        }
        const T *start = x + logits.start(row);
        Exponentials<T> exponentials;
        A sum = 0; // the sum of the logits, for the smoothing
        const bool smooth = smoothing > 0.0;
        for_each_pack(start, logits.classes, /*wide=*/true, [&](uint32_t at, auto count) {
            constexpr int N = decltype(count)::value;
            const auto pack = load_pack<N>(start + at);
            exponentials.add(pack);
            if (!smooth) return;
#pragma unroll
            for (int i = 0; i < N; i++) sum += widen(pack.values[i]);
        });
        exponentials.join(shared);
        if (smooth) sum = team_sum(sum, shared);
        if (threadIdx.x > 0) continue;
        const A row_lse = exponentials.largest + log(exponentials.sum);
        A loss = row_lse - static_cast<A>(1.0 - smoothing) * widen(start[target]);
        // Without smoothing this term is left out: 0 · ∞ of an infinite logit would be NaN.
        if (smooth) loss -= static_cast<A>(smoothing / logits.classes) * sum;
        losses[row] = loss;
        lse[row] = row_lse;
    }
}

template <typename T>
__device__ __forceinline__ void backward(const T *x, const Acc<T> *lse, Targets targets, const T *grad, bool of_rows,
                                         const Acc<T> *divisor, const Acc<T> *weights, T *dx, Logits logits,
                                         double smoothing) {
    using A = Acc<T>;
    // What is subtracted from each softmax, and what is subtracted in addition at the target.
    const A share = static_cast<A>(smoothing / logits.classes), at_target = static_cast<A>(1.0 - smoothing);
    for (uint64_t row = first_row(); row < logits.rows; row += row_stride()) {
        const int64_t target = targets[row];
        const bool counts = target != targets.ignore_index && is_id(target, logits.classes);
        const T *start = x + logits.start(row);
        const A row_lse = lse[row];
        A scale = grad != nullptr ? widen(grad[of_rows ? row : 0]) : A(1);
        if (divisor != nullptr) scale /= *divisor;
        if (weights != nullptr) scale *= weights[row];
        T *out = dx + row * logits.classes;
        // Packs of x are at 16-byte boundaries of dx, too, only if both rows begin at the same distance from such a boundary.
        const bool wide = (reinterpret_cast<uintptr_t>(start) - reinterpret_cast<uintptr_t>(out)) % 16 == 0;
        for_each_pack(start, logits.classes, wide, [&](uint32_t at, auto count) {
            constexpr int N = decltype(count)::value;
            A result[N] = {};
            if (counts) {
                const auto pack = load_pack<N>(start + at);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    result[i] = exponential<T>(widen(pack.values[i]) - row_lse) - share;
                    if (at + i == target) result[i] -= at_target;
                    result[i] *= scale;
                }
            }
            store_pack(out + at, narrow_pack<T>(result));
        });
    }
}

} // namespace

// losses (rows) and lse (rows), of f32 (f64 for f64), become the loss and the log-sum-exp of each row. lse is 0 for a row whose target
// is ignored or out of range. *out_of_range becomes the lowest row whose target is out of range (see ids.cuh). Launch: over rows (rows.cuh)
// of `classes` elements.
#define DEFINE_FORWARD(SUFFIX, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(TEAM, 1)                                                              \
        cross_entropy_forward_##SUFFIX(const T *x, const void *targets, Acc<T> *losses, Acc<T> *lse,                   \
                                       Counter *out_of_range, uint64_t rows, uint64_t inner, uint64_t outer_stride,    \
                                       uint64_t inner_stride, uint32_t classes, int64_t ignore_index,                  \
                                       uint32_t id_bytes, double smoothing) {                                          \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[WARP];                                                                                \
        const Logits logits{rows, inner, outer_stride, inner_stride, classes};                                         \
        const Targets ids{targets, ignore_index, id_bytes};                                                            \
        forward<T>(x, ids, losses, lse, out_of_range, logits, smoothing, shared);                                      \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_FORWARD)

// dx (rows, classes) = the gradient of each row's loss, times the upstream gradient of this loss; dx is dense. The upstream gradient is 1
// if grad is null, else grad (rows) if of_rows = 1, and the number *grad for all rows if of_rows = 0. The kernel divides it by *divisor
// unless divisor is null, and multiplies it by weights (rows) unless weights is null.
// dx may be the memory of x if x is dense. Launch: as for the forward kernel.
#define DEFINE_BACKWARD(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(TEAM, 1)                                                              \
        cross_entropy_backward_##SUFFIX(const T *x, const Acc<T> *lse, const void *targets, const T *grad,             \
                                        const Acc<T> *divisor, const Acc<T> *weights, T *dx, uint64_t rows,            \
                                        uint64_t inner, uint64_t outer_stride, uint64_t inner_stride,                  \
                                        uint32_t classes, int64_t ignore_index, uint32_t id_bytes, double smoothing,   \
                                        uint32_t of_rows) {                                                            \
        follow();                                                                                                      \
        const Logits logits{rows, inner, outer_stride, inner_stride, classes};                                         \
        const Targets ids{targets, ignore_index, id_bytes};                                                            \
        backward<T>(x, lse, ids, grad, of_rows != 0, divisor, weights, dx, logits, smoothing);                         \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_BACKWARD)

// *result = (Σ losses) / *divisor, summed in f64. The kernel also writes *divisor: the number of targets that are not ignored if `mean`
// is 1, else 1. A mean over no targets is NaN.
// Launch: block 1024, grid 1, no dynamic shared memory. One block suffices, because there are far fewer rows than logits.
#define DEFINE_TOTAL(SUFFIX, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        cross_entropy_total_##SUFFIX(const Acc<T> *losses, const void *targets, T *result, Acc<T> *divisor,            \
                                     uint64_t rows, int64_t ignore_index, uint32_t id_bytes, uint32_t mean) {          \
        follow();                                                                                                      \
        __shared__ double shared[WARP];                                                                                \
        const Targets ids{targets, ignore_index, id_bytes};                                                            \
        double sum = 0, count = 0;                                                                                     \
        for (uint64_t row = threadIdx.x; row < rows; row += blockDim.x) {                                              \
            sum += losses[row];                                                                                        \
            if (ids[row] != ignore_index) count += 1;                                                                  \
        }                                                                                                              \
        sum = block_sum(sum, shared);                                                                                  \
        count = mean != 0 ? block_sum(count, shared) : 1.0;                                                            \
        if (threadIdx.x > 0) return;                                                                                   \
        *result = narrow<T>(static_cast<Acc<T>>(sum / count));                                                         \
        *divisor = static_cast<Acc<T>>(count);                                                                         \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_TOTAL)
