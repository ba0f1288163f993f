// Shared code of the optimizers' kernels: structures that host and kernels exchange, and access to runs of elements.
//
// A segment has three vectors in the same element order: the parameters, their gradients, and a 16-bit copy of the parameters. The work is
// a list of pieces of segments, so that one launch covers any set of variables and parameter groups. The variables may share one flat
// buffer (one segment) or have memory of their own (a segment each). Buffers of states contain the states of one piece after another; those
// of each piece begin at a multiple of STATE_BLOCK (256) elements. The host zeroes the padding after a piece once; later, kernels may
// overwrite it.
#pragma once

#include "element.cuh"
#include "dynamic_map.cuh"
#include "philox.cuh"

// Consecutive elements of one segment. The host makes the list of pieces once.
struct alignas(16) Piece {
    uint32_t start;   // its first element in the segment
    uint32_t segment; // the index of the segment
    uint32_t state;   // its first element in the state buffers, in units of STATE_BLOCK
    uint16_t length;  // the number of its elements, at least 1; at most STATE_BLOCK with 8-bit states
    uint16_t group;   // the index of its parameter group, whose settings and coefficients apply
};

// The addresses of the parameters, their gradients and their 16-bit copy (null if there is none). Vectors need only the alignment of an
// element.
struct Segment {
    void *params; // f32, or bf16 that each step rounds stochastically
    void *grads;
    void *copy;
};

__device__ __forceinline__ Piece load_piece(const Piece *piece) {
    const uint4 words = __ldg(reinterpret_cast<const uint4 *>(piece));
    return {words.x, words.y, words.z, static_cast<uint16_t>(words.w), static_cast<uint16_t>(words.w >> 16)};
}

// The hyper-parameters of a parameter group, in device memory. Between steps the host may write any of them, such as `lr`.
struct Settings {
    double lr;
    double beta1; // SGD: momentum
    double beta2; // SGD: dampening
    double eps;
    double weight_decay;
    uint64_t step; // steps taken so far; `<optimizer>_prepare` advances it, so the step's later kernels read the step's number, from 1
    uint64_t seed; // of stochastic rounding
    uint32_t maximize;
    uint32_t nesterov;
    double more[8]; // further values of an optimizer, in the order in which its kernels read them
};

// What a step's kernels need of a group, computed by `<optimizer>_prepare` from the group's settings. Fields that an optimizer does not
// use are 0.
struct alignas(16) Coefficients {
    float gain;    // gradients are multiplied by this first: 1 / loss scale, negated to maximize
    uint32_t skip; // 1 if the step leaves parameters and states as they are; the same in all groups
    float decay; // the parameters are multiplied by this: 1, or less for decoupled weight decay
    float l2;    // l2 times the parameter is added to the gradient
    float step_size; // negative for the Adam kernel that follows bitsandbytes and adds the step to the parameter
    float eps;
    float beta1, gain1; // weights of the old first state and of the gradient in the new first state
    float beta2, gain2; // the same for the second state; for SGD, `beta2` is the factor of the momentum buffer in Nesterov's form
    float root_correction2; // Adam: sqrt(1 - beta2^step), the root of the bias correction of the second state
    uint32_t nesterov;
};

// The norm of all gradients, and the factor that clips them, in device memory.
struct Clip {
    double norm;   // not finite if a gradient is infinite or NaN
    double factor; // the gradients are multiplied by this: 1 if the norm needs no clipping
};

// The state of dynamic loss scaling, in device memory.
struct LossScale {
    double scale;
    uint64_t growth_tracker; // the number of consecutive steps with finite gradients (see gradient.cu)
};

// The number of elements that one thread handles at a time: in f32, they have 16 bytes.
constexpr int QUAD = 4;

// Whether one access can take four elements at this address.
template <typename T> __device__ __forceinline__ bool is_quad_aligned(const T *pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % (QUAD * sizeof(T)) == 0;
}

// Loads four values, widened to f32. With WIDE, it loads them in one access, which the address must allow, and ignores `count`. Otherwise
// it loads the first `count` (0 to 4) values, and sets the remaining ones to 0.
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

// Rounds to the nearest number of the stored type. f32 needs no rounding.
struct Nearest {
    template <typename T> __device__ __forceinline__ T round(float value, int, int) const { return narrow<T>(value); }
};

// Rounds to bf16 stochastically, to one of the two bf16 numbers next to the value. The number of larger magnitude has the probability
// (|value| - smaller magnitude) / (larger magnitude - smaller magnitude). rust/nn/src/optim/rounding.rs has the same `round`, and defines
// the random bits of an element. Infinities and NaN stay what they are.
struct Stochastic {
    // Random bits, 16 for each stored value. Value `number` of the element k (see `round`) has a half of component k of words[number / 2]:
    // the lower half if `number` is even, otherwise the upper half.
    uint4 words[2];

    // For four elements. `first` is the number of the first of them among all elements of the optimizer's variables, a multiple of four.
    // The last word of the counter is 2 or 3: counters of other random numbers have 0 or 1 there.
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

