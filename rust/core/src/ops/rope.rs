//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864): pairs of features turn by angles that grow with the position.

use super::attention::heads_lie_inside;
use super::case::{Case, Entry};
use super::rows;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::raw::{Raw, from_vec};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, is_grad_enabled, record};
use crate::{Error, Result, Tensor, compute, dispatch_float};

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
    let op = ROPE.name;
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
        if !table.device().same_device(x.device()) {
            return Err(Error::device(op, format!("{name} is on another device than the input; move one with to()")));
        }
        if table.requires_grad() && is_grad_enabled() {
            return Err(Error::NoBackward { op });
        }
    }
    record(
        &ROPE,
        &[x],
        || rotate(&x.raw, &cos.raw, &sin.raw, interleaved, false),
        |saver, _| RopeBackward { cos: saver.hold(cos), sin: saver.hold(sin), interleaved },
    )
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

/// Turn the pairs, or turn them back.
fn rotate(x: &Raw, cos: &Raw, sin: &Raw, interleaved: bool, back: bool) -> Result<Raw> {
    let rank = x.rank();
    if heads_lie_inside(x) {
        let swapped = x.transpose(rank - 3, rank - 2)?;
        let y = rotate_rows(&swapped, cos, sin, x.dims()[rank - 3], interleaved, back)?;
        return Ok(y.transpose(rank - 3, rank - 2)?);
    }
    rotate_rows(x, cos, sin, 1, interleaved, back)
}

/// [`rotate`] for rows of which `repeats` in turn have the same position.
fn rotate_rows(x: &Raw, cos: &Raw, sin: &Raw, repeats: usize, interleaved: bool, back: bool) -> Result<Raw> {
    let op = ROPE.name;
    let x = compute::contiguous(x)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::rows::rope(op, &x, [cos, sin], repeats, interleaved, back);
    }
    let len = x.dims()[x.rank() - 1];
    let positions = cos.dims()[0];
    let rows = x.elem_count() / len.max(1);
    dispatch_float!(x.dtype(), op, T => {
        type Number = <T as Elem>::Acc;
        let dtype = <Number as candle_core::WithDType>::DTYPE;
        let table = |table: &Raw| compute::contiguous(&compute::cast(table, dtype)?);
        let y = read_all(op, &[&x, &table(cos)?, &table(sin)?], |operands| {
            let x = elements::<T>(operands[0])?;
            let (cos, sin) = (elements::<Number>(operands[1])?, elements::<Number>(operands[2])?);
            let one = Number::ONE;
            let sign = if back { -one } else { one };
            // SAFETY: each row is written as a whole.
            let y = unsafe {
                rows::fill_rows::<T>(rows, len, rows::rows_per_block(len), |range, out| {
                    dispatch(
                        #[inline(always)]
                        || {
                            for (row, out) in range.zip(out.chunks_exact_mut(len)) {
                                let angle = row / repeats % positions * (len / 2);
                                let angles = cos[angle..angle + len / 2].iter().zip(&sin[angle..angle + len / 2]);
                                let x = &x[row * len..(row + 1) * len];
                                let turn = |a: T, b: T, cos: Number, sin: Number| {
                                    let (a, b, sin) = (a.to_acc(), b.to_acc(), sign * sin);
                                    (T::from_acc(a * cos - b * sin), T::from_acc(a * sin + b * cos))
                                };
                                if interleaved {
                                    for ((out, x), (cos, sin)) in out.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(angles) {
                                        let (a, b) = turn(x[0], x[1], *cos, *sin);
                                        out[0].write(a);
                                        out[1].write(b);
                                    }
                                } else {
                                    let (x, out) = (x.split_at(len / 2), out.split_at_mut(len / 2));
                                    let outs = out.0.iter_mut().zip(out.1);
                                    for (((to_a, to_b), (a, b)), (cos, sin)) in outs.zip(x.0.iter().zip(x.1)).zip(angles) {
                                        let (a, b) = turn(*a, *b, *cos, *sin);
                                        to_a.write(a);
                                        to_b.write(b);
                                    }
                                }
                            }
                        },
                    );
                })
            };
            Ok(y)
        })?;
        Ok(from_vec(y, x.shape()))
    })
}

/// Registry entry of this operation.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &ROPE,
    cases: || {
        /// Any numbers will do: the operation does not ask that they belong to angles.
        fn tables(x: &Tensor) -> Result<[Tensor; 2]> {
            let (length, half) = (x.dims()[x.rank() - 2], x.dims()[x.rank() - 1] / 2);
            let table = |f: fn(f64) -> f64| {
                let values = (0..length * half).map(|i| f(i as f64 * 0.7)).collect::<Vec<_>>();
                Tensor::from_vec(values, (length, half), x.device())?.to_dtype(x.dtype())
            };
            Ok([table(f64::cos)?, table(f64::sin)?])
        }
        let case = |label, shape: &[usize], interleaved| {
            let fused = move |x: &[Tensor]| {
                let [cos, sin] = tables(&x[0])?;
                rope(&x[0], &cos, &sin, interleaved)
            };
            Case::new(label, &[shape], fused).plain(move |x| {
                let x = &x[0];
                let ([cos, sin], rank, half) = (tables(x)?, x.rank(), x.dims()[x.rank() - 1] / 2);
                let (a, b) = if interleaved {
                    let mut dims = x.dims().to_vec();
                    dims[rank - 1] = half;
                    dims.push(2);
                    let pairs = x.reshape(dims)?;
                    (pairs.narrow(rank, 0, 1)?.squeeze(rank)?, pairs.narrow(rank, 1, 1)?.squeeze(rank)?)
                } else {
                    (x.narrow(rank - 1, 0, half)?, x.narrow(rank - 1, half, half)?)
                };
                let (to_a, to_b) = (a.mul(&cos)?.sub(&b.mul(&sin)?)?, a.mul(&sin)?.add(&b.mul(&cos)?)?);
                if interleaved {
                    Tensor::stack(&[&to_a, &to_b], rank)?.reshape(x.shape().clone())
                } else {
                    Tensor::cat(&[&to_a, &to_b], rank - 1)
                }
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
