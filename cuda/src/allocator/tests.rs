//! Tests of the allocator with a simulated device.

use std::collections::BTreeMap;

use super::*;

/// A simulated device with `limit` bytes of memory. It panics if the allocator maps or unmaps memory wrongly.
struct Fake {
    limit: u64,
    /// The address that the next reservation gets.
    next: u64,
    /// The sizes of the mapped chunks in bytes, by address.
    mapped: BTreeMap<u64, u64>,
    /// The number of calls of `wait`.
    waits: usize,
}

/// The error of a device whose memory is full.
#[derive(Debug, PartialEq, Eq)]
struct Full;

/// The handle of memory that [`Fake`] mapped at `address`.
struct Chunk {
    address: u64,
}

impl Fake {
    fn used(&self) -> u64 {
        self.mapped.values().sum()
    }
}

impl Backend for Fake {
    type Chunk = Chunk;
    type Error = Full;

    fn reserve(&mut self, size: u64) -> Result<u64, Full> {
        assert!(size.is_multiple_of(PAGE));
        self.next += size;
        Ok(self.next - size)
    }

    fn map(&mut self, address: u64, size: u64) -> Result<Chunk, Full> {
        assert!(size > 0 && size.is_multiple_of(PAGE) && address.is_multiple_of(PAGE), "{address} {size}");
        let before = self.mapped.range(..address + size).next_back();
        assert!(before.is_none_or(|(at, size)| at + size <= address), "mapped twice");
        if self.used() + size > self.limit {
            return Err(Full);
        }
        self.mapped.insert(address, size);
        Ok(Chunk { address })
    }

    fn unmap(&mut self, address: u64, size: u64, chunk: Chunk) {
        assert_eq!((chunk.address, self.mapped.remove(&address)), (address, Some(size)));
    }

    fn wait(&mut self) -> Result<(), Full> {
        self.waits += 1;
        Ok(())
    }

    fn full() -> Full {
        Full
    }

    fn is_full(_: &Full) -> bool {
        true
    }
}

const MIB: u64 = 1 << 20;

/// An allocator of a simulated device with `limit` bytes. Each of its pools reserves twice as many bytes of addresses. No
/// address is 0.
fn allocator(limit: u64) -> Allocator<Fake> {
    Allocator::new(Fake { limit, next: 64 * PAGE, mapped: BTreeMap::new(), waits: 0 }, 2 * limit)
}

/// Numbers of a linear congruential generator.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Check that blocks in use are in mapped memory and do not overlap, and that the statistics are right.
fn check(allocator: &Allocator<Fake>, live: &BTreeMap<u64, u64>) {
    let mut end = 0;
    for (&address, &size) in live {
        assert!(address >= end && address.is_multiple_of(ALIGNMENT), "overlap at {address}");
        end = address + size;
        let mut at = address;
        while at < end {
            let (start, length) = allocator.backend.mapped.range(..=at).next_back().expect("mapped");
            assert!(start + length > at, "{at} is not mapped");
            at = start + length;
        }
    }
    let stats = allocator.stats();
    assert_eq!(stats.allocated, live.values().map(|size| size.next_multiple_of(ALIGNMENT)).sum::<u64>());
    assert_eq!(stats.reserved, allocator.backend.used());
    assert!(stats.peak_allocated >= stats.allocated && stats.peak_reserved >= stats.reserved);
    assert!(stats.reserved >= stats.allocated);
}

#[test]
fn blocks_of_random_sizes_do_not_overlap_and_join_when_they_are_freed() {
    for seed in 0..8 {
        let (mut allocator, mut numbers) = (allocator(4096 * MIB), Numbers(seed));
        let mut live = BTreeMap::new();
        let mut peak = 0;
        for step in 0..4000 {
            // Tiny blocks, blocks of the pool of small blocks, and two ranges of large blocks.
            let size = match numbers.below(4) {
                0 => numbers.below(2000) + 1,
                1 => numbers.below(SMALL) + 1,
                2 => SMALL + numbers.below(8 * MIB),
                _ => numbers.below(90 * MIB) + 1,
            };
            if live.len() < 60 && numbers.below(5) < 3 {
                let address = allocator.allocate(size).unwrap();
                assert!(live.insert(address, size).is_none());
            } else if !live.is_empty() {
                let at = numbers.below(live.len() as u64) as usize;
                let address = *live.keys().nth(at).unwrap();
                live.remove(&address);
                assert!(allocator.free(address));
            }
            if step % 500 == 499 {
                allocator.trim().unwrap();
            }
            peak = peak.max(allocator.stats().allocated);
            if step % 50 == 0 {
                check(&allocator, &live);
            }
        }
        assert_eq!(allocator.stats().peak_allocated, peak);
        for &address in live.keys() {
            assert!(allocator.free(address));
        }
        // With no block in use, the mapped memory between two gaps is one free block, and `trim` unmaps all memory.
        for pool in allocator.eager.pools() {
            let gaps_inside = pool.gaps.keys().filter(|gap| pool.blocks.range(**gap..).next().is_some()).count();
            assert!(pool.blocks.len() <= gaps_inside + 1, "{} blocks are left", pool.blocks.len());
        }
        allocator.trim().unwrap();
        check(&allocator, &BTreeMap::new());
        assert_eq!(allocator.backend.used(), 0);
    }
}

