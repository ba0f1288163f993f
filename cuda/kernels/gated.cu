// Gated linear units (Shazeer 2020, arXiv:2002.05202): y = h * f(gate), elementwise. In GEGLU, f is GELU with the error function; in
// SwiGLU, f is SiLU.
//
// A row of x (rows, 2 width) has h, then the gate. y and its gradient grad are (rows, width); dx, the gradient of x, has the shape of x.
// Launch: block 256, grid clamp(ceil(rows width / (256 WIDE)), 1, 2^31 - 1), no dynamic shared memory; WIDE is the number of elements in
// 16 bytes. Any grid gives the same results.

#include "functions.cuh"
#include "rows.cuh"

namespace {

// N is the number of elements of a pack: of h, of the gate and of y, which a thread loads and stores at once.
template <typename T, int N, typename F>
__device__ __forceinline__ void forward(const T *x, T *y, uint64_t rows, uint32_t width) {
    const uint32_t packs = width / N; // in a row of y; `index` counts the packs of all rows
    for (uint64_t index = flat_index(); index < rows * packs; index += flat_stride()) {
        const auto [row, pack] = divide(index, packs);
        const T *start = x + row * 2 * width + pack * static_cast<uint64_t>(N);
        const auto h = load_pack<N>(start), gate = load_pack<N>(start + width);
        Acc<T> result[N];
#pragma unroll
        for (int i = 0; i < N; i++) result[i] = widen(h.values[i]) * F::template value<T>(widen(gate.values[i]));
        store_pack(y + index * N, narrow_pack<T>(result));
    }
}

template <typename T, int N, typename F>
__device__ __forceinline__ void backward(const T *x, const T *grad, T *dx, uint64_t rows, uint32_t width) {
    const uint32_t packs = width / N; // in a row of y; `index` counts the packs of all rows
    for (uint64_t index = flat_index(); index < rows * packs; index += flat_stride()) {
        const auto [row, pack] = divide(index, packs);
        const uint64_t start = row * 2 * width + pack * static_cast<uint64_t>(N);
        const auto h = load_pack<N>(x + start), gate = load_pack<N>(x + start + width), g = load_pack<N>(grad + index * N);
        Acc<T> to_h[N], to_gate[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            Acc<T> value, slope; // f and its derivative, at the gate
            F::template both<T>(widen(gate.values[i]), value, slope);
            to_h[i] = widen(g.values[i]) * value;
            to_gate[i] = widen(g.values[i]) * widen(h.values[i]) * slope;
        }
        store_pack(dx + start, narrow_pack<T>(to_h));
        store_pack(dx + start + width, narrow_pack<T>(to_gate));
    }
}

} // namespace

// If `width` or an address does not allow 16-byte access, packs have one element.
#define DEFINE_GATED(NAME, F, SUFFIX, T)                                                                               \
    extern "C" __global__ void NAME##_forward_##SUFFIX(const T *x, T *y, uint64_t rows, uint32_t width) {              \
        follow();                                                                                                      \
        if (width % WIDE<T> == 0 && are_wide(x, y)) forward<T, WIDE<T>, F>(x, y, rows, width);                         \
        else forward<T, 1, F>(x, y, rows, width);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void NAME##_backward_##SUFFIX(const T *x, const T *grad, T *dx, uint64_t rows,               \
                                                        uint32_t width) {                                              \
        follow();                                                                                                      \
        if (width % WIDE<T> == 0 && are_wide(x, grad, dx)) backward<T, WIDE<T>, F>(x, grad, dx, rows, width);          \
        else backward<T, 1, F>(x, grad, dx, rows, width);                                                              \
    }
#define DEFINE_ALL(SUFFIX, T)                                                                                          \
    DEFINE_GATED(geglu, GeluExact, SUFFIX, T)                                                                          \
    DEFINE_GATED(swiglu, Silu, SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_ALL)
