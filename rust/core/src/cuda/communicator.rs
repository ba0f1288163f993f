//! Sums and copies over the GPUs of several processes, by NCCL.
//!
//! Every process has one GPU and one communicator. All calls are queued on the GPU's one stream, so they are in order
//! with all other work. Nothing blocks inside NCCL or the driver, so a process can still be stopped when another
//! process has ended.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use trainable_candle_cuda::nccl::{self, Comm, Nccl};

use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use crate::{Error, Raw, Result, capture, interrupt};

const OP: &str = "nccl";

/// How long a wait polls without sleeping.
const SPIN: Duration = Duration::from_millis(1);
/// How long a wait then sleeps between polls.
const NAP: Duration = Duration::from_micros(50);
/// How often a wait asks the embedding program whether to continue.
const ASK: Duration = Duration::from_millis(100);

/// A communicator of NCCL, and whether it can be used.
struct State {
    comm: Comm,
    /// False after an abort.
    is_alive: bool,
}

// SAFETY: NCCL requires that only one thread at a time uses a communicator; the lock around the state ensures that.
unsafe impl Send for State {}

/// This process's part in a group of processes with one GPU each.
pub struct Communicator {
    nccl: Nccl,
    gpu: &'static Gpu,
    rank: usize,
    size: usize,
    state: Mutex<State>,
    stop: AtomicBool,
}

/// The identifier by which the processes find each other. Rank 0 makes it, and the other ranks must receive it.
///
/// # Errors
/// [`Error::CudaUnavailable`] if NCCL cannot be used, [`Error::Device`] if NCCL cannot listen for the other processes.
pub fn unique_id(folders: &[&Path]) -> Result<[u8; 128]> {
    let nccl = load(folders)?;
    Ok(nccl.unique_id().map_err(|result| failed(nccl, result))?.0)
}

/// The version of NCCL, as `major * 10000 + minor * 100 + patch`.
///
/// # Errors
/// [`Error::CudaUnavailable`] if NCCL cannot be used.
pub fn version(folders: &[&Path]) -> Result<i32> {
    Ok(load(folders)?.version())
}

fn load(folders: &[&Path]) -> Result<Nccl> {
    nccl::load(folders).map_err(|reason| Error::CudaUnavailable(reason.to_string()))
}

#[cold]
fn failed(nccl: Nccl, result: i32) -> Error {
    Error::device(OP, format!("NCCL reports: {}; set NCCL_DEBUG=INFO to see NCCL's log", nccl.describe(result)))
}

/// The value of `ncclDataType_t` in `nccl.h` for a dtype.
fn number_of(dtype: DType) -> Result<i32> {
    Ok(match dtype {
        DType::U8 => 1,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        other => {
            return Err(Error::dtype(OP, format!("found dtype {}, expected u8, u32, i64 or a float", other.as_str())));
        }
    })
}

impl Communicator {
    /// Join the group of `size` processes that use the same `id`, as the process with the number `rank` (from 0). Every
    /// process of the group must call this function.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`] if NCCL cannot be used, [`Error::Argument`] if `rank` is not below `size`,
    /// [`Error::Device`] if `device` is not a CUDA device, if NCCL fails, or if not all processes have joined within
    /// `limit`. Returns the error of the check that was set with [`interrupt::set_check`], if the check fails.
    pub fn new(
        device: &Device,
        rank: usize,
        size: usize,
        id: [u8; 128],
        limit: Duration,
        folders: &[&Path],
    ) -> Result<Self> {
        let numbers = i32::try_from(rank).ok().zip(i32::try_from(size).ok()).filter(|_| rank < size);
        let Some((rank_number, size_number)) = numbers else {
            return Err(Error::argument(
                OP,
                format!("found rank {rank} of {size} processes, expected a rank below {size}"),
            ));
        };
        let nccl = load(folders)?;
        let gpu = Gpu::of_device(OP, device)?;
        capture::refuse(OP)?;
        bind(gpu)?;
        // SAFETY: the context is current.
        let comm = unsafe { nccl.init_rank(nccl::UniqueId(id), rank_number, size_number) };
        let comm = comm.map_err(|result| failed(nccl, result))?;
        let state = Mutex::new(State { comm, is_alive: true });
        let made = Self { nccl, gpu, rank, size, state, stop: AtomicBool::new(false) };
        let what = format!("not all of the {size} processes have joined within {} s", limit.as_secs_f64());
        made.wait_for(limit, &what, |state| made.progress(state))?;
        Ok(made)
    }

    /// The number of this process, from 0.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Queue the sum of each tensor over all processes, in place. All processes must call this function with tensors of
    /// the same sizes and dtypes, in the same order. Read the results, or buffers that contain them, only after
    /// [`wait`](Self::wait).
    ///
    /// # Errors
    /// [`Error::Shape`] if a tensor is not contiguous, [`Error::DType`] if its dtype is not u8, u32, i64 or a
    /// floating-point one, [`Error::Device`] if it is on another device than the communicator, the communicator was
    /// aborted, NCCL fails, or [`stop`](Self::stop) was called. Returns the error of the check as [`wait`](Self::wait)
    /// does.
    pub fn all_reduce(&self, tensors: &[&Raw]) -> Result<()> {
        self.queue(tensors, |comm, stream, place, count, dtype| {
            // SAFETY: the tensor is contiguous, has `count` elements, and is used on this stream only.
            unsafe { self.nccl.all_reduce(place, count, dtype, comm, stream) }
        })
    }

