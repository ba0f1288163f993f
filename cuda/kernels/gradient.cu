// The norm of the gradients, clipping and dynamic loss scaling. The norm, the clip factor and the loss scale stay on the device.
#include "optim.cuh"

// The larger of two magnitudes; NaN if either is NaN.
static __device__ __forceinline__ double larger(double a, double b) { return a > b || a != a ? a : b; }

// A "sum" of gradients is their largest magnitude if MAX, otherwise the sum of their squares; both start at 0. `gather` adds gradient x to
// `sum`, `combine` joins two such sums.
template <bool MAX> static __device__ __forceinline__ double gather(double sum, double x) {
    return MAX ? larger(fabs(x), sum) : fma(x, x, sum);
}

template <bool MAX> static __device__ __forceinline__ double combine(double a, double b) { return MAX ? larger(a, b) : a + b; }

// Combines the sums of the block's threads. Only in thread 0 is the returned value the result.
template <bool MAX> static __device__ double combine_block(double value) {
    __shared__ double warps[WARP];
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = combine<MAX>(value, __shfl_xor_sync(ALL_LANES, value, offset));
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = value;
    __syncthreads();
    value = threadIdx.x < blockDim.x / WARP ? warps[threadIdx.x] : 0.0;
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = combine<MAX>(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// Writes the sum of the gradients that this block reads to parts[blockIdx.x].
template <typename T, bool MAX>
static __device__ __forceinline__ void norm_part(const T *grads, uint64_t count, double *parts) {
    constexpr int N = WIDE<T>;
    const uint64_t packs = count / N, thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    double sum = 0.0;
    if (is_wide(grads)) {
#pragma unroll 4
        for (uint64_t pack = thread; pack < packs; pack += threads) {
            const auto values = reinterpret_cast<const Pack<T, N> *>(grads)[pack];
#pragma unroll
            for (int k = 0; k < N; ++k) sum = gather<MAX>(sum, widen(values.values[k]));
        }
    } else {
        for (uint64_t pack = thread; pack < packs; pack += threads) {
            for (int k = 0; k < N; ++k) sum = gather<MAX>(sum, widen(grads[pack * N + k]));
        }
    }
    // The gradients after the last pack, one for each of the first threads.
    if (thread < count % N) sum = gather<MAX>(sum, widen(grads[packs * N + thread]));
    sum = combine_block<MAX>(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// gradient_norm_l2_<dtype>: parts[b] = the sum of the squares of the gradients that block b reads, in f64.
// gradient_norm_max_<dtype>: parts[b] = the largest magnitude of these gradients, NaN if one of them is NaN.
//   grads [count], not necessarily from a 16-byte boundary; parts f64 [gridDim.x]. The order in which gradients are added
//   depends only on `count` and the grid.
// Grid: (count + 4095) / 4096, at most 1024; block: 256; no dynamic shared memory.
#define DEFINE_NORM(suffix, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        gradient_norm_l2_##suffix(const T *grads, uint64_t count, double *parts) {                                     \
        follow();                                                                                                      \
        norm_part<T, /*MAX=*/false>(grads, count, parts);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        gradient_norm_max_##suffix(const T *grads, uint64_t count, double *parts) {                                    \
        follow();                                                                                                      \
        norm_part<T, /*MAX=*/true>(grads, count, parts);                                                               \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_NORM)

// Writes to *clip the norm of the gradients of all buffers, and the clip factor of torch.nn.utils.clip_grad_norm_:
// factor = min(1, max_norm / (norm + 1e-6)). The factor is NaN if the norm is NaN, or if norm and max_norm are infinite. The norm is that
// of the gradients divided by the loss scale.
//   parts f64 [count]: the results of gradient_norm_* for all buffers, concatenated; is_max: 1 if they are those of gradient_norm_max,
//   0 for gradient_norm_l2; max_norm: infinity for no clipping; loss_scale: null for a scale of 1.
// Grid: 1; block: 256; no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256)
    gradient_clip(const double *parts, uint32_t count, uint32_t is_max, double max_norm, const LossScale *loss_scale, Clip *clip) {
    follow();
    double value = 0.0;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) value = is_max ? larger(value, parts[i]) : value + parts[i];
    value = is_max ? combine_block<true>(value) : combine_block<false>(value);
    if (threadIdx.x != 0) return;
    const double norm = (is_max ? value : sqrt(value)) / (loss_scale == nullptr ? 1.0 : loss_scale->scale);
    const double factor = max_norm / (norm + 1e-6);
    // Not min(1, factor), which could turn NaN into 1.
    *clip = {norm, factor >= 1.0 ? 1.0 : factor};
}

template <typename T>
static __device__ __forceinline__ void scale_gradients(T *grads, uint64_t count, const Clip *clip, const LossScale *loss_scale) {
    const double scale = loss_scale == nullptr ? 1.0 : loss_scale->scale;
    const Acc<T> factor = static_cast<Acc<T>>((clip == nullptr ? 1.0 : clip->factor) / scale);
    if (factor == Acc<T>(1)) return;
    const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
        grads[i] = narrow<T>(widen(grads[i]) * factor);
    }
}

// gradient_scale_<dtype>: grads *= clip->factor / loss_scale->scale, for clipping and for callers that need gradients without the
// loss scale. (The optimizers' kernels do not clip, but they can divide the gradients by the loss scale themselves.) The kernel
// neither reads nor writes gradients if the quotient is 1.
//   grads [count]; clip: null for a factor of 1; loss_scale: null for a scale of 1.
// Grid: any; block: any; no dynamic shared memory.
#define DEFINE_SCALE(suffix, T)                                                                                        \
    extern "C" __global__ void gradient_scale_##suffix(T *grads, uint64_t count, const Clip *clip,                     \
                                                       const LossScale *loss_scale) {                                  \
        follow();                                                                                                      \
        scale_gradients<T>(grads, count, clip, loss_scale);                                                            \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SCALE)

// Updates the loss scale after a step, as torch.amp.GradScaler does. The scale is multiplied by `backoff` if the norm is infinite
// or NaN. It is multiplied by `growth` after `interval` consecutive steps with a finite norm, unless the product is larger than
// the largest f32 number. `growth_tracker` is the number of consecutive steps with a finite norm; it is set to 0 when it reaches
// `interval`, even if the scale does not grow.
//   norm: the norm of this step's gradients, which is infinite or NaN if one of them is.
// Grid: 1; block: 1; no dynamic shared memory.
extern "C" __global__ void
loss_scale_update(LossScale *loss_scale, const double *norm, double growth, double backoff, uint64_t interval) {
    follow();
    LossScale next = *loss_scale;
    if (!isfinite(*norm)) {
        next = {next.scale * backoff, 0};
    } else if (++next.growth_tracker == interval) {
        const double grown = next.scale * growth;
        next = {grown <= 3.40282346638528859812e38 ? grown : next.scale, 0};
    }
    *loss_scale = next;
}
