// Picking elements by integer ids: index_select, embedding (index_select with outer = 1) and gather, and their gradients.
//
// x and dx are (outer, size, inner), where `size` is the size of the indexed dimension; y and grad are (outer, count, inner). The ids are
// (count) for index_select, and (outer, count, inner) for gather; each has `id_bytes` bytes. An id is out of range unless 0 <= id < size.
// For an id out of range, the forward kernels write 0 and report the id's index in *out_of_range (see ids.cuh), and the backward kernels
// leave out its gradient. Gradients of equal ids are added in a fixed order, in f32 (f64 for f64). A pack is N neighbouring elements along
// `inner`: N = WIDE elements of 16 bytes in all, or N = 1.

#include "architecture.cuh"
#include "ids.cuh"
#include "rows.cuh"

namespace {

// A thread copies pack `pack` of y[o, j, :] from the row ids[j] of x. `row` is o · count + j.
template <typename T, int N>
__device__ __forceinline__ void select(const T *x, const void *ids, T *y, Counter *out_of_range, uint64_t outer, uint32_t size,
                                       uint32_t count, uint32_t inner, uint32_t id_bytes) {
    const uint32_t packs = inner / N;
    for (uint64_t index = flat_index(); index < outer * count * packs; index += flat_stride()) {
        const auto [row, pack] = divide(index, packs);
        const auto [o, j] = divide(row, count);
        const int64_t id = load_id(ids, id_bytes, j);
        Pack<T, N> values = {};
        if (is_id(id, size)) values = load_pack<N>(x + ((o * size + id) * packs + pack) * N);
        else report_id(out_of_range, j);
        store_pack(y + index * N, values);
    }
}

// A thread copies one element, y[o, j, i] with the index `index`, which is also the index of its id. `row` is o · count + j.
template <typename T>
__device__ __forceinline__ void gather(const T *x, const void *ids, T *y, Counter *out_of_range, uint64_t outer, uint32_t size,
                                       uint32_t count, uint32_t inner, uint32_t id_bytes) {
    for (uint64_t index = flat_index(); index < outer * count * inner; index += flat_stride()) {
        const auto [row, i] = divide(index, inner);
        const int64_t id = load_id(ids, id_bytes, index);
        T value = {};
        if (is_id(id, size)) value = x[(divide(row, count).quotient * size + id) * inner + i];
        else report_id(out_of_range, index);
        y[index] = value;
    }
}

// The number of threads of a block in the kernels for index_select's gradient. Loops over the ids take as many ids in each step: each
// thread loads one id.
constexpr int THREADS = 128;
// How many blocks a multiprocessor must have room for at a time. The number limits a thread's registers. With 0, the compiler sets its own
// limit, which may be so low that the kernel spills registers to make room for one more block. The numbers are those without spills: 0
// where the compiler's own limit causes none.
constexpr int SCATTER_BLOCKS = ARCHITECTURE >= 1200 ? 10 : 0;
template <typename T> constexpr int BACKWARD_BLOCKS = sizeof(T) == 2 ? 8 : 10;

// The ids of one step that equal a wanted id. `find` looks at the ids from index `step` up to, but not including, the smaller of
// step + THREADS and `end`. It returns how many of them equal `wanted`, and writes their indices minus `step` to `list`, in ascending
// order. All threads of the block must call `find`. If it does not return 0, the block needs a barrier between its last use of `list` and
// the next `find`.
struct Matches {
    uint32_t list[THREADS];
    uint32_t counts[THREADS / WARP];

