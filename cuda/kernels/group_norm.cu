// Group norm (Wu & He 2018, arXiv:1803.08494) with channels last: alone (group_norm), or followed by SiLU (group_norm_silu).
//
// x and y, and their gradients dx and grad, are (batch, positions, channels); a group is `channels / groups` neighbouring channels of a
// sample. mean and rstd = 1/√(var + eps) are (batch, groups), f32 (f64 for f64). weight and bias (channels) may be null; see affine.cuh,
// also for `affine_f32`.
//
// The forward pass has three kernels: statistics, moments and forward. The backward pass also has three: sums, slopes and backward. The
// first and the third kernel of each pass are launched over the tensor, as channels.cuh says. The second kernel (moments, slopes) is
// launched over the groups:
//     block 128, grid batch * groups, no dynamic shared memory.
// channels.cuh also says how the tensor is split into pieces of positions and tiles of channels. partials is
// (batch, tiles, groups, pieces, 2) of f32 (f64 for f64), and begins at a 16-byte boundary.
//
// In short: a block has one piece of a sample's positions and one tile of channels. Its threads form lines. A thread has N = WIDE
// neighbouring channels (16 bytes), and its line's positions of the piece: line l of `part.lines` has the positions l, l + lines, and so
// on. `Slots` has two numbers of each line and channel in shared memory. Its `join_lines` joins those of a channel's lines, its
// `for_each_group` those of a group's channels. ALIGNED: the number of channels is a multiple of WIDE, and all
// tensors begin at multiples of 16 bytes (`are_wide`), so a thread loads its channels at once. BATCH: the number of positions whose loads
// overlap. `keep_narrow` keeps loaded f16 and bf16 values in 16 bits until they are used. `part.valid` is the number of channels that the
// thread has, 0 for a surplus thread; `size.width()` is the number of channels of a group.

#include "architecture.cuh"
#include "channels.cuh"
#include "functions.cuh"

namespace {

// The mean and the sum of squared deviations of each group, over the group's elements in the block's piece and tile. For each of its
// channels, a thread sums the differences of the elements from the first element that it reads, and the squares of these differences;
// meanwhile `mean` holds that first element. The differences are about as large as the deviations from the mean, so few digits cancel
// when sum² / count is subtracted from the sum of squares.
template <typename T, bool ALIGNED>
__device__ __forceinline__ void statistics(const T *x, Acc<T> *partials, ChannelSize size, Slots<T> &slots) {
    using A = Acc<T>;
    constexpr int N = WIDE<T>, BATCH = !ALIGNED ? 1 : IS_HALF<T> ? 6 : 8;
    const Part<T, ALIGNED> part(size);
    // Each line has `full` of the piece's positions; the first `rest` lines have one more.
    const uint32_t positions = size.count(part.piece), full = positions / part.lines, rest = positions % part.lines;
    auto count_of = [&](uint32_t line) { return static_cast<A>(full + (line < rest)); };
    A mean[N] = {}, sum[N] = {}, squares[N] = {};
    const A count = part.valid > 0 ? count_of(part.line) : A(0);
    if (count > 0) {
        const auto pack = part.load(x, size.first(part.piece) + part.line);
#pragma unroll
        for (int i = 0; i < N; i++) mean[i] = widen(pack.values[i]);
    }
    part.template for_each<BATCH>([&](const uint32_t(&at)[BATCH], const bool(&exists)[BATCH]) {
        Pack<T, N> packs[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (exists[k]) packs[k] = part.load(x, at[k]);
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (!exists[k]) continue;
            keep_narrow(packs[k]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const A d = widen(packs[k].values[i]) - mean[i];
                sum[i] += d;
                squares[i] += d * d;
            }
        }
    });
    if (count > 0) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            squares[i] -= sum[i] * sum[i] / count;
            mean[i] += sum[i] / count;
        }
    }
    slots.put(mean, squares);

    // Chan's formula joins means and sums of squared deviations: first those of a channel's lines, then those of a group's channels. Each
    // channel has `total` elements in the piece. of_line(line, 0) is a line's mean, of_line(line, 1) its sum of squared deviations; the
    // results of a channel, in the same order, are afterwards in slots.values.
    const A total = positions;
    slots.join_lines(part.tile, [&](uint32_t, auto of_line, A(&results)[2]) {
        results[0] = results[1] = 0;
        for (uint32_t line = 0; line < part.lines; line++) results[0] += of_line(line, 0) * count_of(line);
        if (positions > 0) results[0] /= total;
        for (uint32_t line = 0; line < part.lines; line++) {
            const A distance = of_line(line, 0) - results[0];
            results[1] += of_line(line, 1) + distance * distance * count_of(line);
        }
    });
    // `lanes` threads share a group, whose channels in the tile are `low` to `high` (exclusive); none if they are equal.
    slots.for_each_group(size, part.tile, [&](uint32_t group, uint32_t low, uint32_t high, uint32_t lane, uint32_t lanes) {
        A center = 0, deviations = 0;
        for (uint32_t at = low + lane; at < high; at += lanes) center += slots.values[0][at];
        center = lanes_sum(center, lanes) / (high - low);
        for (uint32_t at = low + lane; at < high; at += lanes) {
            const A distance = slots.values[0][at] - center;
            deviations += slots.values[1][at] + total * distance * distance;
        }
        deviations = lanes_sum(deviations, lanes);
        if (lane > 0 || low == high) return;
        // The number of tiles is gridDim.y; blockIdx.y is the block's tile.
        const Partials<A> all{partials, gridDim.y};
        store_pack(all.at(size, part.sample, blockIdx.y, group, part.piece), Pack<A, 2>{{center, deviations}});
    });
}

