// RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467) of rows, then rotary position embedding (Su et al. 2021, arXiv:2104.09864) of the
// normalized rows, for the queries and keys of models that normalize them.
//
// x, y and their gradients dx and grad are (rows, width). weight is (width) in the dtype of x, or in f32 if `weight_f32` is 1; a null
// weight means ones. rstd = 1/√(mean(x²) + eps) has one value per row, f32 (f64 for f64).
//
// cos and sin are (positions, width / 2): one angle for each pair of elements. Row r has the position (r / repeats) % positions. Pair i of
// a row is its elements 2i and 2i + 1 if `interleaved` is 1, else i and i + width / 2. If cos and sin are null, nothing is rotated.
//
// The kernels rms_norm_rope_heads_* read the queries, keys and perhaps values of a projection in place. x and dx are (batch, tokens,
// columns) with at least all_heads · width columns; y and grad are (batch, tokens, all_heads, width). `x_token` is the distance in elements
// between two neighbouring tokens of x, and `x_sample` between two neighbouring samples of the batch. `dx_*` are these distances in dx,
// and `y_*` those in y and in grad. A token has `heads` rows of queries, then `key_heads` rows of keys; its remaining rows up to
// `all_heads` are values, which are copied. Without norm, rstd is null, and the x of the backward kernel must be null too: then rows are
// multiplied by the weights and rotated, but not normalized.
//
// A row is short, so a team of 1 to 32 lanes of a warp handles it. A pack is N pairs of elements (`Pairs` in rope.cuh), where N is WIDE or
// 1. The 2N elements of a pack are two runs of N neighbouring elements, its sides: side s is in values[s], and Pairs::start(s, ...) is the
// index of its first element in the row.
// The team has as many lanes as the row has packs, rounded up to a power of two, but at most 32. Each lane keeps its first pack in
// registers: with 32 lanes, up to 64 · WIDE values of a row. The other values of a longer row are read twice.

#include "affine.cuh"
#include "rope.cuh"

