// The order in which the thread blocks of the backward pass take tiles of queries and add to the gradients of these queries, for attention
// without a mask. An item is a tile of keys of one head, with one step for each tile of `M` queries. One block takes all steps of an item,
// or several blocks share the steps of a split item (schedule.cuh). A span is the steps of an item that one block takes.
#pragma once

#include "schedule.cuh"

// Number of keys in a tile.
constexpr int KEYS_AT_ONCE = 128;

// A split item, of which `count` consecutive blocks, from block `first` on, have computed parts. `starts` tells whether block `first`
// begins its share of the work with the item's first step. Only `Shares`, the order for packed rows (shares.cuh), sets and reads `starts`.
struct SplitItem {
    uint32_t item, first, count;
    bool starts;
};

// The order for attention without a mask: every query sees every key.
template <int M> struct Order {
    const Schedule &schedule;
    uint32_t tiles, heads, keys_of_head;

    __device__ __forceinline__ Order(const Schedule &schedule, const AttentionShape &shape)
        : schedule(schedule), tiles(ceil_divide(shape.keys, KEYS_AT_ONCE)), heads(shape.heads), keys_of_head(shape.keys) {}

    // The position of a block in its work. `next` sets `span` to the block's next span, and returns false if there is none.
    struct Walk : ScheduleWalk {
        __device__ __forceinline__ explicit Walk(const Order &order) : ScheduleWalk(order.schedule) {}
        __device__ __forceinline__ bool next(const Order &order, Span &span) { return ScheduleWalk::next(order.schedule, span); }
    };

    // The tile of keys of an item: `tile` is its index within its head, `index` the index of the head over (batch, heads).
    __device__ __forceinline__ Task keys(uint32_t item) const { return Task(item, tiles, heads); }

    // The tile of queries of the first step of tile `tile` of keys. From there, the steps go through all tiles of queries; the first tile
    // follows the last. The first steps of the tiles of keys are spread evenly over the tiles of queries, so that blocks seldom wait for
    // each other's additions. There is a step for each tile of queries, so `schedule.steps` is also the number of these tiles.
    __device__ __forceinline__ uint32_t first(uint32_t tile) const { return tile * schedule.steps / tiles; }

    // The tile of queries of the current step of a span.
    struct QueryCursor {
        uint32_t tile;

        __device__ __forceinline__ QueryCursor(const Order &order, const Span &span, const Task &keys)
            : tile(span.begin + order.first(keys.tile)) {
            if (tile >= order.schedule.steps) tile -= order.schedule.steps;
        }
        __device__ __forceinline__ void advance(const Order &order) {
            if (++tile == order.schedule.steps) tile = 0;
        }
        // The current tile of queries, in the head of the tile `keys`.
        __device__ __forceinline__ Task queries(const Order &, Task keys) const {
            keys.tile = tile;
            return keys;
        }
    };

    // The turn of the tile `keys` to add to the gradients of the tile of queries at `cursor`: how many other tiles of keys add to these
    // gradients before it. The block of each tile of keys has done a number of steps when it reaches these queries; for the block of
    // `keys`, the number is `time`. Tiles of keys with smaller numbers add earlier; of two with equal numbers, the one with the lower
    // index adds earlier. All lanes of the warp take part and get the result.
    __device__ __forceinline__ uint32_t turn(const Task &keys, const QueryCursor &cursor, uint32_t time) const {
        const uint32_t queries = cursor.tile;
        uint32_t before = 0;
        for (uint32_t tile = threadIdx.x % WARP; tile < tiles; tile += WARP) {
            const uint32_t begin = first(tile), step = queries >= begin ? queries - begin : queries + schedule.steps - begin;
            const uint32_t other = schedule.time(keys.index * tiles + tile, step);
            before += other < time || (other == time && tile < keys.tile);
        }
        return __reduce_add_sync(ALL_LANES, before);
    }

    // The mask of the 64 keys from `first` on, of which each of four warps has 16: it hides keys beyond the head's last key. `key` is the
    // thread's first key; its second key is `key` + 8. `has_hidden` tells whether the tile of these keys reaches beyond the last key.
    struct VisibleKeys {
        uint32_t key, keys;
        bool has_hidden;

        __device__ __forceinline__ VisibleKeys(const Order &order, uint32_t first)
            : key(first + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4), keys(order.keys_of_head),
              has_hidden((first / KEYS_AT_ONCE + 1) * KEYS_AT_ONCE > order.keys_of_head) {}

        // Whether weights may need `hide`. The argument, the first query, does not matter: the answer is the same for all queries.
        __device__ __forceinline__ bool hides(uint32_t) const { return has_hidden; }
        // Sets the weights of keys beyond the last key to zero. Of every four weights, the last two are those of the thread's second key.
        __device__ __forceinline__ void hide(float (&weights)[32], uint32_t) const {
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (key + i / 2 % 2 * 8 >= keys) weights[i] = 0.0f;
        }
    };

    // Describes the split item with index `index` among the split items. Always returns true, unlike `Shares::split`.
    __device__ __forceinline__ bool split(uint32_t index, SplitItem &split) const {
        split.item = schedule.whole + index; // the first `whole` items are not split
        split.first = schedule.first_block(split.item, split.count); // also sets `split.count`
        return true;
    }
    // The slot in which a block has stored part `index` of a split item.
    __device__ __forceinline__ uint32_t slot(const SplitItem &split, uint32_t index) const {
        return schedule.slot(split.item, split.first + index);
    }
};
