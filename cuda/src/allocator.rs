//! The caching allocator of a stream's memory, apart from the driver that it asks.
//!
//! Work goes to one stream, so a block can be handed out again as soon as it is freed: whoever gets it is queued behind whoever had
//! it. A pool is one reserved range of addresses, into which memory is mapped where no free block fits, at its end or in a gap that
//! [`Allocator::trim`] left. So neighbours in it can always be joined, and what is freed in small pieces is there for large ones.
//!
//! While a graph is captured, blocks come from a space of their own, which eager work never gets: each replay of a graph writes to
//! the addresses of its capture, also those that the capture has freed. Graphs are replayed one after another, so they share it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// What every size and address is a multiple of.
pub const ALIGNMENT: u64 = 512;
/// Requests up to this size come from pools of their own, so that they do not split what large ones need.
pub const SMALL: u64 = 1 << 20;
/// What memory is mapped in multiples of.
pub const PAGE: u64 = 2 << 20;
/// The least that a pool of large blocks grows by.
const GROWTH: u64 = 32 << 20;

/// Who reserves addresses and maps memory.
pub trait Backend {
    /// Mapped memory.
    type Chunk;
    /// Why something cannot be had.
    type Error;

    /// `size` bytes of addresses, a multiple of [`PAGE`].
    ///
    /// # Errors
    /// The driver's.
    fn reserve(&mut self, size: u64) -> Result<u64, Self::Error>;
    /// Memory for a part of a reserved range.
    ///
    /// # Errors
    /// The driver's.
    fn map(&mut self, address: u64, size: u64) -> Result<Self::Chunk, Self::Error>;
    /// Give memory back. No queued work may use it.
    fn unmap(&mut self, address: u64, size: u64, chunk: Self::Chunk);
    /// Wait until no queued work uses memory that was freed.
    ///
    /// # Errors
    /// The driver's.
    fn wait(&mut self) -> Result<(), Self::Error>;
    /// The error that says that there is no memory left.
    fn full() -> Self::Error;
    /// Whether an error says that there is no memory left.
    fn is_full(error: &Self::Error) -> bool;
}

/// What an allocator holds, in bytes, and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// In blocks that are in use.
    pub allocated: u64,
    /// The most that was.
    pub peak_allocated: u64,
    /// Mapped: in use, or kept for later.
    pub reserved: u64,
    /// The most that was.
    pub peak_reserved: u64,
    /// Of [`reserved`](Self::reserved), what belongs to graphs.
    pub graphs: u64,
    /// Blocks handed out.
    pub allocations: u64,
    /// Times that memory was mapped.
    pub growths: u64,
    /// Times that memory ran out and what was kept for later was given back.
    pub retries: u64,
}

/// A piece of mapped memory.
#[derive(Clone, Copy, Debug)]
struct Block {
    size: u64,
    is_free: bool,
}

/// One range of addresses.
struct Pool<C> {
    start: u64,
    end: u64,
    growth: u64,
    /// What is mapped, without gaps between neighbours, by address.
    blocks: BTreeMap<u64, Block>,
    /// The free ones, by size and address.
    free: BTreeSet<(u64, u64)>,
    /// Mapped memory by address, with its size.
    chunks: BTreeMap<u64, (u64, C)>,
    /// What is not mapped, by address, with its size.
    gaps: BTreeMap<u64, u64>,
}

impl<C> Pool<C> {
    fn new(start: u64, size: u64, growth: u64) -> Self {
        Self {
            start,
            end: start + size,
            growth,
            blocks: BTreeMap::new(),
            free: BTreeSet::new(),
            chunks: BTreeMap::new(),
            gaps: BTreeMap::from([(start, size)]),
        }
    }

    /// The smallest free block that fits, cut to `size`.
    fn take(&mut self, size: u64) -> Option<u64> {
        let &(found, address) = self.free.range((size, 0)..).next()?;
        self.free.remove(&(found, address));
        self.blocks.insert(address, Block { size, is_free: false });
        if found > size {
            self.blocks.insert(address + size, Block { size: found - size, is_free: true });
            self.free.insert((found - size, address + size));
        }
        Some(address)
    }

    /// Return a block; its size, or nothing if it is not one in use.
    fn give(&mut self, address: u64) -> Option<u64> {
        let block = self.blocks.get(&address).copied().filter(|block| !block.is_free)?;
        self.insert_free(address, block.size);
        Some(block.size)
    }

    /// A free block, joined with its neighbours.
    fn insert_free(&mut self, mut address: u64, mut size: u64) {
        self.blocks.remove(&address);
        if let Some((&before, block)) = self.blocks.range(..address).next_back()
            && block.is_free
            && before + block.size == address
        {
            let joined = block.size;
            self.forget_free(before, joined);
            (address, size) = (before, size + joined);
        }
        if let Some(next) = self.blocks.get(&(address + size)).copied().filter(|block| block.is_free) {
            self.forget_free(address + size, next.size);
            size += next.size;
        }
        self.blocks.insert(address, Block { size, is_free: true });
        self.free.insert((size, address));
    }

