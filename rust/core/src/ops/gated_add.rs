//! x + y · gate as one operation: the gated residual connection of adaLN-zero (Peebles & Xie 2022, arXiv:2212.09748,
//! section 3.2).

use super::arithmetic::{check, reduced};
#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::cpu::{Mul, Real, Ternary};
use crate::raw::is_float;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute};

static GATED_ADD: OpInfo = OpInfo::cheap("gated_add");

/// a + b · c.
#[derive(Clone, Copy)]
struct PlusProduct;

impl Ternary for PlusProduct {
    const KERNEL: &'static str = "plus_product";

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R, c: R) -> R {
        a + b * c
    }
}

/// `x` + `y` · `gate`, where `gate` broadcasts to the shape of `x` and `y`. The product is not rounded to the dtype
/// before it is added. Saves `gate` if `y` needs a gradient, and `y` if `gate` needs one.
///
/// # Errors
/// [`Error::Shape`] if `x` and `y` differ in shape or `gate` does not broadcast to their shape, [`Error::DType`] if the
/// operands differ in dtype or are not floating point, [`Error::Device`] if they differ in device.
pub fn gated_add(x: &Tensor, y: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let op = GATED_ADD.name;
    // The dtypes and the devices.
    check(op, x, y)?;
    check(op, x, gate)?;
    if !is_float(x.dtype()) {
        let found = x.dtype().as_str();
        return Err(Error::dtype(
            op,
            format!("expected floating point tensors, found {found}; convert them with to()"),
        ));
    }
    let broadcasts = crate::cpu::broadcast_dims(gate.dims(), x.dims()).is_some_and(|dims| *dims == *x.dims());
    if y.dims() != x.dims() || !broadcasts {
        let (x, y, gate) = (x.dims(), y.dims(), gate.dims());
        let message = format!(
            "found x {x:?}, y {y:?} and gate {gate:?}, expected x and y of one shape and a gate that broadcasts to it"
        );
        return Err(Error::shape(op, message));
    }
    // Inputs 1 and 2 are `y` and `gate`. `Saved::keep` keeps a gate smaller than `y`, which takes little memory, even
    // inside a checkpoint. With `save`, a recomputation would have to reach this operation to save the gate, and would
    // compute `y` on the way, which is often an expensive product.
    record(
        &GATED_ADD,
        &[x, y, gate],
        || compute::ternary(&x.raw, &y.raw, &gate.raw, PlusProduct),
        |saver, _| GatedAddBackward {
            y: saver.needs(2).then(|| saver.save(y)),
            gate: saver
                .needs(1)
                .then(|| if gate.elem_count() < y.elem_count() { Saved::keep(gate) } else { saver.save(gate) }),
            gate_dims: gate.dims().to_vec(),
        },
    )
}

/// Inputs 0, 1 and 2 are `x`, `y` and `gate`.
struct GatedAddBackward {
    y: Option<Saved>,
    gate: Option<Saved>,
    gate_dims: Vec<usize>,
}

impl Backward for GatedAddBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        if let Some(gate) = self.gate.as_ref().filter(|_| context.needs(1)) {
            context.add(1, compute::binary(&grad, &gate.get()?, Mul)?)?;
        }
        if let Some(y) = self.y.as_ref().filter(|_| context.needs(2)) {
            let product = compute::binary(&grad, &y.get()?, Mul)?;
            // Sum over the dimensions in which the gate was broadcast.
            context.add(2, reduced(product, &self.gate_dims)?)?;
        }
        if context.needs(0) { context.add(0, grad) } else { Ok(()) }
    }
}

/// Registry entries of this file.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[Entry {
    info: &GATED_ADD,
    cases: || {
        let case = |label, shapes: &[&[usize]]| {
            Case::new(label, shapes, |x| gated_add(&x[0], &x[1], &x[2])).plain(|x| x[0].add(&x[1].mul(&x[2])?))
        };
        vec![
            case("a gate per sample", &[&[2, 3, 5], &[2, 3, 5], &[2, 1, 5]]),
            case("a gate of the same shape", &[&[3, 7], &[3, 7], &[3, 7]]),
            case("a scalar gate", &[&[3, 7], &[3, 7], &[]]),
            case("no rows", &[&[0, 7], &[0, 7], &[7]]),
        ]
    },
}];
