// Attention without tensor cores, for the calls that the tensor-core kernels do not support (attention.cu lists what they support).
// Arithmetic is in f32, or in f64 for f64. Scores are computed tile by tile, for `PLAIN_TILE` queries and as many keys. A block computes
// `PLAIN_COLUMNS` columns of a tile of rows of the result or of a gradient. If there are more columns, several blocks compute the same
// scores. `VisibleKeys` tells which keys a query sees, and how many heads of queries share a head of keys (group).
// `Task` (shape.cuh) is the work of a block: the tile `tile` of the head `head` of `batch`; `index` counts the heads over (batch, heads).
// `HAS_SPANS` of `VisibleKeys` is false if a query sees all keys that `AttentionShape` allows; then `first_key` is 0 for every query.
// `query_end` is the end (exclusive) of the queries that see a key, without regard to `is_causal`.
#pragma once

#include "shape.cuh"

// A tile is as wide as a warp: where a warp handles a row of a tile, each lane has one column.
constexpr int PLAIN_TILE = 32, PLAIN_COLUMNS = 64, PLAIN_THREADS = 256;
// A block's threads form a square: thread (y, x) is in row y and column x, both below `PLAIN_SIDE`.
constexpr int PLAIN_SIDE = 16, PLAIN_WARPS = PLAIN_THREADS / WARP;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

// An additive mask. `numbers` points to what is added to the scaled scores; if it is null, there is no mask. The other fields are the
// strides of the mask's dimensions, in elements; a stride of zero broadcasts. Passed by value.
template <typename R> struct Mask {
    const R *numbers;
    uint64_t batch, head, query, key;
};

// Tiles in shared memory. The rows of a `Square` are one number longer than its tile, against bank conflicts.
template <typename R> using Square = R[PLAIN_TILE][PLAIN_TILE + 1];
template <typename R> using Panel = R[PLAIN_TILE][PLAIN_COLUMNS];

// The matrix of one head in device memory: `rows` rows of `width` elements, `stride` elements apart.
template <typename T> struct MatrixRows {
    const T *data;
    uint64_t stride;
    uint32_t rows, width;

    __device__ __forceinline__ MatrixRows(const T *tensor, const Strides &strides, uint32_t batch, uint32_t head, uint32_t rows,
                                          uint32_t width)
        : data(strides.matrix(tensor, batch, head)), stride(strides.row), rows(rows), width(width) {}

    // Returns an element in the type of the arithmetic; zero outside the matrix.
    __device__ __forceinline__ Acc<T> at(uint32_t row, uint32_t column) const {
        return row < rows && column < width ? widen(data[row * stride + column]) : Acc<T>(0);
    }
};

// Computes the dot products of 32 rows of `a`, from `a_row` on, with 32 rows of `b`, from `b_row` on. A thread (y, x) gets in
// sum[i][j] the product of row y + 16 i of these rows of `a` with row x + 16 j of those of `b`. `left` and `right` are scratch space.
template <typename T>
__device__ void row_products(Acc<T> (&sum)[2][2], const MatrixRows<T> &a, uint32_t a_row, const MatrixRows<T> &b, uint32_t b_row,
                             Square<Acc<T>> &left, Square<Acc<T>> &right) {
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) sum[i][j] = 0;
    for (uint32_t start = 0; start < a.width; start += PLAIN_TILE) {
        for (int row = warp; row < PLAIN_TILE; row += PLAIN_WARPS) {
            left[row][lane] = a.at(a_row + row, start + lane);
            right[row][lane] = b.at(b_row + row, start + lane);
        }
        __syncthreads();
        for (int k = 0; k < PLAIN_TILE; k++) {
            const Acc<T> a0 = left[y][k], a1 = left[y + PLAIN_SIDE][k], b0 = right[x][k], b1 = right[x + PLAIN_SIDE][k];
            sum[0][0] += a0 * b0, sum[0][1] += a0 * b1, sum[1][0] += a1 * b0, sum[1][1] += a1 * b1;
        }
        __syncthreads();
    }
}

