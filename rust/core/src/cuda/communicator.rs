//! Sums over the GPUs of several processes, and copies between these GPUs, by NCCL.
//!
//! Every process has one GPU and one communicator. NCCL's work is queued on the stream of the GPU's other work, so both
//! run in the order in which they were queued. Waits poll, and never block inside NCCL or the driver, so a process can
//! still be stopped when another process has ended.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use trainable_candle_cuda::nccl::{self, Comm, Nccl};

use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use crate::device::name;
use crate::{Error, Raw, Result, capture, interrupt};

const OP: &str = "nccl";

/// How long a wait first polls without sleeping.
const SPIN: Duration = Duration::from_millis(1);
/// How long a wait then sleeps between polls.
const NAP: Duration = Duration::from_micros(50);
/// How often a wait asks the embedding program whether to continue.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// How long NCCL may take to queue calls.
const QUEUE_LIMIT: Duration = Duration::from_secs(60);
/// How long NCCL may take to finalize a communicator. Without this limit, the wait would never end if another process
/// has ended.
const FINALIZE_LIMIT: Duration = Duration::from_secs(5);

/// A communicator of NCCL, and whether it can be used.
struct State {
    comm: Comm,
    /// False after an abort.
    is_alive: bool,
}

// SAFETY: NCCL requires that only one thread at a time uses a communicator; the lock around the state ensures that.
unsafe impl Send for State {}

/// This process's membership in a group of processes with one GPU each.
pub struct Communicator {
    nccl: Nccl,
    gpu: &'static Gpu,
    rank: usize,
    size: usize,
    state: Mutex<State>,
    /// Whether [`stop`](Self::stop) was called.
    is_stopped: AtomicBool,
}

/// Make the identifier by which the processes of a group find each other. Only rank 0 may call this function, and must
/// send the result to the other ranks. NCCL is looked for in `folders` first.
///
/// # Errors
/// [`Error::CudaUnavailable`] if NCCL cannot be used, [`Error::Device`] if NCCL cannot listen for the other processes.
pub fn unique_id(folders: &[&Path]) -> Result<[u8; 128]> {
    let nccl = load(folders)?;
    Ok(nccl.unique_id().map_err(|result| failed(nccl, result))?.0)
}

/// Return the version of NCCL, as `major * 10000 + minor * 100 + patch`. NCCL is looked for in `folders` first.
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

/// Return the value of `ncclDataType_t` (`nccl.h`) for a dtype.
fn nccl_dtype(dtype: DType) -> Result<i32> {
    Ok(match dtype {
        DType::U8 => 1,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        other => {
            let expected = "expected u8, u32, i64, f16, bf16, f32 or f64";
            return Err(Error::dtype(OP, format!("found dtype {}, {expected}", other.as_str())));
        }
    })
}