// Maps x to the norm's result, with a center, a scale and an offset for each channel of a thread: (x - center) · scale + offset. For
// f16 and bf16, `offset` contains -center · scale, and the result x · scale + offset is exact enough for these types.
template <typename T, bool ALIGNED> struct Normalize {
    static constexpr int N = WIDE<T>;
    static constexpr bool FUSED = IS_HALF<T>;
    Acc<T> center[N], scale[N], offset[N];

    __device__ __forceinline__ Normalize(const Part<T, ALIGNED> &part, Affine affine, const Acc<T> *mean, const Acc<T> *rstd) {
        part.for_each_channel([&](int i, uint64_t group) {
            center[i] = mean[group];
            scale[i] = rstd[group];
        });
        Acc<T> weight[N];
        // The third argument stands in for a parameter that is null.
        part.parameter(affine.weight, affine.is_f32, Acc<T>(1), weight);
        part.parameter(affine.bias, affine.is_f32, Acc<T>(0), offset);
#pragma unroll
        for (int i = 0; i < N; i++) {
            scale[i] *= weight[i];
            if (FUSED) offset[i] -= center[i] * scale[i];
        }
    }

    __device__ __forceinline__ Acc<T> operator()(int i, Acc<T> x) const {
        return (FUSED ? x : x - center[i]) * scale[i] + offset[i];
    }
};

template <typename T, bool ALIGNED, bool SILU>
__device__ __forceinline__ void forward(const T *x, Affine affine, const Acc<T> *mean, const Acc<T> *rstd, T *y, ChannelSize size) {
    // From compute capability 12.0 on, the compiler needs more registers, so fewer loads overlap.
    constexpr int N = WIDE<T>, BATCH = !ALIGNED ? 1 : ARCHITECTURE >= 1200 ? 3 : 4;
    const Part<T, ALIGNED> part(size);
    const Normalize<T, ALIGNED> normalize(part, affine, mean, rstd);
    part.template for_each<BATCH>([&](const uint32_t(&at)[BATCH], const bool(&exists)[BATCH]) {
        Pack<T, N> packs[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (exists[k]) packs[k] = part.load(x, at[k]);
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (!exists[k]) continue;
            keep_narrow(packs[k]);
            Acc<T> result[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                const Acc<T> normal = normalize(i, widen(packs[k].values[i]));
                result[i] = SILU ? Silu::value<T>(normal) : normal;
            }
            part.store(y, at[k], result);
        }
    });
}

// The gradient of the norm's result (before SiLU, if there is one) at x. `normalize` is a `Normalize`, and i the index of the channel among
// the thread's channels. `grad` is an element of the tensor grad. The comments and the code below call the returned gradient g.
template <typename T, bool SILU, typename Norm>
__device__ __forceinline__ Acc<T> of_norm(const Norm &normalize, int i, T grad, T x) {
    return SILU ? widen(grad) * Silu::slope<T>(normalize(i, widen(x))) : widen(grad);
}

