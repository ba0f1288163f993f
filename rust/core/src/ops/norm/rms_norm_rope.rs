//! RMS norm and rotary position embedding in one pass: the queries and keys of models that normalise them (Flux, Qwen3).

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::WithDType;

use super::cases::{frozen, plain_rms_norm};
use super::{Affine, SavedAffine, check_eps};
use crate::compute::{cast, contiguous};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::ops::case::{Case, Entry};
use crate::ops::rope::{self, Angles, RowOrder};
use crate::ops::rows;
use crate::raw::{Raw, from_vec};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Result, Tensor, dispatch_float};

static RMS_NORM_ROPE: OpInfo = OpInfo::cheap("rms_norm_rope");

/// [`rope`](crate::ops::rope::rope) of [`rms_norm`](super::rms_norm): `x (..., S, D)`, `weight (D)`, `cos` and `sin` `(S, D/2)`.
///
/// `weight` has the dtype of `x`, or f32; `cos` and `sin` have any floating-point dtype and get no gradient. What lies between the
/// two is not rounded to the dtype of `x`. Pairs are as for `rope`. Saves `x` and one number a row. The result lies in memory as
/// `x` does.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) if `eps` is negative or not finite, [`Error::Shape`](crate::Error::Shape),
/// [`Error::DType`](crate::Error::DType), [`Error::Device`](crate::Error::Device) if the operands do not fit,
/// [`Error::NoBackward`](crate::Error::NoBackward) if `cos` or `sin` needs a gradient.
pub fn rms_norm_rope(
    x: &Tensor,
    weight: Option<&Tensor>,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    eps: f64,
) -> Result<Tensor> {
    let op = RMS_NORM_ROPE.name;
    check_eps(op, eps)?;
    rope::check(op, x, cos, sin)?;
    let affine = Affine::new(op, x, weight, None, &x.dims()[x.rank() - 1..])?;
    let order = RowOrder::of(&x.raw);
    record_with_aux(
        &RMS_NORM_ROPE,
        &affine.inputs(x),
        || {
            let rows = contiguous(&order.swap(&x.raw)?)?;
            let turn = Turn { tables: [&cos.raw, &sin.raw], repeats: order.repeats(), interleaved };
            let [y, rstd] = forward(&rows, &affine, &turn, eps)?;
            Ok((order.swap(&y)?, std::iter::once(rstd).collect()))
        },
        |saver, _, statistics| RmsNormRopeBackward {
            x: saver.save(x),
            rstd: saver.save_raw(&statistics[0]),
            tables: [saver.hold(cos), saver.hold(sin)],
            order,
            interleaved,
            affine: affine.save(saver, false),
        },
    )
}

/// How dense rows turn.
pub(crate) struct Turn<'a> {
    /// cos and sin, (positions, width / 2).
    pub tables: [&'a Raw; 2],
    /// How many rows in turn have the same position.
    pub repeats: usize,
    pub interleaved: bool,
}

/// The result, and 1/√(mean(x²) + eps) of each row, of dense rows.
fn forward(x: &Raw, affine: &Affine<'_>, turn: &Turn<'_>, eps: f64) -> Result<[Raw; 2]> {
    let op = RMS_NORM_ROPE.name;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        let [weight, _] = affine.parameters();
        return cuda::rms_norm_rope::forward(op, x, weight, turn, eps);
    }
    dispatch_float!(x.dtype(), op, T => {
        let [cos, sin] = numbers::<T>(turn.tables)?;
        let rows = Rows::new(x, turn);
        let weight = affine.scale(rows.len())?;
        let (y, rstd) = read_all(op, &[x, &cos, &sin], |operands| {
            let angles = rows.angles(elements(operands[1])?, elements(operands[2])?);
            Ok(rows.forward::<T>(elements(operands[0])?, &weight, &angles, Real::from_f64(eps)))
        })?;
        Ok([from_vec(y, x.shape()), from_vec(rstd, rows.count)])
    })
}

/// Tables as arithmetic on elements of type `T` reads them.
fn numbers<T: Elem<Acc: WithDType>>(tables: [&Raw; 2]) -> Result<[Raw; 2]> {
    let numbers = |table: &Raw| contiguous(&cast(table, T::Acc::DTYPE)?);
    Ok([numbers(tables[0])?, numbers(tables[1])?])
}

/// The sizes of dense rows and of their angles.
#[derive(Clone, Copy)]
struct Rows {
    count: usize,
    half: usize,
    positions: usize,
    repeats: usize,
    interleaved: bool,
}

impl Rows {
    fn new(x: &Raw, turn: &Turn<'_>) -> Self {
        let (positions, half) = (turn.tables[0].dims()[0], turn.tables[0].dims()[1]);
        let count = x.dims()[..x.rank() - 1].iter().product();
        Self { count, half, positions, repeats: turn.repeats, interleaved: turn.interleaved }
    }

    fn len(&self) -> usize {
        2 * self.half
    }

