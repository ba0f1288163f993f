// The optimizers with states in f32, and the same optimizers with parameters and states in bf16. Arithmetic and rounding are the same as
// on the CPU, operation by operation, so that parameters and states are equal bit for bit. Products and sums are written as intrinsics:
// the compiler would fuse the operators * and + into fused multiply-adds, which round differently.
//
// A step launches <optimizer>_prepare, and then `<optimizer>_step_*` (or <optimizer>_rounded_bf16) for all pieces (each has up to 1024
// consecutive elements of the parameters). <optimizer> is not always the same in both names: adam_step_* follows adam_prepare or
// adamw_prepare, and small_adam_step_* follows adam_8bit_prepare. Clipping launches gradient_norm_* (once for each vector of gradients),
// gradient_clip and gradient_scale_* (gradient.cu) before the step. Loss scaling launches gradient_norm_max_* and gradient_clip before the
// step, and loss_scale_update after it. No argument of a launch changes from step to step: the learning rate is in `Settings` on the
// device, and the kernels count the steps and compute everything else. So a CUDA graph that captured a step can be replayed.
#include "optim.cuh"

// The functions *_coefficients compute the coefficients of one step (its number is `step`, from 1) from `at`, the settings of a group of
// parameters. There is one function for each <optimizer>_prepare. A field that the optimizer does not need has a value without effect.
// `prepare` sets `gain` and `skip`.

static __device__ Coefficients adam_moments(const Settings &at, double step) {
    const double correction1 = 1.0 - pow(at.beta1, step), correction2 = 1.0 - pow(at.beta2, step);
    Coefficients to{};
    to.decay = 1.0f;
    to.gain1 = static_cast<float>(1.0 - at.beta1);
    to.beta2 = static_cast<float>(at.beta2);
    to.gain2 = static_cast<float>(1.0 - at.beta2);
    to.eps = static_cast<float>(at.eps);
    to.step_size = static_cast<float>(at.lr / correction1);
    to.root_correction2 = static_cast<float>(sqrt(correction2));
    return to;
}

static __device__ Coefficients adam_coefficients(const Settings &at, double step) {
    Coefficients to = adam_moments(at, step);
    to.l2 = static_cast<float>(at.weight_decay);
    return to;
}

static __device__ Coefficients adamw_coefficients(const Settings &at, double step) {
    Coefficients to = adam_moments(at, step);
    to.decay = static_cast<float>(1.0 - __dmul_rn(at.lr, at.weight_decay));
    return to;
}

static __device__ Coefficients lion_coefficients(const Settings &at, double) {
    const float lr = static_cast<float>(at.lr), beta1 = static_cast<float>(at.beta1), beta2 = static_cast<float>(at.beta2);
    Coefficients to{};
    to.beta1 = beta1;
    to.gain1 = 1.0f - beta1;
    to.beta2 = beta2;
    to.gain2 = 1.0f - beta2;
    to.step_size = lr;
    to.decay = 1.0f - __fmul_rn(lr, static_cast<float>(at.weight_decay));
    return to;
}

// As in bitsandbytes, step_size · m / (√v + eps) is added to the parameter, so `step_size` is negative. With the corrections c1 of m and c2
// of √v, Adam's term is lr · (m / c1) / (√v / c2 + eps) = (lr · c2 / c1) · m / (√v + eps · c2). So `step_size` contains c1 and c2,
// and `eps` contains c2.
static __device__ Coefficients adam_8bit_coefficients(const Settings &at, double step) {
    // The weights of the states and `decay` are computed as for Lion; the step size and eps are not.
    Coefficients to = lion_coefficients(at, step);
    const float correction1 = static_cast<float>(1.0 - pow(static_cast<double>(to.beta1), step));
    const float correction2 = static_cast<float>(sqrt(1.0 - pow(static_cast<double>(to.beta2), step)));
    to.step_size = __fdiv_rn(__fmul_rn(-static_cast<float>(at.lr), correction2), correction1);
    to.eps = __fmul_rn(static_cast<float>(at.eps), correction2);
    return to;
}