    __device__ __forceinline__ uint32_t find(const void *ids, uint32_t id_bytes, uint64_t step, uint64_t end, int64_t wanted) {
        const uint64_t at = step + threadIdx.x; // the index of this thread's id
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const bool matches = at < end && load_id(ids, id_bytes, at) == wanted;
        const uint32_t mask = __ballot_sync(ALL_LANES, matches);
        // Most steps have no match and end here, after one barrier instead of three.
        if (!__syncthreads_or(matches)) return 0;
        if (lane == 0) counts[warp] = __popc(mask);
        __syncthreads();
        uint32_t in_earlier_warps = 0, total = 0;
#pragma unroll
        for (int w = 0; w < THREADS / WARP; w++) {
            if (w < warp) in_earlier_warps += counts[w];
            total += counts[w];
        }
        if (matches) list[in_earlier_warps + __popc(mask & ((1u << lane) - 1))] = threadIdx.x;
        __syncthreads();
        return total;
    }
};

// A column is one of the packs of (outer, inner), and a tile is THREADS columns, one per thread. Each iteration of the outer loop handles
// the row `id` of dx in one tile: `work` is tile · size + id. `piece_ids` is the number of ids in a piece (index_select_backward below),
// and the block has the ids from `first` up to, but not including, `end`. `at` is the index along `inner` of the first element of the
// column.
template <typename T, int N>
__device__ __forceinline__ void select_backward(const T *grad, const void *ids, T *dx, Acc<T> *partials, uint64_t outer,
                                                uint32_t size, uint32_t count, uint32_t inner, uint32_t id_bytes,
                                                Matches &matches) {
    using A = Acc<T>;
    const uint64_t packs = inner / N, columns = outer * packs, piece_ids = (count + gridDim.y - 1ull) / gridDim.y;
    const uint64_t first = blockIdx.y * piece_ids, end = min(first + piece_ids, static_cast<uint64_t>(count));
    const uint64_t tiles = (columns + THREADS - 1) / THREADS;
    for (uint64_t work = blockIdx.x; work < tiles * size; work += gridDim.x) {
        const uint64_t column = work / size * THREADS + threadIdx.x, o = column / packs, at = column % packs * N;
        const int64_t id = static_cast<int64_t>(work % size);
        A sum[N] = {};
        for (uint64_t step = first; step < end; step += THREADS) {
            const uint32_t found = matches.find(ids, id_bytes, step, end, id);
            if (column < columns) {
#pragma unroll 4
                for (uint32_t k = 0; k < found; k++) {
                    const auto g = load_pack<N>(grad + (o * count + step + matches.list[k]) * inner + at);
#pragma unroll
                    for (int i = 0; i < N; i++) sum[i] += widen(g.values[i]);
                }
            }
            if (found > 0) __syncthreads();
        }
        if (column >= columns) continue;
        const uint64_t to = (o * size + id) * inner + at;
        if (partials == nullptr) {
            store_pack(dx + to, narrow_pack<T>(sum));
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) partials[blockIdx.y * outer * size * inner + to + i] = sum[i];
        }
    }
}

// Columns and tiles are those of `select_backward`. Each iteration of the outer loop handles the id with index j in one tile: `work` is
// tile · count + j. If several ids are equal, only the iterations of the first of these ids add up the gradients of all of them. The
// iterations of the others do nothing.
template <typename T, int N>
__device__ __forceinline__ void select_scatter(const T *grad, const void *ids, T *dx, uint64_t outer, uint32_t size, uint32_t count,
                                               uint32_t inner, uint32_t id_bytes, Matches &matches) {
    using A = Acc<T>;
    const uint64_t packs = inner / N, columns = outer * packs, tiles = (columns + THREADS - 1) / THREADS;
    for (uint64_t work = blockIdx.x; work < tiles * count; work += gridDim.x) {
        const uint32_t j = static_cast<uint32_t>(work % count);
        const int64_t id = load_id(ids, id_bytes, j);
        bool is_first = is_id(id, size);
        for (uint64_t step = 0; step < j && is_first; step += THREADS) {
            const uint64_t earlier = step + threadIdx.x; // the index of the id that this thread compares
            is_first = !__syncthreads_or(earlier < j && load_id(ids, id_bytes, earlier) == id);
        }
        if (!is_first) continue;
        const uint64_t column = work / count * THREADS + threadIdx.x, o = column / packs, at = column % packs * N;
        A sum[N] = {};
        for (uint64_t step = j; step < count; step += THREADS) {
            const uint32_t found = matches.find(ids, id_bytes, step, count, id);
            if (column < columns) {
#pragma unroll 8
                for (uint32_t k = 0; k < found; k++) {
                    const auto g = load_pack<N>(grad + (o * count + step + matches.list[k]) * inner + at);
#pragma unroll
                    for (int i = 0; i < N; i++) sum[i] += widen(g.values[i]);
                }
            }
            if (found > 0) __syncthreads();
        }
        if (column < columns) store_pack(dx + (o * size + id) * inner + at, narrow_pack<T>(sum));
    }
}

} // namespace

