//! Pieces of pinned host memory, through which copies between host and device go: the GPU can read and write pinned memory directly.

use std::ffi::c_void;

use super::driver::{self, Stream};
use super::memory::{Status, check};

/// The number of bytes of a piece.
pub(crate) const PIECE: usize = 8 << 20;
/// The largest number of pieces of a ring. A ring has the pieces that the copies of a stream use in turn: while the GPU reads or writes
/// some of them, the host can use another.
pub(crate) const PIECES: usize = 4;

/// A piece of pinned memory, and an event that marks the end of the GPU's last use of the memory. Memory and event are never freed.
pub(crate) struct Piece {
    /// The address of the memory. It is a number, like `event`, because pointers cannot be moved to other threads.
    host: usize,
    event: usize,
    /// Whether work was queued that [`wait`](Self::wait) has not waited for yet.
    is_queued: bool,
}

impl Piece {
    pub(crate) fn new() -> Result<Self, Status> {
        let (mut host, mut event) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the signatures are the driver's.
        unsafe {
            check(driver::cuEventCreate(&raw mut event, driver::NO_TIMING))?;
            let flags = 0;
            check(driver::cuMemHostAlloc(&raw mut host, PIECE, flags))?;
        }
        Ok(Self { host: host as usize, event: event as usize, is_queued: false })
    }

    /// The piece's memory, [`PIECE`] bytes.
    pub(crate) const fn host(&self) -> *mut u8 {
        self.host as *mut u8
    }

    /// Record that all work queued on the stream up to now may use the piece: the next [`wait`](Self::wait) waits for it.
    pub(crate) fn queued(&mut self, stream: Stream) -> Result<(), Status> {
        // SAFETY: the event lives as long as the process, the stream as long as its device.
        check(unsafe { driver::cuEventRecord(self.event as *mut c_void, stream) })?;
        self.is_queued = true;
        Ok(())
    }

    /// Wait until the work of the last [`queued`](Self::queued) is done. Returns at once if an earlier call has waited
    /// for this work, or if there is no such work.
    pub(crate) fn wait(&mut self) -> Result<(), Status> {
        if std::mem::take(&mut self.is_queued) {
            // SAFETY: as in `queued`.
            check(unsafe { driver::cuEventSynchronize(self.event as *mut c_void) })?;
        }
        Ok(())
    }
}