static __device__ Coefficients sgd_coefficients(const Settings &at, double step) {
    Coefficients to{};
    to.decay = 1.0f;
    // `at.beta1` is the momentum, `at.beta2` the dampening. In the first step, the buffer becomes the gradient, without dampening. The
    // field `to.beta1` is the momentum in the update of the buffer, and `to.beta2` the momentum in Nesterov's update of the parameter.
    to.beta1 = step == 1.0 ? 0.0f : static_cast<float>(at.beta1);
    to.gain1 = step == 1.0 ? 1.0f : static_cast<float>(1.0 - at.beta2);
    to.beta2 = static_cast<float>(at.beta1);
    to.nesterov = at.nesterov;
    to.step_size = static_cast<float>(at.lr);
    to.l2 = static_cast<float>(at.weight_decay);
    return to;
}

// The kernels of optimizers that update whole variables (optim_whole.cu) read `Settings`, so they need no coefficients but `gain` and
// `skip`.
static __device__ Coefficients whole_coefficients(const Settings &, double) { return Coefficients{}; }

// Sets a group's hyper-parameters between steps: settings[group] = value. Unless `like` is 0xffffffff, the group's `step` becomes that of
// group `like` instead of value.step, so that the host need not know how many steps the device has taken.
//   settings: must have the element `group`, and the element `like` unless `like` is 0xffffffff.
// Grid: 1; block: 1; no dynamic shared memory.
extern "C" __global__ void optim_configure(Settings *settings, uint32_t group, uint32_t like, Settings value) {
    follow();
    if (like != 0xffffffffu) value.step = settings[like].step;
    settings[group] = value;
}

// Begins a step: <optimizer>_prepare increments `step` of every group and writes the group's coefficients.
//   settings, coefficients [groups]; loss_scale: the step's kernel first divides the gradients by loss_scale->scale, or by 1 if it is null;
//   norm: the norm of the gradients, or null. If the norm is infinite or NaN, the step is skipped: `step` does not change, and the step's
//   kernel does nothing but zero the gradients (if zero_grads is 1).
// Grid: (groups + 31) / 32; block: 32; no dynamic shared memory.
template <Coefficients (*COEFFICIENTS)(const Settings &, double)>
static __device__ __forceinline__ void prepare(Settings *settings, uint32_t groups, const double *norm, const LossScale *loss_scale,
                                               Coefficients *coefficients) {
    const uint32_t group = blockIdx.x * blockDim.x + threadIdx.x;
    if (group >= groups) return;
    const bool skip = norm != nullptr && !isfinite(*norm);
    if (!skip) ++settings[group].step;
    const Settings at = settings[group];
    Coefficients to = COEFFICIENTS(at, static_cast<double>(at.step));
    const double factor = loss_scale == nullptr ? 1.0 : 1.0 / loss_scale->scale;
    to.gain = static_cast<float>(at.maximize ? -factor : factor);
    to.skip = skip;
    coefficients[group] = to;
}

#define DEFINE_PREPARE(NAME)                                                                                           \
    extern "C" __global__ void NAME##_prepare(Settings *settings, uint32_t groups, const double *norm,                 \
                                              const LossScale *loss_scale, Coefficients *coefficients) {               \
        follow();                                                                                                      \
        prepare<NAME##_coefficients>(settings, groups, norm, loss_scale, coefficients);                                \
    }
DEFINE_PREPARE(adam)
DEFINE_PREPARE(adamw)
DEFINE_PREPARE(adam_8bit)
DEFINE_PREPARE(lion)
DEFINE_PREPARE(sgd)
DEFINE_PREPARE(whole)

