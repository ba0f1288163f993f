//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864): pairs of features turn by angles that grow with the position.

use std::mem::MaybeUninit;

use candle_core::WithDType;

use super::attention::heads_lie_inside;
use super::case::{Case, Entry};
use super::rows;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::raw::{Raw, from_vec, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, is_grad_enabled, record};
use crate::{Error, Result, Tensor, checkpoint, compute, dispatch_float};

static ROPE: OpInfo = OpInfo::cheap("rope");

/// Turn the pair (a, b) of features to (a cos - b sin, a sin + b cos): `x (..., S, D)`, `cos` and `sin` `(S, D/2)` of any
/// floating-point dtype, which get no gradient.
///
/// Pair i is features 2i and 2i + 1 if `interleaved` (Flux, original LLaMA), else i and i + D/2 (GPT-NeoX, Hugging Face's
/// LLaMA). The result lies in memory as `x` does.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit, [`Error::NoBackward`] if `cos` or `sin`
/// needs a gradient.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Tensor> {
    check(ROPE.name, x, cos, sin)?;
    record(
        &ROPE,
        &[x],
        || rotate(&x.raw, &cos.raw, &sin.raw, interleaved, false),
        |saver, _| RopeBackward { cos: saver.hold(cos), sin: saver.hold(sin), interleaved },
    )
}

/// Check the operands of an operation that turns pairs; its tables are no inputs on the tape.
pub(super) fn check(op: &'static str, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
    let &[.., length, width] = x.dims() else {
        return Err(Error::shape(op, format!("the input has shape {:?}, expected (..., length, width)", x.dims())));
    };
    if width % 2 != 0 {
        return Err(Error::shape(op, format!("the width {width} of shape {:?} is odd, expected pairs", x.dims())));
    }
    for (name, table) in [("cos", cos), ("sin", sin)] {
        if *table.dims() != [length, width / 2] {
            return Err(Error::shape(
                op,
                format!(
                    "{name} has shape {:?}, expected {:?} for an input of shape {:?}",
                    table.dims(),
                    [length, width / 2],
                    x.dims()
                ),
            ));
        }
        if !is_float(table.dtype()) {
            let found = table.dtype().as_str();
            return Err(Error::dtype(op, format!("{name} is {found}, expected floating point; convert it with to()")));
        }
        if !table.device().same_device(x.device()) {
            return Err(Error::device(op, format!("{name} is on another device than the input; move one with to()")));
        }
        if table.requires_grad() && is_grad_enabled() {
            return Err(Error::NoBackward { op });
        }
    }
    checkpoint::reads(&[cos, sin]);
    Ok(())
}

struct RopeBackward {
    cos: Saved,
    sin: Saved,
    interleaved: bool,
}

impl Backward for RopeBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = rotate(context.grad(), &self.cos.get()?, &self.sin.get()?, self.interleaved, true)?;
        context.add(0, grad)
    }
}

/// The order in which the rows of `(..., S, D)` lie in memory.
#[derive(Clone, Copy)]
pub(super) struct RowOrder {
    /// How many heads a position has, if they lie next to one another.
    heads: Option<usize>,
}

impl RowOrder {
    pub fn of(x: &Raw) -> Self {
        Self { heads: heads_lie_inside(x).then(|| x.dims()[x.rank() - 3]) }
    }

    /// How many rows in turn have the same position.
    pub fn repeats(self) -> usize {
        self.heads.unwrap_or(1)
    }

    /// Turns the dimensions of `x` to the order of memory, or back.
    pub fn swap(self, x: &Raw) -> Result<Raw> {
        let rank = x.rank();
        Ok(if self.heads.is_some() { x.transpose(rank - 3, rank - 2)? } else { x.clone() })
    }
}

/// The angles of rows.
pub(super) struct Angles<'a, R> {
    /// (positions, half).
    pub cos: &'a [R],
    pub sin: &'a [R],
    pub positions: usize,
    /// How many rows in turn have the same position.
    pub repeats: usize,
    /// How many pairs a row has.
    pub half: usize,
    pub interleaved: bool,
}

impl<R: Real> Angles<'_, R> {
    /// Turn the pairs of row `row`, or turn them `back`.
    #[inline(always)]
    pub fn turn<X: Copy, Y>(
        &self,
        row: usize,
        (x, out): (&[X], &mut [Y]),
        back: bool,
        read: impl Fn(X) -> R,
        write: impl Fn(&mut Y, R),
    ) {
        let angle = row / self.repeats % self.positions * self.half;
        let angles = self.cos[angle..angle + self.half].iter().zip(&self.sin[angle..angle + self.half]);
        let sign = if back { -R::ONE } else { R::ONE };
        let turn = |a: X, b: X, cos: R, sin: R| {
            let (a, b, sin) = (read(a), read(b), sign * sin);
            (a * cos - b * sin, a * sin + b * cos)
        };
        if self.interleaved {
            for ((out, x), (cos, sin)) in out.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(angles) {
                let (a, b) = turn(x[0], x[1], *cos, *sin);
                write(&mut out[0], a);
                write(&mut out[1], b);
            }
        } else {
            let (x, out) = (x.split_at(self.half), out.split_at_mut(self.half));
            let outs = out.0.iter_mut().zip(out.1);
            for (((to_a, to_b), (a, b)), (cos, sin)) in outs.zip(x.0.iter().zip(x.1)).zip(angles) {
                let (a, b) = turn(*a, *b, *cos, *sin);
                write(to_a, a);
                write(to_b, b);
            }
        }
    }
}