namespace {

constexpr int THREADS = 256;
// How many blocks a multiprocessor must have room for at a time. With 0, the compiler chooses, and may spill registers so that one more
// block fits.
template <typename T> constexpr int FORWARD_BLOCKS = sizeof(T) == 2 ? 3 : 4;
template <typename T> constexpr int BACKWARD_BLOCKS = sizeof(T) == 4 ? 3 : 2;
template <typename T> constexpr int WEIGHT_BLOCKS = sizeof(T) == 8 ? 3 : 0;

// The number of lanes of the team of a row with `packs` packs: a power of two, at most 32. WARP - __clz(n) is the number of bits of n,
// because a word has as many bits as a warp has lanes.
__device__ __forceinline__ uint32_t team_lanes(uint32_t packs) { return packs < WARP ? 1u << (WARP - __clz(packs - 1)) : WARP; }

// The sum over a team of `lanes` lanes, returned to all of them. Every lane of the warp must call this function.
template <typename A> __device__ __forceinline__ A lanes_sum(A value, uint32_t lanes) {
    for (uint32_t offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

// Calls f(row, lane, lanes, whether the row exists) for the rows of this thread's team, which has `lanes` lanes; this thread is its lane
// `lane`. All lanes of a warp call f together, so the last call of a team may be for a row that does not exist. A warp has WARP / lanes
// teams, which handle as many neighbouring rows at a time, from `first` on.
template <typename F> __device__ __forceinline__ void for_each_row(uint64_t rows, uint32_t packs, F f) {
    const uint32_t lanes = team_lanes(packs), teams = WARP / lanes, lane = threadIdx.x % lanes;
    const uint64_t step = flat_stride() / WARP * teams;
    for (uint64_t first = flat_index() / WARP * teams; first < rows; first += step) {
        const uint64_t row = first + threadIdx.x % WARP / lanes;
        f(row, lane, lanes, row < rows);
    }
}

// Where a row is and what happens to it. `x`, `dx` and `y` are the indices of the row's first element in x, in dx, and in y and grad.
// `weight` multiplies the row, or is null for ones. If `is_copied`, the row is copied without norm and rotation.
struct Place {
    uint64_t x, dx, y;
    const void *weight;
    bool is_copied;
};

// Rows that follow one another without gaps, all with the same weight.
struct DenseRows {
    const void *weight;
    uint32_t width;

    __device__ __forceinline__ Place operator()(uint64_t row) const {
        return {row * width, row * width, row * width, weight, false};
    }
};

// The rows of a projection: for each token the heads of its queries, then of its keys, then of its values.
struct HeadRows {
    const void *weights[2];
    uint64_t x_token, x_sample, dx_token, dx_sample, y_token, y_sample;
    uint32_t tokens, heads, key_heads, all_heads, width;

    __device__ __forceinline__ Place operator()(uint64_t row) const {
        const auto [token, head] = divide(row, all_heads);
        const auto [sample, position] = divide(token, tokens);
        const uint64_t inside = static_cast<uint64_t>(head) * width;
        const bool is_query = head < heads, is_value = head >= heads + key_heads;
        return {sample * x_sample + position * x_token + inside, sample * dx_sample + position * dx_token + inside,
                sample * y_sample + position * y_token + inside,
                is_query ? weights[0] : is_value ? nullptr : weights[1], is_value};
    }
};

// `places` is DenseRows or HeadRows: it returns the Place of a row.
template <typename T, int N, bool INTERLEAVED, typename R>
__device__ __forceinline__ void forward(const T *x, R places, bool is_f32, Angles<Acc<T>> angles, T *y, Acc<T> *rstd,
                                        uint64_t rows, Acc<T> eps) {
    using A = Acc<T>;
    using Packs = Pairs<T, N, INTERLEAVED>;
    const uint32_t half = angles.half, packs = half / N, width = 2 * half;
    for_each_row(rows, packs, [&](uint64_t row, uint32_t lane, uint32_t lanes, bool exists) {
        const Place place = places(exists ? row : 0);
        const T *from = x + place.x;
        const uint32_t end = exists ? packs : 0;
        A squares = 0;
        const auto add_squares = [&](const Packs &pairs) {
#pragma unroll
            for (int i = 0; i < N; i++)
                squares += pairs.values[0][i] * pairs.values[0][i] + pairs.values[1][i] * pairs.values[1][i];
        };
        Packs held;
        if (lane < end) {
            held.load(from, lane * N, half);
            add_squares(held);
        }
        for (uint32_t pack = lane + lanes; pack < end; pack += lanes) {
            Packs more;
            more.load(from, pack * N, half);
            add_squares(more);
        }
        const A root = sqrt(lanes_sum(squares, lanes) / width + eps);
        const A scale = place.is_copied || rstd == nullptr ? A(1) : A(1) / root;
        const auto finish = [&](Packs &pairs, uint32_t pair) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                A weight[N];
                load_parameter<T>(place.weight, is_f32, Packs::start(side, pair, half), A(1), weight);
#pragma unroll
                for (int i = 0; i < N; i++) pairs.values[side][i] *= scale * weight[i];
            }
            if (angles.cos != nullptr && !place.is_copied) {
                A cos[N], sin[N];
                angles.load(row, pair, cos, sin);
                pairs.rotate(cos, sin, false); // not back
            }
            pairs.store(y + place.y, pair, half);
        };
        if (lane < end) finish(held, lane * N);
        for (uint32_t pack = lane + lanes; pack < end; pack += lanes) {
            Packs more;
            more.load(from, pack * N, half);
            finish(more, pack * N);
        }
        if (exists && lane == 0 && rstd != nullptr) rstd[row] = scale;
    });
}

// One pack of a row in the backward pass. `normal` has the normalized pairs x̂ = x · rstd. After `load`, `grads` has u, which is grad
// rotated back: the gradients of x̂·w. After `weigh`, `grads` has u·w, the gradients of x̂. `scale` is the row's rstd, or 1 without norm.
// Without norm, x is null and `normal` is 0, so that dx = u·w.
template <typename T, int N, bool INTERLEAVED> struct Slopes {
    using A = Acc<T>;
    Pairs<T, N, INTERLEAVED> grads, normal;

    __device__ __forceinline__ void load(const T *x, const T *grad, const Angles<A> &angles, const Place &place, uint64_t row,
                                         uint32_t pair, A scale) {
        const uint32_t half = angles.half;
        grads.load(grad + place.y, pair, half);
        normal = {};
        if (x != nullptr) normal.load(x + place.x, pair, half);
        if (angles.cos != nullptr && !place.is_copied) {
            A cos[N], sin[N];
            angles.load(row, pair, cos, sin);
            grads.rotate(cos, sin, true); // back
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            normal.values[0][i] *= scale;
            normal.values[1][i] *= scale;
        }
    }

    // Multiplies `grads` by the weight, which makes them the gradients of `normal`. Returns the dot product of `grads` and `normal`.
    __device__ __forceinline__ A weigh(const void *parameter, bool is_f32, uint32_t pair, uint32_t half) {
        A dot = 0;
#pragma unroll
        for (int side = 0; side < 2; side++) {
            A weight[N];
            load_parameter<T>(parameter, is_f32, Pairs<T, N, INTERLEAVED>::start(side, pair, half), A(1), weight);
#pragma unroll
            for (int i = 0; i < N; i++) {
                grads.values[side][i] *= weight[i];
                dot += grads.values[side][i] * normal.values[side][i];
            }
        }
        return dot;
    }

    // Writes dx, after `weigh`. `mean` is the mean of u·w·x̂ over the row.
    __device__ __forceinline__ void store(T *dx, uint32_t pair, uint32_t half, A mean, A scale) {
#pragma unroll
        for (int side = 0; side < 2; side++)
#pragma unroll
            for (int i = 0; i < N; i++)
                grads.values[side][i] = scale * (grads.values[side][i] - normal.values[side][i] * mean);
        grads.store(dx, pair, half);
    }
};

template <typename T, int N, bool INTERLEAVED, typename R>
__device__ __forceinline__ void backward(const T *x, const T *grad, R places, bool is_f32, Angles<Acc<T>> angles,
                                         const Acc<T> *rstd, T *dx, uint64_t rows) {
    using A = Acc<T>;
    const uint32_t half = angles.half, packs = half / N, width = 2 * half;
    for_each_row(rows, packs, [&](uint64_t row, uint32_t lane, uint32_t lanes, bool exists) {
        const Place place = places(exists ? row : 0);
        const uint32_t end = exists ? packs : 0;
        const A scale = !exists ? A(0) : place.is_copied || rstd == nullptr ? A(1) : rstd[row];
        A dot = 0;
        Slopes<T, N, INTERLEAVED> held;
        if (lane < end) {
            held.load(x, grad, angles, place, row, lane * N, scale);
            dot += held.weigh(place.weight, is_f32, lane * N, half);
        }
        for (uint32_t pack = lane + lanes; pack < end; pack += lanes) {
            Slopes<T, N, INTERLEAVED> more;
            more.load(x, grad, angles, place, row, pack * N, scale);
            dot += more.weigh(place.weight, is_f32, pack * N, half);
        }
        const A sum = lanes_sum(dot, lanes), mean = place.is_copied ? A(0) : sum / width;
        T *to = dx + place.dx;
        if (lane < end) held.store(to, lane * N, half, mean, scale);
        for (uint32_t pack = lane + lanes; pack < end; pack += lanes) {
            Slopes<T, N, INTERLEAVED> more;
            more.load(x, grad, angles, place, row, pack * N, scale);
            more.weigh(place.weight, is_f32, pack * N, half);
            more.store(to, pack * N, half, mean, scale);
        }
    });
}

// A block handles a piece of the rows, and of each row a tile of as many packs as a team has lanes (or several tiles, one after the other).
// Team t of the block sums the piece's rows t, t + teams, ... Then the block adds the sums of its teams in the order of the teams.
template <typename T, int N, bool INTERLEAVED>
__device__ __forceinline__ void weight_sums(const T *x, const T *grad, Angles<Acc<T>> angles, const Acc<T> *rstd, Acc<T> *partials,
                                            uint64_t rows, Acc<T> *shared) {
    using A = Acc<T>;
    const uint32_t half = angles.half, packs = half / N, lanes = team_lanes(packs), teams = THREADS / lanes;
    const uint32_t lane = threadIdx.x % lanes, team = threadIdx.x / lanes;
    const uint64_t piece_rows = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * piece_rows;
    const uint64_t end = rows < first + piece_rows ? rows : first + piece_rows;
    // A piece has 2 · width = 4 · half elements in `partials`, of which the kernel writes the first `width`.
    A *partial = partials + static_cast<uint64_t>(blockIdx.y) * 4 * half;
    for (uint32_t tile = blockIdx.x * lanes; tile < packs; tile += gridDim.x * lanes) {
        A sums[2][N] = {};
        if (tile + lane < packs)
            for (uint64_t row = first + team; row < end; row += teams) {
                Slopes<T, N, INTERLEAVED> slopes;
                const uint64_t start = row * 2 * half;
                slopes.load(x, grad, angles, Place{start, start, start, nullptr, false}, row, (tile + lane) * N, rstd[row]);
#pragma unroll
                for (int side = 0; side < 2; side++)
#pragma unroll
                    for (int i = 0; i < N; i++) sums[side][i] += slopes.grads.values[side][i] * slopes.normal.values[side][i];
            }
#pragma unroll
        for (int at = 0; at < 2 * N; at++) shared[at * THREADS + threadIdx.x] = sums[at / N][at % N];
        __syncthreads();
        // Each `index` is one element of the tile: element `at` of the pack of lane index % lanes. The 2N elements of a pack are numbered
        // from 0: first those of side 0, then those of side 1.
        for (uint32_t index = threadIdx.x; index < 2 * N * lanes; index += THREADS) {
            const uint32_t at = index / lanes, pack = tile + index % lanes;
            if (pack >= packs) continue;
            A sum = 0;
            for (uint32_t i = 0; i < teams; i++) sum += shared[at * THREADS + i * lanes + index % lanes];
            partial[Pairs<T, N, INTERLEAVED>::start(at / N, pack * N, half) + at % N] = sum;
        }
        __syncthreads();
    }
}

} // namespace

