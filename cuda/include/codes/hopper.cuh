// Products of int8 codes with the matrix instructions and the copy engine of compute capability 9.0 (code for sm_90a alone). One
// thread copies tiles; two warpgroups multiply 64 rows by 128 or 256 columns each, scale the sums and store them. Two blocks form a cluster:
// they take neighbouring tiles of rows and the same columns, and each block fetches half of the columns' codes for both.
#pragma once

#include "../rows.cuh"
#include "../stages.cuh"
#include "parts.cuh"

// Maps of the codes of x (rows, inner) and of each part of w. They have elements of 8 bits, dimensions (inner, 1, rows), boxes
// (128, 1, 128) for x and (128, 1, COLUMNS / 2) for w, and a 128-byte swizzle. Elements outside a matrix are read as zeros.
struct CodeMaps {
    TensorMap x, w[MOST_PARTS];
};

// The descriptor of an operand with rows of 128 bytes, for a product whose sum runs along the rows: 128-byte swizzle, groups of eight rows
// 1024 bytes apart.
__device__ __forceinline__ uint64_t rows_descriptor(uint32_t address) {
    return (address & 0x3ffff) >> 4 | 1ull << 16 | uint64_t(1024 >> 4) << 32 | 1ull << 62;
}

#define SUMS_16(d, i)                                                                                                                  \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7]),        \
        "+r"(d[i + 8]), "+r"(d[i + 9]), "+r"(d[i + 10]), "+r"(d[i + 11]), "+r"(d[i + 12]), "+r"(d[i + 13]), "+r"(d[i + 14]),           \
        "+r"(d[i + 15])
#define SUMS_64(d) SUMS_16(d, 0), SUMS_16(d, 16), SUMS_16(d, 32), SUMS_16(d, 48)
#define SUMS_128(d)                                                                                                                    \
    SUMS_64(d), SUMS_16(d, 64), SUMS_16(d, 80), SUMS_16(d, 96), SUMS_16(d, 112)
#define REGISTERS_64                                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "        \
    "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "         \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_128                                                                                                                  \
    REGISTERS_64                                                                                                                       \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "                                                                             \
    "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "         \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "           \
    "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// sums (64 rows, 128 columns) = a bᵀ, or sums += a bᵀ if `adds`, with a (64, 32) and b (128, 32).
__device__ __forceinline__ void multiply_codes(uint32_t (&sums)[64], uint64_t a, uint64_t b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" REGISTERS_64 "}, %64, %65, adds;\n}"
                 : SUMS_64(sums)
                 : "l"(a), "l"(b), "r"(int(adds)));
}

// sums (64 rows, 256 columns) = a bᵀ, or sums += a bᵀ if `adds`, with a (64, 32) and b (256, 32).
__device__ __forceinline__ void multiply_codes(uint32_t (&sums)[128], uint64_t a, uint64_t b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" REGISTERS_128 "}, %128, %129, adds;\n}"
                 : SUMS_128(sums)
                 : "l"(a), "l"(b), "r"(int(adds)));
}

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

template <typename T> __device__ __forceinline__ uint32_t narrow_pair(float x, float y) {
    const float values[2] = {x, y};
    const Pack<T, 2> pack = narrow_pack<T>(values);
    uint32_t word;
    memcpy(&word, &pack, 4);
    return word;
}

