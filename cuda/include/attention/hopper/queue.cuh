// The work of the forward pass over a packed row: a queue of tiles of queries. A block that has finished a tile takes the next one from the
// queue. The number of tiles of keys that a tile of queries sees depends on the spans, which are in device memory, so the host cannot
// divide the work evenly in advance. Results do not depend on which block takes a tile.
#pragma once

#include "schedule.cuh"

// Number of bytes that `write_span` writes.
constexpr int QUEUED_BYTES = 16;

// The thread that copies writes an item to shared memory for the groups of warps that multiply. The groups read it after they have waited
// for the barrier of the item's tile of queries.
__device__ __forceinline__ void write_span(uint32_t to, const Span &span) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(span.item), "r"(span.begin), "r"(span.end), "r"(span.slot)
                 : "memory");
}
// Reads what `write_span` wrote. Returns false if the span has no steps, which means that no item is left.
__device__ __forceinline__ bool read_span(Span &span, uint32_t from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(span.item), "=r"(span.begin), "=r"(span.end), "=r"(span.slot)
                 : "r"(from)
                 : "memory");
    span.is_part = false;
    return span.begin < span.end;
}

// An item is a tile of `rows_at_once` queries of one of the `heads` heads; a step is a tile of `keys_at_once` keys. Blocks take the last
// tiles first. No query sees a key after itself, so the tiles at the start of the packed row have few steps. Blocks take these last, so
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
            span = {0, 0, 0, 0, 0, false};
            if (index >= items) {
                // For each block, exactly one attempt finds no item. The last of these attempts resets the counter.
                if (index == items + gridDim.x - 1) *queue.taken = 0;
                return false;
            }
            const uint32_t tile = tiles - 1 - index / queue.heads, first = tile * queue.rows_at_once;
            span.item = index % queue.heads * tiles + tile;
            span.end = ceil_divide(min(first + queue.rows_at_once, queue.spans.rows), queue.keys_at_once);
            // A query outside all segments has the next position as its first key. A tile that begins with such queries still gets at least
            // one step.
            span.begin = min(queue.spans.first_key(first) / queue.keys_at_once, span.end - 1);
            return true;
        }
    };

    // The mask of the 64 queries from `first` on. `last_begin` is the first key that the last of these queries sees; `begin` has the first
    // keys that the thread's two queries see.
    struct VisibleKeys {
        uint32_t first, last_begin, begin[2];

        // The first of the thread's two queries. The second is eight later.
        __device__ __forceinline__ uint32_t row() const { return first + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4; }

        __device__ __forceinline__ VisibleKeys(const Queue &queue, uint32_t first)
            : first(first), last_begin(queue.spans.first_key(first + 63)),
              begin{queue.spans.first_key(row()), queue.spans.first_key(row() + 8)} {}

        // Whether any of the queries does not see one of the `KEYS` keys from `key` on.
        template <int KEYS> __device__ __forceinline__ bool hides(uint32_t key) const {
            return key + KEYS > first + 1 || key < last_begin;
        }
        // Sets a score to negative infinity if its query does not see its key. The scores are those of the keys from `key` on.
        template <int N> __device__ __forceinline__ void hide(float (&scores)[N], uint32_t key) const {
            key += threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const uint32_t at = key + i / 4 * 8 + i % 2;
                if (at < begin[i / 2 % 2] || at > row() + i / 2 % 2 * 8) scores[i] = -INFINITY;
            }
        }
    };

    // Returns the task with the head of keys for a task with a head of queries. `index` stays that of the queries.
    __device__ __forceinline__ Task of_keys(Task task) const {
        task.head /= spans.group();
        return task;
    }
};
