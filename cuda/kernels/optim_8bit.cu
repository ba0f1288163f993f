// The optimizers with 8-bit states, as in bitsandbytes' Adam8bit, AdamW8bit and Lion8bit. Adam and AdamW have two states for each
// parameter, Lion has one. A value of a state is stored as one byte, its code (dynamic_map.cuh). Every 256 values of a state share a
// scale. Below, a "block" is 256 (STATE_BLOCK) elements that share their scales. Only where a comment describes a launch, a block is a
// block of threads. A piece is the elements of a parameter that are in one block: all 256, or fewer at the end of the parameter.
//
// A warp updates a block of 256 elements in registers. Each lane has four neighbouring elements of each half of the block, so that every
// access of the warp is to 512 contiguous bytes of f32 or 128 contiguous bytes of codes. Multiplications and additions are fused where the
// CUDA code of bitsandbytes fuses them, and quotients and roots are rounded as on the CPU. Parameters, codes and scales therefore equal
// those of the CPU bit for bit.
#include "optim.cuh"

using dynamic_map::Table;

static __device__ const Table SIGNED_TABLE = dynamic_map::make_table<true>();
static __device__ const Table UNSIGNED_TABLE = dynamic_map::make_table<false>();

// The number of quads (runs of four neighbouring elements) of a block that each lane has.
constexpr int QUADS = STATE_BLOCK / (WARP * QUAD);

// For launches: the number of threads of a block, and how many blocks of threads a multiprocessor must have room for. With three blocks,
// each thread can have the 80 registers that it needs.
constexpr int THREADS = 256;
constexpr int BLOCKS = 3;

// Copies a table into shared memory. All threads of a block of threads call this function, and need a barrier before they read the copy.
static __device__ __forceinline__ void load_table(Table &shared, const Table &table) {
    constexpr int WORDS = sizeof(Table) / sizeof(uint4);
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) {
        reinterpret_cast<uint4 *>(&shared)[i] = reinterpret_cast<const uint4 *>(&table)[i];
    }
}

// A lane's codes of one state of one block, and the block's scale. Byte k of words[q] is the code of element k of the lane's quad q.
struct BlockState {
    uint32_t *codes;
    float *scale;
    uint32_t words[QUADS];
    float old_scale;

    __device__ __forceinline__ BlockState(uint8_t *all_codes, float *scales, const Piece &piece, uint32_t lane)
        : codes(reinterpret_cast<uint32_t *>(all_codes + static_cast<uint64_t>(piece.state) * STATE_BLOCK) + lane),
          scale(scales + piece.state), old_scale(*scale) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) words[q] = codes[q * WARP];
    }

    // Sets the codes of the elements of quad q from element `count` on, which are beyond the end of the piece, to `code`. bitsandbytes does
    // so too: its code is 128 with signs (the smallest positive value) and 0 without signs (zero).
    __device__ __forceinline__ void pad(int q, uint32_t count, uint32_t code) {
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            if (k >= count) words[q] = (words[q] & ~(0xffu << 8 * k)) | code << 8 * k;
        }
    }

    __device__ __forceinline__ float decode(const Table &table, int q, int k) const {
        return __fmul_rn(table.values[words[q] >> 8 * k & 0xff], old_scale);
    }

    // Computes the scale and the codes of `values`, and writes them to global memory. No value may be NaN. All lanes call this function.
    template <bool SIGNED>
    __device__ __forceinline__ void store(const Table &table, const float (&values)[QUADS][QUAD], uint32_t lane) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS * QUAD; ++i) largest = fmaxf(largest, fabsf(values[i / QUAD][i % QUAD]));
        // Non-negative floats are ordered like their bits.
        largest = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(largest)));
        // Infinite if all values are 0. Then the quotients are NaN, which have codes too (dynamic_map.cuh), and the scale is 0.
        const float inverse = __frcp_rn(largest);
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            uint32_t word = 0;
#pragma unroll
            for (int k = 0; k < QUAD; ++k) {
                const float quotient = __fmul_rn(values[q][k], inverse);
                const uint32_t code = SIGNED ? dynamic_map::encode_signed(table.to_rank, quotient)
                                             : dynamic_map::encode_unsigned(table.to_rank, quotient);
                word |= code << 8 * k;
            }
            codes[q * WARP] = word;
        }
        if (lane == 0) *scale = largest;
    }
};

// The index, in the block, of the first element of a lane's quad `q`.
static __device__ __forceinline__ uint32_t index_of(int q, uint32_t lane) { return (q * WARP + lane) * QUAD; }

// As bitsandbytes' Adam8bit and AdamW8bit. The first state has signs, the second has none.
struct AdamBlocks {
    uint8_t *codes1;
    float *scales1;
    uint8_t *codes2;
    float *scales2;

