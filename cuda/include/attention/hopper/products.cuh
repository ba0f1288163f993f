// Matrix products of a warpgroup (PTX `wgmma`) and the tiles that they read. Products are asynchronous: warps continue until they wait for
// them.
//
// Tiles have the layout of mma.cuh: panels of 64 columns, in which rows of 128 bytes follow one another. A row has eight chunks of 16
// bytes; chunk c of row r is stored as chunk c ^ (r % 8). The copy engine calls this order the 128-byte swizzle.
// Accumulators are distributed as those of `mma.sync`, warp by warp. With g = lane / 4 and
// t = lane % 4, the accumulators `sum[4 * n]` and `sum[4 * n + 1]` of a thread are the columns 8 * n + 2 * t and 8 * n + 2 * t + 1 of row
// 16 * warp + g. `sum[4 * n + 2]` and `sum[4 * n + 3]` are the same columns of row 16 * warp + g + 8.
#pragma once

#include "../mma.cuh"

// Number of threads of a warpgroup.
constexpr int WARPGROUP = 128;

// Returns `x`, which must be the same in the whole warp, and lets the compiler know that it is: descriptors computed from the result take
// uniform registers, not one register per lane.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(ALL_LANES, x, 0); }

// A descriptor (64 bits) says where `wgmma` finds an operand in shared memory. Its addresses and distances are in units of 16 bytes, hence
// the shifts by 4. The lower half has the address (18 bits, without the last 4) from bit 0 on, and the distance between panels from bit 16
// on. The upper half has the distance between groups of eight rows from bit 0 on, and the kind of swizzle in its two highest bits.
// The upper half of a tile's descriptor: 128-byte swizzle (1), and 1024 bytes from each group of eight rows to the next.
constexpr uint32_t UPPER_HALF = 1u << 30 | 1024 >> 4;

// The lower half of the descriptor of an operand at `address`, for a product whose sum runs over the rows of the operand's tile. The tile's
// panels begin `panel` bytes after one another.
__device__ __forceinline__ uint32_t across_rows(uint32_t address, uint32_t panel) {
    return uniform(panel >> 4 << 16 | (address & 0x3ffff) >> 4);
}

// The same for a product whose sum runs over the columns of the operand's tile. The hardware ignores the distance between
// panels then; 16 bytes, the unit of distances, stand for it.
__device__ __forceinline__ uint32_t along_rows(uint32_t address) { return across_rows(address, 16); }

// The lower half of the descriptor of an operand that begins `bytes` bytes after that of `descriptor`.
__device__ __forceinline__ uint32_t later(uint32_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// SUM_n(d, i): n accumulators of `d` from d[i] on, as operands of `asm`. REGISTERS_n: the first n operands, as a list in PTX.
#define SUM_8(d, i)                                                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUM_32(d, i) SUM_8(d, i), SUM_8(d, i + 8), SUM_8(d, i + 16), SUM_8(d, i + 24)
#define SUM_40(d, i) SUM_32(d, i), SUM_8(d, i + 32)
#define SUM_64(d, i) SUM_32(d, i), SUM_32(d, i + 32)
#define REGISTERS_32                                                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "    \
    "%26, %27, %28, %29, %30, %31}"
#define REGISTERS_40                                                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "    \
    "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}"
#define REGISTERS_64                                                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "    \
    "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "     \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// multiply_first computes sum = a @ b and multiply_next sum += a @ b, with `a` (64, 16) and `b` (16, columns) in shared memory. The
// arguments are the lower halves of their descriptors. A_ACROSS is 1 if the product sums over the rows of the tile of `a`, and 0 if it sums
// over the columns; B_ACROSS says the same of `b`.
// multiply_held computes sum += a @ b with `a` in registers; it sums over the rows of the tile of `b`.
// The value of the first argument has no meaning: its type chooses between f16 and bf16.
// The parameters A to F of the macro are the numbers of the `asm` operands after the accumulators. The last numbers of an instruction are
// whether it adds to the sum, the signs of `a` and `b` (1: not negated), and, for each operand in shared memory, A_ACROSS or B_ACROSS. In
// multiply_first, the predicate `add` (0 != 0) is false, so the instruction overwrites the sum.
#define HOPPER_PRODUCTS(type, dtype, columns, SUMS, REGISTERS, A, B, C, D, E, F)                                                   \
    template <int A_ACROSS, int B_ACROSS>                                                                                          \
    __device__ __forceinline__ void multiply_first(type, float (&sum)[columns / 2], uint32_t a, uint32_t b) {                      \
        asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, 0, 0;\n"                                               \
                     "mov.b64 a, {%" A ", %" C "};\nmov.b64 b, {%" B ", %" C "};\n"                                                \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." dtype "." dtype " " REGISTERS ", a, b, add, 1, 1, %" D\
                     ", %" E ";\n}"                                                                                                \
                     : SUMS(sum, 0)                                                                                                \
                     : "r"(a), "r"(b), "r"(UPPER_HALF), "n"(A_ACROSS), "n"(B_ACROSS));                                             \
    }                                                                                                                              \
    template <int A_ACROSS, int B_ACROSS>                                                                                          \
    __device__ __forceinline__ void multiply_next(type, float (&sum)[columns / 2], uint32_t a, uint32_t b) {                       \
        asm volatile("{\n.reg .b64 a, b;\nmov.b64 a, {%" A ", %" C "};\nmov.b64 b, {%" B ", %" C "};\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." dtype "." dtype " " REGISTERS ", a, b, 1, 1, 1, %" D  \
                     ", %" E ";\n}"                                                                                                \
                     : SUMS(sum, 0)                                                                                                \
                     : "r"(a), "r"(b), "r"(UPPER_HALF), "n"(A_ACROSS), "n"(B_ACROSS));                                             \
    }                                                                                                                              \
    __device__ __forceinline__ void multiply_held(type, float (&sum)[columns / 2], const uint32_t (&a)[4], uint32_t b) {           \
        asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%" E ", %" F "};\n"                                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." dtype "." dtype " " REGISTERS                         \
                     ", {%" A ", %" B ", %" C ", %" D "}, b, 1, 1, 1, 1;\n}"                                                       \
                     : SUMS(sum, 0)                                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(UPPER_HALF));                                       \
    }