// y[o, j, i] = x[o, ids[j], i] for index_select, and y[o, j, i] = x[o, ids[o, j, i], i] for gather. Launch: block 256, grid
// clamp(ceil(elements of y / (256 · WIDE)), 1, 2^31 - 1), where gather has 1 in place of WIDE, no dynamic shared memory. Any grid gives the
// same results.
#define DEFINE_FORWARD(SUFFIX, T)                                                                                      \
    extern "C" __global__ void index_select_forward_##SUFFIX(const T *x, const void *ids, T *y, Counter *out_of_range, \
                                                             uint64_t outer, uint32_t size, uint32_t count,            \
                                                             uint32_t inner, uint32_t id_bytes) {                      \
        follow();                                                                                                      \
        if (inner % WIDE<T> == 0 && are_wide(x, y))                                                                    \
            select<T, WIDE<T>>(x, ids, y, out_of_range, outer, size, count, inner, id_bytes);                          \
        else select<T, 1>(x, ids, y, out_of_range, outer, size, count, inner, id_bytes);                               \
    }                                                                                                                  \
    extern "C" __global__ void gather_forward_##SUFFIX(const T *x, const void *ids, T *y, Counter *out_of_range,       \
                                                       uint64_t outer, uint32_t size, uint32_t count, uint32_t inner,  \
                                                       uint32_t id_bytes) {                                            \
        follow();                                                                                                      \
        gather<T>(x, ids, y, out_of_range, outer, size, count, inner, id_bytes);                                       \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_FORWARD)
DEFINE_FORWARD(u8, uint8_t)
DEFINE_FORWARD(u32, uint32_t)
DEFINE_FORWARD(i64, int64_t)

// The gradient of index_select: dx[o, s, i] = Σ_j grad[o, j, i] over the j with ids[j] = s, in the order of j (with pieces, see below: in
// the order of j within a piece, then in the order of the pieces). The caller chooses one of two kernels. Below,
// tiles = ceil(outer · inner / (128 · WIDE)).
//
// index_select_scatter is for few ids and many rows (embeddings). It writes only the rows s that occur in ids, so dx must hold zeros before
// the launch. A block handles one id and 128 packs of (outer, inner). It looks through all ids, and stops if an earlier id equals its
// own. The kernel loads about tiles · count² ids at most. With 4096 ids and 128 000 rows, these loads take half as long as zeroing dx. If
// an id occurs thousands of times, the kernel is slow: only `tiles` blocks add all the gradients of this id, one after another.
// Launch: block 128, grid clamp(tiles · count, 1, 2^31 - 1), no dynamic shared memory.
//
// index_select_backward is for many ids and few rows. It writes every element of dx. The ids are divided into pieces. A block handles
// one row s, one piece of the ids and 128 packs of (outer, inner). It looks through all ids of the piece, so the kernel loads
// tiles · size · count ids.
// Launch: block 128, grid (clamp(tiles · size, 1, 2^31 - 1), pieces), no dynamic shared memory. The caller may choose up to 65535 pieces,
// depending on sizes alone, for instance ceil(count / 4096) if the grid would otherwise have fewer than 1024 blocks. With one piece,
// partials must be null. With more than one piece, the kernel writes the sums of each piece to partials (pieces, outer, size, inner), f32
// (f64 for f64), instead of dx, and the caller must launch index_select_sum afterwards.
#define DEFINE_SELECT_SCATTER(SUFFIX, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, SCATTER_BLOCKS)                                              \
        index_select_scatter_##SUFFIX(const T *grad, const void *ids, T *dx, uint64_t outer, uint32_t size,            \
                                      uint32_t count, uint32_t inner, uint32_t id_bytes) {                             \
        follow();                                                                                                      \
        __shared__ Matches matches;                                                                                    \
        if (inner % WIDE<T> == 0 && are_wide(grad, dx))                                                                \
            select_scatter<T, WIDE<T>>(grad, ids, dx, outer, size, count, inner, id_bytes, matches);                   \
        else select_scatter<T, 1>(grad, ids, dx, outer, size, count, inner, id_bytes, matches);                        \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SELECT_SCATTER)

