//! Tensors that wait in pinned memory of the host while other tensors use their memory on the device.
//!
//! Two streams take part: "the device's stream" computes, and a second stream makes all copies of the device to and
//! from this memory (see `copies.rs`). Copies run in the order of their stream, so a buffer can be reused without
//! waiting. Buffers stay allocated for the next training step. A buffer is allocated only if no free one is large
//! enough.
//!
//! Graphs do not use the buffers of eager work, because replays would overwrite values that eager work still needs. So
//! graphs have a second pool of buffers. All graphs share this pool: a replay writes each buffer before it reads the
//! buffer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::DType;
use trainable_candle_cuda::host::Pinned as Memory;
use trainable_candle_cuda::{download, upload};

use super::copies::{Copies, Event};
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::{address, empty};
use super::recorder;
use crate::{Error, Raw, Result, capture};

const OP: &str = "checkpoint";

/// Pinned memory for one tensor.
struct Buffer {
    memory: Memory,
    gpu: &'static Gpu,
    /// Recorded after the copy to the host.
    downloaded: Event,
    /// Recorded after the copy to the device.
    uploaded: Event,
}

/// The buffers of all devices. A buffer is free if only its pool owns it.
struct Pools {
    eager: Vec<Arc<Buffer>>,
    graphs: Vec<Arc<Buffer>>,
}

static POOLS: Mutex<Pools> = Mutex::new(Pools { eager: Vec::new(), graphs: Vec::new() });

/// The index of the smallest free buffer of `gpu` with at least `bytes`.
fn find_free(pool: &[Arc<Buffer>], gpu: &'static Gpu, bytes: usize) -> Option<usize> {
    let size = |buffer: &Arc<Buffer>| buffer.memory.len();
    let fits =
        |buffer: &Arc<Buffer>| Arc::strong_count(buffer) == 1 && std::ptr::eq(buffer.gpu, gpu) && size(buffer) >= bytes;
    (0..pool.len()).filter(|&index| fits(&pool[index])).min_by_key(|&index| size(&pool[index]))
}

/// Takes a free buffer of at least `bytes`, or allocates one if no function is being captured.
fn take(gpu: &'static Gpu, bytes: usize) -> Result<Arc<Buffer>> {
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let Pools { eager, graphs } = &mut *pools;
    if capture::is_capturing() {
        if let Some(index) = find_free(graphs, gpu, bytes) {
            return Ok(graphs[index].clone());
        }
        // The driver allocates no pinned memory during a capture. But the function has run eagerly before, and the
        // buffers of that run are free now, so the recording takes one of them, which then stays in the graphs' pool.
        let Some(index) = find_free(eager, gpu, bytes) else {
            let message = "a recording cannot allocate pinned memory, and the buffers that the function's last eager call \
                           has released are too few or too small; run the backward pass of that call, or drop the tensors \
                           that the function has kept";
            return Err(Error::device(OP, message));
        };
        let buffer = eager.swap_remove(index);
        graphs.push(buffer.clone());
        return Ok(buffer);
    }
    if let Some(index) = find_free(eager, gpu, bytes) {
        return Ok(eager[index].clone());
    }
    let event = || Event::new().map_err(|error| driver_error(OP, error));
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
    let memory = Memory::new(bytes).map_err(|status| {
        if status.is_out_of_memory() {
            let mib = bytes as f64 / (1u64 << 20) as f64;
            let message = format!(
                "the system gives no further {mib:.1} MiB of pinned memory, to which inputs of checkpoints are offloaded; use \"full\" \
                 checkpointing, which keeps them on the device (under WSL2 a .wslconfig with more memory raises the limit)"
            );
            return Error::OutOfMemory { op: OP, message };
        }
        status_error(OP, status)
    })?;
    let buffer = Arc::new(Buffer { memory, gpu, downloaded: event()?, uploaded: event()? });
    eager.push(buffer.clone());
    Ok(buffer)
}

/// The values of a tensor, copied to pinned memory.
pub struct Away {
    /// The stream of the copies.
    copies: &'static Copies,
    buffer: Arc<Buffer>,
    dims: Vec<usize>,
    dtype: DType,
    /// Whether the device's stream waits for the copy to the host.
    is_awaited: AtomicBool,
}

