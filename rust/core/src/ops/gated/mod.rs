//! Gated linear units (Shazeer 2020, arXiv:2002.05202): the first half of the features times an activation of the
//! second half, the gate. `feed_forward` and `linear` fuse such a unit with the linear layers around it; `codes` does
//! so for layers with 8-bit weights, whose inputs are rounded to 8-bit codes too.

#[cfg(feature = "testing")]
mod cases;
mod codes;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod feed_forward;
mod linear;

use super::activation::{GeluExact, Silu};
use super::elementwise::Pointwise;
use crate::compute::on_device;
use crate::raw::{Raw, is_float};
use crate::tape::{Again, Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;
pub use codes::geglu_feed_forward;
pub use feed_forward::swiglu_feed_forward;
pub use linear::swiglu_linear_group;

static GEGLU: OpInfo = OpInfo::cheap("geglu");
static SWIGLU: OpInfo = OpInfo::cheap("swiglu");

/// h · GELU(gate) with the exact GELU: `x (..., 2 n)` → `(..., n)`. The first n features of `x` are h, the last n are
/// the gate, as in diffusers' `GEGLU`. Saves only `x`.
///
/// # Errors
/// [`Error::Shape`] if `x` is a scalar or its last dimension is odd, [`Error::DType`] if `x` is not floating point.
pub fn geglu(x: &Tensor) -> Result<Tensor> {
    gated(&GEGLU, x, GeluExact)
}

/// h · SiLU(gate), with h and the gate as in [`geglu`]. Saves only `x`.
///
/// # Errors
/// As [`geglu`].
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    gated(&SWIGLU, x, Silu)
}

/// Gives h · `function`(gate). On a GPU, the name in `info` chooses the kernel, and `function` is not used.
fn gated<F: Pointwise>(info: &'static OpInfo, x: &Tensor, function: F) -> Result<Tensor> {
    // `function` must compute its derivative from the gate, because the activation of the gate is not saved.
    const { assert!(!F::SAVES_RESULT) };
    let op = info.name;
    let width = match x.dims().last() {
        Some(&features) if features % 2 == 0 => features / 2,
        _ => {
            let found = x.dims();
            return Err(Error::shape(
                op,
                format!("the input has shape {found:?}, expected (..., 2 n): n features, then n of the gate"),
            ));
        }
    };
    if !is_float(x.dtype()) {
        return Err(Error::dtype(
            op,
            format!("expected a floating point tensor, found {}; convert it with to()", x.dtype().as_str()),
        ));
    }
    record(
        info,
        &[x],
        || run(op, &x.raw, width, function),
        |saver, _| GatedBackward { op, x: saver.save(x), width, function },
    )
}

fn run<F: Pointwise>(op: &'static str, x: &Raw, width: usize, function: F) -> Result<Raw> {
    on_device!(
        x.device(),
        cuda => cuda::forward(op, x, width),
        cpu => cpu::forward(op, x, width, function),
    )
}

fn run_backward<F: Pointwise>(op: &'static str, x: &Raw, grad: &Raw, width: usize, function: F) -> Result<Raw> {
    on_device!(
        x.device(),
        cuda => cuda::backward(op, x, grad, width),
        cpu => cpu::backward(op, x, grad, width, function),
    )
}

struct GatedBackward<F> {
    op: &'static str,
    x: Saved,
    /// n, the number of features of the result.
    width: usize,
    function: F,
}

impl<F: Pointwise> Backward for GatedBackward<F> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        // Input 0 is `x`, the only input.
        context.add(0, run_backward(self.op, &self.x.get()?, &grad, self.width, self.function)?)
    }

    // A function that recomputes the result from the saved `x`.
    fn again(&self) -> Option<Again<'_>> {
        Some(Box::new(|| run(self.op, &self.x.get()?, self.width, self.function)))
    }
}