    // Rounds one of the values of element `k` of the four: the parameter if `number` is 0, the first state if it is 1, and so on. A carry
    // from the random lower half of the bits moves the upper half to the number of larger magnitude. NaN gets a bit in its upper half,
    // because without one it would become infinity.
    template <typename T> __device__ __forceinline__ T round(float value, int k, int number) const {
        const uint4 pair = words[number / 2];
        const uint32_t word = k == 0 ? pair.x : k == 1 ? pair.y : k == 2 ? pair.z : pair.w;
        const uint32_t random = word >> (number % 2 == 0 ? 0 : 16) & 0xffffu;
        const uint32_t bits = __float_as_uint(value);
        const bool finite = (bits & 0x7f800000u) != 0x7f800000u; // the exponent bits are all 1 in infinities and NaN
        const uint32_t sum = finite ? bits + random : bits | (isnan(value) ? 1u << 22 : 0u);
        return __ushort_as_bfloat16(static_cast<unsigned short>(sum >> 16));
    }
};

// How a launch rounds: `at` returns a `Nearest` or a `Stochastic` for the four elements of a quad.
struct RoundNearest {
    __device__ __forceinline__ Nearest at(const Piece &, uint32_t, uint32_t) const { return {}; }
};

struct RoundStochastically {
    const Settings *settings;
    const uint32_t *firsts; // for each piece, the element number (see `Stochastic`) of its first element, in units of STATE_BLOCK

    // For the four elements from element `index` of `piece` on. `piece_index` is the index of the piece in the list of pieces.
    __device__ __forceinline__ Stochastic at(const Piece &piece, uint32_t piece_index, uint32_t index) const {
        const Settings &group = settings[piece.group];
        return {group.seed, group.step, static_cast<uint64_t>(firsts[piece_index]) * STATE_BLOCK + index};
    }
};

// Stores four values, rounded to `T`: with WIDE all of them in one access, otherwise the first `count`. `number` tells `Stochastic::round`
// which value of an element they are: 0 for parameters, 1 for the first state, and so on. `Nearest::round` ignores it.
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

// The vectors of a segment with their types: the parameters, their gradients and their 16-bit copy (null if there is none).
template <typename P, typename G, typename C> struct Buffers {
    P *params;
    G *grads;
    C *copy;
    uint32_t zero_grads; // whether the step also sets the gradients to zero

    __device__ __forceinline__ Buffers(const Segment *segments, const Piece &piece, uint32_t zero_grads) : zero_grads(zero_grads) {
        const auto words = reinterpret_cast<const unsigned long long *>(segments + piece.segment);
        params = reinterpret_cast<P *>(__ldg(words));
        grads = reinterpret_cast<G *>(__ldg(words + 1));
        copy = reinterpret_cast<C *>(__ldg(words + 2));
    }

    // Whether, in each vector that is not null, one access can take four elements of the piece, if the index of their first one in the
    // piece is a multiple of four.
    __device__ __forceinline__ bool is_wide(const Piece &piece) const {
        return is_quad_aligned(params + piece.start) && is_quad_aligned(grads + piece.start) &&
               (copy == nullptr || is_quad_aligned(copy + piece.start));
    }
};

// The four elements of a piece from `index` (a multiple of four) on; elements beyond the end of the piece are 0. With WIDE, the caller
// guarantees that all four exist and that one access can take them.
template <bool WIDE, typename P, typename G, typename C> struct Quad {
    Buffers<P, G, C> at; // its pointers are those of the first of the four elements
    uint32_t count;      // how many of the four exist
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

    // Stores the parameters and their copy, and zeroes the gradients if the step is to do so.
    template <typename Rounding> __device__ __forceinline__ void store(const Rounding &rounding) const {
        store_quad<WIDE>(at.params, params, count, rounding, /*number=*/0);
        if (at.copy != nullptr) store_quad<WIDE>(at.copy, params, count, Nearest{}, /*number=*/0);
        const float zeros[QUAD] = {};
        if (at.zero_grads) store_quad<WIDE>(at.grads, zeros, count, Nearest{}, /*number=*/0);
    }
};

// Zeroes the gradients of a piece if `zero_grads` is set. A skipped step calls this function and does nothing else. `thread` is the index
// of this thread among the `threads` threads that share the piece.
template <typename P, typename G, typename C>
__device__ void clear_grads(const Buffers<P, G, C> &buffers, const Piece &piece, uint32_t thread, uint32_t threads) {
    if (!buffers.zero_grads) return;
    G *const grads = buffers.grads + piece.start;
    for (uint32_t i = thread; i < piece.length; i += threads) grads[i] = narrow<G>(0.0f);
}

// Lion's update: `p` decayed, then moved by the step size against the sign of `direction`. The compiler does not fuse these intrinsics
// to a multiply-add, so the result is rounded as on the CPU.
__device__ __forceinline__ float lion_descend(const Coefficients &coefficients, float p, float direction) {
    const float decrease = direction > 0.0f ? coefficients.step_size : 0.0f;
    const float increase = direction < 0.0f ? coefficients.step_size : 0.0f;
    return __fadd_rn(__fsub_rn(__fmul_rn(p, coefficients.decay), decrease), increase);
}

// Calls the macro `DEFINE(suffix, type of the gradients, type of the copy)` for the pairs of types that a step may have.
#define FOR_EACH_GRADIENT_AND_COPY(DEFINE)                                                                             \
    DEFINE(f32_bf16, float, __nv_bfloat16)                                                                             \
    DEFINE(f32_f16, float, __half)                                                                                     \
    DEFINE(bf16_bf16, __nv_bfloat16, __nv_bfloat16)                                                                    \
    DEFINE(f16_f16, __half, __half)
