// Products x wᵀ of 8-bit codes (int8 or e4m3) with the matrix instructions and the copy engine of compute capability 9.0 (code for sm_90a
// alone). In each block of threads, one thread copies tiles of codes; two warpgroups multiply 64 rows by 80 to 256 columns each, scale the
// sums and store them. Two blocks form a cluster: they take neighbouring tiles of rows and the same columns, and each block fetches half
// of the columns' codes for both.
#pragma once

#include "../rows.cuh"
#include "../stages.cuh"
#include "multiply.cuh"
#include "parts.cuh"

// Maps of the codes of x (rows, inner) and of each part of w. They have elements of 8 bits, dimensions (inner, 1, rows), boxes
// (128, 1, 128) for x and (128, 1, COLUMNS / 2) for w, and a 128-byte swizzle. The dimension of size 1 is there because `copy_box` takes
// maps of three dimensions. Elements outside a matrix are read as zeros.
struct CodeMaps {
    TensorMap x, w[MOST_PARTS];
};

// Exchanges values among four lanes t = 0 to 3. Each lane passes a value of each of four column blocks: `a` to `d` belong to column blocks
// 0 to 3. Lane t gets the four lanes' values of column block t.
__device__ __forceinline__ uint4 exchange(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    // First, neighbouring lanes exchange values of column blocks 0 and 1, and of column blocks 2 and 3.
    const uint32_t ab = __shfl_xor_sync(ALL_LANES, odd ? a : b, 1), cd = __shfl_xor_sync(ALL_LANES, odd ? c : d, 1);
    if (odd) a = ab, c = cd;
    else b = ab, d = cd;
    // Lane t now has two values of column block t % 2 and two of column block t % 2 + 2: `a` and `c` come from the even lane of its pair
    // of lanes, `b` and `d` from the odd lane.
    const uint32_t ac = __shfl_xor_sync(ALL_LANES, high ? a : c, 2), bd = __shfl_xor_sync(ALL_LANES, high ? b : d, 2);
    return high ? make_uint4(ac, bd, c, d) : make_uint4(a, b, ac, bd);
}

// Rounds two values to T and packs them into a word: `x` in the low half, `y` in the high half.
template <typename T> __device__ __forceinline__ uint32_t narrow_pair(float x, float y) {
    const float values[2] = {x, y};
    const Pack<T, 2> pack = narrow_pack<T>(values);
    uint32_t word;
    memcpy(&word, &pack, 4);
    return word;
}

// The sums of eight pairs of values, each rounded to T.
template <typename T> __device__ __forceinline__ uint4 add_eight(uint4 x, uint4 y) {
    Pack<T, 8> a, b;
    memcpy(&a, &x, 16);
    memcpy(&b, &y, 16);
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] = widen(a.values[i]) + widen(b.values[i]);
    a = narrow_pack<T>(sums);
    memcpy(&x, &a, 16);
    return x;
}