// Computes the scores of 32 queries, from `query` on, and 32 keys, from `key` on: negative infinity where a query does not see a key.
// They are distributed over the threads as the products of `row_products`. A mask comes only with `Dense`: then each head of keys
// belongs to one head of queries, and `task.head` is the index of both.
template <typename T, class VisibleKeys>
__device__ void plain_scores(Acc<T> (&scores)[2][2], const MatrixRows<T> &q, uint32_t query, const MatrixRows<T> &k, uint32_t key,
                             const Mask<Acc<T>> &mask, const Task &task, const AttentionShape &shape, const VisibleKeys &visible,
                             Square<Acc<T>> &left, Square<Acc<T>> &right) {
    row_products(scores, q, query, k, key, left, right);
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            const uint64_t row = query + y + i * PLAIN_SIDE, column = key + x + j * PLAIN_SIDE;
            Acc<T> score = scores[i][j] * static_cast<Acc<T>>(shape.scale);
            const bool exists = row < shape.queries && column < shape.keys;
            if (exists && mask.numbers != nullptr)
                score += mask.numbers[task.batch * mask.batch + task.head * mask.head + row * mask.query + column * mask.key];
            const bool sees =
                exists && (!shape.is_causal || column <= row) && (!VisibleKeys::HAS_SPANS || column >= visible.first_key(row));
            scores[i][j] = sees ? score : -Acc<T>(INFINITY);
        }
}

// Loads 64 columns of 32 rows, from `row` and `column` on, to shared memory; elements outside the matrix are zero.
template <typename T>
__device__ void load_panel(Panel<Acc<T>> &panel, const MatrixRows<T> &x, uint32_t row, uint32_t column) {
    for (int i = threadIdx.x; i < PLAIN_TILE * PLAIN_COLUMNS; i += PLAIN_THREADS)
        panel[i / PLAIN_COLUMNS][i % PLAIN_COLUMNS] = x.at(row + i / PLAIN_COLUMNS, column + i % PLAIN_COLUMNS);
}

// Computes sum += weights panel, or sum += weightsᵀ panel if TRANSPOSED. sum[i][c] of thread (y, x) is in row y + 16 i and column
// x + 16 c.
template <bool TRANSPOSED, typename R>
__device__ void add_panel(R (&sum)[2][4], const Square<R> &weights, const Panel<R> &panel) {
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
    for (int k = 0; k < PLAIN_TILE; k++)
        for (int i = 0; i < 2; i++) {
            const int row = y + i * PLAIN_SIDE;
            const R weight = TRANSPOSED ? weights[k][row] : weights[row][k];
            for (int c = 0; c < 4; c++) sum[i][c] += weight * panel[k][x + c * PLAIN_SIDE];
        }
}

// Writes the sums of `add_panel` to the matrix of the task's head, which has `rows` rows and `width` columns. `first` and `column` are
// the row and the column of the matrix where the block's sums begin.
template <typename T>
__device__ void write_panel(T *tensor, const Strides &strides, const Task &task, uint32_t first, uint32_t rows, uint32_t column,
                            uint32_t width, const Acc<T> (&sum)[2][4]) {
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
    T *matrix = strides.matrix(tensor, task.batch, task.head);
    for (int i = 0; i < 2; i++)
        for (int c = 0; c < 4; c++) {
            const uint32_t row = first + y + i * PLAIN_SIDE, to = column + x + c * PLAIN_SIDE;
            if (row < rows && to < width) matrix[row * strides.row + to] = narrow<T>(sum[i][c]);
        }
}

