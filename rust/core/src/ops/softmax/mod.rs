//! Softmax and its logarithm along a dimension, each as one fused kernel. A row that fits in the cache (CPU) or in the
//! registers (CUDA) is read from memory only once.

#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;

use crate::compute::{contiguous, on_device};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor};
use cpu::{LogSoftmax, RowFunction, Softmax};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;

static SOFTMAX: OpInfo = OpInfo::cheap("softmax");
static LOG_SOFTMAX: OpInfo = OpInfo::cheap("log_softmax");

/// `x` with dimension `dim` and the last dimension swapped, contiguous.
fn as_rows(x: &Raw, dim: usize) -> Result<Raw> {
    contiguous(&x.transpose(dim, x.rank() - 1)?)
}

/// Computes `function` along `dim`. The CUDA form chooses its kernel by the name `op`.
fn forward<F: RowFunction>(op: &'static str, x: &Raw, dim: usize, function: F) -> Result<Raw> {
    let x = as_rows(x, dim)?;
    let y = on_device!(x.device(), cuda => cuda::forward(op, &x), cpu => cpu::forward(op, &x, function))?;
    Ok(y.transpose(dim, x.rank() - 1)?)
}

struct SoftmaxBackward<F> {
    y: Saved,
    dim: usize,
    op: &'static str,
    function: F,
}

impl<F: RowFunction> Backward for SoftmaxBackward<F> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (y, g) = (as_rows(&self.y.get()?, self.dim)?, as_rows(context.grad(), self.dim)?);
        let grad = on_device!(
            y.device(),
            cuda => cuda::backward(self.op, &y, &g)?,
            cpu => cpu::backward(self.op, &y, &g, self.function)?,
        );
        // The gradient of input 0, which is x.
        context.add(0, grad.transpose(self.dim, y.rank() - 1)?)
    }
}

/// Computes `function`, the softmax or its logarithm, along `dim`, and records it on the tape.
fn record_along<F: RowFunction>(info: &'static OpInfo, x: &Tensor, dim: usize, function: F) -> Result<Tensor> {
    let op = info.name;
    if dim >= x.rank() {
        return Err(Error::index(op, format!("dimension {dim} is out of range for shape {:?}", x.dims())));
    }
    record(
        info,
        &[x],
        || forward(op, &x.raw, dim, function),
        |saver, y| SoftmaxBackward { y: saver.save_raw(y), dim, op, function },
    )
}

impl Tensor {
    /// e^x / Σ e^x along dimension `dim`, without overflow (the largest element is subtracted first). A row of negative
    /// infinities gives NaN, as in torch.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` is out of range, [`Error::DType`] if the tensor is not floating point.
    pub fn softmax(&self, dim: usize) -> Result<Self> {
        record_along(&SOFTMAX, self, dim, Softmax)
    }

    /// The logarithm of [`softmax`](Self::softmax). It is accurate even where the softmax itself would be rounded to 0.
    ///
    /// # Errors
    /// As [`softmax`](Self::softmax).
    pub fn log_softmax(&self, dim: usize) -> Result<Self> {
        record_along(&LOG_SOFTMAX, self, dim, LogSoftmax)
    }
}
