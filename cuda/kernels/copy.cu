// Copies, conversions and in-place changes of tensors with strides.
//
// `tensors` has the sizes, which y and x share, the strides of y, and those of x if the kernel has an x. In the formulas below, y and x
// are elements.
// Launch of all kernels: `tensors.count / tensors.width` threads in blocks of 256, no shared memory. `count` is the number of elements, and
// `width` the number of neighbouring elements of a thread: 1, or as many as 16 bytes hold of the kernel's type (`WIDE`) or of the larger
// of its two types (`BOTH`).
#include "strided.cuh"

// Converts an element to another type. Rounds to nearest, ties to even; f64 becomes f16 or bf16 through f32, so it is rounded twice.
template <typename D, typename S> __device__ __forceinline__ D convert(S x) { return narrow<D>(Acc<D>(widen(x))); }

// The functions F of `Update` (below): apply(old y, x, number) is the new y. D is the type of y, S that of x, and Acc<D> the type for
// computations with D: f64 for f64, otherwise f32.
struct Copy {
    template <typename D, typename S> static __device__ __forceinline__ D apply(D, S x, double) { return convert<D>(x); }
};
struct Accumulate {
    template <typename D, typename S> static __device__ __forceinline__ D apply(D y, S x, double) {
        return narrow<D>(widen(y) + Acc<D>(widen(x)));
    }
};
struct Lerp {
    template <typename D, typename S> static __device__ __forceinline__ D apply(D y, S x, double weight) {
        const Acc<D> old = widen(y);
        return narrow<D>(old + Acc<D>(weight) * (Acc<D>(widen(x)) - old));
    }
};

// `for_each` calls `run` once in each thread. `run` applies F to the `N` neighbouring elements of y from y[offsets[0]] on and to those of x
// from x[offsets[1]] on, and writes the results to y. If strides[1], the stride of x, is 0, x[offsets[1]] stands for all `N` elements of x.
template <typename F, typename D, typename S> struct Update {
    D *y;
    const S *x;
    double number;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *strides) const {
        Pack<D, N> *to = reinterpret_cast<Pack<D, N> *>(y + offsets[0]);
        const Pack<S, N> from = load<N>(x + offsets[1], strides[1]);
        // `Copy` and `Bits` (below) do not use the old values, so the compiler drops the load.
        Pack<D, N> values = *to;
#pragma unroll
        for (int i = 0; i < N; ++i) values.values[i] = F::apply(values.values[i], from.values[i], number);
        *to = values;
    }
};

// How many elements of the larger of two types fit into 16 bytes.
template <typename D, typename S> constexpr int BOTH = 16 / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));

// `copy_<from>_<to>(y, x, tensors)`: y = x.
// `accumulate_<from>_<to>(y, x, tensors)`: y += x.
// `lerp_<from>_<to>(y, x, tensors, weight)`: y += *weight * (x - y), where `weight` points to an f64 in device memory.
#define UPDATES(FROM, S, TO, D)                                                                                        \
    extern "C" __global__ void copy_##FROM##_##TO(D *y, const S *x, Strided<2> tensors) {                              \
        follow();                                                                                                      \
        for_each<BOTH<D, S>>(tensors, Update<Copy, D, S>{y, x, 0});                                                    \
    }                                                                                                                  \
    extern "C" __global__ void accumulate_##FROM##_##TO(D *y, const S *x, Strided<2> tensors) {                        \
        follow();                                                                                                      \
        for_each<BOTH<D, S>>(tensors, Update<Accumulate, D, S>{y, x, 0});                                              \
    }                                                                                                                  \
    extern "C" __global__ void lerp_##FROM##_##TO(D *y, const S *x, Strided<2> tensors, const double *weight) {        \
        follow();                                                                                                      \
        for_each<BOTH<D, S>>(tensors, Update<Lerp, D, S>{y, x, *weight});                                              \
    }
#define UPDATES_FROM(FROM, S)                                                                                          \
    UPDATES(FROM, S, f32, float)                                                                                       \
    UPDATES(FROM, S, f16, __half)                                                                                      \
    UPDATES(FROM, S, bf16, __nv_bfloat16)                                                                              \
    UPDATES(FROM, S, f64, double)
FOR_EACH_FLOAT_AND_DOUBLE(UPDATES_FROM)

// As `Copy`, for types without arithmetic.
struct Bits {
    template <typename T> static __device__ __forceinline__ T apply(T, T x, double) { return x; }
};

// `copy_bytes_<size>(y, x, tensors)`: y = x bit for bit, for elements of any type with <size> bytes (1, 2, 4 or 8).
#define COPY_BYTES(SIZE, T)                                                                                            \
    extern "C" __global__ void copy_bytes_##SIZE(T *y, const T *x, Strided<2> tensors) {                               \
        follow();                                                                                                      \
        for_each<BOTH<T, T>>(tensors, Update<Bits, T, T>{y, x, 0});                                                    \
    }
COPY_BYTES(1, uint8_t)
COPY_BYTES(2, uint16_t)
COPY_BYTES(4, uint32_t)
COPY_BYTES(8, uint64_t)

template <typename T> struct Fill {
    T *y;
    T value;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *) const {
        // The stride 0 makes `load` return N copies of the value.
        *reinterpret_cast<Pack<T, N> *>(y + offsets[0]) = load<N>(&value, 0);
    }
};

template <typename T> struct Scale {
    T *y;
    Acc<T> factor;

    template <int N> __device__ __forceinline__ void run(const uint64_t *offsets, const uint64_t *) const {
        Pack<T, N> *to = reinterpret_cast<Pack<T, N> *>(y + offsets[0]);
        Pack<T, N> values = *to;
#pragma unroll
        for (int i = 0; i < N; ++i) values.values[i] = narrow<T>(widen(values.values[i]) * factor);
        *to = values;
    }
};

// `fill_<dtype>(y, tensors, number)`: y = number, rounded to the dtype.
// `scale_in_place_<dtype>(y, tensors, number)`: y *= number.
#define IN_PLACE(DTYPE, T)                                                                                             \
    extern "C" __global__ void fill_##DTYPE(T *y, Strided<1> tensors, double number) {                                 \
        follow();                                                                                                      \
        for_each<WIDE<T>>(tensors, Fill<T>{y, narrow<T>(Acc<T>(number))});                                             \
    }                                                                                                                  \
    extern "C" __global__ void scale_in_place_##DTYPE(T *y, Strided<1> tensors, double number) {                       \
        follow();                                                                                                      \
        for_each<WIDE<T>>(tensors, Scale<T>{y, Acc<T>(number)});                                                       \
    }
FOR_EACH_FLOAT_AND_DOUBLE(IN_PLACE)