// Computes o and log_sums (batch, heads, queries), ln Σ e^score over the keys that a query sees. As keys are processed tile by tile, `base`
// is the highest score of each query so far, `total` the sum of e^(score - base), and `factor` what multiplies the earlier sums when `base`
// rises.
template <typename T, class VisibleKeys>
__device__ void attention_plain_forward(const T *q, const T *k, const T *v, T *o, Acc<T> *log_sums, const Strides &q_strides,
                                        const Strides &k_strides, const Strides &v_strides, const Strides &o_strides,
                                        const Mask<Acc<T>> &mask, const AttentionShape &shape, const VisibleKeys &visible) {
    using R = Acc<T>;
    __shared__ Square<R> left, right, weights;
    __shared__ Panel<R> panel;
    __shared__ R base[PLAIN_TILE], total[PLAIN_TILE], factor[PLAIN_TILE];
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Task task(blockIdx.x, ceil_divide(shape.queries, PLAIN_TILE), shape.heads);
    const uint32_t first = task.tile * PLAIN_TILE, column = blockIdx.y * PLAIN_COLUMNS, key_head = task.head / visible.group();
    const MatrixRows<T> queries(q, q_strides, task.batch, task.head, shape.queries, shape.width);
    const MatrixRows<T> keys(k, k_strides, task.batch, key_head, shape.keys, shape.width);
    const MatrixRows<T> values(v, v_strides, task.batch, key_head, shape.keys, shape.value_width);
    if (threadIdx.x < PLAIN_TILE) base[threadIdx.x] = -R(INFINITY), total[threadIdx.x] = 0;

    R sum[2][4] = {};
    // The end (exclusive) of the keys that some query of the tile may see.
    const uint32_t key_end = shape.is_causal ? min(shape.keys, first + PLAIN_TILE) : shape.keys;
    for (uint32_t key = visible.first_key(first); key < key_end; key += PLAIN_TILE) {
        R scores[2][2];
        plain_scores(scores, queries, first, keys, key, mask, task, shape, visible, left, right);
        // `weights` holds the scores until the loop over `row` replaces them by weights.
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++) weights[y + i * PLAIN_SIDE][x + j * PLAIN_SIDE] = scores[i][j];
        load_panel(panel, values, key, column);
        __syncthreads();
        for (int row = warp; row < PLAIN_TILE; row += PLAIN_WARPS) {
            const R score = weights[row][lane], top = warp_max(score), before = base[row];
            const R raised = top > before ? top : before;
            // As long as the query has seen no key, its scores and `raised` are negative infinity; their difference would be NaN.
            const R shift = raised == -R(INFINITY) ? R(0) : raised;
            const R weight = exponential(score - shift), added = warp_sum(weight);
            weights[row][lane] = weight;
            __syncwarp();
            if (lane == 0) {
                factor[row] = exponential(before - shift);
                total[row] = total[row] * factor[row] + added;
                base[row] = raised;
            }
        }
        __syncthreads();
        for (int i = 0; i < 2; i++)
            for (int c = 0; c < 4; c++) sum[i][c] *= factor[y + i * PLAIN_SIDE];
        add_panel<false>(sum, weights, panel);
        __syncthreads();
    }
    // Without any key, no barrier of the loop separates the initial `total` from the reads below.
    __syncthreads();
    for (int i = 0; i < 2; i++) {
        const R row_total = total[y + i * PLAIN_SIDE];
        // If the query sees no key, its result is zero, not zero divided by zero.
        for (int c = 0; c < 4; c++) sum[i][c] = row_total == R(0) ? R(0) : sum[i][c] / row_total;
    }
    write_panel(o, o_strides, task, first, shape.queries, column, shape.value_width, sum);
    if (blockIdx.y == 0 && threadIdx.x < PLAIN_TILE && first + threadIdx.x < shape.queries)
        log_sums[uint64_t(task.index) * shape.queries + first + threadIdx.x] = base[threadIdx.x] + logarithm(total[threadIdx.x]);
}

// Which gradient a kernel computes.
enum class GradientOf { query, key, value };