    fn angles<'a, R>(&self, cos: &'a [R], sin: &'a [R]) -> Angles<'a, R> {
        let &Self { half, positions, repeats, interleaved, .. } = self;
        Angles { cos, sin, positions, repeats, half, interleaved }
    }

    /// The result, and 1/√(mean(x²) + eps) of each row.
    fn forward<T: Elem>(
        &self,
        x: &[T],
        weight: &[T::Acc],
        angles: &Angles<'_, T::Acc>,
        eps: T::Acc,
    ) -> (Vec<T>, Vec<T::Acc>) {
        let len = self.len();
        let mut rstd = vec![T::Acc::ZERO; self.count];
        let rstds = SharedMut::new(&mut rstd);
        let count = T::Acc::from_f64(len as f64);
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            // SAFETY: ranges of rows do not overlap.
            let rstds = unsafe { rstds.slice(range.clone()) };
            let mut scaled = vec![T::Acc::ZERO; len];
            dispatch(
                #[inline(always)]
                || {
                    for ((row, out), rstd) in range.zip(out.chunks_exact_mut(len)).zip(rstds) {
                        let x = &x[row * len..(row + 1) * len];
                        let squares = rows::sum(x, |x: T| x.to_acc() * x.to_acc());
                        *rstd = T::Acc::ONE / (squares / count + eps).sqrt();
                        for (scaled, (x, w)) in scaled.iter_mut().zip(x.iter().zip(weight)) {
                            *scaled = x.to_acc() * *rstd * *w;
                        }
                        let write = |slot: &mut MaybeUninit<T>, y| {
                            slot.write(T::from_acc(y));
                        };
                        angles.turn(row, (&scaled, out), false, |x| x, write);
                    }
                },
            );
        };
        // SAFETY: each row is written as a whole.
        let y = unsafe { rows::fill_rows(self.count, len, rows::rows_per_block(len), write) };
        (y, rstd)
    }
}

struct RmsNormRopeBackward {
    x: Saved,
    rstd: Saved,
    tables: [Saved; 2],
    order: RowOrder,
    interleaved: bool,
    affine: SavedAffine,
}

impl Backward for RmsNormRopeBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let op = RMS_NORM_ROPE.name;
        let order = self.order;
        let x = contiguous(&order.swap(&self.x.get()?)?)?;
        let grad = contiguous(&order.swap(context.grad())?)?;
        let (rstd, cos, sin) = (self.rstd.get()?, self.tables[0].get()?, self.tables[1].get()?);
        let turn = Turn { tables: [&cos, &sin], repeats: order.repeats(), interleaved: self.interleaved };
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let [weight, _] = self.affine.parameters()?;
            let [wants_input, wants_weight, _] = self.affine.wants(context);
            let (saved, wants) = ([&x, &grad, &rstd], [wants_input, wants_weight]);
            let mut grads = cuda::rms_norm_rope::backward(op, saved, weight.as_ref(), &turn, wants)?;
            if let Some(grad) = grads.input.take() {
                context.add(0, order.swap(&grad)?)?;
            }
            return self.affine.add_gradients(context, grads);
        }
        let rows = Rows::new(&x, &turn);
        dispatch_float!(x.dtype(), op, T => {
            let [cos, sin] = numbers::<T>(turn.tables)?;
            let weight = self.affine.scale(rows.len())?;
            let (wants_input, wants_weight) = (context.needs(0), self.affine.needs_grad(context));
            let (grad_x, grad_weight) = read_all(op, &[&x, &grad, &rstd, &cos, &sin], |operands| {
                let pass = BackwardPass::<T> {
                    rows,
                    x: elements(operands[0])?,
                    grad: elements(operands[1])?,
                    rstd: elements(operands[2])?,
                    angles: rows.angles(elements(operands[3])?, elements(operands[4])?),
                    weight: &weight,
                };
                Ok(pass.run(wants_input, wants_weight))
            })?;
            if wants_input {
                context.add(0, order.swap(&from_vec(grad_x, x.shape()))?)?;
            }
            self.affine.add(context, grad_weight, Vec::new())
        })
    }
}

struct BackwardPass<'a, T: Elem> {
    rows: Rows,
    x: &'a [T],
    grad: &'a [T],
    rstd: &'a [T::Acc],
    angles: Angles<'a, T::Acc>,
    weight: &'a [T::Acc],
}

/// Rows whose shares of the weight's gradient are summed one after another, at least; bounds the memory for the partial sums.
const MIN_BLOCK: usize = 16;

