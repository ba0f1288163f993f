// Tensor-core products of f16 and bf16 tiles (PTX `mma.sync.m16n8k16`, `ldmatrix`) and asynchronous copies into shared memory.
//
// A tile in shared memory consists of panels of 64 columns. A panel stores its rows one after another, 128 bytes each. A row of a panel
// has eight 16-byte chunks; chunk c of row r is stored as chunk c ^ (r % 8) of the row. The eight rows of a matrix that `ldmatrix` reads
// are therefore in different banks.
//
// The PTX manual defines which elements of a 16 x 8 product each thread has. With g = lane / 4 and t = lane % 4, the four
// accumulators of a thread are the elements (g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t) and (g + 8, 2 * t + 1). If the accumulators of
// two neighbouring products are rounded to 16 bits, they have the layout of a 16 x 16 left operand. A second product can thus use the
// result of a first one without an exchange between threads.
#pragma once

#include "../functions.cuh"
#include "warpgroup.cuh"

// Number of values in a 16-byte chunk. Copies move whole chunks, and the chunks of a row are stored in the permuted order above.
constexpr int CHUNK = 8;

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8 x 8 matrices. Lanes 8 * i to 8 * i + 7 pass the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// Loads four 8 x 8 matrices as `load_matrices` does, and transposes each of them.
__device__ __forceinline__ void load_transposed(uint32_t (&matrices)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// sum += a @ b, where sum is (16, 8), a is (16, 16) and b, in registers `b0` and `b1`, is (16, 8).
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two values to `T` and packs them into a register: `first` in the low half, `second` in the high half.
template <typename T> __device__ __forceinline__ uint32_t pair(float first, float second);
template <> __device__ __forceinline__ uint32_t pair<__half>(float first, float second) {
    __half2 values = __floats2half2_rn(first, second);
    return *reinterpret_cast<uint32_t *>(&values);
}
template <> __device__ __forceinline__ uint32_t pair<__nv_bfloat16>(float first, float second) {
    __nv_bfloat162 values = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<uint32_t *>(&values);
}

// Starts to write 16 bytes to shared memory: the first `bytes` bytes from global memory, then zeros.
__device__ __forceinline__ void copy_wide(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Starts to write 4 bytes to shared memory: the first `bytes` bytes from global memory, then zeros.
__device__ __forceinline__ void copy_word(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Call this after the copies that `wait_for_copies` must wait for.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all copies that came before `end_copies`, in any thread of the block, have arrived in shared memory.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    publish_to_products(); // Makes what this thread wrote visible to `wgmma`; without `wgmma` it does nothing.
    __syncthreads();
}

// Number of bytes in `rows` rows of `D` two-byte values.
template <int D> __host__ __device__ constexpr int tile_bytes(int rows) { return rows * D * 2; }

// Number of bytes in a row of a panel, and number of 16-column steps in a panel.
constexpr int ROW_BYTES = 128, PANEL_STEPS = 4;

// The offset in bytes of chunk `chunk` of row `row` from the start of a tile of `ROWS` rows.
template <int ROWS> __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return chunk / 8 * (ROWS * ROW_BYTES) + row * ROW_BYTES + ((chunk % 8 ^ (row & 7)) << 4);
}

// `address` is that of a chunk in the first 16 columns of a tile. Returns the address of the corresponding chunk of the same row in the 16
// columns of step `step`. A step is two chunks, 32 bytes. The first step has the chunks 0 and 1, so within a panel `step` sets only the
// upper two bits of the chunk's index. An exclusive or sets them in the permuted index too, because the permutation is an exclusive or
// itself.
template <int ROWS> __device__ __forceinline__ uint32_t step_columns(uint32_t address, int step) {
    return (address ^ (step % PANEL_STEPS << 5)) + step / PANEL_STEPS * (ROWS * ROW_BYTES);
}

// Starts to copy `ROWS` rows and `D` columns to a tile. Row i begins at `source + i * stride`. Only `rows` rows and `width` columns exist
// in the source; the rest of the tile becomes zero. The address `source` and the distance between rows must be multiples of 16 bytes, and
// `width` a multiple of `CHUNK`. `THREADS` threads take part.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void copy_tile(uint32_t tile, const T *source, uint64_t stride, int rows, int width) {
    // The threads copy `STEP` rows at a time. A multiple of 8 keeps row % 8, and so the order of a thread's chunks, in all iterations.
    constexpr int CHUNKS = D / CHUNK, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0 && (STEP % 8 == 0), "all threads copy the same number of chunks");
    const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const bool in_width = chunk * CHUNK < width;
    const uint32_t to = tile + chunk_offset<ROWS>(first, chunk);
    const T *from = source + first * stride + chunk * CHUNK;
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP) {
        const bool exists = in_width && first + row < rows;
        // A copy of 0 bytes writes zeros; its source is not read, but must be a valid address.
        copy_wide(to + row * ROW_BYTES, exists ? from + row * stride : source, exists ? 16 : 0);
    }
}

