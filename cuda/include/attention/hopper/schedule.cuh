// How the blocks of a launch, one on each multiprocessor, share the launch's work.
//
// An item is a tile of queries in the forward pass and a tile of keys in the backward pass. It takes `steps` steps: one for each tile
// of keys in the forward pass, one for each tile of queries in the backward pass. (With few keys, few_keys.cuh, an item is a head, and its
// steps are its tiles of queries.)
//
// Each of the first `whole` items goes to one block: block b takes items b, b + blocks, b + 2 * blocks and so on. The steps of the
// remaining items, the split ones, form one sequence. Every block takes an equal part of it, to within one step, so that all blocks end at
// nearly the same time. A later kernel sums the parts of each split item. If the sequence has fewer steps than there are blocks, the last
// blocks take none. If there are split items, `whole` is a multiple of the number of blocks.
#pragma once

#include "../shape.cuh"

// Steps `begin` to `end` (exclusive) of an item, which one block computes. If `is_part`, the block stores their result in slot `slot`,
// and a later kernel sums the parts of the item. `time` is the number of steps that the block has done before this span; the
// backward pass orders its sums by it. (With `Shares`, shares.cuh, it also counts the loads and stores of whole items, as a number of
// steps that take equally long; with `Queue`, queue.cuh, it is not used.)
struct Span {
    uint32_t item, begin, end, slot, time;
    bool is_part;
};

struct Schedule;

// The position of a block in its work. `item` is the block's next unsplit item. The steps of the sequence that the block still has to do
// are `place` to `end` (exclusive). `time` is the number of steps that the block has done.
struct ScheduleWalk {
    uint32_t item = blockIdx.x, place, end, time = 0;

    __device__ __forceinline__ explicit ScheduleWalk(const Schedule &schedule);
    // Sets `span` to the block's next span. Returns false if no work is left.
    __device__ __forceinline__ bool next(const Schedule &schedule, Span &span);
};

// A kernel parameter, passed by value: `items` items of `steps` steps each, of which the first `whole` are not split, for `blocks` blocks.
struct Schedule {
    // Whether blocks take their items from a queue while they run, as with `Queue`.
    static constexpr bool IS_QUEUE = false;
    using Walk = ScheduleWalk;
    // The mask of the forward pass. Every query sees every key, so it hides nothing. `HopperForward` itself hides columns beyond the last
    // key.
    struct VisibleKeys {
        __device__ __forceinline__ VisibleKeys(const Schedule &, uint32_t) {}
        template <int KEYS> __device__ __forceinline__ bool hides(uint32_t) const { return false; }
        template <int N> __device__ __forceinline__ void hide(float (&)[N], uint32_t) const {}
    };

    uint32_t items, steps, whole, blocks;

    // A task (shape.cuh) is a tile and its head. Replaces the head of a task, a head of queries, by the head of the keys that it attends
    // to: here the same head, because each head of queries has its own keys.
    __device__ __forceinline__ Task of_keys(const Task &task) const { return task; }

    // The length of the sequence: the number of steps of all split items.
    __device__ __forceinline__ uint32_t sequence_steps() const { return (items - whole) * steps; }
    // The number of blocks that take at least one step of the sequence. They are the first blocks of the launch, so consecutive blocks
    // compute the parts of an item. If the sequence is empty, this is 1, because `start` divides by it.
    __device__ __forceinline__ uint32_t sharing_blocks() const { return max(1u, min(blocks, sequence_steps())); }
    // `start`: the index of a block's first step in the sequence, or the sequence's length for a block that takes no step. `owner`: the
    // block that takes step `step` of the sequence, which is the last block that starts at `step` or before it.
    __device__ __forceinline__ uint32_t start(uint32_t block) const {
        return min(block, sharing_blocks()) * sequence_steps() / sharing_blocks();
    }
    __device__ __forceinline__ uint32_t owner(uint32_t step) const { return ((step + 1) * sharing_blocks() - 1) / sequence_steps(); }

    // How many steps the block that takes step `step` of an item has done before.
    __device__ __forceinline__ uint32_t time(uint32_t item, uint32_t step) const {
        if (item < whole) return item / blocks * steps + step;
        const uint32_t place = (item - whole) * steps + step;
        return whole / blocks * steps + place - start(owner(place));
    }

    // The first block that computes a part of a split item. Sets `count` to the number of blocks that compute parts of the item.
    __device__ __forceinline__ uint32_t first_block(uint32_t item, uint32_t &count) const {
        const uint32_t place = (item - whole) * steps, first = owner(place);
        count = owner(place + steps - 1) - first + 1;
        return first;
    }
    // The slot of a block's part of an item. Each block has two slots: the first is for the item in which the block's part of the sequence
    // begins, the second for the next item. They suffice if there are fewer split items than blocks: then a block's part of the sequence
    // has at most as many steps as an item, so steps of at most two items.
    __device__ __forceinline__ uint32_t slot(uint32_t item, uint32_t block) const {
        return 2 * block + (start(block) / steps != item - whole);
    }
};

__device__ __forceinline__ ScheduleWalk::ScheduleWalk(const Schedule &schedule)
    : place(schedule.start(blockIdx.x)), end(schedule.start(blockIdx.x + 1)) {}

__device__ __forceinline__ bool ScheduleWalk::next(const Schedule &schedule, Span &span) {
    const uint32_t steps = schedule.steps;
    if (item < schedule.whole) {
        span = {item, /*begin=*/0, /*end=*/steps, /*slot=*/0, time, /*is_part=*/false};
        item += schedule.blocks;
    } else if (place < end) {
        const uint32_t index = place / steps, begin = place - index * steps;
        span = {schedule.whole + index, begin, min(steps, begin + end - place), /*slot=*/0, time, /*is_part=*/true};
        span.slot = schedule.slot(span.item, blockIdx.x);
        place += span.end - begin;
    } else {
        return false;
    }
    time += span.end - span.begin;
    return true;
}
