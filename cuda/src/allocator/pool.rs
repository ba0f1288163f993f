//! [`Pool`]: one reserved range of addresses, the memory that is mapped in it, and its blocks.

use std::collections::{BTreeMap, BTreeSet};

use super::{Backend, PAGE};

/// A block of mapped memory, in use or free. It may lie in several chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    size: u64,
    is_free: bool,
}

/// A reserved range of addresses: chunks of mapped memory, which are divided into blocks, and unmapped gaps. `C` is the backend's handle of
/// a mapped chunk ([`Backend::Chunk`]).
pub(super) struct Pool<C> {
    pub(super) start: u64,
    pub(super) end: u64,
    /// The number of bytes by which the pool grows. It grows by more for a larger request, and by less if not so much
    /// memory is left.
    growth: u64,
    /// All blocks by address. Every mapped byte is in exactly one block.
    pub(super) blocks: BTreeMap<u64, Block>,
    /// The free blocks, by size and address.
    free: BTreeSet<(u64, u64)>,
    /// The mapped chunks by address, with their sizes and handles.
    chunks: BTreeMap<u64, (u64, C)>,
    /// The unmapped gaps by address, with their sizes.
    pub(super) gaps: BTreeMap<u64, u64>,
}

impl<C> Pool<C> {
    pub(super) fn new(start: u64, size: u64, growth: u64) -> Self {
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

    /// Use the first `size` bytes of the smallest free block that is large enough; its other bytes stay a free block.
    /// Returns the address, or None if no free block is large enough.
    pub(super) fn allocate(&mut self, size: u64) -> Option<u64> {
        let &(block_size, address) = self.free.range((size, 0)..).next()?;
        self.free.remove(&(block_size, address));
        self.blocks.insert(address, Block { size, is_free: false });
        if block_size > size {
            self.blocks.insert(address + size, Block { size: block_size - size, is_free: true });
            self.free.insert((block_size - size, address + size));
        }
        Some(address)
    }

    /// Free a block. Returns its size, or None if it is not in use.
    pub(super) fn free_block(&mut self, address: u64) -> Option<u64> {
        let block = self.blocks.get(&address).copied().filter(|block| !block.is_free)?;
        self.insert_free(address, block.size);
        Some(block.size)
    }

    /// Add a free block, or mark the block at `address` as free, and join it with free neighbours.
    fn insert_free(&mut self, mut address: u64, mut size: u64) {
        self.blocks.remove(&address);
        if let Some((&before, block)) = self.blocks.range(..address).next_back()
            && block.is_free
            && before + block.size == address
        {
            let joined = block.size;
            self.remove_free(before, joined);
            (address, size) = (before, size + joined);
        }
        if let Some(next) = self.blocks.get(&(address + size)).copied().filter(|block| block.is_free) {
            self.remove_free(address + size, next.size);
            size += next.size;
        }
        self.blocks.insert(address, Block { size, is_free: true });
        self.free.insert((size, address));
    }

    /// Remove a free block from `blocks` and `free`.
    fn remove_free(&mut self, address: u64, size: u64) {
        self.free.remove(&(size, address));
        self.blocks.remove(&address);
    }

    /// Map memory in a gap that has `size` bytes together with its free neighbours. Returns the number of mapped bytes,
    /// or None if there is no such gap.
    pub(super) fn grow<B: Backend<Chunk = C>>(&mut self, backend: &mut B, size: u64) -> Result<Option<u64>, B::Error> {
        // Of the first gap that is large enough: the address, the least number of bytes to map there, and the wanted number.
        let found = self.gaps.iter().find_map(|(&gap, &length)| {
            let before = self.blocks.range(..gap).next_back();
            let before = before.filter(|(address, block)| block.is_free && *address + block.size == gap);
            let before = before.map_or(0, |(_, block)| block.size);
            let after = self.blocks.get(&(gap + length)).filter(|block| block.is_free).map_or(0, |block| block.size);
            // The memory that makes a block of `size` bytes together with the free block before the gap. If the gap is
            // too short for it, the whole gap is mapped, provided that both free neighbours make up for the rest.
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
            // The device may still have `missing` bytes, which are enough for the request.
            Err(error) if B::is_full(&error) && missing < wanted => (missing, backend.map(address, missing)?),
            Err(error) => return Err(error),
        };
        self.insert_chunk(address, length, chunk);
        Ok(Some(length))
    }

    /// Record that memory was mapped in a gap.
    pub(super) fn insert_chunk(&mut self, address: u64, size: u64, chunk: C) {
        self.chunks.insert(address, (size, chunk));
        // What the gap has before and after the memory stays a gap.
        if let Some((&start, &length)) = self.gaps.range(..=address).next_back() {
            self.gaps.remove(&start);
            for (start, end) in [(start, address), (address + size, start + length)] {
                if end > start {
                    self.gaps.insert(start, end - start);
                }
            }
        }
        self.insert_free(address, size);
    }

    /// The addresses of the chunks without a block in use.
    pub(super) fn unused(&self) -> Vec<u64> {
        let if_unused = |(&address, (size, _)): (&u64, &(u64, C))| {
            let around = self.blocks.range(..=address).next_back();
            around
                .is_some_and(|(&start, block)| block.is_free && start + block.size >= address + size)
                .then_some(address)
        };
        self.chunks.iter().filter_map(if_unused).collect()
    }

    /// Unmap the chunks without a block in use. Returns the number of unmapped bytes.
    pub(super) fn trim<B: Backend<Chunk = C>>(&mut self, backend: &mut B) -> u64 {
        self.unused().into_iter().map(|address| self.release(backend, address)).sum()
    }

    /// Unmap the chunk at `address`, which must have no block in use. Returns the number of unmapped bytes.
    pub(super) fn release<B: Backend<Chunk = C>>(&mut self, backend: &mut B, address: u64) -> u64 {
        let around = self.blocks.range(..=address).next_back().map(|(&start, &block)| (start, block));
        let (Some((size, chunk)), Some((start, block))) = (self.chunks.remove(&address), around) else { return 0 };
        // The chunk is in this free block. What the block has before and after the chunk stays free.
        self.remove_free(start, block.size);
        for (start, end) in [(start, address), (address + size, start + block.size)] {
            if end > start {
                self.blocks.insert(start, Block { size: end - start, is_free: true });
                self.free.insert((end - start, start));
            }
        }
        backend.unmap(address, size, chunk);
        self.insert_gap(address, size);
        size
    }

    /// Add a gap, and join it with neighbouring gaps.
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

    /// The number of mapped bytes.
    pub(super) fn mapped(&self) -> u64 {
        self.chunks.values().map(|(size, _)| size).sum()
    }
}
