//! [`Shards`]: memory on the devices of several processes, for streamed blocks, whose weights the devices share. Each
//! process has one shard and reads the shards of all processes.
//!
//! The driver does not allow a process to free memory that another process has mapped. So the processes share a ledger
//! in the memory of the host, in which each process records that it has ended its mappings of the other shards. A shard
//! that other processes still map waits in `WAITING`. It is freed when, at a later time, [`Shards`] are made or
//! dropped, or cached memory is released. If a process ends without a record in the ledger, the other processes keep
//! their shards until they end, too.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device};
use trainable_candle_cuda::memory::Status;
use trainable_candle_cuda::peers::{self, Exported, HANDLE, Handle, Opened};

use super::copies::Copies;
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use super::streaming::wait_for_copies;
use crate::device::Link;
use crate::streaming::Pages;
use crate::{Error, Raw, Result, capture};

const OP: &str = "stream_blocks";
/// What the errors of this file advise.
const ADVICE: &str = "stream from the host (stream_from: host)";

/// The address of a device on the PCI bus. All processes of the machine name the device by this address.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, or the driver reports an error.
pub fn bus_id(device: &Device) -> Result<String> {
    const OP: &str = "bus_id";
    peers::bus_id(make_current(OP, device)?).map_err(|status| status_error(OP, status))
}

/// How a device reads the memory of the device whose address on the bus is `bus_id`; see [`crate::device::link`].
/// `None` if this process does not see that device, or if both are the same device.
///
/// # Errors
/// As [`bus_id`].
pub fn link(device: &Device, bus_id: &str) -> Result<Option<Link>> {
    const OP: &str = "link";
    let access = peers::access(make_current(OP, device)?, bus_id).map_err(|status| status_error(OP, status))?;
    // Devices on NVLink have atomic operations on each other's memory; those on the bus do not.
    Ok(access.map(|access| match (access.is_direct, access.has_atomics) {
        (false, _) => Link::None,
        (true, true) => Link::NvLink,
        (true, false) => Link::Bus,
    }))
}

/// Make a device current on this thread; returns the driver's number of the device.
fn make_current(op: &'static str, device: &Device) -> Result<i32> {
    let context = Gpu::of_device(op, device)?.stream().context();
    context.bind_to_thread().map_err(|error| driver_error(op, error))?;
    Ok(context.cu_device())
}

/// Memory of the host that all processes share. Each process has an entry, which is nonzero when the process has ended
/// its mappings of the other shards.
struct Ledger {
    pages: Pages,
    /// The number of processes.
    processes: usize,
}

impl Ledger {
    fn entry(&self, process: usize) -> &AtomicU32 {
        assert!(process < self.processes, "process {process} of {}", self.processes);
        let entries = self.pages.mapping().0.cast::<u32>();
        // SAFETY: the mapping begins at a page boundary and has an entry for each process; all accesses to entries are
        // atomic.
        unsafe { AtomicU32::from_ptr(entries.as_ptr().add(process)) }
    }

    /// Record that a process has ended its mappings.
    fn leave(&self, process: usize) {
        self.entry(process).store(1, Ordering::Release);
    }

    fn have_all_left(&self) -> bool {
        (0..self.processes).all(|process| self.entry(process).load(Ordering::Acquire) != 0)
    }
}

/// A shard of this process that others may still map.
struct Waiting {
    shard: Exported,
    ledger: Ledger,
    gpu: &'static Gpu,
}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());

/// Free the shards that no process maps any more.
pub(super) fn sweep() {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    for Waiting { shard, gpu, .. } in waiting.extract_if(.., |entry| entry.ledger.have_all_left()) {
        if gpu.stream().context().bind_to_thread().is_ok() {
            drop(shard);
        } else {
            // The driver frees memory only in the device's context, so leak the shard.
            std::mem::forget(shard);
        }
    }
}