// y = R(x · rstd · w), where R rotates by the angles of cos and sin, and w is the weight. Writes rstd too.
// Launch of the forward and the backward kernels: block 256, grid clamp(ceil(rows · width / (512 · WIDE)), 1, 2^31 - 1), no dynamic shared
// memory. Any grid gives the same results.
#define DEFINE_FORWARD(SUFFIX, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS<T>) rms_norm_rope_forward_##SUFFIX(           \
        const T *x, const void *weight, const Acc<T> *cos, const Acc<T> *sin, T *y, Acc<T> *rstd, uint64_t rows,       \
        uint32_t positions, uint32_t repeats, uint32_t width, double eps, uint32_t weight_f32, uint32_t interleaved) { \
        follow();                                                                                                      \
        const DenseRows places{weight, width};                                                                         \
        const Angles<Acc<T>> angles{cos, sin, positions, repeats, width / 2};                                          \
        const bool is_wide = angles.half % WIDE<T> == 0 && are_wide(x, y) && are_wide(cos, sin) && are_wide(weight);   \
        choose_pairs<T>(is_wide, interleaved != 0, [&](auto n, auto is_interleaved) {                                  \
            forward<T, decltype(n)::value, decltype(is_interleaved)::value>(x, places, weight_f32 != 0, angles, y,     \
                                                                            rstd, rows, static_cast<Acc<T>>(eps));     \
        });                                                                                                            \
    }

