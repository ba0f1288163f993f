//! Copies from the host to a device: the function that replaces `cuMemcpyHtoDAsync`.
//!
//! The host copies the bytes to pinned memory, and the GPU copies them from there to the device. So the caller may reuse its memory at
//! once, and the host waits only if the GPU still needs all pinned memory of the stream.
//!
//! A CUDA graph cannot copy from host memory that is freed before a replay. In this module, a value is the bytes of one
//! copy. During a capture, a value is a constant if an eager run of the captured function copied the same bytes. A
//! constant is put into device memory that lives as long as the graph, and the graph copies from there. Any other value
//! is rejected: it may change from call to call, but each replay would copy the value of the capture.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::{c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::driver::{self, Stream};
use super::memory::{self, Status, check};
use super::pinned::{PIECE, PIECES, Piece};
use crate::allocator::Origin;

/// The address of the driver's own `cuMemcpyHtoDAsync`.
pub(crate) static COPY: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// Call the driver's own `cuMemcpyHtoDAsync`.
///
/// # Safety
/// As the driver's function.
unsafe fn driver_copy(to: u64, from: *const c_void, size: usize, stream: Stream) -> c_int {
    // SAFETY: `COPY` is filled before any call, with the driver's function of this signature.
    unsafe {
        let copy: extern "C" fn(u64, *const c_void, usize, Stream) -> c_int =
            std::mem::transmute(COPY.load(Ordering::Acquire));
        copy(to, from, size, stream)
    }
}

/// Queue a copy from pinned memory to the device. During a capture, the copy becomes a node of the graph.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// `to` and `from` must be valid for `size` bytes. The memory at `from` must be pinned, and must stay allocated and unchanged until the
/// copy is done and while a graph contains the copy.
pub unsafe fn copy_pinned(to: u64, from: *const u8, size: usize, stream: *mut c_void) -> Result<(), Status> {
    if size == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    check(unsafe { driver_copy(to, from.cast(), size, stream) })
}

/// Queue a copy from any memory of the host to the device. Returns as soon as the caller may reuse the memory at `from`; the copy to the
/// device may not be done yet.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// `to` and `from` must be valid for `size` bytes. The stream must exist, and no thread may be capturing.
pub unsafe fn copy_pageable(to: u64, from: *const u8, size: usize, stream: *mut c_void) -> Result<(), Status> {
    if size == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    check(unsafe { stage(to, from.cast(), size, stream) })
}

/// Copy `length` bytes within host memory. One thread does not reach the bandwidth of the memory, so several threads copy many bytes.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn copy_in_parallel(from: *const u8, to: *mut u8, length: usize) {
    /// The fewest bytes for which a thread is worth its start.
    const LEAST: usize = 2 << 20;
    static THREADS: OnceLock<usize> = OnceLock::new();
    let threads =
        *THREADS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from).min(PIECE / LEAST));
    let parts = threads.min(length / LEAST).max(1);
    let part = length.div_ceil(parts);
    // Pointers cannot be moved to other threads; addresses can.
    let (from, to) = (from as usize, to as usize);
    let copy = |start: usize| {
        let count = part.min(length - start);
        // SAFETY: the caller's promise, for the part of both memories that begins at `start`. Parts do not overlap.
        unsafe { std::ptr::copy_nonoverlapping((from + start) as *const u8, (to + start) as *mut u8, count) }
    };
    std::thread::scope(|scope| {
        for start in (part..length).step_by(part) {
            // Without another thread, this one copies the part.
            if std::thread::Builder::new().spawn_scoped(scope, move || copy(start)).is_err() {
                copy(start);
            }
        }
        copy(0);
    });
}

/// The pieces of pinned memory through which a stream's copies go in turn: at most [`PIECES`], of [`PIECE`] bytes each. The next value goes
/// to piece `current`, after its first `used` bytes.
struct Ring {
    stream: usize,
    pieces: Vec<Piece>,
    current: usize,
    used: usize,
}

/// The rings by stream. They are never freed. Each ring has its own lock, so that a copy that waits for the GPU blocks only the copies of
/// the same stream.
static RINGS: Mutex<Vec<(usize, &'static Mutex<Ring>)>> = Mutex::new(Vec::new());

/// The ring of a stream.
fn ring(stream: Stream) -> &'static Mutex<Ring> {
    let (stream, mut rings) = (stream as usize, RINGS.lock().unwrap_or_else(PoisonError::into_inner));
    if let Some((_, ring)) = rings.iter().find(|(known, _)| *known == stream) {
        return ring;
    }
    let ring = Box::leak(Box::new(Mutex::new(Ring { stream, pieces: Vec::new(), current: 0, used: 0 })));
    rings.push((stream, ring));
    ring
}

impl Ring {
    /// Make the next piece the current one, and wait until the GPU no longer reads it.
    fn advance(&mut self) -> Result<(), Status> {
        // The piece that was current so far may be reused when the copies that are now queued are done.
        if let Some(piece) = self.pieces.get_mut(self.current) {
            piece.queued(self.stream as Stream)?;
            self.current = (self.current + 1) % PIECES;
        }
        if self.current == self.pieces.len() {
            self.pieces.push(Piece::new()?);
        }
        self.pieces[self.current].wait()?;
        self.used = 0;
        Ok(())
    }

