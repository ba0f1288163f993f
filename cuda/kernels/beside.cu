// An activation f and a concatenation in one kernel: y = [before | f(x)] has the columns of `before`, unchanged, followed by those of f(x).
// f is GELU in its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415; kernels gelu_tanh_beside_*), or the gated linear unit
// SiLU(gate) * h with x = [gate | h] (Shazeer 2020, arXiv:2002.05202; kernels swiglu_beside_*).
//
// before is (rows, before_width), and may be null if before_width is 0. x is (rows, width), or for the gated unit (rows, 2 width); the
// rows of x are x_row elements apart. y is (rows, before_width + width). In the backward pass, grad (rows, width) is the gradient of f(x),
// the last columns of y; the rows of grad are grad_row elements apart. dx has the shape of x; its rows are dx_row elements apart.
// Launch: block 256, grid clamp(ceil(rows (before_width + width) / (256 WIDE)), 1, 2^31 - 1), where WIDE elements take 16 bytes; no dynamic
// shared memory. before_width is 0 in this formula for the backward kernels. Any grid gives the same results.

#include "functions.cuh"
#include "rows.cuh"

namespace {

struct GeluTanh {
    static constexpr bool IS_GATED = false;

    // Sets `value` to the activation of x and `slope` to its derivative.
    template <typename T> static __device__ __forceinline__ void both(Acc<T> x, Acc<T> &value, Acc<T> &slope) {
        using A = Acc<T>;
        const A scale = A(0.79788456080286535588), cube = A(0.044715);
        const A inner = scale * (x + cube * x * x * x);
        A t;
        // Near 0, 1 - 2 / (1 + exp(2 inner)) has a larger relative error than tanh(inner). For bf16 and f16 it is exact enough, because
        // their results have only 8 and 11 significant bits.
        if constexpr (IS_HALF<T>) t = A(1) - A(2) * sigmoid<T>(A(-2) * inner);
        else t = tanh(inner);
        value = A(0.5) * x * (A(1) + t);
        slope = A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * scale * (A(1) + A(3) * cube * x * x);
    }
};

struct GatedSilu {
    static constexpr bool IS_GATED = true;

    // As `GeluTanh::both`, for the SiLU of the gate, which is passed as x. The kernels multiply by h.
    template <typename T> static __device__ __forceinline__ void both(Acc<T> x, Acc<T> &value, Acc<T> &slope) {
        Silu::both<T>(x, value, slope);
    }
};

template <typename T, int N, typename F>
__device__ __forceinline__ void forward(const T *before, const T *x, T *y, uint64_t rows, uint64_t x_row, uint32_t before_width,
                                        uint32_t width) {
    // The numbers of packs, of N columns each, in a row of `before` and in a row of y.
    const uint32_t before_packs = before_width / N, packs = before_packs + width / N;
    for (uint64_t index = flat_index(); index < rows * packs; index += flat_stride()) {
        const auto [row, pack] = divide(index, packs);
        if (pack < before_packs) {
            store_pack(y + index * N, load_pack<N>(before + row * before_width + pack * static_cast<uint64_t>(N)));
            continue;
        }
        const T *from = x + row * x_row + (pack - before_packs) * static_cast<uint64_t>(N);
        const auto first = load_pack<N>(from);
        // The derivative `slope` is not used. For the gated unit, `first` is the gate and `second` is h.
        Acc<T> results[N], slope;
#pragma unroll
        for (int i = 0; i < N; i++) F::template both<T>(widen(first.values[i]), results[i], slope);
        if constexpr (F::IS_GATED) {
            const auto second = load_pack<N>(from + width);
#pragma unroll
            for (int i = 0; i < N; i++) results[i] *= widen(second.values[i]);
        }
        store_pack(y + index * N, narrow_pack<T>(results));
    }
}

template <typename T, int N, typename F>
__device__ __forceinline__ void backward(const T *x, const T *grad, T *dx, uint64_t rows, uint64_t x_row, uint64_t grad_row,
                                         uint64_t dx_row, uint32_t width) {
    const uint32_t packs = width / N;
    for (uint64_t index = flat_index(); index < rows * packs; index += flat_stride()) {
        const auto [row, pack] = divide(index, packs);
        const uint64_t column = pack * static_cast<uint64_t>(N);
        const T *from = x + row * x_row + column;
        T *to = dx + row * dx_row + column;
        const auto first = load_pack<N>(from), g = load_pack<N>(grad + row * grad_row + column);
        Acc<T> values[N], slopes[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            F::template both<T>(widen(first.values[i]), values[i], slopes[i]);
            slopes[i] *= widen(g.values[i]);
        }
        if constexpr (F::IS_GATED) {
            // `first` is the gate and `second` is h. `slopes` becomes the gradient of the gate, and `values` that of h.
            const auto second = load_pack<N>(from + width);
#pragma unroll
            for (int i = 0; i < N; i++) {
                slopes[i] *= widen(second.values[i]);
                values[i] *= widen(g.values[i]);
            }
            store_pack(to + width, narrow_pack<T>(values));
        }
        store_pack(to, narrow_pack<T>(slopes));
    }
}

} // namespace

// The kernels access 16 bytes at a time (WIDE elements) if all widths and distances are multiples of WIDE, a power of two (their bitwise
// `or` is a multiple of a power of two only if each of them is), and all addresses are multiples of 16 bytes.
#define DEFINE_BESIDE(NAME, F, SUFFIX, T)                                                                              \
    extern "C" __global__ void NAME##_forward_##SUFFIX(const T *before, const T *x, T *y, uint64_t rows,               \
                                                       uint64_t x_row, uint32_t before_width, uint32_t width) {        \
        follow();                                                                                                      \
        if ((x_row | before_width | width) % WIDE<T> == 0 && are_wide(before, x, y))                                   \
            forward<T, WIDE<T>, F>(before, x, y, rows, x_row, before_width, width);                                    \
        else forward<T, 1, F>(before, x, y, rows, x_row, before_width, width);                                         \
    }                                                                                                                  \
    extern "C" __global__ void NAME##_backward_##SUFFIX(const T *x, const T *grad, T *dx, uint64_t rows,               \
                                                        uint64_t x_row, uint64_t grad_row, uint64_t dx_row,            \
                                                        uint32_t width) {                                              \
        follow();                                                                                                      \
        if ((x_row | grad_row | dx_row | width) % WIDE<T> == 0 && are_wide(x, grad, dx))                               \
            backward<T, WIDE<T>, F>(x, grad, dx, rows, x_row, grad_row, dx_row, width);                                \
        else backward<T, 1, F>(x, grad, dx, rows, x_row, grad_row, dx_row, width);                                     \
    }
#define DEFINE_ALL(SUFFIX, T)                                                                                          \
    DEFINE_BESIDE(gelu_tanh_beside, GeluTanh, SUFFIX, T)                                                               \
    DEFINE_BESIDE(swiglu_beside, GatedSilu, SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_ALL)
