//! In builds without CUDA, stands in for `cuda/streaming.rs`, which copies streamed weights to a device while the
//! device computes. As in `no_cuda.rs`, types have no values, so their methods are never called. `crate::streaming`
//! says what units and slots are; `cuda/streaming.rs` describes the functions in full.

use std::any::Any;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Device;

use super::peers::Shards;
use crate::streaming::Pages;
use crate::{Raw, Result};

/// What a copy reads.
pub enum Source<'a> {
    /// Memory of the host.
    Host(&'a HostMemory),
    /// Bytes of a shard, which is the part of the streamed weights on one GPU of the machine: all shards, the number of
    /// the process that owns the shard, and the range of bytes in the shard.
    Peer(&'a Shards, usize, Range<usize>),
}

/// Whether some of the streamed weights are in pageable memory: no weights are streamed in this build.
pub const fn is_staging(_device: &Device) -> bool {
    false
}

/// How many of `_wanted` bytes of pinned memory this process gets now.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device): this build has no CUDA device.
pub fn pinnable(device: &Device, _wanted: usize) -> Result<usize> {
    super::no_device("pinnable", device)
}

/// Copies units of streamed weights to slots in the memory of a device.
pub struct Copier(Infallible);

impl Copier {
    /// A copier for `_slots` slots.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device): this build has no CUDA device.
    pub fn new(device: &Device, _slots: usize) -> Result<Self> {
        super::no_device("stream_blocks", device)
    }

    /// A number that changes when slots may have other contents than the last copies wrote: when the capture of a graph
    /// begins or ends, and when a replay begins.
    pub const fn epoch(&self) -> u64 {
        match self.0 {}
    }

    /// Allocate host memory, pinned or pageable.
    ///
    /// # Errors
    /// None.
    pub fn allocate(&self, _bytes: usize) -> Result<HostMemory> {
        match self.0 {}
    }

    /// Whether [`start_staging`](Self::start_staging) was called, so that a thread copies from pageable memory.
    pub const fn is_staging(&self) -> bool {
        match self.0 {}
    }

    /// Allocate pageable memory from now on.
    ///
    /// # Errors
    /// None.
    pub fn start_staging(&self) -> Result<()> {
        match self.0 {}
    }

    /// A copy of `_memory` in pageable memory.
    pub fn unpinned(&self, _memory: &HostMemory) -> HostMemory {
        match self.0 {}
    }

    /// Pin memory that other processes share.
    ///
    /// # Errors
    /// None.
    pub fn register(&self, _pages: Pages) -> Result<Arc<Registered>> {
        match self.0 {}
    }

    /// The bytes `_range` of shared memory.
    pub fn part(&self, _registered: &Arc<Registered>, _range: Range<usize>) -> HostMemory {
        match self.0 {}
    }

    /// Queue copies to a slot: each of `_parts` has a source, and the tensor in the slot to which the source is copied.
    /// `_owner` owns the sources.
    ///
    /// # Errors
    /// None.
    pub fn copy(&self, _slot: usize, _parts: &[(Source<'_>, Raw)], _owner: &Arc<impl Any + Send + Sync>) -> Result<()> {
        match self.0 {}
    }

    /// Let the device's stream wait for the last copy to a slot.
    ///
    /// # Errors
    /// None.
    pub fn wait(&self, _slot: usize) -> Result<()> {
        match self.0 {}
    }
}

/// Memory that other processes share, pinned in this process.
pub struct Registered(Infallible);

/// Host memory from which copies read.
pub struct HostMemory(Infallible);

impl HostMemory {
    /// The bytes.
    pub const fn bytes(&self) -> &[u8] {
        match self.0 {}
    }

    /// Write `_bytes` from byte `_start` on.
    pub const fn write(&mut self, _start: usize, _bytes: &[u8]) {
        match self.0 {}
    }
}