#[test]
fn a_repeated_step_maps_no_more_memory() {
    let mut allocator = allocator(4096 * MIB);
    let mut step = || {
        let blocks: Vec<_> = (1..40u64).map(|i| allocator.allocate(i * 700_000).unwrap()).collect();
        blocks.into_iter().for_each(|address| assert!(allocator.free(address)));
        allocator.stats()
    };
    let (first, second) = (step(), step());
    assert_eq!((first.growths, first.reserved), (second.growths, second.reserved));
    assert_eq!(second.allocations, 2 * first.allocations);
    assert_eq!(first.peak_allocated, second.peak_allocated);
}

#[test]
fn cached_memory_is_released_before_an_allocation_fails() {
    let mut allocator = allocator(100 * MIB);
    let small: Vec<_> = (0..20).map(|_| allocator.allocate(MIB).unwrap()).collect();
    let large = allocator.allocate(60 * MIB).unwrap();
    assert!(allocator.allocate(50 * MIB).is_err());
    small.into_iter().for_each(|address| assert!(allocator.free(address)));
    assert!(allocator.free(large));
    // This block fits only if the pool of small blocks releases its memory.
    let all = allocator.allocate(96 * MIB).unwrap();
    // The failed allocation of 50 MiB was tried again, and that of `all`.
    assert_eq!(allocator.stats().retries, 2);
    assert!(allocator.backend.waits > 0);
    assert!(allocator.allocate(100 * MIB).is_err() && allocator.allocate(1 << 40).is_err());
    assert!(allocator.free(all));
}

#[test]
fn freeing_an_address_that_is_no_block_in_use_returns_false() {
    let mut allocator = allocator(100 * MIB);
    let block = allocator.allocate(MIB).unwrap();
    assert!(allocator.free(block));
    assert!(!allocator.free(block), "the block is free already");
    assert!(!allocator.free(12), "the allocator has not allocated this address");
}

#[test]
fn a_pool_grows_by_less_than_usual_if_little_memory_is_left() {
    let mut allocator = allocator(40 * MIB);
    // The first block makes the pool grow by `GROWTH`, 32 MiB. The second block lacks 6 MiB, and the device has no 32 MiB
    // left.
    let first = allocator.allocate(30 * MIB).unwrap();
    let second = allocator.allocate(8 * MIB).unwrap();
    assert_eq!((second, allocator.stats().reserved), (first + 30 * MIB, 38 * MIB));
    assert!(allocator.allocate(4 * MIB).is_err());
}

#[test]
fn gaps_are_filled_again() {
    let mut allocator = allocator(1024 * MIB);
    let blocks: Vec<_> = (0..4).map(|_| allocator.allocate(64 * MIB).unwrap()).collect();
    assert!(allocator.free(blocks[1]) && allocator.free(blocks[2]));
    assert_eq!(allocator.trim().unwrap(), 128 * MIB);
    // The allocation of `first` maps 40 MiB of the gap. The allocation of `whole` maps the other 88 MiB, which join the free block of
    // 40 MiB before them.
    let first = allocator.allocate(40 * MIB).unwrap();
    assert_eq!(first, blocks[1]);
    assert!(allocator.free(first));
    let whole = allocator.allocate(128 * MIB).unwrap();
    assert_eq!((whole, allocator.stats().reserved), (blocks[1], 256 * MIB));
}

