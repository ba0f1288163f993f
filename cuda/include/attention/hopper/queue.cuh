// The work of attention's forward pass over a packed row: a queue of tiles of queries. A block that has finished a tile takes the next one
// from the queue. The number of tiles of keys that a tile of queries sees depends on the row's segments. These are in device memory
// (`Spans`, shape.cuh), so the host cannot divide the work evenly in advance. Results do not depend on which block takes a tile.
//
// An item is a tile of queries of one head; a step is a tile of keys. A `Span` (schedule.cuh) has the number of an item and its steps,
// `begin` to `end` (exclusive). Its `slot`, `time` and `is_part` are for items that several blocks share, which a queue does not have: here
// they are always 0 and false.
#pragma once

#include "schedule.cuh"

// Number of bytes that `write_span` writes.
constexpr int QUEUED_BYTES = 16;

// The thread that copies writes an item to shared memory for the groups of warps that multiply. The groups read it after they have waited
// for the barrier of the item's tile of queries. The unused `slot` fills up the 16 bytes of a single store.
__device__ __forceinline__ void write_span(uint32_t to, const Span &span) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(span.item), "r"(span.begin), "r"(span.end), "r"(span.slot)
                 : "memory");
}
// Reads what `write_span` wrote. Returns false if the span has no steps, which means that no item is left.
// `is_part` is false, because one block computes all steps of an item of a queue.
__device__ __forceinline__ bool read_span(Span &span, uint32_t from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(span.item), "=r"(span.begin), "=r"(span.end), "=r"(span.slot)
                 : "r"(from)
                 : "memory");
    span.is_part = false;
    return span.begin < span.end;
}

// A tile of queries has `rows_at_once` queries of one of the `heads` heads, a tile of keys `keys_at_once` keys. Blocks take the last tiles
// first. No query sees a key after itself, so the tiles at the start of the packed row have few steps. Blocks take these last, so
// that all blocks end at nearly the same time.
struct Queue {
    static constexpr bool IS_QUEUE = true;
    Spans spans;
    // How many times blocks have asked for an item after their first one: zero before the launch and after it.
    uint32_t *taken;
    uint32_t heads, rows_at_once, keys_at_once;

    // Takes items for the block. Only the thread that copies does this; it passes them on with `write_span`.
    struct Walk {
        bool is_first = true;

        __device__ __forceinline__ explicit Walk(const Queue &) {}

        __device__ __forceinline__ bool next(const Queue &queue, Span &span) {
            const uint32_t tiles = ceil_divide(queue.spans.rows, queue.rows_at_once);
            const uint32_t items = tiles * queue.heads;
            const uint32_t index = is_first ? blockIdx.x : gridDim.x + atomicAdd(queue.taken, 1);
            is_first = false;
            span = {/*item=*/0, /*begin=*/0, /*end=*/0, /*slot=*/0, /*time=*/0, /*is_part=*/false};
            if (index >= items) {
                // For each block, exactly one attempt finds no item. So the attempts have the indices 0 to items + gridDim.x - 1, and the
                // last of them resets the counter.
                if (index == items + gridDim.x - 1) *queue.taken = 0;
                return false;
            }
            const uint32_t tile = tiles - 1 - index / queue.heads, first = tile * queue.rows_at_once;
            // The tiles of a head have consecutive numbers.
            span.item = index % queue.heads * tiles + tile;
            span.end = ceil_divide(min(first + queue.rows_at_once, queue.spans.rows), queue.keys_at_once);
            // A query outside all segments sees no key. For such a query, `first_key` returns the position after the query. The step with
            // this position may be `span.end` or later. A tile that begins with such a query still gets at least one step, because a span
            // without steps means that no item is left.
            span.begin = min(queue.spans.first_key(first) / queue.keys_at_once, span.end - 1);
            return true;
        }
    };

    // The mask of the 64 queries from `first` on, which four warps multiply with keys, 16 queries each. `largest_first_key` is the first
    // key that the last of these queries sees; `first_keys` has the first keys that the thread's two queries see.
    struct VisibleKeys {
        uint32_t first, largest_first_key, first_keys[2];

        // The first of the thread's two queries. The second is eight later.
        __device__ __forceinline__ uint32_t row() const { return first + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4; }

        __device__ __forceinline__ VisibleKeys(const Queue &queue, uint32_t first)
            : first(first), largest_first_key(queue.spans.first_key(first + 63)),
              first_keys{queue.spans.first_key(row()), queue.spans.first_key(row() + 8)} {}

        // Whether any of the queries does not see one of the `KEYS` keys from `key` on. The first query sees no key after itself, and no
        // query has a later first key than the last query.
        template <int KEYS> __device__ __forceinline__ bool hides(uint32_t key) const {
            return key + KEYS > first + 1 || key < largest_first_key;
        }
        // Sets a score to negative infinity if its query does not see its key. The scores are those of the keys from `key` on, as
        // wgmma leaves them in registers: of each 8 keys the thread has two neighbouring ones, for its first query and then for its second.
        template <int N> __device__ __forceinline__ void hide(float (&scores)[N], uint32_t key) const {
            key += threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const uint32_t at = key + i / 4 * 8 + i % 2;
                if (at < first_keys[i / 2 % 2] || at > row() + i / 2 % 2 * 8) scores[i] = -INFINITY;
            }
        }
    };

    // A task (shape.cuh) is one tile of one head. Returns `task` with its `head`, a head of queries, replaced by the head of keys that it
    // shares with the other heads of its group. `task.index` remains the index of the head of queries.
    __device__ __forceinline__ Task of_keys(Task task) const {
        task.head /= spans.group();
        return task;
    }
};