// out[i, j] = (Σ_k x[i, k] w[j, k]) row_scales[i] scales[j] + bias[j], for the rows of all parts of w.
template <typename T, int COLUMNS, int STAGES> struct CodesProduct {
    static constexpr int ROWS = 128, STEP = 128, LEFT_BYTES = ROWS * STEP, STAGE_BYTES = LEFT_BYTES + COLUMNS * STEP,
                         WORKERS = 2 * WARPGROUP, SUMS = COLUMNS / 2;
    using Ring = Stages<STAGES, STAGE_BYTES, 2>;

    T *out;
    const T *bias;
    const float *row_scales;
    const CodeMaps &maps;
    const CodeParts &parts;
    uint32_t rows, inner, stride, count;

    // A tile of the cluster: 256 rows, of which this block takes half, and COLUMNS columns of a part.
    struct Tile {
        uint32_t row, part, column;
    };

    __device__ __forceinline__ bool find(uint32_t index, Tile &tile) const {
        const uint32_t pairs = (rows + 2 * ROWS - 1) / (2 * ROWS);
        uint32_t column = index / pairs;
        tile.row = (index % pairs * 2 + cluster_rank()) * ROWS;
        for (tile.part = 0; tile.part < count; tile.part++) {
            const uint32_t tiles = (parts.list[tile.part].rows + COLUMNS - 1) / COLUMNS;
            if (column < tiles) break;
            column -= tiles;
        }
        tile.column = column * COLUMNS;
        return tile.part < count;
    }

    __device__ __forceinline__ void copy(Ring ring) const {
        const uint32_t half = cluster_rank() * (COLUMNS / 2);
        Tile tile;
        for (uint32_t index = blockIdx.x / 2; find(index, tile); index += gridDim.x / 2)
            for (uint32_t k = 0; k < inner; k += STEP) {
                ring.begin_copies();
                copy_box<false>(ring.address(), maps.x, ring.barrier(), k, 0, tile.row);
                copy_box<true>(ring.address() + LEFT_BYTES + half * STEP, maps.w[tile.part], ring.barrier(), k, 0, tile.column + half);
                ring.advance();
            }
    }

    __device__ __forceinline__ void multiply(Ring ring) const {
        const uint32_t left = threadIdx.x / WARPGROUP * 64 * STEP;
        Tile tile;
        for (uint32_t index = blockIdx.x / 2; find(index, tile); index += gridDim.x / 2) {
            uint32_t sums[SUMS];
            for (uint32_t k = 0; k < inner; k += STEP) {
                barrier_wait(ring.barrier(), ring.round & 1);
                multiply_fence();
#pragma unroll
                for (uint32_t slice = 0; slice < STEP; slice += 32)
                    multiply_codes(sums, rows_descriptor(ring.address() + left + slice),
                                            rows_descriptor(ring.address() + LEFT_BYTES + slice), k + slice > 0);
                multiply_commit();
                multiply_wait<1>();
                if (k > 0) ring.leave_last();
                ring.advance();
            }
            multiply_wait<0>();
            ring.leave_last();
#pragma unroll
            for (int i = 0; i < SUMS; i++) asm volatile("" : "+r"(sums[i])::"memory");
            store(tile, sums);
        }
    }

    __device__ __forceinline__ void store(const Tile &tile, const uint32_t (&sums)[SUMS]) const {
        const CodePart &part = parts.list[tile.part];
        const uint32_t lane = threadIdx.x % WARP, row = tile.row + threadIdx.x / WARP * 16 + lane / 4, t = lane % 4;
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) scale[r] = row + 8 * r < rows ? __ldg(row_scales + row + 8 * r) : 0.0f;
#pragma unroll
        for (int i = 0; i < COLUMNS / 32; i++) {
            // Four blocks of eight columns.
            uint32_t words[2][4];
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const int n = 4 * i + b;
                const uint32_t column = tile.column + n * 8 + t * 2;
                const bool exists = column < part.rows;
                float factor[2] = {1.0f, 1.0f}, more[2] = {0.0f, 0.0f};
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    if (exists && part.scales != nullptr) factor[c] = scale_of(part, column + c);
                    if (exists && bias != nullptr) more[c] = widen(bias[part.start + column + c]);
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float values[2];
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const auto number = static_cast<float>(static_cast<int32_t>(sums[4 * n + 2 * r + c]));
                        values[c] = number * scale[r] * factor[c] + more[c];
                    }
                    words[r][b] = narrow_pair<T>(values[0], values[1]);
                }
            }
            const uint32_t column = tile.column + (4 * i + t) * 8;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint4 eight = exchange(words[r][0], words[r][1], words[r][2], words[r][3]);
                if (row + 8 * r < rows && column < part.rows)
                    *reinterpret_cast<uint4 *>(out + static_cast<uint64_t>(row + 8 * r) * stride + part.start + column) = eight;
            }
        }
    }

    __device__ __forceinline__ void run(uint32_t shared) const {
        Ring ring{shared};
        ring.init();
        if (threadIdx.x >= WORKERS) {
            registers_fewer<40>();
            if (threadIdx.x == WORKERS) copy(ring);
            __syncwarp();
        } else {
            registers_more<232>();
            multiply(ring);
        }
        // The other block of the cluster may still write to this block's shared memory or signal its barriers, so this block must not end
        // before the other.
        cluster_wait();
    }
};
