//! Copies of streamed weights from pageable host memory to the device, for systems that give little pinned memory.
//!
//! A separate thread copies the bytes piece by piece to a small ring of pinned memory (`upload`), from which the device
//! copies them. So the thread that queues the computation waits only when the computation needs the copied values, and
//! only until the copies are queued. Copies are queued in the order of their jobs.

use std::any::Any;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::sys::CUstream;
use trainable_candle_cuda::upload;

use super::copies::Event;
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use crate::{Error, Result};

const OP: &str = "stream_blocks";

/// The copies of one unit of streamed weights to its slot.
pub(super) struct Job {
    /// For each copy: the address on the device, and the bytes to copy.
    pub(super) parts: Vec<(u64, Bytes)>,
    /// Recorded after the last copy.
    pub(super) filled: Event,
    /// Keeps the bytes of `parts` alive.
    pub(super) _owner: Arc<dyn Any + Send + Sync>,
}

/// Bytes in host memory that the job's `_owner` owns.
pub(super) struct Bytes {
    pub(super) address: *const u8,
    pub(super) len: usize,
}

// SAFETY: `Bytes` is an address that any thread may read from; its job keeps the memory alive.
unsafe impl Send for Bytes {}

/// The thread that queues copies from pageable memory in a device's stream of copies. The thread lives as long as the
/// process.
pub(super) struct Staging {
    sent: Mutex<Sent>,
    progress: Arc<Progress>,
}

/// The sender of jobs to the thread, and the number of jobs sent.
struct Sent {
    sender: Sender<Job>,
    count: u64,
}

#[derive(Default)]
struct Progress {
    done: Mutex<Done>,
    changed: Condvar,
}

/// The number of jobs that are done: their copies are queued, or have failed. Also the first error of a job.
#[derive(Default)]
struct Done {
    count: u64,
    error: Option<String>,
}

/// The address of a stream as a number, which may be sent to another thread.
#[derive(Clone, Copy)]
struct StreamAddress(usize);

impl Staging {
    /// Starts the thread, which queues its copies in `stream`.
    pub(super) fn new(gpu: &'static Gpu, stream: CUstream) -> Result<Self> {
        let (sender, jobs) = channel::<Job>();
        let progress = Arc::new(Progress::default());
        let (shared, stream) = (progress.clone(), StreamAddress(stream as usize));
        let work = move || {
            for job in jobs {
                let result = run(gpu, stream, &job);
                // Release the bytes before the job counts as done.
                drop(job);
                let mut done = shared.done.lock().unwrap_or_else(PoisonError::into_inner);
                done.count += 1;
                // Keep the first error.
                if let (Err(error), None) = (result, &done.error) {
                    done.error = Some(error.to_string());
                }
                shared.changed.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name("staging".into()).spawn(work);
        thread.map_err(|error| {
            Error::device(OP, format!("cannot start the thread that copies streamed blocks: {error}"))
        })?;
        Ok(Self { sent: Mutex::new(Sent { sender, count: 0 }), progress })
    }

    /// Adds a job and returns its number.
    pub(super) fn queue(&self, job: Job) -> Result<u64> {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.sender.send(job).map_err(|_| Error::device(OP, "the thread that copies streamed blocks has ended"))?;
        sent.count += 1;
        Ok(sent.count)
    }

    /// Waits until the copies of job `number` and of all earlier jobs are queued. Returns the first error of any job so
    /// far.
    pub(super) fn wait(&self, number: u64) -> Result<()> {
        let mut done = self.progress.done.lock().unwrap_or_else(PoisonError::into_inner);
        while done.count < number {
            done = self.progress.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
        done.error.as_ref().map_or(Ok(()), |error| Err(Error::device(OP, error.clone())))
    }

    /// Waits until the copies of all jobs are queued. Returns the first error of any job so far.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        let number = self.sent.lock().unwrap_or_else(PoisonError::into_inner).count;
        self.wait(number)
    }
}

/// Queues the copies of a job in the stream.
fn run(gpu: &Gpu, StreamAddress(stream): StreamAddress, job: &Job) -> Result<()> {
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
    for (to, bytes) in &job.parts {
        // SAFETY: the slot is large enough, which `Copier::copy` has checked, and exists until all jobs are done; the
        // job keeps the bytes alive. The stream lives as long as the process.
        let queued = unsafe { upload::copy_pageable(*to, bytes.address, bytes.len, stream as *mut _) };
        queued.map_err(|status| status_error(OP, status))?;
    }
    job.filled.record(stream as CUstream).map_err(|error| driver_error(OP, error))
}
