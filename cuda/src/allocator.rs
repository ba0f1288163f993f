//! A caching allocator for the device memory of one stream. The memory comes from a [`Backend`]: the driver, or a
//! substitute in tests.
//!
//! All work is queued in one stream, so a block can be reused as soon as it is freed: the new owner's kernels run after
//! the old owner's. A pool is one reserved range of addresses. If no free block fits, the allocator maps memory into an
//! unmapped gap of the range. A gap is the unused end of the range, or addresses whose memory was unmapped. All blocks
//! of a pool are in one range, so free neighbours can always be joined, and a large block can reuse memory that was
//! freed in small blocks.
//!
//! While a CUDA graph is captured, blocks come from a separate space. Each replay of a graph writes to the addresses of
//! its capture, including those that the capture has freed, so eager work (all work outside of graphs) never gets
//! addresses of this space. Graphs are replayed one after another, so they share the space. Between replays, addresses
//! that a capture has freed hold no data. Eager work that needs more memory can therefore unmap these addresses and map
//! as much memory into its own pools; memory is mapped at these addresses again before the next replay. So a run needs
//! the larger of the memory of graphs and the memory of eager work between replays, not their sum.

mod pool;

use std::collections::BTreeMap;
use std::ops::Range;

use pool::Pool;

/// The address and the size of every block are multiples of this number of bytes.
pub const ALIGNMENT: u64 = 512;
/// Requests up to this number of bytes come from separate pools, so that they do not split large blocks.
pub const SMALL: u64 = 1 << 20;
/// Memory is mapped in multiples of this number of bytes.
pub const PAGE: u64 = 2 << 20;
/// The minimum number of bytes by which a pool of large blocks grows.
const GROWTH: u64 = 32 << 20;

/// What the allocator needs of a driver: it reserves addresses and maps memory.
pub trait Backend {
    /// The handle of a chunk: the memory that one call of [`map`](Self::map) has mapped.
    type Chunk;
    /// The error of a failed reservation or mapping.
    type Error;

    /// Reserve `size` bytes of addresses, a multiple of [`PAGE`].
    ///
    /// # Errors
    /// The driver's error.
    fn reserve(&mut self, size: u64) -> Result<u64, Self::Error>;
    /// Map memory to a part of a reserved range.
    ///
    /// # Errors
    /// The driver's error.
    fn map(&mut self, address: u64, size: u64) -> Result<Self::Chunk, Self::Error>;
    /// Unmap memory. No queued work may use it.
    fn unmap(&mut self, address: u64, size: u64, chunk: Self::Chunk);
    /// Wait until no queued work uses memory that was freed.
    ///
    /// # Errors
    /// The driver's error.
    fn wait(&mut self) -> Result<(), Self::Error>;
    /// The backend's out-of-memory error.
    fn full() -> Self::Error;
    /// Whether an error means that memory ran out.
    fn is_full(error: &Self::Error) -> bool;
}

/// The state of an allocator, in bytes, and its counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of blocks in use (allocated and not freed).
    pub allocated: u64,
    /// The peak of [`allocated`](Self::allocated).
    pub peak_allocated: u64,
    /// Bytes of mapped memory: of blocks in use and of free (cached) blocks.
    pub reserved: u64,
    /// The peak of [`reserved`](Self::reserved).
    pub peak_reserved: u64,
    /// The bytes of [`reserved`](Self::reserved) that are mapped for graphs.
    pub graphs: u64,
    /// Number of allocations.
    pub allocations: u64,
    /// How often a pool grew by mapping memory.
    pub growths: u64,
    /// How often an allocation released cached blocks because the device's memory ran out.
    pub retries: u64,
}

/// The pools of small and of large blocks, for eager work or for graphs. Each pool is created at its first use.
struct Space<C>([Option<Pool<C>>; 2]);

impl<C> Space<C> {
    fn pools(&self) -> impl Iterator<Item = &Pool<C>> {
        self.0.iter().flatten()
    }

    /// The pool that an address is in.
    fn pool_of(&mut self, address: u64) -> Option<&mut Pool<C>> {
        self.0.iter_mut().flatten().find(|pool| (pool.start..pool.end).contains(&address))
    }

    fn owns(&self, address: u64) -> bool {
        self.pools().any(|pool| (pool.start..pool.end).contains(&address))
    }
}