HOPPER_PRODUCTS(__half, "f16", 64, SUM_32, REGISTERS_32, "32", "33", "34", "35", "36", "37")
HOPPER_PRODUCTS(__half, "f16", 80, SUM_40, REGISTERS_40, "40", "41", "42", "43", "44", "45")
HOPPER_PRODUCTS(__half, "f16", 128, SUM_64, REGISTERS_64, "64", "65", "66", "67", "68", "69")
HOPPER_PRODUCTS(__nv_bfloat16, "bf16", 64, SUM_32, REGISTERS_32, "32", "33", "34", "35", "36", "37")
HOPPER_PRODUCTS(__nv_bfloat16, "bf16", 80, SUM_40, REGISTERS_40, "40", "41", "42", "43", "44", "45")
HOPPER_PRODUCTS(__nv_bfloat16, "bf16", 128, SUM_64, REGISTERS_64, "64", "65", "66", "67", "68", "69")

// Keeps the compiler from moving uses of accumulators to before the wait for the products that write them.
template <int N> __device__ __forceinline__ void products_are_ready(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// Returns `x`, but hides from the compiler where `x` comes from. The compiler then computes values that depend on `x` at each use, instead
// of keeping them in registers throughout a loop.
__device__ __forceinline__ uint32_t unknown(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// sum = a @ b.T, where sum is (64, 2 * N), a (64, D) consists of 64 rows of a tile of `A_ROWS` rows, and b (2 * N, D) consists of 2 * N
// rows of a tile of `B_ROWS` rows. The arguments `a` and `b` are the addresses of the first rows. A thread has N accumulators.
template <typename T, int D, int A_ROWS, int B_ROWS, int N>
__device__ __forceinline__ void multiply_rows(float (&sum)[N], uint32_t a, uint32_t b) {
    const uint32_t left = along_rows(a), right = along_rows(b);
    multiply_first<0, 0>(T(), sum, left, right);
#pragma unroll
    for (int k = 1; k < D / 16; k++) {
        // Where the 16 columns begin in a row of their panel, in bytes. A panel has the columns of four products.
        const uint32_t column = k % 4 * 32;
        multiply_next<0, 0>(T(), sum, later(left, k / 4 * A_ROWS * ROW_BYTES + column),
                                    later(right, k / 4 * B_ROWS * ROW_BYTES + column));
    }
}

// sum += weights @ x, where sum is (64, 2 * N), weights is (64, 16 * STEPS), and x consists of 16 * STEPS rows of a tile of `ROWS` rows.
template <typename T, int ROWS, int STEPS, int N>
__device__ __forceinline__ void add_weighted(float (&sum)[N], const uint32_t (&weights)[STEPS][4], uint32_t x) {
    const uint32_t right = across_rows(x, ROWS * ROW_BYTES);
#pragma unroll
    for (int k = 0; k < STEPS; k++) multiply_held(T(), sum, weights[k], later(right, k * 16 * ROW_BYTES));
}

// Rounds accumulators to `T`, as the left operand of a product that sums over their columns.
template <typename T, int N> __device__ __forceinline__ void narrow_sums(uint32_t (&narrow)[N / 8][4], const float (&sum)[N]) {
#pragma unroll
    for (int k = 0; k < N / 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) narrow[k][i] = pair<T>(sum[8 * k + 2 * i], sum[8 * k + 2 * i + 1]);
}

// Writes narrowed accumulators to the first 16 * STEPS columns of 64 rows of a tile of `ROWS` rows. `rows` is the address of the first row.
template <int ROWS, int STEPS> __device__ __forceinline__ void write_narrow(uint32_t rows, const uint32_t (&narrow)[STEPS][4]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    // `stmatrix` stores four matrices of 8 rows and 8 columns. Lanes 8 * i to 8 * i + 7 give the addresses of the rows of matrix i, which
    // comes from the registers narrow[k][i]: the upper and the lower half of the warp's 16 rows, first for the left 8 columns, then for the
    // right 8. `step_columns` moves an address by 16 * k columns.
    const uint32_t first = unknown(rows + chunk_offset<ROWS>(warp * 16 + lane % 16, lane / 16));
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(step_columns<ROWS>(first, k)),
                     "r"(narrow[k][0]), "r"(narrow[k][1]), "r"(narrow[k][2]), "r"(narrow[k][3])
                     : "memory");
}

// The index of this thread's warpgroup in the block.
__device__ __forceinline__ int warpgroup() { return int(uniform(threadIdx.x / WARPGROUP)); }

// `group_sync` and `group_arrive` arrive at named barrier `barrier`, which `threads` threads of the block share. `group_sync` then waits
// until all of these threads have arrived; `group_arrive` does not wait.
__device__ __forceinline__ void group_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void group_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Writes accumulators to 64 rows of f32 in global memory. Row i begins at `to + i * width`.
template <int N> __device__ __forceinline__ void write_sums(float *to, int width, const float (&sum)[N]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    to += (warp * 16 + lane / 4) * width + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        *reinterpret_cast<float2 *>(to + n * 8) = make_float2(sum[4 * n], sum[4 * n + 1]);
        *reinterpret_cast<float2 *>(to + n * 8 + 8 * width) = make_float2(sum[4 * n + 2], sum[4 * n + 3]);
    }
}