    fn forget_free(&mut self, address: u64, size: u64) {
        self.free.remove(&(size, address));
        self.blocks.remove(&address);
    }

    /// Map memory such that a free block of `size` bytes comes to be; how much, or nothing if no gap is large enough.
    fn grow<B: Backend<Chunk = C>>(&mut self, backend: &mut B, size: u64) -> Result<Option<u64>, B::Error> {
        let found = self.gaps.iter().find_map(|(&gap, &length)| {
            let before = self.blocks.range(..gap).next_back();
            let before = before.filter(|(address, block)| block.is_free && *address + block.size == gap);
            let before = before.map_or(0, |(_, block)| block.size);
            let after = self.blocks.get(&(gap + length)).filter(|block| block.is_free).map_or(0, |block| block.size);
            let missing = size.saturating_sub(before).next_multiple_of(PAGE).max(PAGE);
            if missing <= length {
                Some((gap, missing, missing.max(self.growth).min(length)))
            } else {
                (before + length + after >= size).then_some((gap, length, length))
            }
        });
        let Some((address, missing, wanted)) = found else { return Ok(None) };
        let (length, chunk) = match backend.map(address, wanted) {
            Ok(chunk) => (wanted, chunk),
            // The last of a device's memory comes in small pieces.
            Err(error) if B::is_full(&error) && missing < wanted => (missing, backend.map(address, missing)?),
            Err(error) => return Err(error),
        };
        self.chunks.insert(address, (length, chunk));
        if let Some(gap) = self.gaps.remove(&address)
            && gap > length
        {
            self.gaps.insert(address + length, gap - length);
        }
        self.insert_free(address, length);
        Ok(Some(length))
    }

    /// The chunks of which nothing is in use.
    fn unused(&self) -> Vec<u64> {
        let is_free = |(&address, (size, _)): (&u64, &(u64, C))| {
            let around = self.blocks.range(..=address).next_back();
            around
                .is_some_and(|(&start, block)| block.is_free && start + block.size >= address + size)
                .then_some(address)
        };
        self.chunks.iter().filter_map(is_free).collect()
    }

    /// Give the chunks back of which nothing is in use; how much.
    fn trim<B: Backend<Chunk = C>>(&mut self, backend: &mut B) -> u64 {
        let mut total = 0;
        for address in self.unused() {
            let Some((size, chunk)) = self.chunks.remove(&address) else { continue };
            let Some((start, block)) = self.blocks.range(..=address).next_back().map(|(&a, &b)| (a, b)) else {
                continue;
            };
            self.forget_free(start, block.size);
            for (start, end) in [(start, address), (address + size, start + block.size)] {
                if end > start {
                    self.blocks.insert(start, Block { size: end - start, is_free: true });
                    self.free.insert((end - start, start));
                }
            }
            backend.unmap(address, size, chunk);
            self.insert_gap(address, size);
            total += size;
        }
        total
    }

    fn insert_gap(&mut self, mut address: u64, mut size: u64) {
        if let Some((&before, &length)) = self.gaps.range(..address).next_back()
            && before + length == address
        {
            self.gaps.remove(&before);
            (address, size) = (before, size + length);
        }
        if let Some(length) = self.gaps.remove(&(address + size)) {
            size += length;
        }
        self.gaps.insert(address, size);
    }

    fn mapped(&self) -> u64 {
        self.chunks.values().map(|(size, _)| size).sum()
    }
}

/// The pools of eager work, or those of graphs; made when first used.
struct Space<C>([Option<Pool<C>>; 2]);

impl<C> Space<C> {
    fn pools(&self) -> impl Iterator<Item = &Pool<C>> {
        self.0.iter().flatten()
    }

    /// The pool that an address lies in.
    fn pool_of(&mut self, address: u64) -> Option<&mut Pool<C>> {
        self.0.iter_mut().flatten().find(|pool| (pool.start..pool.end).contains(&address))
    }

    fn owns(&self, address: u64) -> bool {
        self.pools().any(|pool| (pool.start..pool.end).contains(&address))
    }
}

/// Where blocks come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Eager work.
    Eager,
    /// The capture of a graph.
    Graph,
}

/// The memory of one stream.
pub struct Allocator<B: Backend> {
    backend: B,
    /// How many addresses each pool reserves.
    range: u64,
    eager: Space<B::Chunk>,
    graph: Space<B::Chunk>,
    capturing: bool,
    /// Blocks of the capture that is under way or was the last, which are in use, with their sizes.
    captured: BTreeMap<u64, u64>,
    /// Graphs that exist.
    graphs: usize,
    stats: Stats,
}

impl<B: Backend> Allocator<B> {
    /// Pools that reserve `range` bytes of addresses each, twice the device's memory say.
    pub fn new(backend: B, range: u64) -> Self {
        Self {
            backend,
            range: range.next_multiple_of(PAGE),
            eager: Space([None, None]),
            graph: Space([None, None]),
            capturing: false,
            captured: BTreeMap::new(),
            graphs: 0,
            stats: Stats::default(),
        }
    }