template <typename T, bool ALIGNED, bool SILU>
__device__ __forceinline__ void sums(const T *x, const T *grad, Affine affine, const Acc<T> *mean, const Acc<T> *rstd,
                                     Acc<T> *partials, Acc<T> *affine_partials, ChannelSize size, Slots<T> &slots) {
    using A = Acc<T>;
    constexpr int N = WIDE<T>, BATCH = !ALIGNED ? 1 : IS_HALF<T> ? 3 : 4;
    const Part<T, ALIGNED> part(size);
    {
        const Normalize<T, ALIGNED> normalize(part, affine, mean, rstd);
        A dot[N] = {}, sum[N] = {};
        part.template for_each<BATCH>([&](const uint32_t(&at)[BATCH], const bool(&exists)[BATCH]) {
            Pack<T, N> packs[BATCH], grads[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (!exists[k]) continue;
                packs[k] = part.load(x, at[k]);
                grads[k] = part.load(grad, at[k]);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (!exists[k]) continue;
                keep_narrow(packs[k]);
                keep_narrow(grads[k]);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const A g = of_norm<T, SILU>(normalize, i, grads[k].values[i], packs[k].values[i]);
                    dot[i] += g * (widen(packs[k].values[i]) - (IS_HALF<T> ? A(0) : normalize.center[i]));
                    sum[i] += g;
                }
            }
        });
        // For f16 and bf16, `dot` is Σ g x so far: Σ g (x - mean) = Σ g x - mean Σ g, exact enough for these types.
        if (IS_HALF<T>) part.for_each_channel([&](int i, uint64_t group) { dot[i] -= sum[i] * mean[group]; });
        slots.put(dot, sum);
    }
    // Kind 0 is Σ g (x - mean), which times rstd is Σ g x̂, and kind 1 is Σ g.
    slots.join_lines(part.tile, [&](uint32_t channel, auto of_line, A(&results)[2]) {
        A weight[1];
        load_parameter<T>(affine.weight, affine.is_f32, channel, A(1), weight);
        const A scale = rstd[static_cast<uint64_t>(part.sample) * size.groups + channel / size.width()];
        for (int kind = 0; kind < 2; kind++) {
            A all = 0;
            for (uint32_t line = 0; line < part.lines; line++) all += of_line(line, kind);
            if (kind == 0) all *= scale;
            // blockIdx.x is the index of the piece over (batch, pieces).
            if (affine_partials != nullptr) affine_partials[(blockIdx.x * 2ull + kind) * size.channels + channel] = all;
            results[kind] = all * weight[0];
        }
    });
    slots.for_each_group(size, part.tile, [&](uint32_t group, uint32_t low, uint32_t high, uint32_t lane, uint32_t lanes) {
        A all[2] = {};
        for (uint32_t at = low + lane; at < high; at += lanes) {
            all[0] += slots.values[0][at];
            all[1] += slots.values[1][at];
        }
        const Pack<A, 2> pair{{lanes_sum(all[0], lanes), lanes_sum(all[1], lanes)}};
        const Partials<A> partial{partials, gridDim.y};
        if (lane == 0 && low < high) store_pack(partial.at(size, part.sample, blockIdx.y, group, part.piece), pair);
    });
}

template <typename T, bool ALIGNED, bool SILU>
__device__ __forceinline__ void backward(const T *x, const T *grad, const T *before, Affine affine, const Acc<T> *mean,
                                         const Acc<T> *rstd, const Acc<T> *slopes, T *dx, ChannelSize size) {
    using A = Acc<T>;
    constexpr int N = WIDE<T>, BATCH = ALIGNED ? 2 : 1;
    const Part<T, ALIGNED> part(size);
    const Normalize<T, ALIGNED> normalize(part, affine, mean, rstd);
    // dx = scale * g - slope * (x - mean) - shift, plus `before`, where g is the result of `of_norm`, and scale is rstd * weight. For f16
    // and bf16, `shift` contains -slope * mean.
    A slope[N], shift[N];
    part.for_each_channel([&](int i, uint64_t group) {
        const auto pair = load_pack<2>(slopes + group * 2);
        slope[i] = pair.values[0];
        shift[i] = pair.values[1];
        if (IS_HALF<T>) shift[i] -= slope[i] * normalize.center[i];
    });
    part.template for_each<BATCH>([&](const uint32_t(&at)[BATCH], const bool(&exists)[BATCH]) {
        Pack<T, N> packs[BATCH], grads[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (!exists[k]) continue;
            packs[k] = part.load(x, at[k]);
            grads[k] = part.load(grad, at[k]);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (!exists[k]) continue;
            keep_narrow(packs[k]);
            keep_narrow(grads[k]);
            A result[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                const A g = of_norm<T, SILU>(normalize, i, grads[k].values[i], packs[k].values[i]);
                const A d = widen(packs[k].values[i]) - (IS_HALF<T> ? A(0) : normalize.center[i]);
                result[i] = normalize.scale[i] * g - d * slope[i] - shift[i];
            }
            if (before != nullptr) {
                const auto addend = part.load(before, at[k]);
#pragma unroll
                for (int i = 0; i < N; i++) result[i] += widen(addend.values[i]);
            }
            part.store(dx, at[k], result);
        }
    });
}

} // namespace

