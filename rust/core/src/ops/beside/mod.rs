//! `activate_beside`: the columns of one tensor and, to the right of them, an activation of the columns of another. In
//! blocks whose attention and feed-forward layer are parallel (Dehghani et al. 2023, arXiv:2302.05442, section 2.1),
//! one linear layer reads both side by side: the result of attention and the activation.

#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use smallvec::SmallVec;

use super::linear::same_kind;
use crate::compute::on_device;
use crate::raw::{Raw, check_allocation_on, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, checkpoint, compute};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;

static GELU_TANH_BESIDE: OpInfo = OpInfo::cheap("gelu_tanh_beside");
static SWIGLU_BESIDE: OpInfo = OpInfo::cheap("swiglu_beside");

/// The function that is applied to the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The tanh form of GELU, n columns → n columns.
    GeluTanh,
    /// SiLU(gate) · h, where the gate is the first n columns and h the last n (diffusers' `Flux2SwiGLU`), 2 n columns →
    /// n columns.
    SwiGlu,
}

impl Activation {
    const fn info(self) -> &'static OpInfo {
        match self {
            Self::GeluTanh => &GELU_TANH_BESIDE,
            Self::SwiGlu => &SWIGLU_BESIDE,
        }
    }

    /// The number of columns of the input for each column of the result.
    const fn columns_per_result(self) -> usize {
        match self {
            Self::GeluTanh => 1,
            Self::SwiGlu => 2,
        }
    }
}

/// Computes `[before | f(x[..., start:])]`, of shape (..., D + n), from `x (..., W)` and, if given, `before (..., D)`.
/// The activation f turns the W - `start` columns into n. Without `before`, D is 0. Saves `x` alone.
///
/// # Errors
/// [`Error::Shape`] if the shapes do not fit together, if W is less than `start`, or, for SwiGLU, if W - `start` is
/// odd; [`Error::DType`] if `x` is not floating point or the dtypes differ; [`Error::Device`] if the devices
/// differ; [`Error::OutOfMemory`] if the result does not fit in memory.
pub fn activate_beside(before: Option<&Tensor>, x: &Tensor, start: usize, activation: Activation) -> Result<Tensor> {
    let info = activation.info();
    let columns = Columns::new(before, x, start, activation)?;
    let inputs: SmallVec<[&Tensor; 2]> = std::iter::once(x).chain(before).collect();
    record(
        info,
        &inputs,
        || {
            if checkpoint::ends_here() {
                // A checkpoint's recomputation ends with this operation, which saves only `x`, so nothing reads the
                // result. One zero takes its place.
                let zero = Raw::zeros((), x.dtype(), x.device())?;
                return Ok(zero.broadcast_as(columns.result(x.dims()))?);
            }
            let before = before.map(Tensor::raw);
            on_device!(x.device(), cuda => cuda::forward(&columns, before, &x.raw), cpu => cpu::forward(&columns, before, &x.raw))
        },
        |saver, _| BesideBackward { x: saver.needs(0).then(|| saver.save(x)), columns },
    )
}

/// The columns of x that the activation reads, and the columns of the result.
#[derive(Clone, Copy)]
struct Columns {
    activation: Activation,
    /// The last dimension, whose indices are the columns.
    dim: usize,
    /// Number of columns of `before`.
    before_width: usize,
    /// The first column of x that the activation reads.
    start: usize,
    /// Number of columns that the activation returns.
    width: usize,
}

impl Columns {
    fn new(before: Option<&Tensor>, x: &Tensor, start: usize, activation: Activation) -> Result<Self> {
        let (op, per_result) = (activation.info().name, activation.columns_per_result());
        let wrong = || {
            let rest = if per_result == 1 { "" } else { ", followed by an even number of columns: gate, then h" };
            Error::shape(op, format!("the input has shape {:?}, expected at least {start} columns{rest}", x.dims()))
        };
        let (&x_width, outer) = x.dims().split_last().ok_or_else(wrong)?;
        let len = x_width.checked_sub(start).filter(|len| len.is_multiple_of(per_result)).ok_or_else(wrong)?;
        if !is_float(x.dtype()) {
            let found = x.dtype().as_str();
            return Err(Error::dtype(
                op,
                format!("expected a floating point tensor, found {found}; convert it with to()"),
            ));
        }
        let mut before_width = 0;
        if let Some(before) = before {
            // The same dtype and device as x.
            same_kind(op, x, "tensor `before`", before)?;
            before_width = match before.dims().split_last() {
                Some((&columns, dims)) if dims == outer => columns,
                _ => {
                    let (found, input) = (before.dims(), x.dims());
                    let message = format!(
                        "`before` has shape {found:?}, expected the dimensions of the input except for the last; the input \
                         has shape {input:?}"
                    );
                    return Err(Error::shape(op, message));
                }
            };
        }
        let columns = Self { activation, dim: outer.len(), before_width, start, width: len / per_result };
        check_allocation_on(x.device(), op, &columns.result(x.dims()), x.dtype())?;
        Ok(columns)
    }

    /// The number of columns of x that the activation reads.
    const fn len(&self) -> usize {
        self.activation.columns_per_result() * self.width
    }

    /// The shape of the result for an input of shape `dims`.
    fn result(&self, dims: &[usize]) -> Vec<usize> {
        let mut dims = dims.to_vec();
        dims[self.dim] = self.before_width + self.width;
        dims
    }

    /// The columns of x that the activation reads, or the same columns of its gradient.
    fn of(&self, x: &Raw) -> Result<Raw> {
        Ok(x.narrow(self.dim, self.start, self.len())?)
    }
}

struct BesideBackward {
    /// The input, if its gradient is needed.
    x: Option<Saved>,
    columns: Columns,
}

impl Backward for BesideBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let Columns { dim, before_width, width, .. } = self.columns;
        let grad = context.grad().clone();
        // Input 0 is x, input 1 is `before`.
        if context.needs(1) {
            // A copy, so that the gradient of the whole result can be freed before the backward pass of `before`.
            context.add(1, compute::contiguous(&grad.narrow(dim, 0, before_width)?)?)?;
        }
        let Some(x) = self.x.as_ref().filter(|_| context.needs(0)) else { return Ok(()) };
        let (x, grad) = (x.get()?, grad.narrow(dim, before_width, width)?);
        on_device!(
            x.device(),
            cuda => cuda::backward(&self.columns, context, &x, &grad),
            cpu => cpu::backward(&self.columns, context, &x, &grad),
        )
    }
}