impl<T: Elem> BackwardPass<'_, T> {
    /// The gradients of the input and of the weight, each empty if not wanted.
    fn run(&self, wants_input: bool, wants_weight: bool) -> (Vec<T>, Vec<T::Acc>) {
        let (count, len) = (self.rows.count, self.rows.len());
        let mut block = rows::rows_per_block(len);
        if wants_weight {
            block = block.max(MIN_BLOCK);
        }
        let width = if wants_weight { len } else { 0 };
        let mut partial = vec![T::Acc::ZERO; count.div_ceil(block) * width];
        let shared = SharedMut::new(&mut partial);
        let work = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let index = range.start / block;
            // SAFETY: blocks do not overlap.
            let partial = unsafe { shared.slice(index * width..(index + 1) * width) };
            let mut turned = vec![T::Acc::ZERO; len];
            dispatch(
                #[inline(always)]
                || self.block(range, out, partial, &mut turned),
            );
        };
        let grad_x = if wants_input {
            // SAFETY: `block` writes every row that it is given.
            unsafe { rows::fill_rows(count, len, block, work) }
        } else {
            par_ranges(count, block, |range| work(range, &mut []));
            Vec::new()
        };
        let mut sum = vec![T::Acc::ZERO; width];
        for partial in partial.chunks_exact(len.max(1)) {
            for (s, p) in sum.iter_mut().zip(partial) {
                *s += *p;
            }
        }
        (grad_x, sum)
    }

    /// Rows of the input's gradient into `out`, and the rows' share of the weight's gradient into `partial`, unless empty.
    /// `turned` has room for a row.
    #[inline(always)]
    fn block(&self, range: Range<usize>, out: &mut [MaybeUninit<T>], partial: &mut [T::Acc], turned: &mut [T::Acc]) {
        let len = self.rows.len();
        let count = T::Acc::from_f64(len as f64);
        let mut out = out.chunks_exact_mut(len.max(1));
        for row in range {
            let (x, g) = (&self.x[row * len..(row + 1) * len], &self.grad[row * len..(row + 1) * len]);
            let rstd = self.rstd[row];
            let normal = |x: T| x.to_acc() * rstd;
            self.angles.turn(row, (g, turned), true, T::to_acc, |slot, g| *slot = g);
            for (dw, (g, x)) in partial.iter_mut().zip(turned.iter().zip(x)) {
                *dw += *g * normal(*x);
            }
            let Some(out) = out.next() else { continue };
            let dot = rows::sum_triples(x, turned, self.weight, |x, g, w| g * w * normal(x)) / count;
            for ((o, x), (g, w)) in out.iter_mut().zip(x).zip(turned.iter().zip(self.weight)) {
                o.write(T::from_acc(rstd * (*g * *w - normal(*x) * dot)));
            }
        }
    }
}

/// Registry entry of this file.
pub(super) const ENTRY: Entry = Entry {
    info: &RMS_NORM_ROPE,
    cases: || {
        const EPS: f64 = 1e-6;
        let case = |label, shapes: &[&[usize]], interleaved| {
            let fused = move |x: &[Tensor]| {
                let [cos, sin] = rope::tables(&x[0])?;
                rms_norm_rope(&x[0], x.get(1), &cos, &sin, interleaved, EPS)
            };
            Case::new(label, shapes, fused).plain(move |x| {
                let [cos, sin] = rope::tables(&x[0])?;
                rope::plain(&plain_rms_norm(x, EPS)?, [&cos, &sin], interleaved)
            })
        };
        // Heads that lie inside of the positions, as a projection leaves them.
        let heads = |x: &Tensor| x.transpose(1, 2);
        let inside = move |x: &[Tensor]| {
            let [cos, sin] = rope::tables(&heads(&x[0])?)?;
            heads(&rms_norm_rope(&heads(&x[0])?, x.get(1), &cos, &sin, false, EPS)?)
        };
        let inside_plain = move |x: &[Tensor]| {
            let [cos, sin] = rope::tables(&heads(&x[0])?)?;
            let normal = plain_rms_norm(x, EPS)?;
            heads(&rope::plain(&heads(&normal)?, [&cos, &sin], false)?)
        };
        vec![
            case("halves", &[&[2, 3, 5, 6], &[6]], false),
            case("interleaved", &[&[2, 3, 5, 6], &[6]], true),
            case("one matrix", &[&[3, 2], &[2]], false),
            case("plain", &[&[2, 3, 10]], true),
            case("wide", &[&[3, 70], &[70]], false),
            Case::new("heads inside", &[&[2, 5, 3, 6], &[6]], inside).plain(inside_plain),
            Case::new("frozen weight", &[&[2, 5, 6]], |x| {
                let [cos, sin] = rope::tables(&x[0])?;
                rms_norm_rope(&x[0], Some(&frozen(&[6], &x[0])?), &cos, &sin, true, EPS)
            })
            .plain(|x| {
                let [cos, sin] = rope::tables(&x[0])?;
                rope::plain(&plain_rms_norm(&[x[0].clone(), frozen(&[6], &x[0])?], EPS)?, [&cos, &sin], true)
            }),
            Case::new("frozen input", &[&[6]], |x| {
                let input = frozen(&[3, 5, 6], &x[0])?;
                let [cos, sin] = rope::tables(&input)?;
                rms_norm_rope(&input, Some(&x[0]), &cos, &sin, false, EPS)
            }),
            case("no positions", &[&[2, 0, 4], &[4]], true),
            case("empty rows", &[&[2, 3, 0], &[0]], false),
        ]
    },
};
