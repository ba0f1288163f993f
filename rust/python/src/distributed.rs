//! Python bindings for training with several processes: sums by NCCL, gradients as vectors, and streamed weights that
//! the processes share.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tc::compute;
use tc::device::communicator::{self, Communicator};
use tc::raw::own_copy;
use tc::streaming::{self, Origin, Sharing};
use trainable_candle_core as tc;

use crate::autograd::Function;
use crate::call::detached;
use crate::device::{DeviceArg, pip_folders};
use crate::error::{Result, from_callback};
use crate::optim::Variables;
use crate::tensor::Tensor;
use crate::var::Var;

/// Run `work`, which takes the folders in which to look for NCCL, without the GIL.
fn with_folders<T: Send>(py: Python<'_>, work: impl FnOnce(&[&Path]) -> tc::Result<T> + Send) -> Result<T> {
    let folders: Vec<PathBuf> = pip_folders(py, "nvidia/nccl/lib");
    let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
    detached(py, || work(&folders))
}

/// The argument `seconds` of the function `op` as a duration.
fn duration(op: &'static str, seconds: f64) -> Result<Duration> {
    let wrong = |_| tc::Error::argument(op, format!("seconds is {seconds}, expected at least 0 and less than 2**64"));
    Ok(Duration::try_from_secs_f64(seconds).map_err(wrong)?)
}

/// Return the version of NCCL, such as 23007 for 2.30.7.
///
/// Raises:
///     CudaUnavailableError: if NCCL cannot be used.
#[pyfunction]
pub fn nccl_version(py: Python<'_>) -> Result<i32> {
    with_folders(py, communicator::version)
}

/// Return 128 bytes by which the processes of a group find each other. Only rank 0 may call this function; the other
/// processes must get its bytes.
///
/// Raises:
///     CudaUnavailableError: if NCCL cannot be used.
///     DeviceError: if NCCL cannot listen for the other processes.
#[pyfunction]
pub fn nccl_unique_id(py: Python<'_>) -> Result<[u8; 128]> {
    with_folders(py, communicator::unique_id)
}

/// This process's membership in a group of processes with one GPU each. All processes of the group must make one at the
/// same time, with equal `size` and `unique_id`.
///
/// Args:
///     device: the GPU of this process.
///     rank: the number of this process, from 0.
///     size: the number of processes in the group.
///     unique_id: the bytes that rank 0 got from `nccl_unique_id`.
///     seconds: how long to wait for the other processes.
///
/// Raises:
///     CudaUnavailableError: if NCCL cannot be used.
///     ArgumentError: if a number is out of range.
///     DeviceError: if `device` is not a CUDA device, if NCCL fails, or if not all processes have joined in time.
#[pyclass(frozen, module = "trainable_candle._core")]
pub struct NcclCommunicator(Communicator);

#[pymethods]
impl NcclCommunicator {
    #[new]
    fn new(
        py: Python<'_>,
        device: DeviceArg,
        rank: usize,
        size: usize,
        unique_id: [u8; 128],
        seconds: f64,
    ) -> Result<Self> {
        let limit = duration("NcclCommunicator", seconds)?;
        with_folders(py, |folders| Communicator::new(&device.0, rank, size, unique_id, limit, folders)).map(Self)
    }

    /// The number of this process.
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank()
    }

    /// The number of processes.
    #[getter]
    fn size(&self) -> usize {
        self.0.size()
    }

    /// Return the sum, over all processes, of each process's `tensor`. The call only queues the work.
    ///
    /// Raises:
    ///     DTypeError: if NCCL cannot send the tensor's dtype.
    ///     DeviceError: if the tensor is not on the device of this communicator, if NCCL fails, or if `stop` was
    ///         called.
    fn all_reduce(&self, py: Python<'_>, tensor: &Tensor) -> Result<Tensor> {
        detached(py, || {
            // NCCL writes the sum over its input, so the input is a copy.
            let sum = own_copy(tensor.0.raw())?;
            self.0.all_reduce(&[&sum])?;
            Ok(tc::Tensor::from_raw(&sum))
        })
        .map(Tensor)
    }

    /// Set a variable to its values on process `root`. The call only queues the work.
    ///
    /// Raises:
    ///     ArgumentError: if there is no such process.
    ///     DTypeError: if NCCL cannot send the variable's dtype.
    ///     DeviceError: if the variable is not on the device of this communicator, if NCCL fails, or if `stop` was
    ///         called.
    fn broadcast_(&self, py: Python<'_>, var: &Var, root: usize) -> Result<()> {
        detached(py, || {
            // On all processes except `root`, NCCL overwrites this copy.
            let values = own_copy(var.0.as_tensor().raw())?;
            self.0.broadcast(&[&values], root)?;
            var.0.set(&tc::Tensor::from_raw(&values))
        })
    }

    /// Replace each gradient by its sum over all processes, and sum one more tensor over the processes. The call only
    /// queues the work.
    ///
    /// Args:
    ///     parameters: the variables, in the same order in all processes. A missing gradient counts as zeros.
    ///     tail: this process's tensor for the second sum, such as losses and counts of the step.
    ///     narrow: whether the gradients are sent as bf16. This halves the bytes of f32 gradients, and rounds every sum
    ///         to bf16.
    ///
    /// Returns:
    ///     The sum of `tail` over all processes.
    ///
    /// Raises:
    ///     DTypeError: if NCCL cannot send a dtype.
    ///     DeviceError: if a variable or `tail` is not on the device of this communicator, if NCCL fails, or if `stop`
    ///         was called.
    ///     OutOfMemoryError: if the vectors of gradients do not fit into memory.
    #[pyo3(signature = (parameters, tail, narrow=false))]
    fn all_reduce_gradients(
        &self,
        py: Python<'_>,
        parameters: Variables,
        tail: &Tensor,
        narrow: bool,
    ) -> Result<Tensor> {
        detached(py, || {
            let gradients = tc::flat::all_gradients(&parameters.0)?;
            let tail = own_copy(tail.0.raw())?;
            // Without `narrow`, the vectors share the gradients' storage, so `all_reduce` changes the gradients
            // themselves. With `narrow`, the sums are copied back below.
            let sent = if narrow {
                gradients.iter().map(|gradient| compute::cast(gradient, tc::DType::BF16)).collect::<tc::Result<_>>()?
            } else {
                gradients.clone()
            };
            let vectors: Vec<&tc::Raw> = sent.iter().chain([&tail]).collect();
            self.0.all_reduce(&vectors)?;
            if narrow {
                for (gradient, sum) in gradients.iter().zip(&sent) {
                    compute::copy_into(gradient, &compute::cast(sum, gradient.dtype())?)?;
                }
            }
            Ok(tc::Tensor::from_raw(&tail))
        })
        .map(Tensor)
    }

    /// Wait until all work queued on the GPU is done.
    ///
    /// Raises:
    ///     DeviceError: inside a captured function. Also if waiting takes longer than `seconds`, if `stop` was called,
    ///         or if NCCL or a kernel fails; then the communicator cannot be used afterwards.
    ///     ArgumentError: if `seconds` is negative, NaN or at least 2**64.
    fn wait(&self, py: Python<'_>, seconds: f64) -> Result<()> {
        let limit = duration("wait", seconds)?;
        detached(py, || self.0.wait(limit))
    }

    /// Make the current or the next call that waits for other processes raise a DeviceError. Any thread may call
    /// `stop`, for example when another process has ended.
    fn stop(&self) {
        self.0.stop();
    }
}