// out[i, j] = round((Σ_k x[i, k] w[j, k]) row_scales[i] scales[j] + bias[j]) + residual[i, j]. x is (rows, inner). w has `count` parts,
// whose rows are the columns of out; `parts` has their scales, their numbers of rows, and the first column of out of each part (`start`).
// The rows of out and residual are `stride` elements apart. bias and residual may be null.
// Sum is uint32_t for int8 codes and float for e4m3 codes. The instructions keep about 14 bits of their sums of e4m3 codes, so the sums of
// stages are added in f32. A stage holds STEP values of k: ROWS rows of x (LEFT_BYTES bytes), then COLUMNS rows of w. A thread has SUMS
// sums, because the 128 threads of a warpgroup share 64 rows by COLUMNS columns.
template <typename T, typename Sum, int COLUMNS, int STAGES> struct CodesProduct {
    static constexpr int ROWS = 128, STEP = 128, LEFT_BYTES = ROWS * STEP, STAGE_BYTES = LEFT_BYTES + COLUMNS * STEP,
                         WORKERS = 2 * WARPGROUP, SUMS = COLUMNS / 2;
    using Ring = Stages<STAGES, STAGE_BYTES, /*CLUSTER=*/2>;

    T *out;
    const T *bias, *residual;
    const float *row_scales;
    const CodeMaps &maps;
    const CodeParts &parts;
    uint32_t rows, inner, stride, count;

    // A tile of the cluster: 256 rows, of which this block takes half, and COLUMNS columns of a part. `row` is the first row of this
    // block's half, `column` the first column, counted from the start of the part.
    struct Tile {
        uint32_t row, part, column;
    };

    // Sets `tile` to this block's half of tile number `index`. Tiles are numbered down the rows first, then across the columns of the first
    // part, then across those of the next part. Returns false if there is no such tile.
    __device__ __forceinline__ bool find(uint32_t index, Tile &tile) const {
        // The number of tiles from top to bottom; a tile has the rows of a pair of blocks.
        const uint32_t pairs = (rows + 2 * ROWS - 1) / (2 * ROWS);
        // The tile's position across the columns, in tiles. It is counted from the start of the first part; after the loop, from the start
        // of part `tile.part`.
        uint32_t across = index / pairs;
        tile.row = (index % pairs * 2 + cluster_rank()) * ROWS;
        for (tile.part = 0; tile.part < count; tile.part++) {
            const uint32_t tiles = (parts.list[tile.part].rows + COLUMNS - 1) / COLUMNS;
            if (across < tiles) break;
            across -= tiles;
        }
        tile.column = across * COLUMNS;
        return tile.part < count;
    }

    // For the copying thread: fills the stages with the codes of this block's tiles, one tile after the other. The rows of x are for this
    // block alone (copy_box<false>). This block's half of the rows of w goes to both blocks of the cluster (copy_box<true>). A box begins
    // at the indices (k, 0, row) of the map. The cluster's number is blockIdx.x / 2; it takes the tile of this number, and further tiles at
    // distances of the number of clusters.
    __device__ __forceinline__ void copy(Ring ring) const {
        // The first of the columns of a tile (rows of w) that this block fetches.
        const uint32_t first = cluster_rank() * (COLUMNS / 2);
        Tile tile;
        for (uint32_t index = blockIdx.x / 2; find(index, tile); index += gridDim.x / 2)
            for (uint32_t k = 0; k < inner; k += STEP) {
                ring.begin_copies();
                copy_box<false>(ring.address(), maps.x, ring.barrier(), k, 0, tile.row);
                copy_box<true>(ring.address() + LEFT_BYTES + first * STEP, maps.w[tile.part], ring.barrier(), k, 0, tile.column + first);
                ring.advance();
            }
    }

    // Starts to compute stage_sums = the sums of a stage's products, or stage_sums += them if `add`. The caller has to wait for the
    // products. A descriptor tells the multiplication where an operand is in shared memory; adding 1 to it moves the operand by
    // DESCRIPTOR_UNIT bytes. A warpgroup takes 64 of the rows of x, and one multiplication sums over 32 values of k.
    __device__ __forceinline__ void multiply_stage(const Ring &ring, Sum (&stage_sums)[SUMS], bool add) const {
        const uint32_t left = rows_descriptor(ring.address()) + threadIdx.x / WARPGROUP * (64 * STEP / DESCRIPTOR_UNIT);
        const uint32_t right = rows_descriptor(ring.address() + LEFT_BYTES);
        // A barrier completes one phase in each round of the ring. The phase has the parity of the round.
        barrier_wait(ring.barrier(), ring.round & 1);
        multiply_fence();
#pragma unroll
        for (uint32_t slice = 0; slice < STEP; slice += 32)
            multiply_codes(stage_sums, left + slice / DESCRIPTOR_UNIT, right + slice / DESCRIPTOR_UNIT, add || slice > 0);
        multiply_commit();
    }

    // Keeps the compiler from reading sums before the products are done.
    static __device__ __forceinline__ void products_are_ready(Sum (&sums)[SUMS]) {
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if constexpr (std::is_same_v<Sum, float>) asm volatile("" : "+f"(sums[i])::"memory");
            else asm volatile("" : "+r"(sums[i])::"memory");
    }

    // sums = the sums of a tile's products. Products of one stage run while the next are started: `multiply_wait<1>` waits until only the
    // newest stage's are unfinished. `ring.leave_last` then releases the finished stage, the one before the ring's current stage.
    __device__ __forceinline__ void sum_up(Ring &ring, Sum (&sums)[SUMS]) const {
        if constexpr (std::is_same_v<Sum, float>) {
            add_stages(ring, sums);
        } else {
            for (uint32_t k = 0; k < inner; k += STEP) {
                multiply_stage(ring, sums, /*add=*/k > 0);
                multiply_wait<1>();
                if (k > 0) ring.leave_last();
                ring.advance();
            }
            multiply_wait<0>();
            ring.leave_last();
            products_are_ready(sums);
        }
    }

    // Does what `sum_up` does, for e4m3 codes. While the products of a stage are computed, the sums of the stage before are added.
    __device__ __forceinline__ void add_stages(Ring &ring, Sum (&sums)[SUMS]) const {
        Sum even[SUMS], odd[SUMS];
        const auto add = [&](Sum (&stage_sums)[SUMS]) {
            products_are_ready(stage_sums);
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] += stage_sums[i];
        };
        // Waits for the products of the tile's last stage, and adds them.
        const auto finish = [&](Sum (&stage_sums)[SUMS]) {
            multiply_wait<0>();
            ring.leave_last();
            add(stage_sums);
        };
        // Starts the products of a stage (`next`), and adds those of the stage before (`previous`).
        const auto multiply_and_add = [&](Sum (&next)[SUMS], Sum (&previous)[SUMS]) {
            multiply_stage(ring, next, /*add=*/false);
            multiply_wait<1>();
            ring.leave_last();
            ring.advance();
            add(previous);
        };
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        multiply_stage(ring, even, /*add=*/false);
        ring.advance();
        for (uint32_t k = STEP;; k += 2 * STEP) {
            if (k >= inner) return finish(even);
            multiply_and_add(odd, even);
            if (k + STEP >= inner) return finish(odd);
            multiply_and_add(even, odd);
        }
    }

    // What scales a tile's sums: the factors of this thread's two rows, and the factor (`column`) and the addend (`bias`) of the tile's
    // column number threadIdx.x. They are loaded before the products, because loads one after the other at the end of a tile took longer
    // than its products.
    struct Factors {
        float rows[2], column, bias;
    };

    // Loads a value. The volatile assembly keeps the compiler from moving the load behind the products.
    static __device__ __forceinline__ float load_early(const float *from) {
        float value;
        asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
        return value;
    }
    static __device__ __forceinline__ float load_early(const T *from) {
        uint16_t bits;
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(from));
        T value;
        memcpy(&value, &bits, 2);
        return widen(value);
    }

    // Converts a sum of products to f32.
    static __device__ __forceinline__ float number(uint32_t sum) { return static_cast<float>(static_cast<int32_t>(sum)); }
    static __device__ __forceinline__ float number(float sum) { return sum; }

    // The first of this thread's two rows of a tile; the second is eight rows below.
    static __device__ __forceinline__ uint32_t row_of(const Tile &tile) {
        return tile.row + threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
    }

    __device__ __forceinline__ Factors load_factors(const Tile &tile) const {
        const CodePart &part = parts.list[tile.part];
        const uint32_t row = row_of(tile), column = tile.column + threadIdx.x;
        Factors factors{{0.0f, 0.0f}, 1.0f, 0.0f};
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (row + 8 * r < rows) factors.rows[r] = load_early(row_scales + row + 8 * r);
        if (threadIdx.x >= COLUMNS || column >= part.rows) return factors;
        const float *scales = static_cast<const float *>(part.scales);
        if (scales != nullptr) factors.column = load_early(scales + (part.scale_count == 1 ? 0 : column));
        if (bias != nullptr) factors.bias = load_early(bias + part.start + column);
        return factors;
    }

    // For the multiplying threads: computes this block's tiles. `columns` has room for the factors and addends of the columns of two tiles,
    // because some threads may still read those of a tile when others write those of the next.
    __device__ __forceinline__ void multiply(Ring ring, float2 (*columns)[COLUMNS]) const {
        Tile tile;
        uint32_t turn = 0;
        for (uint32_t index = blockIdx.x / 2; find(index, tile); index += gridDim.x / 2, turn ^= 1) {
            const Factors factors = load_factors(tile);
            Sum sums[SUMS];
            sum_up(ring, sums);
            if (threadIdx.x < COLUMNS) columns[turn][threadIdx.x] = make_float2(factors.column, factors.bias);
            // A barrier (number 1) of the multiplying threads alone; the copying thread does not take part.
            asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
            store(tile, factors.rows, columns[turn], sums);
        }
    }

    // Scales the sums of a tile and stores the results. sums[4 n + 2 r + c] belongs to row r of this thread's two rows, and to column c of
    // its two columns (2 t + c, with t = lane % 4) in the n-th block of eight columns.
    __device__ __forceinline__ void store(const Tile &tile, const float (&row_factors)[2], const float2 *columns,
                                          const Sum (&sums)[SUMS]) const {
        const CodePart &part = parts.list[tile.part];
        const uint32_t row = row_of(tile), t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < (COLUMNS + 31) / 32; i++) {
            // Four blocks of eight columns; the last blocks may be beyond the tile. words[r][b] is row r, block b.
            uint32_t words[2][4] = {};
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const int n = 4 * i + b;
                if (n >= COLUMNS / 8) break;
                // The factors (x, z) and the addends (y, w) of this thread's two columns.
                const float4 two = *reinterpret_cast<const float4 *>(columns + n * 8 + t * 2);
#pragma unroll
                for (int r = 0; r < 2; r++)
                    words[r][b] = narrow_pair<T>(number(sums[4 * n + 2 * r]) * row_factors[r] * two.x + two.y,
                                                 number(sums[4 * n + 2 * r + 1]) * row_factors[r] * two.z + two.w);
            }
            // After `exchange`, this thread has all eight columns of block t of the four.
            const uint32_t tile_column = (4 * i + t) * 8, column = tile.column + tile_column;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 eight = exchange(words[r][0], words[r][1], words[r][2], words[r][3]);
                // COLUMNS and, as the host checks, the numbers of rows of the parts are multiples of 8. So a part has all eight columns
                // or none.
                if (row + 8 * r >= rows || tile_column >= COLUMNS || column >= part.rows) continue;
                const uint64_t at = static_cast<uint64_t>(row + 8 * r) * stride + part.start + column;
                if (residual != nullptr) eight = add_eight<T>(eight, *reinterpret_cast<const uint4 *>(residual + at));
                *reinterpret_cast<uint4 *>(out + at) = eight;
            }
        }
    }

    // Shared memory: the stages, their barriers, and then the factors and addends of the columns of two tiles.
    static __device__ __forceinline__ unsigned char *shared_memory() {
        extern __shared__ __align__(1024) unsigned char shared[];
        return shared;
    }

    static __device__ __forceinline__ Ring stages() { return {static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory()))}; }

    // What a kernel does before it waits for the kernel before it.
    static __device__ __forceinline__ void prepare(const CodeMaps &maps, const CodeParts &parts, uint32_t count) {
        stages().init();
        if (threadIdx.x != WORKERS) return;
        prefetch(maps.x);
        for (uint32_t part = 0; part < count; part++)
            if (parts.list[part].rows > 0) prefetch(maps.w[part]);
    }

    __device__ __forceinline__ void run() const {
        const Ring ring = stages();
        if (threadIdx.x >= WORKERS) {
            // The warps that do not multiply leave their registers to the two warpgroups, which need more for the sums.
            registers_fewer<40>();
            if (threadIdx.x == WORKERS) copy(ring);
            __syncwarp();
        } else {
            registers_more<232>();
            // A stage has two barriers of 8 bytes.
            multiply(ring, reinterpret_cast<float2(*)[COLUMNS]>(shared_memory() + STAGES * (STAGE_BYTES + 16)));
        }
        // The other block of the cluster may still write to this block's shared memory or signal its barriers, so this block must not end
        // before the other.
        cluster_wait();
    }
};