// dx = rstd · (u·w - x̂ · mean(u·w·x̂)), where u is grad rotated back, w the weight, x̂ = x · rstd, and the mean is over the row. dx may be
// the memory of grad.
#define DEFINE_BACKWARD(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS<T>) rms_norm_rope_backward_##SUFFIX(         \
        const T *x, const T *grad, const void *weight, const Acc<T> *cos, const Acc<T> *sin, const Acc<T> *rstd, T *dx,\
        uint64_t rows, uint32_t positions, uint32_t repeats, uint32_t width, uint32_t weight_f32,                      \
        uint32_t interleaved) {                                                                                        \
        follow();                                                                                                      \
        const DenseRows places{weight, width};                                                                         \
        const Angles<Acc<T>> angles{cos, sin, positions, repeats, width / 2};                                          \
        const bool is_wide =                                                                                           \
            angles.half % WIDE<T> == 0 && are_wide(x, grad, dx) && are_wide(cos, sin) && are_wide(weight);             \
        choose_pairs<T>(is_wide, interleaved != 0, [&](auto n, auto is_interleaved) {                                  \
            backward<T, decltype(n)::value, decltype(is_interleaved)::value>(x, grad, places, weight_f32 != 0, angles, \
                                                                             rstd, dx, rows);                          \
        });                                                                                                            \
    }

// First stage of the gradient of the weight. The rows are divided into pieces, and partials[p, 0] = Σ u·x̂ over the rows of piece p.
// partials is (pieces, 2, width), which the second stage, norm_affine_sum (norm.cu), reads. This kernel does not write partials[p, 1], so
// the dbias of the second stage must be null.
// Launch: block 256, grid (ceil(width / (64 · WIDE)), pieces), no dynamic shared memory. The caller chooses up to 65535 pieces, for
// instance clamp(ceil(rows / 64), 1, 512).
#define DEFINE_WEIGHT(SUFFIX, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, WEIGHT_BLOCKS<T>) rms_norm_rope_weight_##SUFFIX(             \
        const T *x, const T *grad, const Acc<T> *cos, const Acc<T> *sin, const Acc<T> *rstd, Acc<T> *partials,         \
        uint64_t rows, uint32_t positions, uint32_t repeats, uint32_t width, uint32_t interleaved) {                   \
        follow();                                                                                                      \
        __shared__ Acc<T> shared[2 * WIDE<T> * THREADS];                                                               \
        const Angles<Acc<T>> angles{cos, sin, positions, repeats, width / 2};                                          \
        const bool is_wide = angles.half % WIDE<T> == 0 && are_wide(x, grad) && are_wide(cos, sin);                    \
        choose_pairs<T>(is_wide, interleaved != 0, [&](auto n, auto is_interleaved) {                                  \
            weight_sums<T, decltype(n)::value, decltype(is_interleaved)::value>(x, grad, angles, rstd, partials, rows, \
                                                                                shared);                               \
        });                                                                                                            \
    }