    /// Copy `size` bytes to pinned memory, and queue the driver's copies from there to the device.
    ///
    /// # Safety
    /// As the driver's function.
    unsafe fn copy(&mut self, to: u64, from: *const u8, size: usize) -> Result<(), Status> {
        let mut done = 0;
        while done < size {
            if self.pieces.is_empty() || self.used == PIECE {
                self.advance()?;
            }
            let length = (size - done).min(PIECE - self.used);
            let host = self.pieces[self.current].host().wrapping_add(self.used);
            // SAFETY: the piece has room for `length` bytes after its used part; the caller's memory has `size`.
            check(unsafe {
                copy_in_parallel(from.add(done), host, length);
                driver_copy(to + done as u64, host.cast_const().cast(), length, self.stream as Stream)
            })?;
            // Align the next value: it begins at a multiple of 256 bytes.
            self.used = (self.used + length).next_multiple_of(256).min(PIECE);
            done += length;
        }
        Ok(())
    }
}

/// Copy through pinned memory. Returns the driver's status.
///
/// # Safety
/// As the driver's function.
unsafe fn stage(to: u64, from: *const c_void, size: usize, stream: Stream) -> c_int {
    let mut ring = ring(stream).lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the caller's promise.
    unsafe {
        match ring.copy(to, from.cast(), size) {
            Ok(()) => driver::SUCCESS,
            // If no more memory can be pinned, the driver copies all bytes from the caller's memory.
            Err(Status(driver::OUT_OF_MEMORY)) => driver_copy(to, from, size, stream),
            Err(status) => status.0,
        }
    }
}

/// What `upload` does on this thread besides copying a value.
#[derive(Default)]
enum Watch {
    #[default]
    Off,
    /// During an eager run: record the fingerprints of the values.
    Noting(HashSet<u64>),
    /// During a capture: turn values whose fingerprints are in `known` into `constants`. Reject the others, and set
    /// `has_rejected`.
    Capturing { known: HashSet<u64>, constants: Vec<Constant>, has_rejected: bool },
}

thread_local! {
    static WATCH: RefCell<Watch> = RefCell::default();
}

/// Device memory for a value that a graph copies from. `bytes` is the value until [`Constants::upload`] copies it there.
struct Constant {
    address: u64,
    bytes: Vec<u8>,
}

/// The replacement of `cuMemcpyHtoDAsync`.
pub(crate) extern "C" fn upload(to: u64, from: *const c_void, size: usize, stream: Stream) -> c_int {
    let captured = WATCH.with_borrow_mut(|watch| match watch {
        Watch::Off => None,
        Watch::Noting(known) => {
            // SAFETY: by the driver's contract, there are `size` bytes.
            known.insert(fingerprint(unsafe { bytes(from, size) }));
            None
        }
        Watch::Capturing { known, constants, has_rejected } => {
            // SAFETY: by the driver's contract, there are `size` bytes.
            let bytes = unsafe { bytes(from, size) };
            if !known.contains(&fingerprint(bytes)) {
                *has_rejected = true;
                return Some(driver::CAPTURE_UNSUPPORTED);
            }
            // Memory of eager work, not of captures: temporaries of any graph may overwrite the memory of captures.
            let address = match memory::allocate_from(Some(Origin::Eager), size, stream) {
                Ok(address) => address,
                Err(status) => return Some(status.0),
            };
            constants.push(Constant { address, bytes: bytes.to_vec() });
            // SAFETY: both addresses have `size` bytes; the graph's owner drops the `Constants` after the last replay.
            Some(unsafe { driver::cuMemcpyDtoDAsync_v2(to, address, size, stream) })
        }
    });
    // SAFETY: the caller's promise.
    captured.unwrap_or_else(|| unsafe { stage(to, from, size, stream) })
}

/// The `size` bytes at `from`.
///
/// # Safety
/// `from` must be valid for `size` bytes.
unsafe fn bytes<'a>(from: *const c_void, size: usize) -> &'a [u8] {
    if size == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(from.cast(), size) }
}

fn fingerprint(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// The fingerprints of the values that an eager run has copied.
#[derive(Debug, Default)]
pub struct Known(HashSet<u64>);

/// Record the fingerprints of the values that this thread copies, until [`finish_noting`].
pub fn note() {
    WATCH.set(Watch::Noting(HashSet::new()));
}

/// Stop recording, and return the recorded fingerprints.
pub fn finish_noting() -> Known {
    match WATCH.take() {
        Watch::Noting(known) => Known(known),
        _ => Known::default(),
    }
}

/// Until [`finish_capture`], turn each value that this thread copies into a constant of the graph if its fingerprint is
/// `known`, and reject other values.
pub fn capture(known: Known) {
    WATCH.set(Watch::Capturing { known: known.0, constants: Vec::new(), has_rejected: false });
}

/// The constants of a graph. Dropping this object frees their device memory.
pub struct Constants {
    constants: Vec<Constant>,
    has_rejected: bool,
}

/// End a capture and return its constants. [`Constants::upload`] then copies their values to the device.
pub fn finish_capture() -> Constants {
    match WATCH.take() {
        Watch::Capturing { constants, has_rejected, .. } => Constants { constants, has_rejected },
        _ => Constants { constants: Vec::new(), has_rejected: false },
    }
}

impl Constants {
    /// Whether the capture rejected a value because it was not known.
    pub const fn has_rejected(&self) -> bool {
        self.has_rejected
    }

    /// Copy the values to the device memory from which the graph copies.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// `stream` must be the stream that was captured, and its device must be current.
    pub unsafe fn upload(&mut self, stream: *mut c_void) -> Result<(), Status> {
        for constant in &mut self.constants {
            let bytes = std::mem::take(&mut constant.bytes);
            // SAFETY: `constant.address` has `bytes.len()` bytes.
            check(unsafe { stage(constant.address, bytes.as_ptr().cast(), bytes.len(), stream) })?;
        }
        Ok(())
    }
}

impl Drop for Constants {
    fn drop(&mut self) {
        // `free` uses the stream only for pinned memory of the host, which constants are not in.
        for constant in &self.constants {
            memory::free(constant.address, std::ptr::null_mut());
        }
    }
}
