// How the thread blocks of attention's backward pass share the work of a packed row, on Hopper GPUs. A packed row is several segments of
// tokens, such as texts, one after another. A query sees the keys of its own segment up to its own position. `Spans` (shape.cuh) tells
// where the segments begin and end. The number of tiles of queries that see a tile of keys depends on this, and `Spans` is in device
// memory. So a kernel before the backward pass counts these tiles (`make_plan`), and the blocks find their work in the counts.
//
// An item is a tile of keys of one head. Several heads of queries may share a head of keys (grouped-query attention). The steps of an item
// are the tiles of queries that see some of its keys: first those of the first head of queries, then those of the next one. So dk and dv,
// which are sums over these heads, stay in registers. The steps of all items form one sequence, of which every block takes an equal share.
// A later kernel sums the parts of an item that several blocks share.
//
// Blocks add to the gradients of queries in the order in which they would reach these queries if all steps took equally long. This order
// depends only on the sequence, so results do not depend on when blocks run.
#pragma once

#include "order.cuh"

// The sequence is divided into places. A step takes one place. Each item also takes ITEM_PLACES places before its steps. These places stand
// for the time to load the item's first tiles and to store its gradients. Without them, blocks with many short items would end last.
constexpr uint32_t ITEM_PLACES = 2;