// Computes the gradient of q, k or v from the gradient of o (d_o), log_sums and delta (of `attention_delta` below). `first` is the first
// row of the block's tile: a query for the gradient of q, a key for the others.
template <typename T, GradientOf OF, class VisibleKeys>
__device__ void attention_plain_backward(const T *q, const T *k, const T *v, const T *d_o, const Acc<T> *log_sums, const Acc<T> *delta,
                                         T *grad, const Strides &q_strides, const Strides &k_strides, const Strides &v_strides,
                                         const Strides &do_strides, const Strides &grad_strides, const Mask<Acc<T>> &mask,
                                         const AttentionShape &shape, const VisibleKeys &visible) {
    using R = Acc<T>;
    constexpr bool QUERIES = OF == GradientOf::query;
    __shared__ Square<R> left, right, weights;
    __shared__ Panel<R> panel;
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
    const uint32_t rows = QUERIES ? shape.queries : shape.keys, width = OF == GradientOf::value ? shape.value_width : shape.width;
    const uint32_t group = visible.group();
    const Task task(blockIdx.x, ceil_divide(rows, PLAIN_TILE), QUERIES ? shape.heads : shape.heads / group);
    const uint32_t first = task.tile * PLAIN_TILE, column = blockIdx.y * PLAIN_COLUMNS;
    const uint32_t key_head = QUERIES ? task.head / group : task.head;
    const MatrixRows<T> keys(k, k_strides, task.batch, key_head, shape.keys, shape.width);
    const MatrixRows<T> values(v, v_strides, task.batch, key_head, shape.keys, shape.value_width);

    // The rows that the loop over `other` reads, a tile at a time: for the gradient of q, the keys from the first to the last that a
    // query of the block's tile sees; otherwise the queries from the first to the last that see a key of the block's tile.
    uint32_t begin = 0, end = QUERIES ? shape.keys : visible.query_end(min(first + PLAIN_TILE, rows) - 1, shape);
    if (shape.is_causal && QUERIES) end = min(end, first + PLAIN_TILE);
    if (QUERIES) begin = visible.first_key(first);
    if (shape.is_causal && !QUERIES) begin = first;
    R sum[2][4] = {};
    // The gradient of q needs only the tile's head. The gradients of k and v are sums over all heads of queries that share the head of
    // keys.
    const uint32_t heads_begin = QUERIES ? task.head : task.head * group, heads_end = QUERIES ? heads_begin + 1 : heads_begin + group;
    for (uint32_t head = heads_begin; head < heads_end; head++) {
        const MatrixRows<T> queries(q, q_strides, task.batch, head, shape.queries, shape.width);
        const MatrixRows<T> grads(d_o, do_strides, task.batch, head, shape.queries, shape.value_width);
        // The index in `log_sums` and `delta` of the head's first query.
        const uint64_t head_start = (uint64_t(task.batch) * shape.heads + head) * shape.queries;
        for (uint32_t other = begin; other < end; other += PLAIN_TILE) {
            const uint32_t query = QUERIES ? first : other, key = QUERIES ? other : first;
            R scores[2][2], products[2][2];
            plain_scores(scores, queries, query, keys, key, mask, task, shape, visible, left, right);
            if (OF != GradientOf::value) row_products(products, grads, query, values, key, left, right);
            for (int i = 0; i < 2; i++) {
                const uint32_t row = query + y + i * PLAIN_SIDE;
                const bool exists = row < shape.queries;
                const R log_sum = exists ? log_sums[head_start + row] : R(0), row_delta = exists ? delta[head_start + row] : R(0);
                // If the query sees no key, its scores and `log_sum` are negative infinity; their difference would be NaN.
                const R shift = log_sum == -R(INFINITY) ? R(0) : log_sum;
                for (int j = 0; j < 2; j++) {
                    // The softmax weight. For the gradients of q and k it becomes the gradient of the unscaled product of q and k.
                    R weight = exponential(scores[i][j] - shift);
                    if (OF != GradientOf::value) weight *= (products[i][j] - row_delta) * static_cast<R>(shape.scale);
                    weights[y + i * PLAIN_SIDE][x + j * PLAIN_SIDE] = weight;
                }
            }
            load_panel(panel, OF == GradientOf::query ? keys : OF == GradientOf::key ? queries : grads, other, column);
            __syncthreads();
            add_panel<!QUERIES>(sum, weights, panel);
            __syncthreads();
        }
    }
    write_panel(grad, grad_strides, task, first, rows, column, width, sum);
}

// Computes delta (batch, heads, queries), the sum of o ∘ d_o over each row. Eight lanes compute the sum of one row.
template <typename T>
__device__ void attention_delta(const T *o, const T *d_o, Acc<T> *delta, const Strides &o_strides, const Strides &do_strides,
                                const AttentionShape &shape) {
    constexpr int LANES = 8, N = WIDE<T>;
    const uint64_t row = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
    const uint64_t rows = uint64_t(shape.batch) * shape.heads * shape.queries;
    const int lane = threadIdx.x % LANES;
    Acc<T> sum = 0;
    if (row < rows) {
        const uint64_t query = row % shape.queries, index = row / shape.queries;
        const T *a = o_strides.matrix(o, index / shape.heads, index % shape.heads) + query * o_strides.row;
        const T *b = do_strides.matrix(d_o, index / shape.heads, index % shape.heads) + query * do_strides.row;
        // The elements that 16-byte loads read; the second loop reads the elements after them.
        const uint32_t whole = is_wide(a) && is_wide(b) ? shape.value_width / N * N : 0;
        for (uint32_t i = lane * N; i < whole; i += LANES * N) {
            const Pack<T, N> x = *reinterpret_cast<const Pack<T, N> *>(a + i), y = *reinterpret_cast<const Pack<T, N> *>(b + i);
#pragma unroll
            for (int j = 0; j < N; j++) sum += widen(x.values[j]) * widen(y.values[j]);
        }
        for (uint32_t i = whole + lane; i < shape.value_width; i += LANES) sum += widen(a[i]) * widen(b[i]);
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    if (lane == 0 && row < rows) delta[row] = sum;
}
