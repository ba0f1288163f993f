//! The CPU form of RMS norm followed by rotary position embedding.

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::WithDType;

use super::{RMS_NORM_ROPE, RmsNormRopeBackward, Rotation};
use crate::compute::{cast, contiguous};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::ops::norm::parameter_values;
use crate::ops::rope::Angles;
use crate::ops::rows;
use crate::raw::{Raw, from_vec};
use crate::tape::BackwardContext;
use crate::{Result, dispatch_float};

/// Returns the normalised and rotated rows of a dense `x (..., width)`, and 1/√(mean(x²) + eps) of each row.
pub(super) fn forward(
    op: &'static str,
    x: &Raw,
    weight: Option<&Raw>,
    rotation: &Rotation<'_>,
    eps: f64,
) -> Result<[Raw; 2]> {
    dispatch_float!(x.dtype(), op, T => {
        let [cos, sin] = converted_tables::<T>(rotation.tables)?;
        let rows = Rows::new(x, rotation);
        let weight = parameter_values(weight, rows.width(), Real::ONE)?;
        let (y, rstd) = read_all(op, &[x, &cos, &sin], |operands| {
            let angles = rows.angles(elements(operands[1])?, elements(operands[2])?);
            Ok(rows.forward::<T>(elements(operands[0])?, &weight, &angles, Real::from_f64(eps)))
        })?;
        Ok([from_vec(y, x.shape()), from_vec(rstd, rows.count)])
    })
}

/// Adds those gradients of `x` and of the weight that are needed. `x` and `grad` are dense, with rows in the order to
/// which `norm.order.swap` has brought them; a second `swap` restores the order of the operation's input.
pub(super) fn backward(
    norm: &RmsNormRopeBackward,
    context: &mut BackwardContext<'_>,
    [x, grad, rstd]: [&Raw; 3],
    rotation: &Rotation<'_>,
) -> Result<()> {
    let op = RMS_NORM_ROPE.name;
    let rows = Rows::new(x, rotation);
    dispatch_float!(x.dtype(), op, T => {
        let [cos, sin] = converted_tables::<T>(rotation.tables)?;
        let weight = norm.affine.scale(rows.width())?;
        let (wants_input, wants_weight) = (context.needs(0), norm.affine.needs_grad(context));
        let (grad_x, grad_weight) = read_all(op, &[x, grad, rstd, &cos, &sin], |operands| {
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
            context.add(0, norm.order.swap(&from_vec(grad_x, x.shape()))?)?;
        }
        // The norm has no shift, so there is no gradient of one.
        let grad_shift = Vec::new();
        norm.affine.add(context, grad_weight, grad_shift)
    })
}

/// Computes the gradient of `x` alone, without that of the weight. `x` and `grad` are dense.
pub(super) fn input_gradient(
    op: &'static str,
    [x, grad, rstd]: [&Raw; 3],
    weight: Option<&Raw>,
    rotation: &Rotation<'_>,
) -> Result<Raw> {
    let rows = Rows::new(x, rotation);
    dispatch_float!(x.dtype(), op, T => {
        let [cos, sin] = converted_tables::<T>(rotation.tables)?;
        let weight = parameter_values(weight, rows.width(), Real::ONE)?;
        let grad_x = read_all(op, &[x, grad, rstd, &cos, &sin], |operands| {
            let pass = BackwardPass::<T> {
                rows,
                x: elements(operands[0])?,
                grad: elements(operands[1])?,
                rstd: elements(operands[2])?,
                angles: rows.angles(elements(operands[3])?, elements(operands[4])?),
                weight: &weight,
            };
            let (wants_input, wants_weight) = (true, false);
            Ok(pass.run(wants_input, wants_weight).0)
        })?;
        Ok(from_vec(grad_x, x.shape()))
    })
}

/// Returns the tables of cos and sin, dense and in the accumulator type of `T`.
fn converted_tables<T: Elem<Acc: WithDType>>([cos, sin]: [&Raw; 2]) -> Result<[Raw; 2]> {
    let converted = |table: &Raw| contiguous(&cast(table, T::Acc::DTYPE)?);
    Ok([converted(cos)?, converted(sin)?])
}

/// The number and length of the rows, and how their angles are arranged.
#[derive(Clone, Copy)]
struct Rows {
    /// Number of rows.
    count: usize,
    /// Number of pairs of a row.
    half: usize,
    /// Number of rows of cos and sin. Row i of `x` has position ⌊i / `repeats`⌋ mod `positions`.
    positions: usize,
    /// How many successive rows have the same position.
    repeats: usize,
    /// Whether features 2i and 2i + 1 form pair i; else features i and i + `half` do.
    interleaved: bool,
}

impl Rows {
    fn new(x: &Raw, rotation: &Rotation<'_>) -> Self {
        let (positions, half) = (rotation.tables[0].dims()[0], rotation.tables[0].dims()[1]);
        let count = x.dims()[..x.rank() - 1].iter().product();
        Self { count, half, positions, repeats: rotation.repeats, interleaved: rotation.interleaved }
    }

    /// Number of elements of a row.
    fn width(&self) -> usize {
        2 * self.half
    }

    /// The angles whose cos and sin are given, and how the rows share them.
    fn angles<'a, R>(&self, cos: &'a [R], sin: &'a [R]) -> Angles<'a, R> {
        let &Self { half, positions, repeats, interleaved, .. } = self;
        Angles { cos, sin, positions, repeats, half, interleaved }
    }

    /// Returns the normalised and rotated rows, and 1/√(mean(x²) + eps) of each row.
    fn forward<T: Elem>(
        &self,
        x: &[T],
        weight: &[T::Acc],
        angles: &Angles<'_, T::Acc>,
        eps: T::Acc,
    ) -> (Vec<T>, Vec<T::Acc>) {
        let len = self.width();
        let mut rstd = vec![T::Acc::ZERO; self.count];
        let rstds = SharedMut::new(&mut rstd);
        let width = T::Acc::from_f64(len as f64);
        let write_rows = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            // SAFETY: ranges of rows do not overlap.
            let rstds = unsafe { rstds.slice(range.clone()) };
            let mut scaled = vec![T::Acc::ZERO; len];
            dispatch(
                #[inline(always)]
                || {
                    for ((row, out), rstd) in range.zip(out.chunks_exact_mut(len)).zip(rstds) {
                        let x = &x[row * len..(row + 1) * len];
                        let squares = rows::sum(x, |x: T| x.to_acc() * x.to_acc());
                        *rstd = T::Acc::ONE / (squares / width + eps).sqrt();
                        for (scaled, (x, w)) in scaled.iter_mut().zip(x.iter().zip(weight)) {
                            *scaled = x.to_acc() * *rstd * *w;
                        }
                        let store = |slot: &mut MaybeUninit<T>, y| {
                            slot.write(T::from_acc(y));
                        };
                        let back = false;
                        angles.rotate(row, (&scaled, out), back, |x| x, store);
                    }
                },
            );
        };
        // SAFETY: each row is written as a whole.
        let y = unsafe { rows::fill_rows(self.count, len, rows::rows_per_block(len), write_rows) };
        (y, rstd)
    }
}