/// The shards of all processes of a machine. A process is named by its number on the machine.
pub struct Shards {
    gpu: &'static Gpu,
    /// The stream of the device's copies, which may read shards.
    copies: &'static Copies,
    /// The number of this process.
    number: usize,
    /// The shard of this process; None only while this value is dropped.
    own: Option<Exported>,
    /// The shards of the other processes, indexed by process; None at the index of this process. Empty until
    /// [`open`](Self::open).
    opened: Vec<Option<Opened>>,
    /// The number of processes.
    processes: usize,
    /// None until the ledger is open; process 0 creates the ledger.
    ledger: Option<Ledger>,
}

impl Shards {
    /// Allocates the shard of process `number`. Returns the shards, and the text with which the other processes open
    /// this shard.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the shard or the ledger does not fit, [`Error::Device`] if `device` is not a CUDA
    /// device, the system does not let processes share memory of devices, a function is being captured, or the driver
    /// reports an error.
    pub fn new(device: &Device, bytes: usize, number: usize, processes: usize) -> Result<(Self, String)> {
        let gpu = Gpu::of_device(OP, device)?;
        capture::refuse(OP)?;
        let copies = gpu.copies()?;
        sweep();
        make_current(OP, device)?;
        let own = Exported::new(bytes).map_err(|status| allocation_error(bytes, status))?;
        let handle = own.handle().map_err(|status| {
            let message = format!(
                "the memory of this GPU has no handle for other processes (error {} of the driver); {ADVICE}",
                status.0
            );
            Error::device(OP, message)
        })?;
        let mut text: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut ledger = None;
        if number == 0 {
            let size = processes * size_of::<u32>();
            let mut pages = Pages::create(size)?;
            pages.write(0, &vec![0; size])?;
            text = format!("{text} {}", pages.description()?);
            ledger = Some(Ledger { pages, processes });
        }
        Ok((Self { gpu, copies, number, own: Some(own), opened: Vec::new(), processes, ledger }, text))
    }

    /// Open the shards of the other processes, given the texts that [`new`](Self::new) returned in all processes,
    /// this one included, in the order of their numbers.
    ///
    /// # Errors
    /// [`Error::Device`] if this device cannot read the memory of another process's device, [`Error::Argument`] if a
    /// text is not one that `new` has returned, or the ledger cannot be opened; [`Error::OutOfMemory`] if the ledger
    /// cannot be mapped.
    pub fn open(&mut self, texts: &[&str]) -> Result<()> {
        self.gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        // The text of process 0 has its handle and, after a space, the description of the ledger.
        // If it has no description, `description` is empty, and `Pages::open` rejects it.
        let (_, description) = texts.first().and_then(|text| text.split_once(' ')).unwrap_or_default();
        if self.ledger.is_none() {
            self.ledger = Some(Ledger { pages: Pages::open(description)?, processes: self.processes });
        }
        for (process, text) in texts.iter().enumerate() {
            let open = || {
                let Some(handle) = parsed_handle(text) else {
                    let message = format!("process {process} has sent {text:?}, expected the handle of its memory");
                    return Err(Error::argument(OP, message));
                };
                Opened::new(handle).map_err(|status| unreachable_peer(process, self.number, status))
            };
            let opened = if process == self.number { None } else { Some(open()?) };
            self.opened.push(opened);
        }
        Ok(())
    }

    /// The number of this process.
    pub const fn number(&self) -> usize {
        self.number
    }

    /// The address of the shard of a process.
    ///
    /// # Errors
    /// [`Error::Argument`] if this process has not opened the shard.
    pub(super) fn address(&self, process: usize) -> Result<u64> {
        let own = self.own.as_ref().filter(|_| process == self.number).map(Exported::address);
        let other = || self.opened.get(process)?.as_ref().map(Opened::address);
        own.or_else(other).ok_or_else(|| Error::argument(OP, format!("the memory of process {process} is not open")))
    }