    /// Who maps memory.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    /// The address of a block of at least `size` bytes, from where a capture that is under way or its absence says.
    ///
    /// # Errors
    /// The backend's, if the device is full also after what was kept for later is given back.
    pub fn allocate(&mut self, size: u64) -> Result<u64, B::Error> {
        let origin = if self.capturing { Origin::Graph } else { Origin::Eager };
        self.allocate_from(origin, size)
    }

    /// [`allocate`](Self::allocate) from one of the two spaces.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_from(&mut self, origin: Origin, size: u64) -> Result<u64, B::Error> {
        let size = size.max(1).next_multiple_of(ALIGNMENT);
        let address = match self.attempt(origin, size) {
            // Under a capture nothing can be waited for, and so nothing be given back.
            Err(error) if B::is_full(&error) && !self.capturing => {
                self.stats.retries += 1;
                self.trim()?;
                self.attempt(origin, size)?
            }
            other => other?,
        };
        if self.capturing && origin == Origin::Graph {
            self.captured.insert(address, size);
        }
        self.stats.allocations += 1;
        self.stats.allocated += size;
        self.stats.peak_allocated = self.stats.peak_allocated.max(self.stats.allocated);
        Ok(address)
    }

    fn attempt(&mut self, origin: Origin, size: u64) -> Result<u64, B::Error> {
        let space = match origin {
            Origin::Eager => &mut self.eager,
            Origin::Graph => &mut self.graph,
        };
        let (slot, growth) = if size <= SMALL { (&mut space.0[0], PAGE) } else { (&mut space.0[1], GROWTH) };
        let pool = match slot {
            Some(pool) => pool,
            None => slot.insert(Pool::new(self.backend.reserve(self.range)?, self.range, growth)),
        };
        loop {
            if let Some(address) = pool.take(size) {
                return Ok(address);
            }
            // A request beyond the pool's addresses is beyond the device's memory.
            let mapped = pool.grow(&mut self.backend, size)?.ok_or_else(B::full)?;
            self.stats.growths += 1;
            self.stats.reserved += mapped;
            self.stats.peak_reserved = self.stats.peak_reserved.max(self.stats.reserved);
        }
    }

    /// Return a block. False if it is not this allocator's.
    pub fn free(&mut self, address: u64) -> bool {
        let pool = self.eager.pool_of(address).or_else(|| self.graph.pool_of(address));
        let Some(size) = pool.and_then(|pool| pool.give(address)) else { return false };
        self.captured.remove(&address);
        self.stats.allocated -= size;
        true
    }

    /// The blocks in use of the capture that is under way or was the last.
    pub fn captured(&self) -> impl Iterator<Item = Range<u64>> {
        self.captured.iter().map(|(&address, &size)| address..address + size)
    }

    /// Whether an address lies in this allocator's memory.
    pub fn owns(&self, address: u64) -> bool {
        self.eager.owns(address) || self.graph.owns(address)
    }

    /// Whether an address lies in the memory of graphs.
    pub fn is_of_graphs(&self, address: u64) -> bool {
        self.graph.owns(address)
    }

    /// Give back what is kept for later; how much. Graphs keep theirs while there are any.
    ///
    /// # Errors
    /// The backend's, if it cannot wait; nothing is given back then.
    pub fn trim(&mut self) -> Result<u64, B::Error> {
        let graphs = self.graphs == 0;
        let pools = self.eager.0.iter_mut().chain(self.graph.0.iter_mut().filter(|_| graphs)).flatten();
        let mut pools: Vec<_> = pools.filter(|pool| !pool.unused().is_empty()).collect();
        if self.capturing || pools.is_empty() {
            return Ok(0);
        }
        self.backend.wait()?;
        let total = pools.iter_mut().map(|pool| pool.trim(&mut self.backend)).sum();
        self.stats.reserved -= total;
        Ok(total)
    }

    /// From now on blocks are a graph's, until [`end_capture`](Self::end_capture). What is kept for later is given back before, since
    /// the graph needs about as much as the eager run that went before it.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn begin_capture(&mut self) -> Result<(), B::Error> {
        self.trim()?;
        self.captured.clear();
        self.capturing = true;
        self.graphs += 1;
        Ok(())
    }

    /// Blocks are eager work's again. The graph counts until [`release_graph`](Self::release_graph).
    pub const fn end_capture(&mut self) {
        self.capturing = false;
    }

    /// A graph is gone; with the last one goes the memory of graphs, but for what is still in use.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn release_graph(&mut self) -> Result<(), B::Error> {
        self.graphs = self.graphs.saturating_sub(1);
        if self.graphs == 0 { self.trim().map(|_| ()) } else { Ok(()) }
    }

    /// What is held and was done.
    pub fn stats(&self) -> Stats {
        Stats { graphs: self.graph.pools().map(Pool::mapped).sum(), ..self.stats }
    }

    /// Start counting the peaks anew, from what is held now.
    pub const fn reset_peaks(&mut self) {
        self.stats.peak_allocated = self.stats.allocated;
        self.stats.peak_reserved = self.stats.reserved;
    }
}

#[cfg(test)]
mod tests;