/// Turn the pairs, or turn them back.
fn rotate(x: &Raw, cos: &Raw, sin: &Raw, interleaved: bool, back: bool) -> Result<Raw> {
    let op = ROPE.name;
    let order = RowOrder::of(x);
    let x = compute::contiguous(&order.swap(x)?)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return order.swap(&cuda::rows::rope(op, &x, [cos, sin], order.repeats(), interleaved, back)?);
    }
    let (positions, half) = (cos.dims()[0], cos.dims()[1]);
    let len = 2 * half;
    let rows = x.elem_count() / len.max(1);
    dispatch_float!(x.dtype(), op, T => {
        let dtype = <<T as Elem>::Acc as WithDType>::DTYPE;
        let table = |table: &Raw| compute::contiguous(&compute::cast(table, dtype)?);
        let y = read_all(op, &[&x, &table(cos)?, &table(sin)?], |operands| {
            let x = elements::<T>(operands[0])?;
            let (cos, sin) = (elements(operands[1])?, elements(operands[2])?);
            let angles = Angles { cos, sin, positions, repeats: order.repeats(), half, interleaved };
            // SAFETY: each row is written as a whole.
            let y = unsafe {
                rows::fill_rows::<T>(rows, len, rows::rows_per_block(len), |range, out| {
                    dispatch(
                        #[inline(always)]
                        || {
                            for (row, out) in range.zip(out.chunks_exact_mut(len)) {
                                let x = &x[row * len..(row + 1) * len];
                                let write = |slot: &mut MaybeUninit<T>, y| {
                                    slot.write(T::from_acc(y));
                                };
                                angles.turn(row, (x, out), back, T::to_acc, write);
                            }
                        },
                    );
                })
            };
            Ok(y)
        })?;
        order.swap(&from_vec(y, x.shape()))
    })
}

/// The same from basic operations.
pub(super) fn plain(x: &Tensor, [cos, sin]: [&Tensor; 2], interleaved: bool) -> Result<Tensor> {
    let (rank, half) = (x.rank(), x.dims()[x.rank() - 1] / 2);
    let (a, b) = if interleaved {
        let mut dims = x.dims().to_vec();
        dims[rank - 1] = half;
        dims.push(2);
        let pairs = x.reshape(dims)?;
        (pairs.narrow(rank, 0, 1)?.squeeze(rank)?, pairs.narrow(rank, 1, 1)?.squeeze(rank)?)
    } else {
        (x.narrow(rank - 1, 0, half)?, x.narrow(rank - 1, half, half)?)
    };
    let (to_a, to_b) = (a.mul(cos)?.sub(&b.mul(sin)?)?, a.mul(sin)?.add(&b.mul(cos)?)?);
    if interleaved {
        Tensor::stack(&[&to_a, &to_b], rank)?.reshape(x.shape().clone())
    } else {
        Tensor::cat(&[&to_a, &to_b], rank - 1)
    }
}

/// Tables for test cases with `x`. Any numbers will do: the operation does not ask that they belong to angles.
pub(super) fn tables(x: &Tensor) -> Result<[Tensor; 2]> {
    let (length, half) = (x.dims()[x.rank() - 2], x.dims()[x.rank() - 1] / 2);
    let table = |f: fn(f64) -> f64| {
        let values = (0..length * half).map(|i| f(i as f64 * 0.7)).collect::<Vec<_>>();
        Tensor::from_vec(values, (length, half), x.device())?.to_dtype(x.dtype())
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}

/// Registry entry of this operation.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &ROPE,
    cases: || {
        let case = |label, shape: &[usize], interleaved| {
            let fused = move |x: &[Tensor]| {
                let [cos, sin] = tables(&x[0])?;
                rope(&x[0], &cos, &sin, interleaved)
            };
            Case::new(label, &[shape], fused).plain(move |x| {
                let [cos, sin] = tables(&x[0])?;
                plain(&x[0], [&cos, &sin], interleaved)
            })
        };
        vec![
            case("halves", &[2, 3, 5, 6], false),
            case("interleaved", &[2, 3, 5, 6], true),
            case("one matrix", &[3, 2], false),
            case("empty", &[2, 0, 4], true),
        ]
    },
}];
