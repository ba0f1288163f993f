// Shared code of the optimizers' kernels: structures that host and kernels exchange, and access to runs of elements.
//
// A segment has three vectors in the same element order: parameters, their gradients, and their 16-bit copy. The work is a list of
// pieces of segments, so that one launch covers any set of variables and parameter groups, in one flat buffer (one segment) or in many
// variables with memory of their own. Buffers of states have the pieces one after another, each from a multiple of STATE_BLOCK
// elements on. The host zeroes the padding after a piece once; afterwards the kernels may overwrite it.
#pragma once

#include "element.cuh"
#include "dynamic_map.cuh"
#include "philox.cuh"

// A run of elements of one segment. The host makes the list of pieces once.
struct alignas(16) Piece {
    uint32_t start;   // its first element in the segment
    uint32_t segment; // which segment
    uint32_t state;   // its first element in the state buffers, in units of STATE_BLOCK
    uint16_t length;  // the number of its elements, at least 1; at most STATE_BLOCK with 8-bit states
    uint16_t group;   // which coefficients apply
};

// The addresses of parameters, their gradients and their 16-bit copy (or null), at any alignment.
struct Segment {
    void *params; // f32, or bf16 that is rounded stochastically
    void *grads;
    void *copy;
};

__device__ __forceinline__ Piece load_piece(const Piece *piece) {
    const uint4 words = __ldg(reinterpret_cast<const uint4 *>(piece));
    return {words.x, words.y, words.z, static_cast<uint16_t>(words.w), static_cast<uint16_t>(words.w >> 16)};
}

// The hyper-parameters of a group, in device memory. Between steps the host may write any of them, such as `lr`.
struct Settings {
    double lr;
    double beta1; // SGD: momentum
    double beta2; // SGD: dampening
    double eps;
    double weight_decay;
    uint64_t step; // steps taken so far; `<optimizer>_prepare` advances it
    uint64_t seed; // of stochastic rounding
    uint32_t maximize;
    uint32_t nesterov;
    double more[8]; // further values of an optimizer, in the order in which its kernels read them
};

// Numbers that one step needs, computed from a group's settings by `<optimizer>_prepare`.
struct alignas(16) Coefficients {
    float gain;    // gradients are multiplied by this first: 1 / loss scale, negated to maximize
    uint32_t skip; // 1 if the step leaves parameters and states as they are; the same in all groups
    float decay; // the factor of parameters
    float l2;    // l2 times the parameter is added to the gradient
    float step_size;
    float eps;
    float beta1, gain1; // weights of the old first state and of the gradient in the new first state
    float beta2, gain2; // the same for the second state; for SGD, `beta2` is the factor of the momentum buffer in Nesterov's form
    float root_correction2;
    uint32_t nesterov;
};

// The norm of all gradients, in device memory.
struct Clip {
    double norm;   // not finite if a gradient is infinite or NaN
    double factor; // factor of the gradients for clipping: 1 if the norm is small enough
};

// The state of dynamic loss scaling, in device memory.
struct LossScale {
    double scale;
    uint64_t growth_tracker; // consecutive steps with finite gradients
};

// Values of `T` that one thread handles at a time: 16 bytes of f32.
constexpr int QUAD = 4;

template <typename T> __device__ __forceinline__ bool is_quad_aligned(const T *pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % (QUAD * sizeof(T)) == 0;
}

// Loads four values, widened to f32. With WIDE, it loads them in one access, which the address must allow. Otherwise it loads `count`
// (0 to 4) values, and the others are zeros.
template <bool WIDE, typename T>
__device__ __forceinline__ void load_quad(float (&values)[QUAD], const T *source, uint32_t count) {
    if constexpr (WIDE) {
        const auto pack = *reinterpret_cast<const Pack<T, QUAD> *>(source);
#pragma unroll
        for (int k = 0; k < QUAD; ++k) values[k] = widen(pack.values[k]);
    } else {
#pragma unroll
        for (int k = 0; k < QUAD; ++k) values[k] = k < count ? widen(source[k]) : 0.0f;
    }
}

// Rounds to the nearest number of the stored type; f32 stays as it is.
struct Nearest {
    template <typename T> __device__ __forceinline__ T round(float value, int, int) const { return narrow<T>(value); }
};

// Rounds to bf16 stochastically: up in magnitude with a probability equal to the distance to the lower neighbour, in units of the
// distance between the two neighbours. rust/nn/src/optim/rounding.rs has the same `round`, and defines the random bits of an element.
// Infinities and NaN stay what they are.
struct Stochastic {
    uint4 words[2];

    // For the four elements from element number `first` on; `first` is a multiple of four.
    __device__ __forceinline__ Stochastic(uint64_t seed, uint64_t step, uint64_t first) {
        const uint64_t block = first / QUAD;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            uint4 c{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), static_cast<uint32_t>(step), 2u + pair};
#pragma unroll
            for (int round = 0; round < Generator::ROUNDS; ++round) c = philox_round(c, philox_key(seed, round));
            words[pair] = c;
        }
    }

    // Rounds one of the values of element `k` of the four. `number` tells which: 0 the parameter, 1 the first state, and so on.
    template <typename T> __device__ __forceinline__ T round(float value, int k, int number) const {
        const uint4 pair = words[number / 2];
        const uint32_t word = k == 0 ? pair.x : k == 1 ? pair.y : k == 2 ? pair.z : pair.w;
        const uint32_t random = word >> (number % 2 == 0 ? 0 : 16) & 0xffffu;
        const uint32_t found = __float_as_uint(value);
        const bool finite = (found & 0x7f800000u) != 0x7f800000u;
        const uint32_t sum = finite ? found + random : found | (isnan(value) ? 1u << 22 : 0u);
        return __ushort_as_bfloat16(static_cast<unsigned short>(sum >> 16));
    }
};

