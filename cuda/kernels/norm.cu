// Layer norm (Ba et al. 2016, arXiv:1607.06450), RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467) and modulated layer norm
// (Peebles & Xie 2022, arXiv:2212.09748) of rows.
//
// x, y and their gradients dx and grad are (rows, len). mean and rstd = 1/√(var + eps) have one value per row, f32 (f64 for f64). RMS
// norm is layer norm with mean = 0 and bias = 0: its kernels ignore the pointers `mean` and `bias`. If `affine_f32` is 1, weight, bias
// and their gradients are f32, otherwise T. In modulated layer norm, each `sharing` consecutive rows share one weight and one bias; the
// other norms ignore `sharing`.
//
// A team of threads (a warp, or a whole block of up to TEAM threads) works on a row in packs of N neighbouring elements. `at` is the
// index of a pack's first element in the row. `place` is the pack's index in the thread's registers, or NORM_HELD for a pack that is
// only in memory. `keep_narrow` keeps values in registers as T, because widened values take more registers.

#include "architecture.cuh"
#include "norm_rows.cuh"

// How many teams of the largest size a multiprocessor must have room for in a forward kernel. For f64, from compute capability 12.0 on, the
// compiler needs more registers, so only one such team fits.
template <typename T> constexpr int FORWARD_TEAMS = ARCHITECTURE >= 1200 && sizeof(T) == 8 ? 1 : 2;

namespace {

template <typename T, int N, Kind KIND>
__device__ __forceinline__ void forward(const T *x, const T *residual, T *sum, Affine affine, T *y, Acc<T> *mean, Acc<T> *rstd,
                                        uint64_t rows, uint32_t len, uint32_t sharing, Acc<T> eps, Acc<T> *shared) {
    // `normalize` calls `write` for each row. normalized(place, at, result) sets `result` to the row's results in one pack.
    const auto write = [&](uint64_t row, const NormRow<T, N> &values, auto normalized) {
        values.for_each_place([&](int place, uint64_t at) {
            Acc<T> result[N];
            normalized(place, at, result);
            store_pack(y + row * len + at, narrow_pack<T>(result));
        });
    };
    normalize<T, N, KIND>(x, residual, sum, affine, mean, rstd, rows, len, sharing, eps, shared, write);
}

// Writes to dx the gradient of x through the norm plus `before`, the gradient that x already has from its other uses. The sum is
// rounded once to T. A null `before` means zeros.
template <typename T, int N, Kind KIND>
__device__ __forceinline__ void backward(const T *x, const T *grad, const T *before, Affine affine, const Acc<T> *mean,
                                         const Acc<T> *rstd, T *dx, uint64_t rows, uint32_t len, uint32_t sharing,
                                         Acc<T> *shared) {
    using A = Acc<T>;
    constexpr bool CENTER = CENTERS<KIND>;
    for (uint64_t row = first_row(); row < rows; row += row_stride()) {
        NormRow<T, N> values(x + row * len, len), grads(grad + row * len, len);
        // The values of `before`, loaded early, so that they arrive while the sums are computed.
        NormRow<T, N> addends(before + row * len, before == nullptr ? 0 : len);
        const A center = CENTER ? mean[row] : A(0), scale = rstd[row];
        const uint64_t parameters = first_parameter<KIND>(row, sharing, len); // where the row's weight begins
        A sum = 0, dot = 0;
        values.for_each_place([&](int place, uint64_t at) {
            const auto pack = values.get(place, at), g = grads.get(place, at);
            A w[N];
            load_scale<T, KIND>(affine, parameters + at, w);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const A gw = widen(g.values[i]) * w[i];
                sum += gw;
                dot += gw * (widen(pack.values[i]) - center);
            }
        });
        if (CENTER) team_sums(sum, dot, shared);
        else dot = team_sum(dot, shared);
        // dx = scale · g · w - slope · (x - center) - shift (+ `before`), where w is the weight (1 + weight for MODULATED).
        const A slope = dot * scale / len * scale * scale, shift = CENTER ? sum / len * scale : A(0);
        values.keep_narrow();
        grads.keep_narrow();
        T *out = dx + row * len;
        values.for_each_place([&](int place, uint64_t at) {
            const auto pack = values.get(place, at), g = grads.get(place, at);
            A w[N], result[N];
            load_scale<T, KIND>(affine, parameters + at, w);
#pragma unroll
            for (int i = 0; i < N; i++)
                result[i] = scale * (widen(g.values[i]) * w[i]) - slope * (widen(pack.values[i]) - center) - shift;
            if (before != nullptr) {
                auto addend = addends.get(place, at);
                keep_narrow(addend);
#pragma unroll
                for (int i = 0; i < N; i++) result[i] += widen(addend.values[i]);
            }
            store_pack(out + at, narrow_pack<T>(result));
        });
    }
}