    struct Tables {
        Table first, second;

        __device__ __forceinline__ void load() {
            load_table(first, SIGNED_TABLE);
            load_table(second, UNSIGNED_TABLE);
        }
    };

    // Updates a piece, whose index in the list of pieces is `number`, with the coefficients `at` of its group. P, G and C are the types of
    // parameters, gradients and copy. WIDE says that the piece is a whole block whose quads are aligned.
    template <bool WIDE, typename P, typename G, typename C, typename Round>
    __device__ __forceinline__ void update(const Tables &tables, const Piece &piece, uint32_t number, uint32_t lane, const Coefficients &at,
                                           const Buffers<P, G, C> &buffers, const Round &round) const {
        Quad<WIDE, P, G, C> quads[QUADS] = {{buffers, piece, index_of(0, lane)}, {buffers, piece, index_of(1, lane)}};
        BlockState first(codes1, scales1, piece, lane), second(codes2, scales2, piece, lane);
        float m[QUADS][QUAD], v[QUADS][QUAD];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            if constexpr (!WIDE) {
                first.pad(q, quads[q].count, 128);
                second.pad(q, quads[q].count, 0);
            }
#pragma unroll
            for (int k = 0; k < QUAD; ++k) {
                const float g = __fmul_rn(quads[q].grads[k], at.gain);
                const float m_old = first.decode(tables.first, q, k), v_old = second.decode(tables.second, q, k);
                const float m_new = __fmaf_rn(at.gain1, g, __fmul_rn(m_old, at.beta1));
                const float v_new = __fmaf_rn(__fmul_rn(at.gain2, g), g, __fmul_rn(v_old, at.beta2));
                const float ratio = __fdiv_rn(m_new, __fadd_rn(__fsqrt_rn(v_new), at.eps));
                const float p_new = __fmul_rn(__fmaf_rn(at.step_size, ratio, quads[q].params[k]), at.decay);
                // False if the gradient is infinite or NaN, or if the new v is infinite: the number is the largest finite float.
                const bool is_finite = v_new <= 3.402823466e38f;
                if (is_finite) quads[q].params[k] = p_new;
                m[q][k] = is_finite ? m_new : 0.0f;
                v[q][k] = is_finite ? v_new : 0.0f;
            }
            quads[q].store(round.at(piece, number, index_of(q, lane)));
        }
        first.store<true>(tables.first, m, lane);
        second.store<false>(tables.second, v, lane);
    }
};

// As bitsandbytes' Lion8bit. Lion has no second state; the unused fields are here because `DEFINE_STEP` fills this structure and
// `AdamBlocks` from the same list.
struct LionBlocks {
    uint8_t *codes;
    float *scales;
    uint8_t *unused_codes;
    float *unused_scales;

    struct Tables {
        Table momentum;

        __device__ __forceinline__ void load() { load_table(momentum, SIGNED_TABLE); }
    };

    template <bool WIDE, typename P, typename G, typename C, typename Round>
    __device__ __forceinline__ void update(const Tables &tables, const Piece &piece, uint32_t number, uint32_t lane, const Coefficients &at,
                                           const Buffers<P, G, C> &buffers, const Round &round) const {
        Quad<WIDE, P, G, C> quads[QUADS] = {{buffers, piece, index_of(0, lane)}, {buffers, piece, index_of(1, lane)}};
        BlockState momentum(codes, scales, piece, lane);
        float m[QUADS][QUAD];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            if constexpr (!WIDE) momentum.pad(q, quads[q].count, 128);
#pragma unroll
            for (int k = 0; k < QUAD; ++k) {
                const float g = __fmul_rn(quads[q].grads[k], at.gain), old = momentum.decode(tables.momentum, q, k);
                const float direction = __fmaf_rn(at.gain1, g, __fmul_rn(old, at.beta1));
                const float m_new = __fmaf_rn(at.gain2, g, __fmul_rn(old, at.beta2));
                const bool is_finite = isfinite(g);
                if (is_finite) quads[q].params[k] = lion_descend(at, quads[q].params[k], direction);
                m[q][k] = is_finite ? m_new : 0.0f;
            }
            quads[q].store(round.at(piece, number, index_of(q, lane)));
        }
        momentum.store<true>(tables.momentum, m, lane);
    }
};