/// What the backward pass reads.
struct BackwardPass<'a, T: Elem> {
    rows: Rows,
    x: &'a [T],
    /// The gradient of the result.
    grad: &'a [T],
    /// 1/√(mean(x²) + eps) of each row.
    rstd: &'a [T::Acc],
    angles: Angles<'a, T::Acc>,
    weight: &'a [T::Acc],
}

/// The minimum number of rows of a block, if the weight's gradient is wanted. Each block has its own partial sum of
/// this gradient, so a minimum limits the memory for the partial sums.
const MIN_BLOCK_ROWS: usize = 16;

impl<T: Elem> BackwardPass<'_, T> {
    /// Returns the gradients of the input and of the weight, each empty if not wanted.
    fn run(&self, wants_input: bool, wants_weight: bool) -> (Vec<T>, Vec<T::Acc>) {
        let (count, len) = (self.rows.count, self.rows.width());
        let mut block_rows = rows::rows_per_block(len);
        if wants_weight {
            block_rows = block_rows.max(MIN_BLOCK_ROWS);
        }
        let sum_len = if wants_weight { len } else { 0 };
        let mut partials = vec![T::Acc::ZERO; count.div_ceil(block_rows) * sum_len];
        let shared = SharedMut::new(&mut partials);
        let work = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let index = range.start / block_rows;
            // SAFETY: `range` is one block, and each block writes its own range of `partials`.
            let partial = unsafe { shared.slice(index * sum_len..(index + 1) * sum_len) };
            let mut rotated = vec![T::Acc::ZERO; len];
            dispatch(
                #[inline(always)]
                || self.block(range, out, partial, &mut rotated),
            );
        };
        let grad_x = if wants_input {
            // SAFETY: `block` writes every row that it is given.
            unsafe { rows::fill_rows(count, len, block_rows, work) }
        } else {
            par_ranges(count, block_rows, |range| work(range, &mut []));
            Vec::new()
        };
        let mut sum = vec![T::Acc::ZERO; sum_len];
        for partial in partials.chunks_exact(len.max(1)) {
            for (s, p) in sum.iter_mut().zip(partial) {
                *s += *p;
            }
        }
        (grad_x, sum)
    }

    /// Writes the input's gradient for the rows of `range` to `out`, unless `out` is empty. Adds these rows' part of
    /// the weight's gradient to `partial`, unless `partial` is empty. `rotated` is scratch memory for one row of
    /// `grad`, rotated back.
    #[inline(always)]
    fn block(&self, range: Range<usize>, out: &mut [MaybeUninit<T>], partial: &mut [T::Acc], rotated: &mut [T::Acc]) {
        let len = self.rows.width();
        let width = T::Acc::from_f64(len as f64);
        let mut out = out.chunks_exact_mut(len.max(1));
        for row in range {
            let (x, g) = (&self.x[row * len..(row + 1) * len], &self.grad[row * len..(row + 1) * len]);
            let rstd = self.rstd[row];
            let normalised = |x: T| x.to_acc() * rstd;
            let back = true;
            self.angles.rotate(row, (g, rotated), back, T::to_acc, |slot, g| *slot = g);
            for (dw, (g, x)) in partial.iter_mut().zip(rotated.iter().zip(x)) {
                *dw += *g * normalised(*x);
            }
            let Some(out) = out.next() else { continue };
            // dx = rstd (g w - x̂ mean(g w x̂)), where g is `rotated`, w the weight and x̂ = x rstd.
            let mean_dot = rows::sum_triples(x, rotated, self.weight, |x, g, w| g * w * normalised(x)) / width;
            for ((o, x), (g, w)) in out.iter_mut().zip(x).zip(rotated.iter().zip(self.weight)) {
                o.write(T::from_acc(rstd * (*g * *w - normalised(*x) * mean_dot)));
            }
        }
    }
}