/// Return copies of the gradients of variables, as vectors. Gradients that are adjacent in a flat buffer are one
/// vector. Missing gradients are zeros.
///
/// Raises:
///     OutOfMemoryError: if the vectors do not fit into memory.
#[pyfunction]
pub fn gradient_vectors(py: Python<'_>, parameters: Variables) -> Result<Vec<Tensor>> {
    let vectors = detached(py, || {
        let gradients = tc::flat::all_gradients(&parameters.0)?;
        gradients.iter().map(|gradient| Ok(tc::Tensor::from_raw(&own_copy(gradient)?))).collect::<tc::Result<Vec<_>>>()
    })?;
    Ok(vectors.into_iter().map(Tensor).collect())
}

/// Overwrite the gradients of variables with vectors of the sizes that `gradient_vectors` returns.
///
/// Raises:
///     ArgumentError: if there are more or fewer vectors than `gradient_vectors` returns.
///     ShapeError, DTypeError, DeviceError: if a vector has another size, dtype or device than the gradients that it
///         replaces.
#[pyfunction]
pub fn set_gradient_vectors(py: Python<'_>, parameters: Variables, vectors: Vec<PyRef<'_, Tensor>>) -> Result<()> {
    let vectors: Vec<tc::Tensor> = vectors.iter().map(|vector| vector.0.clone()).collect();
    detached(py, || {
        let gradients = tc::flat::all_gradients(&parameters.0)?;
        if gradients.len() != vectors.len() {
            let message = format!("found {} vectors, expected {}", vectors.len(), gradients.len());
            return Err(tc::Error::argument("set_gradient_vectors", message));
        }
        // The vectors in `gradients` share the gradients' storage, so the copies overwrite the gradients themselves.
        gradients.iter().zip(&vectors).try_for_each(|(gradient, vector)| compute::copy_into(gradient, vector.raw()))
    })
}

/// Return a name that identifies the machine, the process namespace and the user, or None if the system does not report
/// them. Processes with equal names can share memory.
#[pyfunction]
pub fn memory_machine() -> Option<String> {
    streaming::machine()
}

/// Share the streamed weights (see `stream_blocks` of `from_pretrained`) of the models that this thread loads from now
/// on: the processes of a machine together keep one copy of these weights. All processes must call this function, and
/// then load the same models in the same order.
///
/// Args:
///     rank: the number of this process, from 0.
///     exchange: a function that sends its argument (bytes) to all processes, and returns the list of the bytes that
///         the processes have sent, in the order of their ranks. None ends the sharing.
///     peers: whether the copy is on the devices of the processes, one slice on each, instead of in host memory.
///
/// Raises:
///     ArgumentError: if `exchange` returns too few messages, or if `peers` is True and a process is alone on its
///         machine.
///     The exceptions of `exchange`.
#[pyfunction]
#[pyo3(signature = (rank=0, exchange=None, peers=false))]
pub fn share_streamed(py: Python<'_>, rank: usize, exchange: Option<Function>, peers: bool) -> Result<()> {
    let Some(exchange) = exchange else {
        Sharing::set(None);
        return Ok(());
    };
    let exchange = move |message: &[u8]| {
        Python::attach(|py| {
            let messages = exchange.0.call1(py, (PyBytes::new(py, message),))?;
            messages.extract::<Vec<Vec<u8>>>(py)
        })
        .map_err(from_callback)
    };
    let origin = if peers { Origin::Peers } else { Origin::Host };
    let sharing = detached(py, || Sharing::new(rank, origin, Box::new(exchange)))?;
    Sharing::set(Some(sharing));
    Ok(())
}