impl Communicator {
    /// Join the group of `size` processes that use the same `id`, as the process with the number `rank` (from 0). Every
    /// process of the group must call this function, which returns when all have joined. NCCL is looked for in
    /// `folders` first.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`] if NCCL cannot be used, [`Error::Argument`] if `rank` is not below `size`,
    /// [`Error::Device`] if `device` is not a CUDA device, inside a captured function, if NCCL fails, or if not all
    /// processes have joined within `limit`. Returns the error of the check that was set with
    /// [`interrupt::set_check`], if the check fails.
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
        capture::refuse(OP)?; // an error inside a captured function
        bind(gpu)?;
        // SAFETY: the context is current.
        let comm = unsafe { nccl.init_rank(nccl::UniqueId(id), rank_number, size_number) };
        let comm = comm.map_err(|result| failed(nccl, result))?;
        let state = Mutex::new(State { comm, is_alive: true });
        let communicator = Self { nccl, gpu, rank, size, state, is_stopped: AtomicBool::new(false) };
        let late_message = format!("not all of the {size} processes have joined within {} s", limit.as_secs_f64());
        communicator.wait_for(limit, &late_message, |state| communicator.has_queued(state))?;
        Ok(communicator)
    }

    /// Return the number of this process, from 0.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Return the number of processes.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Queue the sum of each tensor over all processes, in place. All processes must call this function with tensors of
    /// the same sizes and dtypes, in the same order. Call [`wait`](Self::wait) before the host reads the results or
    /// what was computed from them: such a read could wait for ever for a process that has ended, and cannot be
    /// interrupted.
    ///
    /// # Errors
    /// [`Error::Shape`] if a tensor is not contiguous, [`Error::DType`] if its dtype is not u8, u32, i64, f16, bf16,
    /// f32 or f64, [`Error::Device`] if it is on another device than the communicator, inside a captured function, if
    /// the communicator was aborted, [`stop`](Self::stop) was called, NCCL fails, or NCCL does not queue the work
    /// within 60 s. Returns the error of the check as [`wait`](Self::wait) does. Once NCCL was called, an error aborts
    /// the communicator.
    pub fn all_reduce(&self, tensors: &[&Raw]) -> Result<()> {
        self.queue(tensors, |comm, stream, at, count, dtype| {
            // SAFETY: the tensor is contiguous, has `count` elements, and is used on this stream only.
            unsafe { self.nccl.all_reduce(at, count, dtype, comm, stream) }
        })
    }

    /// Queue copies of the tensors of process `root` to the tensors of all other processes. The conditions are those of
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Error::Argument`] if `root` is not a rank of the group.
    pub fn broadcast(&self, tensors: &[&Raw], root: usize) -> Result<()> {
        let number = i32::try_from(root).ok().filter(|_| root < self.size);
        let Some(number) = number else {
            let last = self.size - 1;
            return Err(Error::argument(OP, format!("found root {root}, expected a rank from 0 to {last}")));
        };
        self.queue(tensors, |comm, stream, at, count, dtype| {
            // SAFETY: as in `all_reduce`.
            unsafe { self.nccl.broadcast(at, count, dtype, number, comm, stream) }
        })
    }

    /// Make `call` once for each tensor, all in one group of NCCL, and wait until NCCL has queued the work. The
    /// arguments of `call` are the communicator, the stream, and the address, the number of elements and the dtype of
    /// the tensor.
    fn queue(
        &self,
        tensors: &[&Raw],
        call: impl Fn(Comm, *mut std::ffi::c_void, u64, usize, i32) -> std::result::Result<(), i32>,
    ) -> Result<()> {
        capture::refuse(OP)?;
        let own_device = Device::Cuda(self.gpu.device().clone());
        let mut calls = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            if !tensor.device().same_device(&own_device) {
                let (found, expected) = (name(tensor.device()), name(&own_device));
                let message = format!("found a tensor on {found}, expected one on {expected}, as the communicator");
                return Err(Error::device(OP, message));
            }
            if !tensor.is_contiguous() {
                return Err(Error::shape(
                    OP,
                    format!("found strides {:?}, expected a contiguous tensor", tensor.stride()),
                ));
            }
            calls.push((address(OP, tensor)?, tensor.elem_count(), nccl_dtype(tensor.dtype())?));
        }
        bind(self.gpu)?;
        let stream = self.gpu.stream().cu_stream().cast();
        let mut pending = Some(calls);
        let late_message = format!("NCCL did not queue the calls within {} s", QUEUE_LIMIT.as_secs());
        self.wait_for(QUEUE_LIMIT, &late_message, |state| {
            // The first iteration makes the calls; every iteration asks whether NCCL has finished queueing them.
            if let Some(calls) = pending.take() {
                let make_call = |&(at, count, dtype): &_| call(state.comm, stream, at, count, dtype);
                let outcome = self.nccl.group_start().and_then(|()| {
                    let outcome = calls.iter().try_for_each(make_call);
                    // A group must end even after an error.
                    self.nccl.group_end().and(outcome)
                });
                outcome.map_err(|result| failed(self.nccl, result))?;
            }
            self.has_queued(state)
        })
    }

    /// Wait until all work that is queued on the GPU's stream is done.
    ///
    /// # Errors
    /// [`Error::Device`] inside a captured function, if the communicator was aborted, the work is not done within
    /// `limit`, [`stop`](Self::stop) was called, or NCCL or the driver fails. Returns the error of the check that was
    /// set with [`interrupt::set_check`], if the check fails. An error during the wait aborts the communicator.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        capture::refuse(OP)?;
        let late_message = format!("the GPU is still waiting for the other processes after {} s", limit.as_secs_f64());
        bind(self.gpu)?;
        let stream = self.gpu.stream().cu_stream().cast();
        self.wait_for(limit, &late_message, |state| {
            // Only errors of NCCL matter here; the stream says whether the work is done.
            self.has_queued(state)?;
            // SAFETY: the stream is the device's, whose context is current; nothing is being captured in this thread.
            unsafe { nccl::is_done(stream) }.map_err(|status| status_error(OP, status))
        })
    }

    /// Make the current or the next call of [`all_reduce`](Self::all_reduce), [`broadcast`](Self::broadcast) or
    /// [`wait`](Self::wait) return the error that another process has ended. Any thread may call `stop`.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }

    /// Return whether NCCL has finished queueing the last call.
    fn has_queued(&self, state: &State) -> Result<bool> {
        // SAFETY: the communicator is alive.
        match unsafe { self.nccl.async_error(state.comm) } {
            nccl::SUCCESS => Ok(true),
            nccl::IN_PROGRESS => Ok(false),
            result => Err(failed(self.nccl, result)),
        }
    }

    /// Call `is_done` until it returns true. If it does not within `limit`, return an error with this `late_message`.
    /// Abort the communicator after an error, because work that NCCL has queued could wait for ever.
    fn wait_for(
        &self,
        limit: Duration,
        late_message: &str,
        mut is_done: impl FnMut(&State) -> Result<bool>,
    ) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.is_alive {
            return Err(Error::device(OP, "the communicator was aborted"));
        }
        let started = Instant::now();
        let mut last_check = started;
        let error = loop {
            match is_done(&state) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => break error,
            }
            let now = Instant::now();
            if self.is_stopped.load(Ordering::Acquire) {
                break Error::device(OP, "another process has ended");
            }
            if now - started > limit {
                break Error::device(OP, late_message.to_owned());
            }
            if now - last_check > CHECK_INTERVAL {
                last_check = now;
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
        Err(error)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::take(&mut state.is_alive) {
            return;
        }
        let comm = state.comm;
        let nccl = self.nccl;
        let started = Instant::now();
        // A communicator that cannot be finalized within the limit is aborted instead of destroyed.
        // SAFETY: nothing else uses the communicator any more.
        unsafe {
            let is_finalized = bind(self.gpu).is_ok()
                && !self.is_stopped.load(Ordering::Acquire)
                && nccl.finalize(comm).is_ok()
                && loop {
                    match nccl.async_error(comm) {
                        nccl::IN_PROGRESS if started.elapsed() < FINALIZE_LIMIT => std::thread::sleep(NAP),
                        result => break result == nccl::SUCCESS,
                    }
                };
            if is_finalized { nccl.destroy(comm) } else { nccl.abort(comm) }
        }
    }
}

/// Make the GPU's context current on this thread.
fn bind(gpu: &Gpu) -> Result<()> {
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))
}