#[test]
fn the_memory_of_graphs_stays_until_the_last_graph_is_dropped() {
    let mut allocator = allocator(1024 * MIB);
    let eager = allocator.allocate(100 * MIB).unwrap();
    assert!(allocator.free(eager));
    allocator.begin_capture().unwrap();
    assert_eq!(allocator.stats().reserved, 0, "cached blocks are released before the capture");
    let temporary = allocator.allocate(100 * MIB).unwrap();
    assert!(allocator.free(temporary));
    // A capture reuses memory that it has freed.
    let output = allocator.allocate(10 * MIB).unwrap();
    assert_eq!(output, temporary);
    let constant = allocator.allocate_from(Origin::Eager, MIB).unwrap();
    // `captured` lists the blocks that the capture allocated and did not free.
    assert!(allocator.captured().eq(std::iter::once(output..output + 10 * MIB)));
    assert!(allocator.is_of_graphs(output) && !allocator.is_of_graphs(constant) && allocator.owns(constant));
    assert_eq!(allocator.trim().unwrap(), 0);
    allocator.end_capture();
    let other = allocator.allocate(20 * MIB).unwrap();
    assert!(!allocator.is_of_graphs(other));
    assert_eq!(allocator.stats().graphs, 100 * MIB);
    // A second graph reuses the first graph's temporaries, but not its output.
    allocator.begin_capture().unwrap();
    assert_eq!(allocator.captured().count(), 0);
    let second = allocator.allocate(90 * MIB).unwrap();
    assert!(second >= output + 10 * MIB && second < output + 100 * MIB);
    allocator.end_capture();
    assert!(allocator.free(second));
    // One of the two graphs is left, so the memory stays mapped.
    allocator.release_graph().unwrap();
    assert_eq!(allocator.stats().graphs, 100 * MIB);
    assert!(allocator.free(output));
    allocator.release_graph().unwrap();
    assert_eq!(allocator.stats().graphs, 0);
    assert!(allocator.free(other) && allocator.free(constant));
}

#[test]
fn eager_work_between_replays_borrows_the_memory_of_graphs() {
    let mut allocator = allocator(180 * MIB);
    let run = |allocator: &mut Allocator<Fake>| {
        let blocks: Vec<_> = (0..3).map(|_| allocator.allocate(40 * MIB).unwrap()).collect();
        blocks.iter().for_each(|&address| assert!(allocator.free(address)));
        blocks
    };
    run(&mut allocator);
    allocator.begin_capture().unwrap();
    let first = run(&mut allocator);
    allocator.end_capture();
    assert_eq!(allocator.stats().graphs, 120 * MIB);
    // Another shape runs eagerly for the first time and keeps a block.
    let stays = allocator.allocate(8 * MIB).unwrap();
    run(&mut allocator);
    // The eager blocks need up to 32 MiB (`GROWTH`, for `stays`) and 3 x 40 MiB. Together with all 120 MiB of the graph,
    // this exceeds the limit, so the graph's memory was unmapped, except for at most a part of a block. The first bound
    // is a little above the 152 MiB that the eager blocks need.
    let stats = allocator.stats();
    assert!(stats.reserved <= 160 * MIB && stats.graphs < 40 * MIB, "{stats:?}");
    assert_eq!(stats.retries, 0);
    let waits = allocator.backend.waits;
    // `restore` maps memory at the first graph's addresses again.
    allocator.restore().unwrap();
    let mapped =
        |at: u64| allocator.backend.mapped.range(..=at).next_back().is_some_and(|(start, size)| start + size > at);
    // Each block of 40 MiB has 20 pages of 2 MiB.
    for &address in &first {
        assert!((0..20).all(|i| mapped(address + i * 2 * MIB)), "{address}");
    }
    assert_eq!((allocator.stats().graphs, allocator.backend.waits), (120 * MIB, waits + 1));
    // A second `restore` has nothing to map, so it does not wait for the device.
    allocator.restore().unwrap();
    assert_eq!(allocator.backend.waits, waits + 1);
    // While eager blocks in use leave too little memory of the device, the graph's memory cannot be mapped again.
    let kept = allocator.allocate(100 * MIB).unwrap();
    assert_eq!(allocator.restore(), Err(Full));
    assert!(allocator.free(kept));
    allocator.restore().unwrap();
    allocator.begin_capture().unwrap();
    assert_eq!(run(&mut allocator), first);
    allocator.end_capture();
    // There were two captures, so there are two graphs.
    allocator.release_graph().unwrap();
    allocator.release_graph().unwrap();
    assert_eq!(allocator.stats().graphs, 0);
    assert!(allocator.free(stays));
    allocator.trim().unwrap();
    assert_eq!(allocator.backend.used(), 0);
}