// The kernels rms_norm_rope_heads_*, with rows = batch · tokens · all_heads. They are launched like the kernels for dense rows. A row of
// values has 1 in rstd. The forward kernel has no dx, and gives HEAD_ROWS the distances of x instead. WIDE is a power of two, so the
// bitwise or of the distances is a multiple of it if each distance is.
#define HEAD_ROWS(T, dx_token, dx_sample)                                                                              \
    const HeadRows places{{q_weight, k_weight}, x_token,  x_sample, dx_token, dx_sample,                               \
                          y_token,              y_sample, tokens,   heads,    key_heads, all_heads, width};            \
    const uint64_t distances = x_token | x_sample | dx_token | dx_sample | y_token | y_sample;                         \
    const bool are_aligned = distances % WIDE<T> == 0 && are_wide(q_weight, k_weight)

#define DEFINE_HEADS_FORWARD(SUFFIX, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS<T>) rms_norm_rope_heads_forward_##SUFFIX(     \
        const T *x, const void *q_weight, const void *k_weight, const Acc<T> *cos, const Acc<T> *sin, T *y,            \
        Acc<T> *rstd, uint64_t rows, uint64_t x_token, uint64_t x_sample, uint64_t y_token, uint64_t y_sample,         \
        uint32_t tokens, uint32_t heads, uint32_t key_heads, uint32_t all_heads, uint32_t positions, uint32_t width,   \
        double eps,                                                                                                    \
        uint32_t weight_f32, uint32_t interleaved) {                                                                   \
        follow();                                                                                                      \
        HEAD_ROWS(T, x_token, x_sample);                                                                               \
        const Angles<Acc<T>> angles{cos, sin, positions, all_heads, width / 2};                                        \
        const bool is_wide = are_aligned && angles.half % WIDE<T> == 0 && are_wide(x, y) && are_wide(cos, sin);        \
        choose_pairs<T>(is_wide, interleaved != 0, [&](auto n, auto is_interleaved) {                                  \
            forward<T, decltype(n)::value, decltype(is_interleaved)::value>(x, places, weight_f32 != 0, angles, y,     \
                                                                            rstd, rows, static_cast<Acc<T>>(eps));     \
        });                                                                                                            \
    }

#define DEFINE_HEADS_BACKWARD(SUFFIX, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS<T>) rms_norm_rope_heads_backward_##SUFFIX(   \
        const T *x, const T *grad, const void *q_weight, const void *k_weight, const Acc<T> *cos, const Acc<T> *sin,   \
        const Acc<T> *rstd, T *dx, uint64_t rows, uint64_t x_token, uint64_t x_sample, uint64_t dx_token,              \
        uint64_t dx_sample, uint64_t y_token, uint64_t y_sample, uint32_t tokens, uint32_t heads, uint32_t key_heads,  \
        uint32_t all_heads, uint32_t positions, uint32_t width,                                                        \
        uint32_t weight_f32, uint32_t interleaved) {                                                                   \
        follow();                                                                                                      \
        HEAD_ROWS(T, dx_token, dx_sample);                                                                             \
        const Angles<Acc<T>> angles{cos, sin, positions, all_heads, width / 2};                                        \
        const bool is_wide = are_aligned && angles.half % WIDE<T> == 0 && are_wide(x, grad, dx) && are_wide(cos, sin); \
        choose_pairs<T>(is_wide, interleaved != 0, [&](auto n, auto is_interleaved) {                                  \
            backward<T, decltype(n)::value, decltype(is_interleaved)::value>(x, grad, places, weight_f32 != 0, angles, \
                                                                             rstd, dx, rows);                          \
        });                                                                                                            \
    }

#define DEFINE_RMS_NORM_ROPE(SUFFIX, T)                                                                                \
    DEFINE_FORWARD(SUFFIX, T)                                                                                          \
    DEFINE_BACKWARD(SUFFIX, T)                                                                                         \
    DEFINE_WEIGHT(SUFFIX, T)                                                                                           \
    DEFINE_HEADS_FORWARD(SUFFIX, T)                                                                                    \
    DEFINE_HEADS_BACKWARD(SUFFIX, T)
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_RMS_NORM_ROPE)
