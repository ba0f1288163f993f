// The shapes and strides that the attention kernels receive.
#pragma once

#include "../element.cuh"

// The sizes of an attention call: q (batch, heads, queries, width), k (batch, heads, keys, width), v (batch, heads, keys, value_width),
// result and its gradient (batch, heads, queries, value_width). With `Spans` (below: packed rows), k and v have only
// heads / `heads_a_key` heads. If `is_causal` is not 0, query i sees no key after key i. Passed by value.
struct AttentionShape {
    uint32_t batch, heads, queries, keys, width, value_width, is_causal;
    // dk and dv are sums over queries. The tensor-core kernels compute them in this number of parts. Each part is a sum over some of the
    // queries or, with `Spans`, over some of the heads of queries.
    uint32_t parts;
    // Multiplies the products of q and k.
    double scale;
};

// The distances between the batch items, the heads and the rows of a tensor, in elements. The elements of a row are consecutive. Passed by
// value.
struct Strides {
    uint64_t batch, head, row;

    // Returns the address of head `h` of batch item `b`.
    template <typename T> __device__ __forceinline__ T *matrix(T *tensor, uint32_t b, uint32_t h) const {
        return tensor + b * batch + h * head;
    }
};

// The work of a block: one tile of rows of one head. The blocks of a head are consecutive, so that they share its keys and values in the
// cache.
struct Task {
    // `tile` is the index of the tile within the head, `index` the index of the head over (batch, heads).
    uint32_t tile, index;
    uint32_t batch, head;

    __device__ __forceinline__ Task(uint32_t block, uint32_t tiles, uint32_t heads)
        : tile(block % tiles), index(block / tiles), batch(index / heads), head(index % heads) {}
};

// `AttentionShape` limits the keys that a query may see. `Dense` and `Spans` tell which of these keys the query does see. With `Dense`,
// each head of queries has its own keys, and a query sees all keys that `AttentionShape` allows.
struct Dense {
    static constexpr bool HAS_SPANS = false;

    // Returns how many consecutive heads of queries share a head of keys.
    static __device__ __forceinline__ uint32_t group() { return 1; }
    // `first_key` returns the first key that a query sees, `query_end` the end (exclusive) of the queries that see a key. Here, neither
    // takes `is_causal` into account.
    static __device__ __forceinline__ uint32_t first_key(uint32_t) { return 0; }
    static __device__ __forceinline__ uint32_t query_end(uint32_t, const AttentionShape &shape) { return shape.queries; }
};

// With `Spans`, a query sees keys of its own segment of a packed row. The shape is causal, with as many keys as queries and a batch of 1.
struct Spans {
    static constexpr bool HAS_SPANS = true;
    // Two ascending lists of `rows` numbers, one number for each position p. The first list has the first key that query p sees, or p + 1
    // if it sees none. The second list has the end (exclusive) of the queries that see key p.
    const uint32_t *spans;
    // `rows` is the number of positions, `heads_a_key` the number of heads of queries that share a head of keys.
    uint32_t rows, heads_a_key;

    __device__ __forceinline__ uint32_t group() const { return heads_a_key; }
    // Positions after the last one count as the last one: the last tile of a head may extend beyond the last position.
    __device__ __forceinline__ uint32_t first_key(uint32_t query) const { return spans[min(query, rows - 1)]; }
    __device__ __forceinline__ uint32_t query_end(uint32_t key) const { return spans[rows + min(key, rows - 1)]; }
    __device__ __forceinline__ uint32_t query_end(uint32_t key, const AttentionShape &) const { return query_end(key); }
};

__host__ __device__ constexpr uint32_t ceil_divide(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The kernels compute exponentials to the base 2: exp(x) = exp2(x * LOG2_E), and log(x) = log2(x) * LN_2.
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
