//! Measures the times of kernels, with an event before and one after each launch.
//!
//! If the GPU waited for the host, the times of launches would include the waiting. So the GPU pauses while a batch of
//! launches is queued, and then runs the batch without a gap.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::sys::{CUevent, CUevent_flags};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result};

use super::error::driver_error;
use super::gpu::Gpu;
use crate::device::stats::KernelTime;
use crate::{Error, Result, capture};

const OP: &str = "profile";
/// Launches in a batch: few enough that a stream accepts them and their events without blocking the host.
const BATCH: usize = 128;
/// The longest time that the GPU pauses for the host. It is longer than queueing a batch usually takes. A pause delays
/// a thread that waits for the GPU by no more than this time.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Whether a profile is in progress; checked at each launch.
static IS_ON: AtomicBool = AtomicBool::new(false);
static PROFILE: Mutex<Option<Profile>> = Mutex::new(None);

struct Profile {
    gpu: &'static Gpu,
    /// The name of each launch, and the events before and after it.
    launches: Vec<(String, Event, Event)>,
    /// The gate before the batch that is being queued.
    gate: Arc<Gate>,
}

/// An event of the device's stream.
struct Event(CUevent);

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Record an event after all work that is queued now.
    fn now(gpu: &Gpu) -> std::result::Result<Self, DriverError> {
        gpu.stream().context().bind_to_thread()?;
        let event = Self(result::event::create(CUevent_flags::CU_EVENT_DEFAULT)?);
        // SAFETY: the event has just been made, in the stream's context.
        unsafe { result::event::record(event.0, gpu.stream().cu_stream()) }?;
        Ok(event)
    }

    /// The milliseconds from this event to the event `later`; both have completed.
    fn until(&self, later: &Self) -> std::result::Result<f64, DriverError> {
        // SAFETY: both events live, and are on one stream.
        unsafe { result::event::elapsed(self.0, later.0) }.map(f64::from)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is not used any more; the driver frees it when the event has completed.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A gate at which the GPU waits until the host opens the gate, or for [`LONGEST_PAUSE`].
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// Make the stream wait at a new gate.
    fn close(gpu: &Gpu) -> std::result::Result<Arc<Self>, DriverError> {
        unsafe extern "C" fn wait(gate: *mut c_void) {
            // SAFETY: `close` has passed on one reference to the gate, for this one call.
            let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
            let is_open = gate.is_open.lock().unwrap_or_else(PoisonError::into_inner);
            drop(gate.opened.wait_timeout_while(is_open, LONGEST_PAUSE, |is_open| !*is_open));
        }
        let gate = Arc::new(Self::default());
        let reference = Arc::into_raw(gate.clone()).cast_mut().cast();
        // SAFETY: `wait` takes the reference when the driver calls it, and does not call CUDA.
        let queued = unsafe { result::stream::launch_host_function(gpu.stream().cu_stream(), wait, reference) };
        if let Err(error) = queued {
            // SAFETY: the driver will not call `wait`, so take the reference back.
            drop(unsafe { Arc::from_raw(reference.cast_const().cast::<Self>()) });
            return Err(error);
        }
        Ok(gate)
    }

    fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }
}

fn profile() -> MutexGuard<'static, Option<Profile>> {
    PROFILE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measure the times of launches on a device from now on, until [`finish`]. Launches in graphs are not measured.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, or the driver reports an error; [`Error::Argument`] if another
/// profile is in progress.
pub fn start(device: &Device) -> Result<()> {
    let gpu = Gpu::of_device(OP, device)?;
    let mut profile = profile();
    if profile.is_some() {
        return Err(Error::argument(OP, "a profile is in progress; finish it before the next one starts"));
    }
    let begin = || Ok(Profile { gpu, gate: Gate::close(gpu)?, launches: Vec::new() });
    *profile = Some(begin().map_err(|error| driver_error(OP, error))?);
    IS_ON.store(true, Ordering::Relaxed);
    Ok(())
}

/// End the profile, and wait for the device. Returns the times of all kernels by name, the longest first.
///
/// # Errors
/// [`Error::Argument`] if no profile is in progress, [`Error::Device`] if a kernel failed.
pub fn finish() -> Result<Vec<KernelTime>> {
    IS_ON.store(false, Ordering::Relaxed);
    let Some(profile) = profile().take() else {
        return Err(Error::argument(OP, "no profile is in progress"));
    };
    profile.times().map_err(|error| driver_error(OP, error))
}

impl Profile {
    /// The times of the kernels, by name; waits for the device.
    fn times(self) -> std::result::Result<Vec<KernelTime>, DriverError> {
        self.gate.open();
        self.gpu.stream().synchronize()?;
        let mut totals: HashMap<&str, (u64, f64)> = HashMap::new();
        for (name, before, after) in &self.launches {
            let (count, milliseconds) = totals.entry(name).or_default();
            *count += 1;
            *milliseconds += before.until(after)?;
        }
        let kernel_time = |(name, (count, milliseconds)): (&str, (u64, f64))| KernelTime {
            name: name.to_owned(),
            count,
            milliseconds,
        };
        let mut times: Vec<KernelTime> = totals.into_iter().map(kernel_time).collect();
        times.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds).then_with(|| a.name.cmp(&b.name)));
        Ok(times)
    }
}

/// Queue a launch. Measure it under the name `name` if a profile of this device is in progress and no graph is being
/// captured.
///
/// # Errors
/// The errors of `queue`, and [`Error::Device`] if the driver reports an error.
pub fn measured<T>(gpu: &Gpu, name: impl FnOnce() -> String, queue: impl FnOnce() -> Result<T>) -> Result<T> {
    if !IS_ON.load(Ordering::Relaxed) || capture::is_capturing() {
        return queue();
    }
    let mut current = profile();
    let Some(profile) = current.as_mut().filter(|profile| std::ptr::eq(profile.gpu, gpu)) else { return queue() };
    let mark = || Event::now(gpu).map_err(|error| driver_error(OP, error));
    let before = mark()?;
    let result = queue()?;
    profile.launches.push((name(), before, mark()?));
    // After a full batch, queue the gate before the next batch, then let the GPU run this one.
    if profile.launches.len().is_multiple_of(BATCH) {
        let next = Gate::close(gpu).map_err(|error| driver_error(OP, error))?;
        std::mem::replace(&mut profile.gate, next).open();
    }
    Ok(result)
}