    /// Queue a copy of the tensors of process `root` to the tensors of all other processes, in place.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Error::Argument`] if `root` is not a rank of the group.
    pub fn broadcast(&self, tensors: &[&Raw], root: usize) -> Result<()> {
        let number = i32::try_from(root).ok().filter(|_| root < self.size);
        let Some(number) = number else {
            let last = self.size - 1;
            return Err(Error::argument(OP, format!("found root {root}, expected a rank from 0 to {last}")));
        };
        self.queue(tensors, |comm, stream, place, count, dtype| {
            // SAFETY: as above.
            unsafe { self.nccl.broadcast(place, count, dtype, number, comm, stream) }
        })
    }

    fn queue(
        &self,
        tensors: &[&Raw],
        call: impl Fn(Comm, *mut std::ffi::c_void, u64, usize, i32) -> std::result::Result<(), i32>,
    ) -> Result<()> {
        capture::refuse(OP)?;
        let mut given = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            if !tensor.device().same_device(&Device::Cuda(self.gpu.device().clone())) {
                return Err(Error::device(OP, "found a tensor on another device than the communicator's"));
            }
            if !tensor.is_contiguous() {
                return Err(Error::shape(
                    OP,
                    format!("found strides {:?}, expected a contiguous tensor", tensor.stride()),
                ));
            }
            given.push((address(OP, tensor)?, tensor.elem_count(), number_of(tensor.dtype())?));
        }
        bind(self.gpu)?;
        let stream = self.gpu.stream().cu_stream().cast();
        let mut calls = Some(given);
        self.wait_for(Duration::from_secs(60), "NCCL did not take a call within 60 s", |state| {
            // The first iteration makes the calls; every iteration asks whether NCCL has finished queueing them.
            if let Some(calls) = calls.take() {
                let queue = |&(place, count, dtype): &_| call(state.comm, stream, place, count, dtype);
                let queued = self.nccl.group_start().and_then(|()| {
                    let queued = calls.iter().try_for_each(queue);
                    self.nccl.group_end().and(queued)
                });
                queued.map_err(|result| failed(self.nccl, result))?;
            }
            self.progress(state)
        })
    }

    /// Wait until all work that is queued on the GPU is done.
    ///
    /// # Errors
    /// [`Error::Device`] if the work is not done within `limit`, [`stop`](Self::stop) was called, or NCCL or the driver
    /// fails. Returns the error of the check that was set with [`interrupt::set_check`], if the check fails. After any
    /// of these errors the communicator is aborted.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let what = format!("the GPU is still waiting for the other processes after {} s", limit.as_secs_f64());
        bind(self.gpu)?;
        let stream = self.gpu.stream().cu_stream().cast();
        self.wait_for(limit, &what, |state| {
            self.progress(state)?;
            // SAFETY: the stream is the device's, whose context is current; nothing is being captured in this thread.
            unsafe { nccl::is_done(stream) }.map_err(|status| status_error(OP, status))
        })
    }

    /// Make the current or next wait end with the error that another process has ended. May be called from any thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Whether NCCL has finished queueing the last call.
    fn progress(&self, state: &State) -> Result<bool> {
        // SAFETY: the communicator is alive.
        match unsafe { self.nccl.async_error(state.comm) } {
            nccl::SUCCESS => Ok(true),
            nccl::IN_PROGRESS => Ok(false),
            result => Err(failed(self.nccl, result)),
        }
    }

    /// Call `ask` until it returns true. After an error the communicator is aborted, because work that NCCL has queued
    /// would wait for ever.
    fn wait_for(&self, limit: Duration, what: &str, mut ask: impl FnMut(&State) -> Result<bool>) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.is_alive {
            return Err(Error::device(OP, "the communicator was aborted"));
        }
        let started = Instant::now();
        let mut asked = started;
        let outcome = loop {
            match ask(&state) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => break error,
            }
            let now = Instant::now();
            if self.stop.load(Ordering::Acquire) {
                break Error::device(OP, "another process has ended");
            }
            if now - started > limit {
                break Error::device(OP, what.to_owned());
            }
            if now - asked > ASK {
                asked = now;
                if let Err(error) = interrupt::ask() {
                    break error;
                }
            }
            if now - started > SPIN {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        };
        state.is_alive = false;
        // SAFETY: the communicator is not used again; the lock keeps other threads out.
        unsafe { self.nccl.abort(state.comm) };
        Err(outcome)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // The wait for NCCL is limited, because NCCL never finishes if another process has ended.
        const LIMIT: Duration = Duration::from_secs(5);
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::take(&mut state.is_alive) {
            return;
        }
        let comm = state.comm;
        let nccl = self.nccl;
        let started = Instant::now();
        // SAFETY: nothing else uses the communicator any more.
        unsafe {
            let is_final = bind(self.gpu).is_ok()
                && !self.stop.load(Ordering::Acquire)
                && nccl.finalize(comm).is_ok()
                && loop {
                    match nccl.async_error(comm) {
                        nccl::IN_PROGRESS if started.elapsed() < LIMIT => std::thread::sleep(NAP),
                        state => break state == nccl::SUCCESS,
                    }
                };
            if is_final { nccl.destroy(comm) } else { nccl.abort(comm) }
        }
    }
}

fn bind(gpu: &Gpu) -> Result<()> {
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))
}