// Launch: over the tensor. Writes to `partials`, for each group, piece and tile, the mean and the sum of squared deviations of the
// group's elements in the piece and tile.
#define DEFINE_STATISTICS(SUFFIX, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)                                                       \
        group_norm_statistics_##SUFFIX(const T *x, Acc<T> *partials, uint32_t positions, uint32_t channels,            \
                                       uint32_t groups, uint32_t pieces) {                                             \
        follow();                                                                                                      \
        __shared__ Slots<T> slots;                                                                                     \
        const ChannelSize size{positions, channels, groups, pieces};                                                   \
        if (channels % WIDE<T> == 0 && are_wide(x)) statistics<T, true>(x, partials, size, slots);                     \
        else statistics<T, false>(x, partials, size, slots);                                                           \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_STATISTICS)

// Launch: over the groups. Computes mean and rstd from `partials`, which have `tiles` tiles. `all.for_each` divides the group's pairs (mean
// and sum of squared deviations) among the threads of the block; `count` is the number of elements that a pair is about. `row` is the
// index of the group over (batch, groups).
#define DEFINE_MOMENTS(SUFFIX, T)                                                                                      \
    extern "C" __global__ void group_norm_moments_##SUFFIX(Acc<T> *partials, Acc<T> *mean, Acc<T> *rstd,               \
                                                           uint32_t positions, uint32_t channels, uint32_t groups,     \
                                                           uint32_t pieces, uint32_t tiles, double eps) {              \
        follow();                                                                                                      \
        const ChannelSize size{positions, channels, groups, pieces};                                                   \
        const Partials<Acc<T>> all{partials, tiles};                                                                   \
        const Acc<T> total = static_cast<Acc<T>>(positions) * size.width();                                            \
        __shared__ Acc<T> shared[WARP];                                                                                \
        const uint64_t row = blockIdx.x;                                                                               \
        const auto [sample, group] = divide(row, groups);                                                              \
        Acc<T> center = 0, deviations = 0;                                                                             \
        all.for_each<T>(size, sample, group, [&](auto pair, Acc<T> count) { center += count * pair.values[0]; });      \
        center = block_sum(center, shared) / total;                                                                    \
        all.for_each<T>(size, sample, group, [&](auto pair, Acc<T> count) {                                            \
            const Acc<T> distance = pair.values[0] - center;                                                           \
            deviations += pair.values[1] + count * distance * distance;                                                \
        });                                                                                                            \
        deviations = block_sum(deviations, shared);                                                                    \
        if (threadIdx.x > 0) return;                                                                                   \
        mean[row] = center;                                                                                            \
        rstd[row] = Acc<T>(1) / sqrt(deviations / total + static_cast<Acc<T>>(eps));                                   \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_MOMENTS)

// Launch: over the tensor. y = f((x - mean) rstd weight + bias), where f(z) is z for group_norm and SiLU(z) for group_norm_silu.
#define DEFINE_FORWARD(NAME, SILU, SUFFIX, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 3)                                                       \
        NAME##_forward_##SUFFIX(const T *x, const void *weight, const void *bias, const Acc<T> *mean,                  \
                                const Acc<T> *rstd, T *y, uint32_t positions, uint32_t channels, uint32_t groups,      \
                                uint32_t pieces, uint32_t affine_f32) {                                                \
        follow();                                                                                                      \
        const ChannelSize size{positions, channels, groups, pieces};                                                   \
        const Affine affine{weight, bias, affine_f32 != 0};                                                            \
        if (channels % WIDE<T> == 0 && are_wide(x, y) && are_wide(weight, bias))                                       \
            forward<T, true, SILU>(x, affine, mean, rstd, y, size);                                                    \
        else forward<T, false, SILU>(x, affine, mean, rstd, y, size);                                                  \
    }

