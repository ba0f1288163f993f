//! Gated linear units (Shazeer 2020, arXiv:2002.05202): one half of the features times an activation of the other.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::activation::{Gelu, GeluExact, Silu};
use super::case::{Case, Entry};
use super::elementwise::Pointwise;
use super::rows;
use crate::compute::contiguous;
use crate::cpu::{Binary, Elem, Unary, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::raw::{Raw, from_vec, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, dispatch_float};

static GEGLU: OpInfo = OpInfo::cheap("geglu");
static SWIGLU: OpInfo = OpInfo::cheap("swiglu");

/// The activation of a gate.
trait Gate: Pointwise {
    /// The kernels of the two directions.
    #[cfg(feature = "cuda")]
    const KERNELS: [&'static str; 2];
}

impl Gate for GeluExact {
    #[cfg(feature = "cuda")]
    const KERNELS: [&'static str; 2] = ["geglu_forward", "geglu_backward"];
}

impl Gate for Silu {
    #[cfg(feature = "cuda")]
    const KERNELS: [&'static str; 2] = ["swiglu_forward", "swiglu_backward"];
}

/// h · GELU(gate), exact, for an input (..., 2 n) whose first n features are h and whose last n are the gate, as in
/// diffusers' `GEGLU`; → (..., n). Saves its input alone.
///
/// # Errors
/// [`Error::Shape`] if the last dimension is missing or odd, [`Error::DType`] if the tensor is not floating point.
pub fn geglu(x: &Tensor) -> Result<Tensor> {
    gated(&GEGLU, x, GeluExact)
}

/// h · SiLU(gate), with the halves as in [`geglu`].
///
/// # Errors
/// As [`geglu`].
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    gated(&SWIGLU, x, Silu)
}

fn gated<F: Gate>(info: &'static OpInfo, x: &Tensor, function: F) -> Result<Tensor> {
    // The derivative reads the gate, not the activation of it.
    const { assert!(!F::SAVES_RESULT) };
    let op = info.name;
    let width = match x.dims().last() {
        Some(&features) if features % 2 == 0 => features / 2,
        _ => {
            let found = x.dims();
            return Err(Error::shape(
                op,
                format!("the input has shape {found:?}, expected (..., 2 n): features, gate"),
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
        || forward(op, &x.raw, width, function),
        |saver, _| GatedBackward { op, x: saver.save(x), width, function },
    )
}

fn forward<F: Gate>(op: &'static str, x: &Raw, width: usize, function: F) -> Result<Raw> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::rows::gated(op, F::KERNELS[0], x, width);
    }
    let x = contiguous(x)?;
    let mut dims = x.dims().to_vec();
    *dims.last_mut().expect("the input has a last dimension") = width;
    dispatch_float!(x.dtype(), op, T => read_all(op, &[&x], |operands| {
        let x = elements::<T>(operands[0])?;
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let x = &x[2 * range.start * width..2 * range.end * width];
            let rows = x.chunks_exact(2 * width).zip(out.chunks_exact_mut(width));
            dispatch(
                #[inline(always)]
                || {
                    for (x, out) in rows {
                        let (h, gate) = x.split_at(width);
                        for (o, (h, gate)) in out.iter_mut().zip(h.iter().zip(gate)) {
                            let value: <T as Elem>::Acc = Unary::apply(&function, gate.to_acc());
                            o.write(T::from_acc(h.to_acc() * value));
                        }
                    }
                },
            );
        };
        let rows = dims[..dims.len() - 1].iter().product();
        // SAFETY: each row is written as a whole.
        Ok(unsafe { rows::fill_rows(rows, width, rows::rows_per_block(width), write) })
    })
    .map(|y| from_vec(y, dims.as_slice())))
}

struct GatedBackward<F> {
    op: &'static str,
    x: Saved,
    width: usize,
    function: F,
}

impl<F: Gate> Backward for GatedBackward<F> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (width, function) = (self.width, self.function);
        let x = self.x.get()?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return context.add(0, cuda::rows::gated_backward(self.op, F::KERNELS[1], &x, context.grad(), width)?);
        }
        let shape = x.shape().clone();
        let (x, grad) = (contiguous(&x)?, contiguous(context.grad())?);
        let grad_x = dispatch_float!(x.dtype(), self.op, T => read_all(self.op, &[&x, &grad], |operands| {
            let (x, g) = (elements::<T>(operands[0])?, elements::<T>(operands[1])?);
            let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
                let x = &x[2 * range.start * width..2 * range.end * width];
                let g = &g[range.start * width..range.end * width];
                let rows = x.chunks_exact(2 * width).zip(g.chunks_exact(width)).zip(out.chunks_exact_mut(2 * width));
                dispatch(
                    #[inline(always)]
                    || {
                        for ((x, g), out) in rows {
                            let ((h, gate), (to_h, to_gate)) = (x.split_at(width), out.split_at_mut(width));
                            let outs = to_h.iter_mut().zip(to_gate);
                            for ((to_h, to_gate), (g, (h, gate))) in outs.zip(g.iter().zip(h.iter().zip(gate))) {
                                let (g, h, gate) = (g.to_acc(), h.to_acc(), gate.to_acc());
                                let value: <T as Elem>::Acc = Unary::apply(&function, gate);
                                to_h.write(T::from_acc(g * value));
                                to_gate.write(T::from_acc(Binary::apply(&function, g * h, gate)));
                            }
                        }
                    },
                );
            };
            // SAFETY: each row is written as a whole.
            Ok(unsafe { rows::fill_rows(x.len() / (2 * width).max(1), 2 * width, rows::rows_per_block(width), write) })
        })
        .map(|grad_x| from_vec(grad_x, shape)))?;
        context.add(0, grad_x)
    }
}

fn plain(x: &Tensor, activation: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let last = x.rank() - 1;
    let width = x.dims()[last] / 2;
    x.narrow(last, 0, width)?.mul(&activation(&x.narrow(last, width, width)?)?)
}

fn cases(
    fused: fn(&Tensor) -> Result<Tensor>,
    activation: impl Fn(&Tensor) -> Result<Tensor> + Copy + Send + Sync + 'static,
) -> Vec<Case> {
    let case = |label, dims: &[usize]| {
        Case::new(label, &[dims], move |x| fused(&x[0])).plain(move |x| plain(&x[0], activation))
    };
    vec![case("rows", &[2, 3, 34]), case("one row", &[10]), case("no rows", &[0, 4]), case("no features", &[3, 0])]
}

/// Registry entries of this file.
pub static ENTRIES: &[Entry] = &[
    Entry { info: &GEGLU, cases: || cases(geglu, |gate| gate.gelu(Gelu::Exact)) },
    Entry { info: &SWIGLU, cases: || cases(swiglu, Tensor::silu) },
];