// One step of all `count` pieces; each warp takes one piece at a time. `Rule` is AdamBlocks or LionBlocks.
template <typename Rule, typename P, typename G, typename C, typename Round>
static __device__ __forceinline__ void step(const Piece *pieces, uint32_t count, const Segment *segments,
                                            const Coefficients *coefficients, uint32_t zero_grads, const Rule &rule,
                                            const Round &round) {
    const uint32_t lane = threadIdx.x % WARP, warps = gridDim.x * (THREADS / WARP);
    const uint32_t first = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (coefficients->skip) { // The same in all groups.
        for (uint32_t i = first; i < count; i += warps) {
            const Piece piece = load_piece(pieces + i);
            clear_grads(Buffers<P, G, C>(segments, piece, zero_grads), piece, lane, WARP);
        }
        return;
    }
    __shared__ typename Rule::Tables tables;
    tables.load();
    __syncthreads();
    if (first >= count) return;
    Piece piece = load_piece(pieces + first);
    for (uint32_t i = first; i < count; i += warps) {
        // The piece of the next iteration is loaded early, and in the last iteration some piece that is not used.
        const Piece next = load_piece(pieces + min(i + warps, count - 1));
        const Coefficients at = coefficients[piece.group];
        const Buffers<P, G, C> buffers(segments, piece, zero_grads);
        if (piece.length == STATE_BLOCK && buffers.is_wide(piece)) {
            rule.template update<true>(tables, piece, i, lane, at, buffers, round);
        } else {
            rule.template update<false>(tables, piece, i, lane, at, buffers, round);
        }
        piece = next;
    }
}

// One step of all pieces, each of at most 256 elements, after adam_8bit_prepare or lion_prepare (optim.cu):
// <optimizer>_8bit_step_<dtype of the gradients>_<dtype of the copy>, for f32_bf16, f32_f16, bf16_bf16, f16_f16.
// With gradient g = gain * grads, p = params, states m, v = table.values[code] * scale, and the coefficients of the piece's group, where
// gain1 = 1 - beta1 and gain2 = 1 - beta2:
//   adam: m = beta1 * m + gain1 * g; v = beta2 * v + gain2 * g^2; p = decay * (p + step_size * m / (sqrt(v) + eps)), where step_size
//         is negative;
//   lion: p = decay * p - step_size * sign(beta1 * m + gain1 * g); m = beta2 * m + gain2 * g;
// then, for each state s, scale = the largest magnitude of s in the piece, and code = the code of the table's value nearest to s / scale.
// If an element's gradient is infinite or NaN (in adam also if v overflows), its states become 0 and its parameter does not change.
// Finally, copy = params in the copy's dtype, unless the copy is null, and grads = 0 if zero_grads is 1.
//   pieces [count]; segments: those that the pieces' indices name, with f32 params; coefficients [groups];
//   codes1, codes2: u8 [blocks * 256], aligned to 4 bytes; scales1, scales2: f32 [blocks]. A piece has the block `piece.state`. All are
//   zeros before the first step. codes2 and scales2 are null for Lion, which has one state.
// Grid: (count + 7) / 8 (a piece for each of the 8 warps of a block), at most 3 for each multiprocessor; block: 256; no dynamic shared
// memory.
#define DEFINE_STEP(NAME, RULE, suffix, G, C)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
    NAME##_8bit_step_##suffix(const Piece *pieces, uint32_t count, const Segment *segments,                            \
                              const Coefficients *coefficients, uint32_t zero_grads, uint8_t *codes1, float *scales1,  \
                              uint8_t *codes2, float *scales2) {                                                       \
        follow();                                                                                                      \
        step<RULE, float, G, C>(pieces, count, segments, coefficients, zero_grads, {codes1, scales1, codes2, scales2}, \
                                RoundNearest{});                                                                       \
    }
#define DEFINE_STEPS(suffix, G, C)                                                                                     \
    DEFINE_STEP(adam, AdamBlocks, suffix, G, C)                                                                        \
    DEFINE_STEP(lion, LionBlocks, suffix, G, C)
FOR_EACH_GRADIENT_AND_COPY(DEFINE_STEPS)

// <optimizer>_8bit_rounded_bf16: as <optimizer>_8bit_step_*, for parameters and gradients of bf16, without copies. The kernel rounds
// the parameters stochastically. optim.cu describes this rounding, `settings` and `firsts`.
#define DEFINE_ROUNDED(NAME, RULE)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
    NAME##_8bit_rounded_bf16(const Piece *pieces, uint32_t count, const Segment *segments,                             \
                             const Coefficients *coefficients, const Settings *settings, const uint32_t *firsts,       \
                             uint32_t zero_grads, uint8_t *codes1, float *scales1, uint8_t *codes2, float *scales2) {  \
        follow();                                                                                                      \
        step<RULE, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(pieces, count, segments, coefficients, zero_grads,     \
                                                                {codes1, scales1, codes2, scales2},                    \
                                                                RoundStochastically{settings, firsts});                \
    }
DEFINE_ROUNDED(adam, AdamBlocks)
DEFINE_ROUNDED(lion, LionBlocks)
