//! The board: device memory in which kernels report ids out of range.
//!
//! A kernel cannot return an error, and waiting for its result would stall the queue. So the board has an entry for
//! each operation that takes ids or bounds of segments. Segments are sequences one after another in a tensor; their
//! bounds are checked like ids. If a kernel of the operation finds an id out of range, it writes the row-major index of
//! the id in the tensor of ids to the entry; the entry keeps the smallest such index. The next time that the host waits
//! for the device, it reads the entries and returns the error.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DriverError, result};
use trainable_candle_cuda::kernels::{Element, Mut};
use trainable_candle_cuda::structs::Address;

use super::error::driver_error;
use crate::capture::HostState;
use crate::{Error, Result};

/// The number of entries, more than there are operations that take ids.
const ENTRIES: usize = 16;

/// The board of a device.
pub struct Board {
    stream: Arc<CudaStream>,
    entries: CudaSlice<u64>,
    /// The operations that have an entry, in the order of the entries.
    names: Mutex<Vec<&'static str>>,
    /// Whether a kernel may have written to an entry since the last check.
    is_used: HostState<bool>,
}

impl Board {
    /// Creates a board on which nothing is reported.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::Device`] if the driver reports an error.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        // SAFETY: `clear` sets the entries below, before anything reads them.
        let entries = unsafe { device.alloc::<u64>(ENTRIES) }?;
        let stream = device.cuda_stream();
        let is_used = HostState::new("whether a kernel may have noted an id out of range", false);
        let board = Self { stream, entries, names: Mutex::default(), is_used };
        board.clear().map_err(|error| driver_error("cuda", error))?;
        Ok(board)
    }

    fn address(&self) -> Address {
        self.entries.device_ptr(&self.stream).0
    }

    /// Sets all entries to the largest value, which means that nothing is reported.
    fn clear(&self) -> std::result::Result<(), DriverError> {
        // SAFETY: the entries have this many bytes.
        unsafe { result::memset_d8_async(self.address(), u8::MAX, ENTRIES * size_of::<u64>(), self.stream.cu_stream()) }
    }

    /// Returns the address of the entry of the operation `op`, for a kernel that is about to be queued. Gives the
    /// operation an entry if it has none yet. Marks the board as used, so that the next check reads it.
    pub fn place(&self, op: &'static str) -> Mut {
        // `advance` is repeated by each replay of a CUDA graph, because a replay queues the kernel again.
        self.is_used.advance(|is_used| *is_used = true);
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = names.iter().position(|&name| name == op).unwrap_or_else(|| {
            names.push(op);
            names.len() - 1
        });
        // `min` has no effect while `ENTRIES` suffices; otherwise it prevents a write outside of the board.
        Mut::new(self.address(), Element::U64).offset_by(entry.min(ENTRIES - 1) * size_of::<u64>())
    }

    /// Waits for the device, then reads and clears the entries. Does nothing if no kernel can have written to an entry
    /// since the last check.
    ///
    /// # Errors
    /// [`Error::Index`] for the first entry to which a kernel has written, [`Error::Device`] or [`Error::OutOfMemory`]
    /// if the driver reports an error.
    pub fn check(&self) -> Result<()> {
        if !self.is_used.change(std::mem::take) {
            return Ok(());
        }
        let read = || {
            self.stream.context().bind_to_thread()?;
            // A copy to memory that is not pinned is synchronous.
            let entries = self.stream.clone_dtoh(&self.entries)?;
            if entries.iter().any(|&at| at != u64::MAX) {
                self.clear()?;
            }
            Ok(entries)
        };
        let entries = read().map_err(|error| driver_error("cuda", error))?;
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        match names.iter().zip(entries).find(|(_, at)| *at != u64::MAX) {
            None => Ok(()),
            Some((op, at)) => Err(Error::index(
                op,
                format!(
                    "the id or bound at position {at} (in row-major order) was out of range in an operation that the program has queued \
                     since it last waited for the GPU; expected ids with 0 <= id < the size of the dimension, or bounds of segments that \
                     ascend from 0 to at most the number of rows; call synchronize() after each operation to find the one that failed"
                ),
            )),
        }
    }
}
