// Picking elements by ids (see ids.cuh): index_select, embedding (index_select with outer = 1) and gather, and their gradients.
//
// A tensor has the shape (outer, size, inner), where `size` is the indexed dimension. The ids are (count) for index_select, and
// (outer, count, inner) for gather. For an id out of range, forward writes 0, and backward leaves out the gradient. Gradients of
// repeated ids are added in a fixed order, in f32 (f64 for f64).

#include "ids.cuh"
#include "rows.cuh"

namespace {

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

// The number of threads of a block, and of ids that the block looks at in a step.
constexpr int THREADS = 128;

// The block's list of the ids of a step that are `wanted`, in their order.
struct Matches {
    uint32_t list[THREADS];
    uint32_t counts[THREADS / WARP];

    __device__ __forceinline__ uint32_t find(const void *ids, uint32_t id_bytes, uint64_t step, uint64_t end, int64_t wanted) {
        const uint64_t at = step + threadIdx.x;
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const bool matches = at < end && load_id(ids, id_bytes, at) == wanted;
        const uint32_t mask = __ballot_sync(ALL_LANES, matches);
        // Most steps have no match, and then one barrier is enough.
        if (!__syncthreads_or(matches)) return 0;
        if (lane == 0) counts[warp] = __popc(mask);
        __syncthreads();
        uint32_t before = 0, total = 0;
#pragma unroll
        for (int w = 0; w < THREADS / WARP; w++) {
            if (w < warp) before += counts[w];
            total += counts[w];
        }
        if (matches) list[before + __popc(mask & ((1u << lane) - 1))] = threadIdx.x;
        __syncthreads();
        return total;
    }
};

template <typename T, int N>
__device__ __forceinline__ void select_backward(const T *grad, const void *ids, T *dx, Acc<T> *partials, uint64_t outer,
                                                uint32_t size, uint32_t count, uint32_t inner, uint32_t id_bytes,
                                                Matches &matches) {
    using A = Acc<T>;
    const uint64_t packs = inner / N, columns = outer * packs, piece = (count + gridDim.y - 1ull) / gridDim.y;
    const uint64_t first = blockIdx.y * piece, end = min(first + piece, static_cast<uint64_t>(count));
    const uint64_t tiles = (columns + THREADS - 1) / THREADS;
    for (uint64_t block = blockIdx.x; block < tiles * size; block += gridDim.x) {
        const uint64_t column = block / size * THREADS + threadIdx.x, o = column / packs, at = column % packs * N;
        const int64_t id = static_cast<int64_t>(block % size);
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

// Of several equal ids, only the block of the first one adds up the gradients of all of them.
template <typename T, int N>
__device__ __forceinline__ void select_scatter(const T *grad, const void *ids, T *dx, uint64_t outer, uint32_t size, uint32_t count,
                                               uint32_t inner, uint32_t id_bytes, Matches &matches) {
    using A = Acc<T>;
    const uint64_t packs = inner / N, columns = outer * packs, tiles = (columns + THREADS - 1) / THREADS;
    for (uint64_t block = blockIdx.x; block < tiles * count; block += gridDim.x) {
        const uint32_t j = static_cast<uint32_t>(block % count);
        const int64_t id = load_id(ids, id_bytes, j);
        bool is_first = is_id(id, size);
        for (uint64_t step = 0; step < j && is_first; step += THREADS) {
            const uint64_t at = step + threadIdx.x;
            is_first = !__syncthreads_or(at < j && load_id(ids, id_bytes, at) == id);
        }
        if (!is_first) continue;
        const uint64_t column = block / count * THREADS + threadIdx.x, o = column / packs, at = column % packs * N;
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
// clamp(ceil(elements of y / (256 WIDE)), 1, 2^31 - 1) with WIDE = 1 for gather, no dynamic shared memory. Any grid gives the same
// results.
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

// dx[o, s, i] = Σ over the j with ids[j] = s of g[o, j, i], in the order of j, where g is grad. There are two forms:
//
// index_select_scatter, for few ids of many rows (embeddings): dx must hold zeros, and only the rows that ids name are written.
// A block has one id and 128 packs of (outer, inner). It looks through all ids, and stops if an earlier id is the same. This costs
// count² ceil(outer inner / (128 WIDE)) loads of an id in total. With 4096 ids and 128 k rows, they take half as long as zeroing dx. If an
// id occurs thousands of times, few blocks add the rows of this id one after another, which is slow.
// Launch: block 128, grid clamp(count ceil(outer inner / (128 WIDE)), 1, 2^31 - 1), no dynamic shared memory.
//
// index_select_backward, for many ids of few rows: every element of dx is written. The ids are divided into pieces. A block has one
// s and one piece, and looks through all ids of the piece: size count ceil(outer inner / (128 WIDE)) loads of an id in total.
// Launch: block 128, grid (clamp(size ceil(outer inner / (128 WIDE)), 1, 2^31 - 1), pieces), no dynamic shared memory. With one
// piece, partials is null. The caller may choose up to 65535 pieces, depending on sizes alone, for instance ceil(count / 4096) if
// the grid would otherwise have fewer than 1024 blocks. partials is then (pieces, outer, size, inner) of f32 (f64 for f64), dx is
// not touched, and index_select_sum follows.
#define DEFINE_SELECT_SCATTER(SUFFIX, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
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
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        index_select_backward_##SUFFIX(const T *grad, const void *ids, T *dx, Acc<T> *partials, uint64_t outer,        \
                                       uint32_t size, uint32_t count, uint32_t inner, uint32_t id_bytes) {             \
        follow();                                                                                                      \
        __shared__ Matches matches;                                                                                    \
        if (inner % WIDE<T> == 0 && are_wide(grad, dx))                                                                \
            select_backward<T, WIDE<T>>(grad, ids, dx, partials, outer, size, count, inner, id_bytes, matches);        \
        else select_backward<T, 1>(grad, ids, dx, partials, outer, size, count, inner, id_bytes, matches);             \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_SELECT_BACKWARD)

// dx (len) = Σ of partials (pieces, len). Launch: block 256, grid clamp(ceil(len / 256), 1, 2^31 - 1), no dynamic shared
// memory.
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

// dx[o, s, i] = Σ over the j with ids[o, j, i] = s of g[o, j, i], in the order of j. Every element of dx is written. A thread looks
// through the ids of its element's column: size count outer inner loads in total. This is cheap for losses, which gather few ids per
// column. For one long vector (outer = inner = 1), index_select_backward is faster.
// Launch: block 256, grid clamp(ceil(outer size inner / 256), 1, 2^31 - 1), no dynamic shared memory. Any grid gives the same
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