/// The space that a block comes from.
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
    /// Bytes of addresses that each pool reserves.
    range: u64,
    eager: Space<B::Chunk>,
    graph: Space<B::Chunk>,
    is_capturing: bool,
    /// The addresses and sizes of blocks that the current or last capture has allocated and not freed.
    captured: BTreeMap<u64, u64>,
    /// Addresses and sizes of graph memory that was unmapped for eager work.
    lent: Vec<(u64, u64)>,
    /// The number of existing graphs.
    graph_count: usize,
    stats: Stats,
}

impl<B: Backend> Allocator<B> {
    /// An allocator whose pools reserve `range` bytes of addresses each, for example twice the device's memory.
    pub fn new(backend: B, range: u64) -> Self {
        Self {
            backend,
            range: range.next_multiple_of(PAGE),
            eager: Space([None, None]),
            graph: Space([None, None]),
            is_capturing: false,
            captured: BTreeMap::new(),
            lent: Vec::new(),
            graph_count: 0,
            stats: Stats::default(),
        }
    }

    /// The backend.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    /// Allocate a block of at least `size` bytes, from the space of graphs during a capture. Returns its address.
    ///
    /// # Errors
    /// The backend's error, for example if the device's memory is full even after cached blocks are released. During a
    /// capture, no blocks are released.
    pub fn allocate(&mut self, size: u64) -> Result<u64, B::Error> {
        let origin = if self.is_capturing { Origin::Graph } else { Origin::Eager };
        self.allocate_from(origin, size)
    }