impl Away {
    /// Queue a copy of a dense tensor to the host. The copy waits for all work that is queued on the device's stream
    /// now. The tensor must live until [`await_copy`](Self::await_copy) is called or this value is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system gives no more pinned memory, [`Error::Device`] if the tensor is not on a
    /// CUDA device, no buffer is free during a capture, another thread captures, or the driver reports an error.
    pub fn new(x: &Raw) -> Result<Self> {
        let gpu = Gpu::of(OP, x)?;
        recorder::check_thread(OP)?;
        let copies = gpu.copies()?;
        let bytes = x.elem_count() * x.dtype().size_in_bytes();
        let buffer = take(gpu, bytes)?;
        let from = address(OP, x)?;
        // The stream of the copies, which now waits for the work that is queued on the device's stream.
        let stream = copies.fork(gpu.stream()).map_err(|error| driver_error(OP, error))?;
        // SAFETY: the buffer and the tensor have this many bytes. The buffer stays allocated, and all its copies are
        // queued in the stream of the copies; the caller keeps the tensor until the device's stream waits for the copy.
        unsafe { download::copy_pinned(buffer.memory.address(), from, bytes, stream.cast()) }
            .map_err(|status| status_error(OP, status))?;
        buffer.downloaded.record(stream).map_err(|error| driver_error(OP, error))?;
        Ok(Self { copies, buffer, dims: x.dims().to_vec(), dtype: x.dtype(), is_awaited: AtomicBool::new(false) })
    }

    /// Let the device's stream wait for the copy, so that other tensors may use the tensor's memory. Later calls do
    /// nothing.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports an error.
    pub fn await_copy(&self) -> Result<()> {
        if self.is_awaited.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let device_stream = self.buffer.gpu.stream().cu_stream();
        self.buffer.downloaded.make_wait(device_stream).map_err(|error| driver_error(OP, error))
    }

    /// Queue a copy to new memory of the device. The copy waits for all work that is queued on the device's stream now,
    /// and runs in parallel with work that is queued later.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device has too little memory, [`Error::Device`] if another thread captures, or the
    /// driver reports an error.
    pub fn fetch(&self) -> Result<Arriving> {
        let gpu = self.buffer.gpu;
        recorder::check_thread(OP)?;
        let raw = empty(OP, gpu, &self.dims, self.dtype)?;
        let to = address(OP, &raw)?;
        // The stream of the copies, as in `new`.
        let stream = self.copies.fork(gpu.stream()).map_err(|error| driver_error(OP, error))?;
        let bytes = raw.elem_count() * self.dtype.size_in_bytes();
        // SAFETY: the buffer and the tensor have this many bytes; the buffer is pinned and stays allocated, and the
        // tensor is not freed before the device's stream has waited for the copy.
        unsafe { upload::copy_pinned(to, self.buffer.memory.address(), bytes, stream.cast()) }
            .map_err(|status| status_error(OP, status))?;
        self.buffer.uploaded.record(stream).map_err(|error| driver_error(OP, error))?;
        Ok(Arriving { raw, buffer: self.buffer.clone(), is_awaited: false })
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        // An error may drop this value before `await_copy` was called; even then nothing may reuse the tensor's memory
        // before the copy is done. A failure is ignored: a driver that cannot queue this wait cannot queue work that
        // reuses the memory either.
        let _ = self.await_copy();
    }
}

/// A tensor whose values are being copied to it.
pub struct Arriving {
    raw: Raw,
    buffer: Arc<Buffer>,
    is_awaited: bool,
}

impl Arriving {
    /// Returns the tensor; work that is queued from now on waits for its values.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports an error.
    pub fn wait(mut self) -> Result<Raw> {
        self.join().map_err(|error| driver_error(OP, error))?;
        Ok(self.raw.clone())
    }

    /// Let the device's stream wait for the copy, if it does not yet.
    fn join(&mut self) -> std::result::Result<(), candle_core::cuda_backend::cudarc::driver::DriverError> {
        if !std::mem::replace(&mut self.is_awaited, true) {
            self.buffer.gpu.stream().context().bind_to_thread()?;
            self.buffer.uploaded.make_wait(self.buffer.gpu.stream().cu_stream())?;
        }
        Ok(())
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        // Later work in the device's stream may reuse the tensor's memory, so the stream first waits for the copy. A
        // failure is ignored: a driver that cannot queue this wait cannot queue that work either.
        let _ = self.join();
    }
}