// The left operand of products: the 16 * M rows of this warp, in a tile of `ROWS` rows. Each product reads them from shared memory.
template <int D, int M, int ROWS> struct SharedRows {
    // The address of the first row of this thread's warpgroup (for `wgmma`), and the address that this lane passes to `ldmatrix` for the
    // warp's first 16 rows and 16 columns.
    uint32_t warpgroup_address, address;

    __device__ __forceinline__ explicit SharedRows(uint32_t tile) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        warpgroup_address = tile + warp / 4 * (4 * 16 * M * ROW_BYTES);
        address = tile + warp * 16 * M * ROW_BYTES + chunk_offset<ROWS>(lane % 16, lane / 16);
    }

    __device__ __forceinline__ void begin_iteration() {}

    // Gets the warp's rows 16 * m to 16 * m + 15 and columns 16 * k to 16 * k + 15, as the left operand of `multiply_add`.
    __device__ __forceinline__ void get(uint32_t (&fragment)[4], int m, int k) const {
        load_matrices(fragment, step_columns<ROWS>(address, k) + m * 16 * ROW_BYTES);
    }
};

// The same left operand in registers. With `mma.sync`, the constructor loads it once. With `wgmma`, `begin_iteration` loads it in each
// iteration of the loop that uses it (warpgroup.cuh says why).
template <int D, int M, int ROWS> struct HeldRows {
    SharedRows<D, M, ROWS> shared;
    uint32_t fragments[M][D / 16][4];

    __device__ __forceinline__ explicit HeldRows(uint32_t tile) : shared(tile) {
        if (!BY_WARPGROUP<M>) load();
    }

    __device__ __forceinline__ void begin_iteration() {
        if (BY_WARPGROUP<M>) load();
    }

    __device__ __forceinline__ void load() {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int k = 0; k < D / 16; k++) shared.get(fragments[m][k], m, k);
    }

    __device__ __forceinline__ void get(uint32_t (&fragment)[4], int m, int k) const {
#pragma unroll
        for (int i = 0; i < 4; i++) fragment[i] = fragments[m][k][i];
    }
};

#if WARPGROUP_PRODUCTS
// sum = a @ b.T with `wgmma`: the form of `multiply_rows` for rows `a` in shared memory, and the form for rows `a` in registers. The last
// argument of `warpgroup_multiply` says whether the product is added to `sum`, as all but the first are. `describe` makes the descriptor by
// which `wgmma` finds an operand in shared memory.
template <typename T, int D, int N, int ROWS, int ROWS_OF_A>
__device__ __forceinline__ void warpgroup_rows(float (&sum)[N / 8][4], const SharedRows<D, 1, ROWS_OF_A> &a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        warpgroup_multiply(T(), sum, describe(step_columns<ROWS_OF_A>(a.warpgroup_address, k)), describe(step_columns<ROWS>(b, k)), k > 0);
}

template <typename T, int D, int N, int ROWS, int ROWS_OF_A>
__device__ __forceinline__ void warpgroup_rows(float (&sum)[N / 8][4], const HeldRows<D, 1, ROWS_OF_A> &a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) warpgroup_multiply(T(), sum, a.fragments[0][k], describe(step_columns<ROWS>(b, k)), k > 0);
}
#endif