    /// [`allocate`](Self::allocate), but from the given space, whether or not a graph is captured.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_from(&mut self, origin: Origin, size: u64) -> Result<u64, B::Error> {
        let size = size.max(1).next_multiple_of(ALIGNMENT);
        let address = match self.attempt(origin, size) {
            // `trim` waits for the device, which is not possible during a capture.
            Err(error) if B::is_full(&error) && !self.is_capturing => {
                self.stats.retries += 1;
                self.trim()?;
                self.attempt(origin, size)?
            }
            other => other?,
        };
        if self.is_capturing && origin == Origin::Graph {
            self.captured.insert(address, size);
        }
        self.stats.allocations += 1;
        self.stats.allocated += size;
        self.stats.peak_allocated = self.stats.peak_allocated.max(self.stats.allocated);
        Ok(address)
    }

    /// Allocate without releasing cached blocks of eager work. If no free block fits, eager work unmaps unused memory
    /// of graphs before its pool grows.
    fn attempt(&mut self, origin: Origin, size: u64) -> Result<u64, B::Error> {
        // Graphs lend nothing during a capture: `lend` waits for the device, which is not possible then.
        let (space, mut lender) = match origin {
            Origin::Eager => (&mut self.eager, (!self.is_capturing).then_some(&mut self.graph)),
            Origin::Graph => (&mut self.graph, None),
        };
        let (slot, growth) = if size <= SMALL { (&mut space.0[0], PAGE) } else { (&mut space.0[1], GROWTH) };
        let pool = match slot {
            Some(pool) => pool,
            None => slot.insert(Pool::new(self.backend.reserve(self.range)?, self.range, growth)),
        };
        loop {
            if let Some(address) = pool.allocate(size) {
                return Ok(address);
            }
            if let Some(graph) = lender.as_deref_mut() {
                self.stats.reserved -= lend(&mut self.backend, graph, &mut self.lent, size.max(growth))?;
            }
            // If no gap is large enough, report full memory: the pool has more addresses than the device has memory.
            let mapped = pool.grow(&mut self.backend, size)?.ok_or_else(B::full)?;
            self.stats.growths += 1;
            self.stats.reserved += mapped;
            self.stats.peak_reserved = self.stats.peak_reserved.max(self.stats.reserved);
        }
    }

    /// Map memory again at the addresses of graph memory that was unmapped for eager work. Must be called before each
    /// replay.
    ///
    /// # Errors
    /// The backend's error, for example if the device's memory is full even after cached blocks are released.
    pub fn restore(&mut self) -> Result<(), B::Error> {
        if self.lent.is_empty() {
            return Ok(());
        }
        self.trim()?;
        while let Some(&(address, size)) = self.lent.last() {
            let chunk = self.backend.map(address, size)?;
            self.lent.pop();
            if let Some(pool) = self.graph.pool_of(address) {
                pool.insert_chunk(address, size, chunk);
            }
            self.stats.reserved += size;
            self.stats.peak_reserved = self.stats.peak_reserved.max(self.stats.reserved);
        }
        Ok(())
    }

    /// Free a block. Returns false if the block is not one of this allocator's blocks in use.
    pub fn free(&mut self, address: u64) -> bool {
        let pool = self.eager.pool_of(address).or_else(|| self.graph.pool_of(address));
        let Some(size) = pool.and_then(|pool| pool.free_block(address)) else { return false };
        self.captured.remove(&address);
        self.stats.allocated -= size;
        true
    }

    /// The blocks that the current or last capture has allocated and that are still in use.
    pub fn captured(&self) -> impl Iterator<Item = Range<u64>> {
        self.captured.iter().map(|(&address, &size)| address..address + size)
    }

    /// Whether an address is in this allocator's memory.
    pub fn owns(&self, address: u64) -> bool {
        self.eager.owns(address) || self.graph.owns(address)
    }

    /// Whether an address is in the memory of graphs.
    pub fn is_of_graphs(&self, address: u64) -> bool {
        self.graph.owns(address)
    }

    /// Unmap the chunks without a block in use; those of graphs only if no graph exists. During a capture, unmap
    /// nothing. Returns the number of unmapped bytes.
    ///
    /// # Errors
    /// The backend's error, if waiting for the device fails; then nothing is unmapped.
    pub fn trim(&mut self) -> Result<u64, B::Error> {
        let has_no_graph = self.graph_count == 0;
        let pools = self.eager.0.iter_mut().chain(self.graph.0.iter_mut().filter(|_| has_no_graph)).flatten();
        let mut pools: Vec<_> = pools.filter(|pool| !pool.unused().is_empty()).collect();
        if self.is_capturing || pools.is_empty() {
            return Ok(0);
        }
        self.backend.wait()?;
        let total = pools.iter_mut().map(|pool| pool.trim(&mut self.backend)).sum();
        self.stats.reserved -= total;
        Ok(total)
    }

    /// Allocate from the space of graphs until [`end_capture`](Self::end_capture). Releases cached blocks first,
    /// because the graph needs about as much memory as the eager run before it.
    ///
    /// # Errors
    /// As [`trim`](Self::trim) and [`restore`](Self::restore).
    pub fn begin_capture(&mut self) -> Result<(), B::Error> {
        self.trim()?;
        // Lent addresses are gaps. The capture must not map memory into them, because `restore` would map it twice.
        self.restore()?;
        self.captured.clear();
        self.is_capturing = true;
        self.graph_count += 1;
        Ok(())
    }

    /// Allocate for eager work again. The graph exists until [`release_graph`](Self::release_graph).
    pub const fn end_capture(&mut self) {
        self.is_capturing = false;
    }

    /// Record that a graph was dropped. After the last graph, also release cached blocks, those of graphs too (see
    /// [`trim`](Self::trim)).
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn release_graph(&mut self) -> Result<(), B::Error> {
        self.graph_count = self.graph_count.saturating_sub(1);
        if self.graph_count > 0 {
            return Ok(());
        }
        // No graph is left to replay, so no memory has to be mapped at the lent addresses again.
        self.lent.clear();
        self.trim().map(|_| ())
    }

    /// The current statistics.
    pub fn stats(&self) -> Stats {
        Stats { graphs: self.graph.pools().map(Pool::mapped).sum(), ..self.stats }
    }

    /// Reset the peaks to the current values.
    pub const fn reset_peaks(&mut self) {
        self.stats.peak_allocated = self.stats.allocated;
        self.stats.peak_reserved = self.stats.reserved;
    }
}

/// Unmap at least `wanted` bytes of graph memory that has no block in use, or all such memory if there is less. Returns
/// the number of unmapped bytes.
fn lend<B: Backend>(
    backend: &mut B,
    graph: &mut Space<B::Chunk>,
    lent: &mut Vec<(u64, u64)>,
    wanted: u64,
) -> Result<u64, B::Error> {
    let mut total = 0;
    for pool in graph.0.iter_mut().flatten() {
        for address in pool.unused() {
            if total >= wanted {
                return Ok(total);
            }
            if total == 0 {
                // Queued replays, and queued kernels that read the results of graphs, may still use this memory.
                backend.wait()?;
            }
            let size = pool.release(backend, address);
            lent.push((address, size));
            total += size;
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests;