// The number of warps of a block of `affine_sums`, which computes what the comment on DEFINE_AFFINE says. Warp l of a block sums the rows
// l, l + LINES, ... of the block's piece.
constexpr int LINES = 8;

template <typename T, int N, bool CENTER>
__device__ __forceinline__ void affine_sums(const T *x, const T *grad, const Acc<T> *mean, const Acc<T> *rstd, Acc<T> *partials,
                                            uint64_t rows, uint32_t len, Acc<T> *dots, Acc<T> *sums) {
    using A = Acc<T>;
    constexpr int WIDTH = WARP * N;
    // The rows of the samples before this block's sample.
    const uint64_t earlier_rows = blockIdx.z * rows;
    x += earlier_rows * len;
    grad += earlier_rows * len;
    if (CENTER) mean += earlier_rows;
    rstd += earlier_rows;
    partials += blockIdx.z * gridDim.y * 2ull * len;
    const uint64_t piece = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * piece;
    const uint64_t end = rows < first + piece ? rows : first + piece;
    for (uint64_t tile = static_cast<uint64_t>(blockIdx.x) * WIDTH; tile < len; tile += static_cast<uint64_t>(gridDim.x) * WIDTH) {
        const uint64_t column = tile + threadIdx.x * N;
        A dot[N] = {}, sum[N] = {};
        if (column < len) {
#pragma unroll 4
            for (uint64_t row = first + threadIdx.y; row < end; row += LINES) {
                const auto pack = load_pack<N>(x + row * len + column), g = load_pack<N>(grad + row * len + column);
                const A center = CENTER ? mean[row] : A(0), scale = rstd[row];
#pragma unroll
                for (int i = 0; i < N; i++) {
                    dot[i] += widen(g.values[i]) * ((widen(pack.values[i]) - center) * scale);
                    sum[i] += widen(g.values[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            dots[threadIdx.y * WIDTH + threadIdx.x * N + i] = dot[i];
            sums[threadIdx.y * WIDTH + threadIdx.x * N + i] = sum[i];
        }
        __syncthreads();
        for (int offset = threadIdx.y * WARP + threadIdx.x; offset < WIDTH && tile + offset < len; offset += LINES * WARP) {
            A all_dots = 0, all_sums = 0;
            for (int line = 0; line < LINES; line++) {
                all_dots += dots[line * WIDTH + offset];
                all_sums += sums[line * WIDTH + offset];
            }
            A *partial = partials + static_cast<uint64_t>(blockIdx.y) * 2 * len + tile + offset;
            partial[0] = all_dots;
            partial[len] = all_sums;
        }
        __syncthreads();
    }
}

} // namespace

// y = (x - mean) · rstd · weight + bias, with 1 + weight instead of weight in modulated_layer_norm. Unless `residual` is null,
// sum = x + residual is rounded to T and written, and y is the norm of `sum`. The kernels also write rstd and, except for RMS norm, mean.
// Launch: over rows (rows.cuh). The comment on NORM_HELD (norm_rows.cuh) says which HELD the host uses there: the number of packs that
// each thread of a team holds.
#define DEFINE_FORWARD(NAME, KIND, SUFFIX, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(TEAM, FORWARD_TEAMS<T>)                                               \
        NAME##_forward_##SUFFIX(const T *x, const T *residual, T *sum, const void *weight, const void *bias, T *y,     \
                                Acc<T> *mean, Acc<T> *rstd, uint64_t rows, uint32_t len, uint32_t sharing, double eps, \
                                uint32_t affine_f32) {                                                                 \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[WARP];                                                                                \
        const Affine affine{weight, KIND == Kind::RMS ? nullptr : bias, affine_f32 != 0};                              \
        const Acc<T> epsilon = static_cast<Acc<T>>(eps);                                                               \
        if (len % WIDE<T> == 0 && are_wide(x, residual, sum, y) && are_wide(affine.weight, affine.bias))               \
            forward<T, WIDE<T>, KIND>(x, residual, sum, affine, y, mean, rstd, rows, len, sharing, epsilon, shared);   \
        else forward<T, 1, KIND>(x, residual, sum, affine, y, mean, rstd, rows, len, sharing, epsilon, shared);        \
    }

// dx = rstd · (g·w - E(g·w) - x̂ · E(g·w·x̂)) + before. Here g = grad, w = weight (1 + weight in modulated_layer_norm),
// x̂ = (x - mean) · rstd, and E is the mean over the row. RMS norm has no term E(g·w). A null `before` means zeros. dx may be the memory of
// grad or of `before`. Launch: as for the forward pass, with the HELD of a backward pass (norm_rows.cuh).
#define DEFINE_BACKWARD(NAME, KIND, SUFFIX, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(TEAM, 1)                                                              \
        NAME##_backward_##SUFFIX(const T *x, const T *grad, const T *before, const void *weight, const Acc<T> *mean,   \
                                 const Acc<T> *rstd, T *dx, uint64_t rows, uint32_t len, uint32_t sharing,             \
                                 uint32_t affine_f32) {                                                                \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[2 * WARP];                                                                            \
        const Affine affine{weight, nullptr, affine_f32 != 0};                                                         \
        if (len % WIDE<T> == 0 && are_wide(x, grad, before, dx) && are_wide(weight))                                   \
            backward<T, WIDE<T>, KIND>(x, grad, before, affine, mean, rstd, dx, rows, len, sharing, shared);           \
        else backward<T, 1, KIND>(x, grad, before, affine, mean, rstd, dx, rows, len, sharing, shared);                \
    }

// First stage of the gradients of weight and bias. x and grad are (samples · rows, len) here: `rows` is the number of rows of one sample.
// Only modulated layer norm, which uses the kernels of layer norm here, has several samples.
// The rows of each sample are divided into pieces. For each piece, the kernel writes Σ g·x̂ and Σ g over the piece's rows to `partials`,
// which is (samples, pieces, 2, len), f32 (f64 for f64). Launch: block (32, 8), grid (ceil(len / (32 · WIDE)), pieces, samples), no dynamic
// shared memory. The caller chooses up to 65535 pieces, for instance clamp(ceil(rows / 64), 1, 128). Second stage: norm_affine_sum.
#define DEFINE_AFFINE(NAME, CENTER, SUFFIX, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(WARP *LINES)                                                          \
        NAME##_affine_##SUFFIX(const T *x, const T *grad, const Acc<T> *mean, const Acc<T> *rstd, Acc<T> *partials,    \
                               uint64_t rows, uint32_t len) {                                                          \
        follow();                                                                                                      \
        __shared__ Acc<T> dots[LINES * WARP * WIDE<T>], sums[LINES * WARP * WIDE<T>];                                  \
        if (len % WIDE<T> == 0 && are_wide(x, grad))                                                                   \
            affine_sums<T, WIDE<T>, CENTER>(x, grad, mean, rstd, partials, rows, len, dots, sums);                     \
        else affine_sums<T, 1, CENTER>(x, grad, mean, rstd, partials, rows, len, dots, sums);                          \
    }