// sum = a @ b.T, where sum is (16 * M, N), a is (16 * M, D) in a tile of `ROWS_OF_A` rows, and b (N, D) consists of N rows of a tile of
// `ROWS` rows. With `wgmma` (BY_WARPGROUP) the products are asynchronous, and the caller must wait for them (warpgroup.cuh). With
// `mma.sync` they are done on return.
template <typename T, int D, int M, int N, int ROWS, template <int, int, int> class Rows, int ROWS_OF_A>
__device__ __forceinline__ void multiply_rows(float (&sum)[M][N / 8][4], const Rows<D, M, ROWS_OF_A> &a, uint32_t b) {
#if WARPGROUP_PRODUCTS
    if constexpr (BY_WARPGROUP<M>) {
        warpgroup_rows<T, D, N, ROWS>(sum[0], a, b);
        return;
    }
#endif
    const int lane = threadIdx.x % WARP;
    // The four 8 x 8 matrices of a load: rows 0 to 7 of b, both chunks of a step, then rows 8 to 15, both chunks.
    const uint32_t address = b + chunk_offset<ROWS>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) a.get(left[m], m, k);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t right[4];
            load_matrices(right, step_columns<ROWS>(address, k) + n * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(sum[m][2 * n], left[m], right[0], right[1]);
                multiply_add<T>(sum[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Accumulators (16 * M, N), rounded to `T`, as the left operand of products (see the top of the file).
template <typename T, int M, int N> struct Weights {
    uint32_t fragments[M][N / 16][4];

    __device__ __forceinline__ explicit Weights(const float (&sum)[M][N / 8][4]) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int k = 0; k < N / 16; k++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    fragments[m][k][i] = pair<T>(sum[m][2 * k + i / 2][i % 2 * 2], sum[m][2 * k + i / 2][i % 2 * 2 + 1]);
    }
};

// sum += weights @ x, where sum is (16 * M, D), weights is (16 * M, N), and x (N, D) consists of N rows of a tile of `ROWS` rows. As in
// `multiply_rows`, the caller must wait for the products if they use `wgmma`.
template <typename T, int D, int M, int N, int ROWS>
__device__ __forceinline__ void add_weighted_rows(float (&sum)[M][D / 8][4], const Weights<T, M, N> &weights, uint32_t x) {
#if WARPGROUP_PRODUCTS
    if constexpr (BY_WARPGROUP<M>) {
#pragma unroll
        for (int panel = 0; panel < D / 64; panel++) {
            auto &panel_sum = *reinterpret_cast<float(*)[8][4]>(&sum[0][panel * 8]);
#pragma unroll
            for (int k = 0; k < N / 16; k++)
                warpgroup_multiply_add(T(), panel_sum, weights.fragments[0][k],
                                       describe(x + panel * (ROWS * ROW_BYTES) + k * 16 * ROW_BYTES));
        }
        return;
    }
#endif
    const int lane = threadIdx.x % WARP;
    // The four 8 x 8 matrices of a load: the first chunk of a step, of rows 0 to 7 and of rows 8 to 15, then the second chunk.
    const uint32_t address = x + chunk_offset<ROWS>(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t right[4];
            load_transposed(right, step_columns<ROWS>(address, n) + k * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(sum[m][2 * n], weights.fragments[m][k], right[0], right[1]);
                multiply_add<T>(sum[m][2 * n + 1], weights.fragments[m][k], right[2], right[3]);
            }
        }
    }
}

// Rounds the accumulators of a warp, (16 * M, D), to `T` and writes them to global memory. Row i begins at `to + i * stride`. Only `rows`
// rows (none if that is negative) and `width` columns, a multiple of `CHUNK`, are written. The values pass through shared memory: `tile`
// points at the 16 * M rows of this warp in a tile of `ROWS` rows, which are overwritten. That tile may be the left operand of the
// products. All threads of the block take part.
template <typename T, int D, int M, int ROWS>
__device__ __forceinline__ void write_rows(T *to, uint64_t stride, int rows, int width, const float (&sum)[M][D / 8][4],
                                           unsigned char *tile) {
    constexpr int CHUNKS = D / CHUNK, STEP = WARP / CHUNKS;
    // `group` and `member` are g and t at the top of the file.
    const int lane = threadIdx.x % WARP, group = lane / 4, member = lane % 4;
    // If the tile is the products' left operand: a product by `wgmma` reads the rows of all four warps of the warpgroup, so all warps must
    // have finished their products before a warp overwrites its rows. A product by `mma.sync` reads the rows of one warp only.
    if constexpr (BY_WARPGROUP<M>)
        __syncthreads();
    else
        __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) // Rows g, then rows g + 8.
                *reinterpret_cast<uint32_t *>(tile + chunk_offset<ROWS>(m * 16 + half * 8 + group, n) + member * 4) =
                    pair<T>(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
    __syncwarp();
    const int chunk = lane % CHUNKS;
#pragma unroll
    for (int start = 0; start < 16 * M; start += STEP) {
        const int row = start + lane / CHUNKS;
        if (row < rows && chunk * CHUNK < width)
            *reinterpret_cast<uint4 *>(to + row * stride + chunk * CHUNK) =
                *reinterpret_cast<const uint4 *>(tile + chunk_offset<ROWS>(row, chunk));
    }
}