#define DEFINE_SELECT_BACKWARD(SUFFIX, T)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS<T>)                                          \
        index_select_backward_##SUFFIX(const T *grad, const void *ids, T *dx, Acc<T> *partials, uint64_t outer,        \
                                       uint32_t size, uint32_t count, uint32_t inner, uint32_t id_bytes) {             \
        follow();                                                                                                      \
        __shared__ Matches matches;                                                                                    \
        if (inner % WIDE<T> == 0 && are_wide(grad, dx))                                                                \
            select_backward<T, WIDE<T>>(grad, ids, dx, partials, outer, size, count, inner, id_bytes, matches);        \
        else select_backward<T, 1>(grad, ids, dx, partials, outer, size, count, inner, id_bytes, matches);             \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SELECT_BACKWARD)

// dx[e] = Σ_p partials[p, e], where partials is (pieces, len), dx is (len), and len = outer · size · inner. Launch: block 256, grid
// clamp(ceil(len / 256), 1, 2^31 - 1), no dynamic shared memory.
#define DEFINE_SELECT_SUM(SUFFIX, T)                                                                                   \
    extern "C" __global__ void index_select_sum_##SUFFIX(const Acc<T> *partials, T *dx, uint32_t pieces,               \
                                                         uint64_t len) {                                               \
        follow();                                                                                                      \
        for (uint64_t index = flat_index(); index < len; index += flat_stride()) {                                     \
            Acc<T> sum = 0;                                                                                            \
            for (uint32_t piece = 0; piece < pieces; piece++) sum += partials[piece * len + index];                    \
            dx[index] = narrow<T>(sum);                                                                                \
        }                                                                                                              \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SELECT_SUM)

// The gradient of gather: dx[o, s, i] = Σ_j grad[o, j, i] over the j with ids[o, j, i] = s, in the order of j. Writes every element of
// dx. The thread of dx[o, s, i] loads ids[o, j, i] for all j, so the kernel loads outer · size · count · inner ids. This is cheap for
// losses, where count is small. For one long vector (outer = inner = 1), index_select_backward is faster.
// Launch: block 256, grid clamp(ceil(outer · size · inner / 256), 1, 2^31 - 1), no dynamic shared memory. Any grid gives the same
// results.
#define DEFINE_GATHER_BACKWARD(SUFFIX, T)                                                                              \
    extern "C" __global__ void gather_backward_##SUFFIX(const T *grad, const void *ids, T *dx, uint64_t outer,         \
                                                        uint32_t size, uint32_t count, uint32_t inner,                 \
                                                        uint32_t id_bytes) {                                           \
        follow();                                                                                                      \
        for (uint64_t index = flat_index(); index < outer * size * inner; index += flat_stride()) {                    \
            const auto [row, i] = divide(index, inner);                                                                \
            const auto [o, s] = divide(row, size);                                                                     \
            Acc<T> sum = 0;                                                                                            \
            for (uint32_t j = 0; j < count; j++) {                                                                     \
                const uint64_t at = (o * count + j) * inner + i;                                                       \
                if (load_id(ids, id_bytes, at) == s) sum += widen(grad[at]);                                           \
            }                                                                                                          \
            dx[index] = narrow<T>(sum);                                                                                \
        }                                                                                                              \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_GATHER_BACKWARD)