// The shares for tiles of M queries.
template <int M> struct Shares {
    // Number of tiles of queries at the positions of a tile of keys. A tile of keys has KEYS_AT_ONCE keys.
    static constexpr uint32_t EACH = KEYS_AT_ONCE / M;

    Spans spans;
    // Two lists, one after the other. The first has `tiles` + 1 numbers: for each tile of keys, the number of steps that all earlier tiles
    // of keys have for one head of queries, and at the end the number of steps of all tiles. The second has `blocks` numbers: the item in
    // which each block's share begins. For a block without a share, this number is not below the number of items.
    const uint32_t *plan;
    uint32_t heads, tiles, blocks;

    // `heads` is the number of heads of keys.
    __device__ __forceinline__ Shares(const Spans &spans, const uint32_t *plan, uint32_t heads, uint32_t blocks)
        : spans(spans), plan(plan), heads(heads), tiles(ceil_divide(spans.rows, KEYS_AT_ONCE)), blocks(blocks) {}

    // The tile of keys of an item: `tile` is its index within the head, `index` and `head` are both the index of the head of keys, because
    // there is one batch.
    __device__ __forceinline__ Task keys(uint32_t item) const { return Task(item, tiles, heads); }

    // The tiles of queries that may see a tile of keys are `first` to `end` (exclusive). They include the tiles at the positions of these
    // keys, so every tile of queries is a step of at least one item, and its gradients are written. `query_end` returns the end of the
    // queries that see a key; it ascends with the key, so the last key of the tile gives the end for the whole tile.
    __device__ __forceinline__ uint32_t first(uint32_t tile) const { return tile * EACH; }
    __device__ __forceinline__ uint32_t end(uint32_t tile) const {
        const uint32_t all = ceil_divide(spans.rows, M), seen = spans.query_end(tile * KEYS_AT_ONCE + KEYS_AT_ONCE - 1);
        return min(max(ceil_divide(seen, M), first(tile) + EACH), all);
    }

    // `places`: the number of places of the items of one head of keys that come before tile `tile`. `all_places`: the number of places of
    // all items. `spans.group()` is the number of heads of queries that share a head of keys.
    __device__ __forceinline__ uint32_t places(uint32_t tile) const { return spans.group() * plan[tile] + ITEM_PLACES * tile; }
    __device__ __forceinline__ uint32_t all_places() const { return heads * places(tiles); }
    // The number of places in a block's share. The shares of the last blocks may be shorter, or empty.
    __device__ __forceinline__ uint32_t share() const { return ceil_divide(all_places(), blocks); }

    // The places of the steps of an item: `begin` to `end` (exclusive).
    struct Places {
        uint32_t begin, end;

        __device__ __forceinline__ Places(const Shares &shares, uint32_t item) {
            const Task keys = shares.keys(item);
            // The number of places of all items of the heads before this one.
            const uint32_t before = keys.index * shares.places(shares.tiles);
            begin = before + shares.places(keys.tile) + ITEM_PLACES;
            end = before + shares.places(keys.tile + 1);
        }
    };

    // Writes the plan to `to`, the memory of `plan`. All threads of one block take part. The first loop computes the first list: each
    // thread counts the steps of one tile, and `before` is the number of steps of the tiles of earlier iterations.
    template <int THREADS> __device__ __forceinline__ void make_plan(uint32_t *to) const {
        __shared__ uint32_t sums[THREADS / WARP];
        const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        uint32_t before = 0;
        for (uint32_t start = 0; start < tiles; start += THREADS) {
            const uint32_t tile = start + threadIdx.x, count = tile < tiles ? end(tile) - first(tile) : 0;
            // `sum` becomes the sum of the counts of the threads up to this one, first within the warp.
            uint32_t sum = count;
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2) {
                const uint32_t other = __shfl_up_sync(ALL_LANES, sum, offset);
                if (lane >= offset) sum += other;
            }
            if (lane == WARP - 1) sums[warp] = sum;
            __syncthreads();
            uint32_t all = 0;
#pragma unroll
            for (int i = 0; i < THREADS / WARP; i++) {
                if (i == warp) sum += all;
                all += sums[i];
            }
            if (tile < tiles) to[tile] = before + sum - count;
            before += all;
            __syncthreads();
        }
        if (threadIdx.x == 0) to[tiles] = before;
        __syncthreads();
        const uint32_t of_head = places(tiles), share = this->share();
        for (uint32_t block = threadIdx.x; block < blocks; block += THREADS) {
            // The first place of the block's share, the head of keys in which it lies, and the place within this head.
            const uint32_t place = block * share, head = min(place / of_head, heads), rest = place - head * of_head;
            // Finds the last tile of keys whose places begin at `rest` or before.
            uint32_t low = 0, high = tiles;
            while (high - low > 1) {
                const uint32_t middle = low + (high - low) / 2;
                if (places(middle) <= rest)
                    low = middle;
                else
                    high = middle;
            }
            to[tiles + 1 + block] = head * tiles + low;
        }
    }

    // The position of a block in its work: its next item. Its share has the places `start` to `end` (exclusive). `next` sets `span` to the
    // steps of this item that are in the share, and returns false if no work is left.
    struct Walk {
        uint32_t item, start, end;

        __device__ __forceinline__ explicit Walk(const Shares &shares) : item(shares.plan[shares.tiles + 1 + blockIdx.x]) {
            const uint32_t share = shares.share();
            start = blockIdx.x * share, end = start + share;
        }

        __device__ __forceinline__ bool next(const Shares &shares, Span &span) {
            if (item >= shares.heads * shares.tiles) return false;
            const Places places(shares, item);
            const uint32_t begin = max(places.begin, start), stop = min(places.end, end);
            if (begin >= stop) return false;
            const bool is_part = begin > places.begin || stop < places.end;
            // Only the first and the last item of a block can be parts, so two slots for each block suffice: the first slot if these steps
            // begin at the first place of the share, otherwise the second slot. The fields: the item, its first step and the end of its
            // steps, the slot, the number of places of the share before these steps, and whether they are only a part of the item's steps.
            span = {item++, begin - places.begin, stop - places.begin, 2 * blockIdx.x + (begin != start), begin - start, is_part};
            return true;
        }
    };

    // The tile and the head of queries of the current step of a span. The item's tiles of queries are `begin` to `end` (exclusive), in each
    // of the heads of queries that share its head of keys. `member` is the index of the head of queries among these.
    struct QueryCursor {
        uint32_t tile, begin, end, member;

        __device__ __forceinline__ QueryCursor(const Shares &shares, const Span &span, const Task &keys) : begin(shares.first(keys.tile)) {
            const uint32_t count = shares.plan[keys.tile + 1] - shares.plan[keys.tile];
            member = span.begin / count;
            tile = begin + span.begin - member * count, end = begin + count;
        }
        __device__ __forceinline__ void advance(const Shares &) {
            if (++tile == end) tile = begin, member++;
        }
        __device__ __forceinline__ Task queries(const Shares &shares, Task keys) const {
            keys.tile = tile;
            // There is one batch, so the head is also the index over (batch, heads).
            keys.head = keys.index = keys.index * shares.spans.group() + member;
            return keys;
        }
    };

    // The turn of the tile `keys` to add to the gradients of the tile of queries at `cursor`: how many other tiles of keys add to these
    // gradients before it. The block of `keys` reaches these queries `time` places after the start of its share. A tile of keys whose block
    // reaches them after fewer places adds earlier; after equally many places, the tile with the lower index adds earlier. All lanes of
    // the warp take part and get the result. Only tiles of keys that have a step for these queries are counted, whatever the spans are. So
    // each addition that a block waits for is made, and no block waits forever.
    __device__ __forceinline__ uint32_t turn(const Task &keys, const QueryCursor &cursor, uint32_t time) const {
        // `own` is the tile of keys at the positions of these queries, the last one that they see. `lowest` is the first one. The first
        // step of tile 0 of this head of keys takes the place `before_head`.
        const uint32_t own = cursor.tile / EACH, share = this->share(), before_head = keys.index * places(tiles) + ITEM_PLACES;
        const uint32_t lowest = min(spans.first_key(cursor.tile * M) / KEYS_AT_ONCE, own);
        uint32_t before = 0;
        for (uint32_t tile = lowest + threadIdx.x % WARP; tile <= own; tile += WARP) {
            const uint32_t count = plan[tile + 1] - plan[tile], step = cursor.tile - first(tile);
            if (step >= count) continue;
            // How many places after the start of its share the block of `tile` reaches the queries.
            const uint32_t other = (before_head + places(tile) + cursor.member * count + step) % share;
            before += other < time || (other == time && tile < keys.tile);
        }
        return __reduce_add_sync(ALL_LANES, before);
    }

    // The mask of the 64 keys from `first` on. `first_end` is the end (exclusive) of the queries that see key `first`.
    struct VisibleKeys {
        const Spans &spans;
        uint32_t first, first_end;

        __device__ __forceinline__ VisibleKeys(const Shares &shares, uint32_t first)
            : spans(shares.spans), first(first), first_end(shares.spans.query_end(first)) {}

        // Whether any of the 64 queries from `query` on does not see one of the keys: the first query is before the last key, or the
        // queries reach beyond `first_end`, the lowest end of all 64 keys.
        __device__ __forceinline__ bool hides(uint32_t query) const { return query < first + 63 || query + 64 > first_end; }
        // Sets a weight to zero if its query does not see its key. The weights are those of the 64 queries from `query` on.
        __device__ __forceinline__ void hide(float (&weights)[32], uint32_t query) const {
            // The weights are in wgmma's layout of sums, with keys as rows and queries as columns: warp number w of the warpgroup has the
            // keys 16 w to 16 w + 15.
            const uint32_t key = first + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
            // The thread has the weights of two keys, `key` and `key` + 8: of every four weights, the last two are those of the second key.
            uint32_t end[2] = {UINT32_MAX, UINT32_MAX};
            if (query + 64 > first_end) end[0] = spans.query_end(key), end[1] = spans.query_end(key + 8);
            query += threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const uint32_t at = query + i / 4 * 8 + i % 2;
                if (at < key + i / 2 % 2 * 8 || at >= end[i / 2 % 2]) weights[i] = 0.0f;
            }
        }
    };

    // Describes the item in which the share of block `index` + 1 begins. Returns true if this item is split and its first step is in the
    // share of block `index`. So each split item is found for exactly one `index`.
    __device__ __forceinline__ bool split(uint32_t index, SplitItem &split) const {
        const uint32_t share = this->share(), start = index * share, place = start + share;
        if (place >= all_places()) return false;
        // Number `index` + 1 of the plan's second list, which follows the `tiles` + 1 numbers of the first list.
        split.item = plan[tiles + 2 + index];
        const Places places(*this, split.item);
        // The item's parts come from `count` blocks, from block `first` on. `starts`: whether block `first` begins with the item's first
        // step.
        split.first = index, split.count = (places.end - 1) / share - index + 1;
        split.starts = places.begin == start;
        return start <= places.begin && places.begin < place && place < places.end;
    }
    // The slot of part `index` of a split item.
    __device__ __forceinline__ uint32_t slot(const SplitItem &split, uint32_t index) const {
        return 2 * (split.first + index) + (index == 0 && !split.starts);
    }
};