// How a launch rounds: `at` returns the rounding of a quad, `Nearest` or `Stochastic`.
struct RoundNearest {
    __device__ __forceinline__ Nearest at(const Piece &, uint32_t, uint32_t) const { return {}; }
};

struct RoundStochastically {
    const Settings *settings;
    const uint32_t *firsts; // for each piece, the element number (see `Stochastic`) of its first element, in units of STATE_BLOCK

    // For four elements of piece `number` of the list: those from the piece's element `index` on.
    __device__ __forceinline__ Stochastic at(const Piece &piece, uint32_t number, uint32_t index) const {
        const Settings &of = settings[piece.group];
        return {of.seed, of.step, static_cast<uint64_t>(firsts[number]) * STATE_BLOCK + index};
    }
};

// The inverse of `load_quad`. `number` tells `Stochastic::round` which value of the elements it rounds: 0 for parameters, their copies
// and gradients, 1 for the first state, and so on.
template <bool WIDE, typename T, typename Rounding>
__device__ __forceinline__ void store_quad(T *target, const float (&values)[QUAD], uint32_t count, const Rounding &rounding,
                                           int number) {
    if constexpr (WIDE) {
        Pack<T, QUAD> pack;
#pragma unroll
        for (int k = 0; k < QUAD; ++k) pack.values[k] = rounding.template round<T>(values[k], k, number);
        *reinterpret_cast<Pack<T, QUAD> *>(target) = pack;
    } else {
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            if (k < count) target[k] = rounding.template round<T>(values[k], k, number);
        }
    }
}

// The vectors of a segment: parameters, their gradients and, unless null, their 16-bit copy.
template <typename P, typename G, typename C> struct Buffers {
    P *params;
    G *grads;
    C *copy;
    uint32_t zero_grads;

    __device__ __forceinline__ Buffers(const Segment *segments, const Piece &piece, uint32_t zero_grads) : zero_grads(zero_grads) {
        const auto words = reinterpret_cast<const unsigned long long *>(segments + piece.segment);
        params = reinterpret_cast<P *>(__ldg(words));
        grads = reinterpret_cast<G *>(__ldg(words + 1));
        copy = reinterpret_cast<C *>(__ldg(words + 2));
    }

    // Whether one access can take four elements of a piece, in each of the vectors that is not null.
    __device__ __forceinline__ bool is_wide(const Piece &piece) const {
        return is_quad_aligned(params + piece.start) && is_quad_aligned(grads + piece.start) &&
               (copy == nullptr || is_quad_aligned(copy + piece.start));
    }
};

// Four neighbouring elements of a piece from `index` on, a multiple of four; elements beyond the end of the piece are 0. With
// WIDE, all four exist and can be accessed at once.
template <bool WIDE, typename P, typename G, typename C> struct Quad {
    Buffers<P, G, C> at; // moved to the first of the four
    uint32_t count;
    float params[QUAD];
    float grads[QUAD];

    __device__ __forceinline__ Quad(const Buffers<P, G, C> &buffers, const Piece &piece, uint32_t index) : at(buffers) {
        const uint64_t start = static_cast<uint64_t>(piece.start) + index;
        at.params += start;
        at.grads += start;
        if (at.copy != nullptr) at.copy += start;
        count = WIDE ? QUAD : piece.length > index ? min(piece.length - index, QUAD) : 0;
        load_quad<WIDE>(params, at.params, count);
        load_quad<WIDE>(grads, at.grads, count);
    }

    template <typename Rounding> __device__ __forceinline__ void store(const Rounding &rounding) const {
        store_quad<WIDE>(at.params, params, count, rounding, 0);
        if (at.copy != nullptr) store_quad<WIDE>(at.copy, params, count, Nearest{}, 0);
        const float zeros[QUAD] = {};
        if (at.zero_grads) store_quad<WIDE>(at.grads, zeros, count, Nearest{}, 0);
    }
};

// Zeroes the gradients of a piece if `zero_grads` is set. A skipped step calls this function and does nothing else.
template <typename P, typename G, typename C>
__device__ void clear_grads(const Buffers<P, G, C> &buffers, const Piece &piece, uint32_t thread, uint32_t threads) {
    if (!buffers.zero_grads) return;
    G *const grads = buffers.grads + piece.start;
    for (uint32_t i = thread; i < piece.length; i += threads) grads[i] = narrow<G>(0.0f);
}

// Lion's update: `p` decayed, then moved by the step size against the sign of `direction`.
__device__ __forceinline__ float lion_descend(const Coefficients &at, float p, float direction) {
    const float up = direction > 0.0f ? at.step_size : 0.0f, down = direction < 0.0f ? at.step_size : 0.0f;
    return __fadd_rn(__fsub_rn(__fmul_rn(p, at.decay), up), down);
}

// Defines a step's functions for each pair of dtypes of gradients and copy: `DEFINE(suffix, gradient, copy)`.
#define FOR_EACH_GRADIENT_AND_COPY(DEFINE)                                                                             \
    DEFINE(f32_bf16, float, __nv_bfloat16)                                                                             \
    DEFINE(f32_f16, float, __half)                                                                                     \
    DEFINE(bf16_bf16, __nv_bfloat16, __nv_bfloat16)                                                                    \
    DEFINE(f16_f16, __half, __half)