// Four neighbouring values of a state, in f32 while a kernel works on them. States are aligned, and padded to STATE_BLOCK elements. So
// `load_quad<true>` and `store_quad<true>` access all four values at once, also at the end of a piece; they do not read their count, QUAD.
template <typename S> struct StateQuad {
    S *pointer;
    float values[QUAD];

    __device__ __forceinline__ StateQuad(S *states, uint64_t index) : pointer(states + index) { load_quad<true>(values, pointer, QUAD); }
    __device__ __forceinline__ float &operator[](int k) { return values[k]; }
    // Rounds the values to S and writes them. `number` is 1 for the optimizer's first state (state1), 2 for the second, 3 for the third.
    template <typename Rounding> __device__ __forceinline__ void store(const Rounding &rounding, int number) {
        store_quad<true>(pointer, values, QUAD, rounding, number);
    }
};

// Each optimizer is a structure with pointers to its states, of type S. Its operator () updates four neighbouring elements: `at` has the
// coefficients of the step, p are the elements' parameters, g their gradients (which it may overwrite), and `index` is the index of the
// first of the elements in the states.

// As torch.optim.Adam (weight decay in `l2`) and AdamW (weight decay in `decay`); with AMSGrad unless `largest` is null.
template <typename S> struct AdamRule {
    S *first, *second, *largest;

    template <typename Rounding>
    __device__ __forceinline__ void operator()(const Coefficients &at, float (&p)[QUAD], float (&g)[QUAD], uint64_t index,
                                               const Rounding &rounding) const {
        StateQuad<S> m(first, index), v(second, index);
        float top[QUAD];
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            p[k] = __fmul_rn(p[k], at.decay);
            const float grad = __fadd_rn(g[k], __fmul_rn(at.l2, p[k]));
            m[k] = __fadd_rn(m[k], __fmul_rn(at.gain1, __fsub_rn(grad, m[k])));
            v[k] = __fadd_rn(__fmul_rn(v[k], at.beta2), __fmul_rn(__fmul_rn(at.gain2, grad), grad));
            top[k] = v[k];
        }
        if (largest != nullptr) {
            StateQuad<S> max(largest, index);
            // The larger of the two numbers; NaN if one of them is NaN.
#pragma unroll
            for (int k = 0; k < QUAD; ++k) top[k] = max[k] = v[k] <= max[k] || max[k] != max[k] ? max[k] : v[k];
            max.store(rounding, 3);
        }
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(top[k]), at.root_correction2), at.eps);
            p[k] = __fsub_rn(p[k], __fdiv_rn(__fmul_rn(at.step_size, m[k]), root));
        }
        m.store(rounding, 1);
        v.store(rounding, 2);
    }
};

// As bitsandbytes' Adam8bit and AdamW8bit for variables with too few elements for 8-bit states. A multiplication and an addition are fused
// (__fmaf_rn) where the compiled CUDA code of bitsandbytes fuses them.
template <typename S> struct SmallAdamRule {
    S *first, *second, *unused;

    template <typename Rounding>
    __device__ __forceinline__ void operator()(const Coefficients &at, float (&p)[QUAD], float (&g)[QUAD], uint64_t index,
                                               const Rounding &rounding) const {
        StateQuad<S> m(first, index), v(second, index);
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            m[k] = __fmaf_rn(m[k], at.beta1, __fmul_rn(at.gain1, g[k]));
            v[k] = __fmaf_rn(v[k], at.beta2, __fmul_rn(at.gain2, __fmul_rn(g[k], g[k])));
            const float ratio = __fdiv_rn(m[k], __fadd_rn(__fsqrt_rn(v[k]), at.eps));
            p[k] = __fmul_rn(__fmaf_rn(at.step_size, ratio, p[k]), at.decay);
        }
        m.store(rounding, 1);
        v.store(rounding, 2);
    }
};

// Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675. Multiplications and additions are
// fused where bitsandbytes fuses them.
template <typename S> struct LionRule {
    S *momentum, *unused[2];

    template <typename Rounding>
    __device__ __forceinline__ void operator()(const Coefficients &at, float (&p)[QUAD], float (&g)[QUAD], uint64_t index,
                                               const Rounding &rounding) const {
        StateQuad<S> m(momentum, index);
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            p[k] = lion_descend(at, p[k], __fmaf_rn(m[k], at.beta1, __fmul_rn(at.gain1, g[k])));
            m[k] = __fmaf_rn(m[k], at.beta2, __fmul_rn(at.gain2, g[k]));
        }
        m.store(rounding, 1);
    }
};

// As torch.optim.SGD. `buffer` is null without momentum.
template <typename S> struct SgdRule {
    S *buffer, *unused[2];

    template <typename Rounding>
    __device__ __forceinline__ void operator()(const Coefficients &at, float (&p)[QUAD], float (&g)[QUAD], uint64_t index,
                                               const Rounding &rounding) const {
#pragma unroll
        for (int k = 0; k < QUAD; ++k) g[k] = __fadd_rn(g[k], __fmul_rn(at.l2, p[k]));
        if (buffer != nullptr) {
            StateQuad<S> b(buffer, index);
#pragma unroll
            for (int k = 0; k < QUAD; ++k) {
                b[k] = __fadd_rn(__fmul_rn(at.beta1, b[k]), __fmul_rn(at.gain1, g[k]));
                g[k] = at.nesterov ? __fadd_rn(g[k], __fmul_rn(at.beta2, b[k])) : b[k];
            }
            b.store(rounding, 1);
        }
#pragma unroll
        for (int k = 0; k < QUAD; ++k) p[k] = __fsub_rn(p[k], __fmul_rn(at.step_size, g[k]));
    }
};

// Updates four elements of a piece, from its element `index` on (fewer at the end of the piece). `WIDE` means one access for all four. P, G
// and C are the types of the parameters, the gradients and the copy of the parameters. `piece.state` counts blocks of STATE_BLOCK elements.
template <bool WIDE, typename Rule, typename P, typename G, typename C, typename Rounding>
static __device__ __forceinline__ void update(const Piece &piece, uint32_t index, const Coefficients &at,
                                              const Buffers<P, G, C> &buffers, const Rule &rule, const Rounding &rounding) {
    Quad<WIDE, P, G, C> quad(buffers, piece, index);
#pragma unroll
    for (int k = 0; k < QUAD; ++k) quad.grads[k] = __fmul_rn(quad.grads[k], at.gain);
    rule(at, quad.params, quad.grads, static_cast<uint64_t>(piece.state) * STATE_BLOCK + index, rounding);
    quad.store(rounding);
}

// Updates the piece of this block. Each thread has four neighbouring elements at a time.
template <typename Rule, typename P, typename G, typename C, typename Round>
static __device__ __forceinline__ void step(const Piece *pieces, const Segment *segments, const Coefficients *coefficients,
                                            uint32_t zero_grads, const Rule &rule, const Round &round) {
    const Piece piece = load_piece(pieces + blockIdx.x);
    const Buffers<P, G, C> buffers(segments, piece, zero_grads);
    // `skip` is the same for all groups.
    if (coefficients->skip) return clear_grads(buffers, piece, threadIdx.x, blockDim.x);
    const Coefficients at = coefficients[piece.group];
    const bool is_wide = buffers.is_wide(piece);
    for (uint32_t i = QUAD * threadIdx.x; i < piece.length; i += QUAD * blockDim.x) {
        const auto rounding = round.at(piece, blockIdx.x, i);
        if (is_wide && i + QUAD <= piece.length) {
            update<true>(piece, i, at, buffers, rule, rounding);
        } else {
            update<false>(piece, i, at, buffers, rule, rounding);
        }
    }
}