// Launch: over the tensor. With w = weight, x̂ = (x - mean) rstd, z = x̂ w + bias and g = grad f'(z), writes Σ w g x̂ and Σ w g to
// `partials`: sums for each group, piece and tile over the group's elements in the piece and tile. Unless affine_partials is null, also
// writes Σ g x̂ and Σ g of each channel over each piece to affine_partials (batch * pieces, 2, channels) of f32 (f64 for f64), from
// which norm_affine_sum (norm.cu) computes the gradients of weight and bias.
#define DEFINE_SUMS(NAME, SILU, SUFFIX, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)                                                       \
        NAME##_sums_##SUFFIX(const T *x, const T *grad, const void *weight, const void *bias, const Acc<T> *mean,      \
                             const Acc<T> *rstd, Acc<T> *partials, Acc<T> *affine_partials, uint32_t positions,        \
                             uint32_t channels, uint32_t groups, uint32_t pieces, uint32_t affine_f32) {               \
        follow();                                                                                                      \
        __shared__ Slots<T> slots;                                                                                     \
        const ChannelSize size{positions, channels, groups, pieces};                                                   \
        const Affine affine{weight, bias, affine_f32 != 0};                                                            \
        if (channels % WIDE<T> == 0 && are_wide(x, grad) && are_wide(weight, bias))                                    \
            sums<T, true, SILU>(x, grad, affine, mean, rstd, partials, affine_partials, size, slots);                  \
        else sums<T, false, SILU>(x, grad, affine, mean, rstd, partials, affine_partials, size, slots);                \
    }

// Launch: over the groups. Computes slopes (batch, groups, 2) of f32 (f64 for f64) from `partials`: rstd² mean(w g x̂) and
// rstd mean(w g), with means over the group; w, g and x̂ as for the sums.
#define DEFINE_SLOPES(SUFFIX, T)                                                                                       \
    extern "C" __global__ void group_norm_slopes_##SUFFIX(Acc<T> *partials, const Acc<T> *rstd, Acc<T> *slopes,        \
                                                          uint32_t positions, uint32_t channels, uint32_t groups,      \
                                                          uint32_t pieces, uint32_t tiles) {                           \
        follow();                                                                                                      \
        const ChannelSize size{positions, channels, groups, pieces};                                                   \
        const Partials<Acc<T>> all{partials, tiles};                                                                   \
        const Acc<T> total = static_cast<Acc<T>>(positions) * size.width();                                            \
        __shared__ Acc<T> shared[WARP];                                                                                \
        const uint64_t row = blockIdx.x;                                                                               \
        const auto [sample, group] = divide(row, groups);                                                              \
        Acc<T> dot = 0, sum = 0;                                                                                       \
        all.for_each<T>(size, sample, group, [&](auto pair, Acc<T>) {                                                  \
            dot += pair.values[0];                                                                                     \
            sum += pair.values[1];                                                                                     \
        });                                                                                                            \
        dot = block_sum(dot, shared) / total;                                                                          \
        sum = block_sum(sum, shared) / total;                                                                          \
        if (threadIdx.x > 0) return;                                                                                   \
        const Acc<T> scale = rstd[row];                                                                                \
        store_pack(slopes + row * 2, Pack<Acc<T>, 2>{{scale * scale * dot, scale * sum}});                             \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SLOPES)

// Launch: over the tensor. dx = rstd (w g - mean(w g) - x̂ mean(w g x̂)) + before, with means over the group; w, g and x̂ as for the sums.
// `before`, of dx's shape, is an earlier part of the gradient of x, or null for zeros. dx may be the memory of grad or of `before`.
#define DEFINE_BACKWARD(NAME, SILU, SUFFIX, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)                                                       \
        NAME##_backward_##SUFFIX(const T *x, const T *grad, const T *before, const void *weight, const void *bias,     \
                                 const Acc<T> *mean, const Acc<T> *rstd, const Acc<T> *slopes, T *dx,                  \
                                 uint32_t positions, uint32_t channels, uint32_t groups, uint32_t pieces,              \
                                 uint32_t affine_f32) {                                                                \
        follow();                                                                                                      \
        const ChannelSize size{positions, channels, groups, pieces};                                                   \
        const Affine affine{weight, bias, affine_f32 != 0};                                                            \
        if (channels % WIDE<T> == 0 && are_wide(x, grad, before, dx) && are_wide(weight, bias))                        \
            backward<T, true, SILU>(x, grad, before, affine, mean, rstd, slopes, dx, size);                            \
        else backward<T, false, SILU>(x, grad, before, affine, mean, rstd, slopes, dx, size);                          \
    }

#define DEFINE_GROUP_NORMS(SUFFIX, T)                                                                                  \
    DEFINE_FORWARD(group_norm, false, SUFFIX, T)                                                                       \
    DEFINE_FORWARD(group_norm_silu, true, SUFFIX, T)                                                                   \
    DEFINE_SUMS(group_norm, false, SUFFIX, T)                                                                          \
    DEFINE_SUMS(group_norm_silu, true, SUFFIX, T)                                                                      \
    DEFINE_BACKWARD(group_norm, false, SUFFIX, T)                                                                      \
    DEFINE_BACKWARD(group_norm_silu, true, SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_GROUP_NORMS)