    /// Write consecutive pieces of `bytes` to shards. Each of `pieces` has the process, the first byte in the process's
    /// shard, and the number of bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if a copy of the bytes on this device does not fit, [`Error::Argument`] if this process
    /// has not opened a shard, [`Error::Device`] if the driver reports an error.
    pub fn write(&self, bytes: &[u8], pieces: impl Iterator<Item = (usize, usize, usize)>) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let device = Device::Cuda(self.gpu.device().clone());
        // The bytes go to this device first: a copy from the host straight to another device's memory would depend on
        // more features of the driver than a copy between devices.
        let staged = Raw::from_raw_buffer(bytes, DType::U8, &[bytes.len()], &device)?;
        let mut from = address(OP, &staged)?;
        for (process, start, size) in pieces {
            self.copy(self.address(process)? + start as u64, from, size)?;
            from += size as u64;
        }
        Ok(())
    }

    /// Read pieces of shards to consecutive bytes of a tensor. `pieces` are as for [`write`](Self::write).
    ///
    /// # Errors
    /// [`Error::Argument`] if this process has not opened a shard, [`Error::Device`] if the driver reports an error.
    pub fn read(&self, to: &Raw, pieces: impl Iterator<Item = (usize, usize, usize)>) -> Result<()> {
        let mut to = address(OP, to)?;
        for (process, start, size) in pieces {
            self.copy(to, self.address(process)? + start as u64, size)?;
            to += size as u64;
        }
        Ok(())
    }

    fn copy(&self, to: u64, from: u64, size: usize) -> Result<()> {
        self.gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        // SAFETY: the pieces that callers pass are within shards and tensors. Shards and tensors are freed in the order
        // of the stream, or after the host has waited for the stream.
        unsafe { peers::copy(to, from, size, self.gpu.stream().cu_stream().cast()) }
            .map_err(|status| status_error(OP, status))
    }

    /// Wait until all queued writes are done, and let no further process open the ledger.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports an error.
    pub fn close(&mut self) -> Result<()> {
        if let Some(ledger) = &mut self.ledger {
            ledger.pages.close();
        }
        self.gpu.stream().synchronize().map_err(|error| driver_error(OP, error))
    }
}

impl Drop for Shards {
    fn drop(&mut self) {
        let Some(shard) = self.own.take() else { return };
        if !wait_for_copies(self.gpu, self.copies) {
            // Leak the memory, which a copy may still use.
            std::mem::forget((std::mem::take(&mut self.opened), shard));
            return;
        }
        self.opened.clear();
        let Some(ledger) = self.ledger.take() else {
            // Other processes may have mapped the shard, and there is no ledger in which they record the end of their
            // mappings.
            std::mem::forget(shard);
            return;
        };
        ledger.leave(self.number);
        WAITING.lock().unwrap_or_else(PoisonError::into_inner).push(Waiting { shard, ledger, gpu: self.gpu });
        sweep();
    }
}

/// The handle at the start of a text from [`Shards::new`]: two hexadecimal digits for each of its [`HANDLE`] bytes.
fn parsed_handle(text: &str) -> Option<Handle> {
    let digits = text.split(' ').next()?.as_bytes();
    let mut handle = [0; HANDLE];
    if digits.len() != 2 * HANDLE {
        return None;
    }
    for (byte, pair) in handle.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(handle)
}

fn allocation_error(bytes: usize, status: Status) -> Error {
    if !status.is_out_of_memory() {
        return status_error(OP, status);
    }
    let gib = bytes as f64 / (1u64 << 30) as f64;
    let message = format!(
        "the GPU has no {gib:.2} GiB left for its slice of the streamed blocks; stream from the host, use more GPUs, or quantize the base"
    );
    Error::OutOfMemory { op: OP, message }
}

fn unreachable_peer(process: usize, own_number: usize, status: Status) -> Error {
    let message = format!(
        "GPU {own_number} of this machine cannot read the memory of GPU {process} (error {} of the driver); {ADVICE}",
        status.0
    );
    Error::device(OP, message)
}