// One step of all pieces: <optimizer>_step_<dtype of the gradients>_<dtype of the parameters' 16-bit copy>, for f32_bf16,
// f32_f16, bf16_bf16, f16_f16.
// With gradient g = gain * grads, p = params, and the coefficients of the piece's group:
//   adam: p *= decay; g += l2 * p; m += gain1 * (g - m); v = beta2 * v + gain2 * g^2;
//         p -= step_size * m / (sqrt(v) / root_correction2 + eps). Unless `largest` is null, largest = max(largest, v), and p's update
//         has `largest` in place of v;
//   small_adam: m = beta1 * m + gain1 * g; v = beta2 * v + gain2 * g^2; p = decay * (p + step_size * m / (sqrt(v) + eps)), where
//         step_size is negative;
//   lion: p = decay * p - step_size * sign(beta1 * m + gain1 * g); m = beta2 * m + gain2 * g;
//   sgd: g += l2 * p; without a buffer p -= step_size * g; with a buffer b = beta1 * b + gain1 * g, and p -= step_size * b, or
//         p -= step_size * (g + beta2 * b) with nesterov, where beta2 is the momentum.
// Then copy = params in the copy's dtype, unless the copy is null, and grads = 0 if zero_grads is 1.
//   pieces [gridDim.x]; segments: those that the pieces' indices name, with f32 params; coefficients [groups];
//   state1, state2, state3: f32, long enough for the indices in the pieces, aligned to 16 bytes, zeros before the first step. A state
//   that the optimizer does not have is null.
// Grid: number of pieces; block: 256 (a piece has at most 1024 elements, four for each thread); no dynamic shared memory.
#define DEFINE_STEP(NAME, RULE, suffix, G, C)                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
    NAME##_step_##suffix(const Piece *pieces, const Segment *segments, const Coefficients *coefficients,               \
                         uint32_t zero_grads, float *state1, float *state2, float *state3) {                           \
        follow();                                                                                                      \
        step<RULE<float>, float, G, C>(pieces, segments, coefficients, zero_grads, {state1, state2, state3},           \
                                       RoundNearest{});                                                                \
    }
#define DEFINE_STEPS(suffix, G, C)                                                                                     \
    DEFINE_STEP(adam, AdamRule, suffix, G, C)                                                                          \
    DEFINE_STEP(small_adam, SmallAdamRule, suffix, G, C)                                                               \
    DEFINE_STEP(lion, LionRule, suffix, G, C)                                                                          \
    DEFINE_STEP(sgd, SgdRule, suffix, G, C)
FOR_EACH_GRADIENT_AND_COPY(DEFINE_STEPS)

// <optimizer>_rounded_bf16: as <optimizer>_step_*, for parameters, gradients and states in bf16, without copies. The kernel computes the
// update in f32 and rounds parameters and states stochastically. The random bits depend on the seed and the step of the piece's group
// and on the element's index among all elements of the optimizer.
//   settings [groups]: those of the groups of `coefficients`; firsts [gridDim.x]: for each piece, the index of its first element among
//   all elements of the optimizer, divided by STATE_BLOCK; states: aligned to 8 bytes.
#define DEFINE_ROUNDED(NAME, RULE)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
    NAME##_rounded_bf16(const Piece *pieces, const Segment *segments, const Coefficients *coefficients,                \
                        const Settings *settings, const uint32_t *firsts, uint32_t zero_grads, __nv_bfloat16 *state1,  \
                        __nv_bfloat16 *state2, __nv_bfloat16 *state3) {                                                \
        follow();                                                                                                      \
        step<RULE<__nv_bfloat16>, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(                                        \
            pieces, segments, coefficients, zero_grads, {state1, state2, state3}, RoundStochastically{settings, firsts}); \
    }
DEFINE_ROUNDED(adam, AdamRule)
DEFINE_ROUNDED(small_adam, SmallAdamRule)
DEFINE_ROUNDED(lion, LionRule)
DEFINE_ROUNDED(sgd, SgdRule)