#define DEFINE_NORMS(SUFFIX, T)                                                                                        \
    DEFINE_FORWARD(layer_norm, Kind::LAYER, SUFFIX, T)                                                                 \
    DEFINE_FORWARD(rms_norm, Kind::RMS, SUFFIX, T)                                                                     \
    DEFINE_FORWARD(modulated_layer_norm, Kind::MODULATED, SUFFIX, T)                                                   \
    DEFINE_BACKWARD(layer_norm, Kind::LAYER, SUFFIX, T)                                                                \
    DEFINE_BACKWARD(rms_norm, Kind::RMS, SUFFIX, T)                                                                    \
    DEFINE_BACKWARD(modulated_layer_norm, Kind::MODULATED, SUFFIX, T)                                                  \
    DEFINE_AFFINE(layer_norm, true, SUFFIX, T)                                                                         \
    DEFINE_AFFINE(rms_norm, false, SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_NORMS)

// Second stage, for every norm (also those of group_norm.cu and rms_norm_rope.cu): adds the sums of the pieces in partials
// (samples, pieces, 2, len) and writes dweight and dbias (samples, len). If dweight or dbias is null, it is not computed. The order of the
// additions is fixed: of the 16 threads of an element, thread i adds the pieces i, i + 16 and so on; then one thread adds the 16 sums.
// Launch: block (32, 16), grid (ceil(len / 32), 2, samples), no dynamic shared memory.
#define DEFINE_SUM(SUFFIX, T)                                                                                          \
    extern "C" __global__ void norm_affine_sum_##SUFFIX(const Acc<T> *partials, void *dweight, void *dbias,            \
                                                        uint32_t pieces, uint32_t len, uint32_t affine_f32) {          \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[16][WARP];                                                                            \
        void *out = blockIdx.y == 0 ? dweight : dbias;                                                                 \
        if (out == nullptr) return;                                                                                    \
        const uint64_t column = flat_index(), sample = blockIdx.z;                                                     \
        Acc<T> sum = 0;                                                                                                \
        if (column < len)                                                                                              \
            for (uint32_t piece = threadIdx.y; piece < pieces; piece += blockDim.y)                                    \
                sum += partials[((sample * pieces + piece) * 2 + blockIdx.y) * len + column];                          \
        shared[threadIdx.y][threadIdx.x] = sum;                                                                        \
        __syncthreads();                                                                                               \
        if (threadIdx.y > 0 || column >= len) return;                                                                  \
        sum = 0;                                                                                                       \
        for (int i = 0; i < 16; i++) sum += shared[i][threadIdx.x];                                                    \
        store_parameter<T>(out, affine_f32 != 0, sample * len + column, sum);                                          \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SUM)
