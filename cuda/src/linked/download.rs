//! Copies from the device to the host through a ring of pieces of pinned memory: the host copies one piece to its target while the GPU
//! writes the next pieces.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use super::driver::{self, Stream};
use super::memory::{Status, check};
use super::pinned::{PIECE, PIECES, Piece};

/// The pieces of pinned memory through which a stream's copies go.
struct Ring {
    stream: usize,
    pieces: Vec<Piece>,
}

/// Rings that are not in use. A thread takes a ring out of the list for a copy, so that it does not hold the lock while it waits for the
/// GPU.
static RINGS: Mutex<Vec<Ring>> = Mutex::new(Vec::new());

impl Ring {
    fn take(stream: Stream) -> Self {
        let mut rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = rings.iter().position(|ring| ring.stream == stream as usize);
        found.map_or_else(|| Self { stream: stream as usize, pieces: Vec::new() }, |at| rings.swap_remove(at))
    }

    fn put_back(self) {
        RINGS.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }

    /// Copy `size` bytes, in parts of at most `PIECE` bytes; part N goes through the piece with the index N % `PIECES`. In iteration
    /// `number`, the host copies part `number` - `PIECES` out of its piece. Then the host queues the copy of part `number` from the GPU to
    /// the same piece.
    ///
    /// # Safety
    /// The conditions of [`download`].
    unsafe fn copy(&mut self, to: *mut u8, from: u64, size: usize) -> Result<(), Status> {
        let count = size.div_ceil(PIECE);
        while self.pieces.len() < count.min(PIECES) {
            self.pieces.push(Piece::new()?);
        }
        let part = |number: usize| (number * PIECE, PIECE.min(size - number * PIECE));
        for number in 0..count + PIECES {
            if let Some(earlier) = number.checked_sub(PIECES).filter(|&earlier| earlier < count) {
                let (start, length) = part(earlier);
                let piece = &mut self.pieces[earlier % PIECES];
                piece.wait()?;
                // SAFETY: the GPU has written these bytes of the piece; the caller's memory has room for `size` bytes.
                unsafe { std::ptr::copy_nonoverlapping(piece.host().cast_const(), to.add(start), length) };
            }
            if number < count {
                let (start, length) = part(number);
                let (piece, stream) = (&mut self.pieces[number % PIECES], self.stream as Stream);
                // SAFETY: the piece has room for `length` bytes, and the host has taken its old contents.
                check(unsafe {
                    driver::cuMemcpyDtoHAsync_v2(piece.host().cast(), from + start as u64, length, stream)
                })?;
                // The next `piece.wait` waits for this copy.
                piece.queued(stream)?;
            }
        }
        Ok(())
    }
}

/// Copy `size` bytes from the device to the host, after the work that is queued on the stream, and wait for the end of the copy.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// `to` and `from` must be valid for `size` bytes. The stream must belong to the current device and must not be capturing.
pub unsafe fn download(to: *mut u8, from: u64, size: usize, stream: *mut c_void) -> Result<(), Status> {
    let mut ring = Ring::take(stream);
    // SAFETY: the caller's promise.
    match unsafe { ring.copy(to, from, size) } {
        Ok(()) => {
            ring.put_back();
            Ok(())
        }
        // If no more memory can be pinned, the driver copies without pinned memory. After any failure, the ring is not put back, because
        // the GPU may still be writing to its pieces. Dropping the ring does not free their memory.
        // SAFETY: the caller's promise.
        Err(Status(driver::OUT_OF_MEMORY)) => unsafe {
            check(driver::cuMemcpyDtoHAsync_v2(to.cast(), from, size, stream))?;
            check(driver::cuStreamSynchronize(stream))
        },
        Err(status) => Err(status),
    }
}

/// Queue a copy from the device to pinned memory. During a capture, the copy becomes a node of the graph.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// `to` and `from` must be valid for `size` bytes. The memory at `to` must be pinned, and must stay allocated until the copy is done and
/// while a graph contains the copy.
pub unsafe fn copy_pinned(to: *mut u8, from: u64, size: usize, stream: *mut c_void) -> Result<(), Status> {
    if size == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    check(unsafe { driver::cuMemcpyDtoHAsync_v2(to.cast(), from, size, stream) })
}
