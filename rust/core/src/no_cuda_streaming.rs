//! Copies from pinned memory while the device computes: unavailable in this build.

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
    Host(&'a Kept),
    /// The shard of a process.
    Peer(&'a Shards, usize, Range<usize>),
}

/// Whether some of the streamed weights are in pageable memory: no weights are streamed in this build.
pub const fn is_staging(_device: &Device) -> bool {
    false
}

/// How much memory can be pinned.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device).
pub fn pinnable(device: &Device, _wanted: usize) -> Result<usize> {
    super::no_device("pinnable", device)
}

/// Copies to slots of a device.
pub struct Copier(Infallible);

impl Copier {
    /// # Errors
    /// [`Error::Device`](crate::Error::Device): this build has no CUDA device.
    pub fn new(device: &Device, _slots: usize) -> Result<Self> {
        super::no_device("stream_blocks", device)
    }

    /// The contents of the slots are known while this number stays the same.
    pub const fn epoch(&self) -> u64 {
        match self.0 {}
    }

    /// Memory of the host.
    ///
    /// # Errors
    /// None.
    pub fn allocate(&self, _bytes: usize) -> Result<Kept> {
        match self.0 {}
    }

    /// Whether memory that is allocated from now on is pageable.
    pub const fn is_staging(&self) -> bool {
        match self.0 {}
    }

    /// Use pageable memory.
    ///
    /// # Errors
    /// None.
    pub fn start_staging(&self) -> Result<()> {
        match self.0 {}
    }

    /// A copy in pageable memory.
    pub fn unpinned(&self, _kept: &Kept) -> Kept {
        match self.0 {}
    }

    /// Pin memory that processes share.
    ///
    /// # Errors
    /// None.
    pub fn register(&self, _pages: Pages) -> Result<Arc<Registered>> {
        match self.0 {}
    }

    /// A part of shared memory.
    pub fn part(&self, _registered: &Arc<Registered>, _range: Range<usize>) -> Kept {
        match self.0 {}
    }

    /// Copy to a slot.
    ///
    /// # Errors
    /// None.
    pub fn copy(&self, _slot: usize, _parts: &[(Source<'_>, Raw)], _owner: &Arc<impl Any + Send + Sync>) -> Result<()> {
        match self.0 {}
    }

    /// Wait for a copy.
    ///
    /// # Errors
    /// None.
    pub fn wait(&self, _slot: usize) -> Result<()> {
        match self.0 {}
    }
}

/// Pinned memory that processes share.
pub struct Registered(Infallible);

/// Memory of the host.
pub struct Kept(Infallible);

impl Kept {
    /// The bytes of the memory.
    pub const fn bytes(&self) -> &[u8] {
        match self.0 {}
    }

    /// Write `bytes` from offset `start` on.
    pub const fn write(&mut self, _start: usize, _bytes: &[u8]) {
        match self.0 {}
    }
}
