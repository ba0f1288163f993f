//! The CPU form of cross-entropy. For a row x of logits and its class c, the loss is
//! `log Σ exp(x) - (1 - smoothing) x[c] - smoothing / classes · Σ x`. In other words: each class gets the part
//! `smoothing / classes` of the target, and class c the rest in addition.

use super::super::super::rows;
use super::{CROSS_ENTROPY, OP, Reduction};
use crate::compute::{cast, contiguous};
use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec, to_cpu, to_f64_vec, to_vec};
use crate::tape::{Backward, BackwardContext, Saved, record_with_aux};
use crate::{DType, Error, Result, Tensor, dispatch_float};

/// Number of elements of a row that are processed at a time: few enough to stay in the first-level cache.
const BLOCK: usize = 1024;

/// The class of each row; `None` where the loss ignores the row.
pub(in crate::ops::loss) type Targets = Vec<Option<usize>>;

/// Reads the class ids, and checks that each is `ignore_index` or from 0 to `classes` - 1.
pub(in crate::ops::loss) fn read_targets(
    op: &'static str,
    targets: &Tensor,
    classes: usize,
    ignore_index: i64,
) -> Result<Targets> {
    let ids: Vec<i64> = match targets.dtype() {
        DType::I64 | DType::U32 => to_vec(&to_cpu(&targets.raw)?.to_dtype(DType::I64)?)?,
        other => {
            return Err(Error::dtype(
                op,
                format!("targets are {}, expected i64 or u32; convert them with to()", other.as_str()),
            ));
        }
    };
    let class = |(index, id): (usize, i64)| {
        if id == ignore_index {
            return Ok(None);
        }
        usize::try_from(id).ok().filter(|&class| class < classes).map(Some).ok_or_else(|| {
            Error::index(
                op,
                format!(
                    "target {id} at position {index} is out of range: expected 0 <= target < {classes} or ignore_index \
                     {ignore_index}"
                ),
            )
        })
    };
    ids.into_iter().enumerate().map(class).collect()
}

/// Rows of `classes` logits each: `offsets` has the index in `data` of the first element of each row.
struct Rows<'a, T> {
    data: &'a [T],
    offsets: &'a [usize],
    classes: usize,
}

impl<'a, T> Rows<'a, T> {
    fn get(&self, row: usize) -> &'a [T] {
        &self.data[self.offsets[row]..self.offsets[row] + self.classes]
    }

    /// Number of rows that one thread computes at a time.
    fn step(&self) -> usize {
        rows::rows_per_block(self.classes)
    }
}

/// The offset of each row of `logits` from the first element of `logits`.
fn offsets(logits: &Raw) -> Result<Vec<usize>> {
    let last = logits.rank() - 1;
    if logits.elem_count() == 0 {
        return Ok(vec![0; logits.dims()[..last].iter().product()]);
    }
    let start = logits.layout().start_offset();
    // The indices of the first elements of the rows, counted in the whole storage.
    Ok(logits.narrow(last, 0, 1)?.strided_index().map(|index| index - start).collect())
}

/// The logits themselves if each row is contiguous, else a contiguous copy.
fn with_contiguous_rows(logits: &Raw) -> Result<Raw> {
    let last = logits.rank() - 1;
    let are_contiguous = logits.stride()[last] == 1 || logits.dims()[last] == 1;
    Ok(if are_contiguous { logits.clone() } else { contiguous(logits)? })
}

/// log Σ exp(x) and Σ x of a row x, in one pass over the blocks of the row. When a block has a new maximum,
/// the sum of exponentials so far is rescaled.
fn row_statistics<T: Elem>(row: &[T]) -> (T::Acc, T::Acc) {
    let (mut largest, mut exponentials, mut sum) = (T::Acc::NEG_INFINITY, T::Acc::ZERO, T::Acc::ZERO);
    for block in row.chunks(BLOCK) {
        dispatch(
            #[inline(always)]
            || {
                let new_largest = largest.max(rows::max(block));
                sum += rows::sum(block, |x: T| x.to_acc());
                if new_largest == T::Acc::NEG_INFINITY {
                    // Each logit so far is -∞, which adds nothing, or NaN, which makes `sum` NaN.
                    exponentials = if sum == T::Acc::NEG_INFINITY { T::Acc::ZERO } else { sum };
                } else {
                    exponentials *= (largest - new_largest).exp();
                    exponentials += rows::sum(block, |x: T| (x.to_acc() - new_largest).exp());
                    largest = new_largest;
                }
            },
        );
    }
    (largest + exponentials.ln(), sum)
}

/// The loss and the log-sum-exp of each row. Both are 0 if the target of the row is ignored.
fn row_losses<T: Elem>(x: &Rows<'_, T>, targets: &Targets, smoothing: f64) -> Vec<(T::Acc, T::Acc)> {
    let mut results = vec![(T::Acc::ZERO, T::Acc::ZERO); targets.len()];
    // The part of the target that smoothing gives to each class.
    let share = T::Acc::from_f64(smoothing / x.classes as f64);
    par_chunks_mut(&mut results, x.step(), |piece, results| {
        for (row, result) in (piece * x.step()..).zip(results) {
            let Some(class) = targets[row] else { continue };
            let x = x.get(row);
            let (lse, sum) = row_statistics(x);
            let loss = lse - T::Acc::from_f64(1.0 - smoothing) * x[class].to_acc();
            // Without smoothing `share` is 0, and its product with the sum would be NaN if another logit is infinite.
            *result = (if smoothing > 0.0 { loss - share * sum } else { loss }, lse);
        }
    });
    results
}

/// The loss and the log-sum-exp of each row as two vectors in the accumulator dtype.
pub(in crate::ops::loss) fn losses(logits: &Raw, targets: &Targets, smoothing: f64) -> Result<(Raw, Raw)> {
    let logits = with_contiguous_rows(logits)?;
    let (offsets, classes) = (offsets(&logits)?, logits.dims()[logits.rank() - 1]);
    dispatch_float!(logits.dtype(), OP, T => read_all(OP, &[&logits], |operands| {
        let x = Rows { data: elements::<T>(operands[0])?, offsets: &offsets, classes };
        Ok(row_losses(&x, targets, smoothing))
    })
    .map(|results| {
        let (losses, lse): (Vec<_>, Vec<_>) = results.into_iter().unzip();
        (from_vec(losses, targets.len()), from_vec(lse, targets.len()))
    }))
}

/// [`gradient`] for logits of element type `T`: the elements of all rows.
fn row_gradients<T: Elem>(x: &Rows<'_, T>, lse: &[f64], targets: &Targets, scales: &[f64], smoothing: f64) -> Vec<T> {
    let mut grad = vec![T::from_acc(T::Acc::ZERO); targets.len() * x.classes];
    par_chunks_mut(&mut grad, x.step() * x.classes, |piece, grad| {
        for (row, grad) in (piece * x.step()..).zip(grad.chunks_exact_mut(x.classes)) {
            if let Some(class) = targets[row] {
                let [lse, scale] = [lse[row], scales[row]].map(T::Acc::from_f64);
                write_gradient(grad, x.get(row), class, lse, scale, smoothing);
            }
        }
    });
    grad
}

/// The gradient of the logits: in each row, `scales[row]` times the gradient of the row's loss, or 0 if the target of
/// the row is ignored. `lse` is the log-sum-exp of each row.
pub(in crate::ops::loss) fn gradient(
    logits: &Raw,
    lse: &Raw,
    targets: &Targets,
    scales: &[f64],
    smoothing: f64,
) -> Result<Raw> {
    let logits = with_contiguous_rows(logits)?;
    let (offsets, classes, lse) = (offsets(&logits)?, logits.dims()[logits.rank() - 1], to_f64_vec(lse)?);
    dispatch_float!(logits.dtype(), OP, T => read_all(OP, &[&logits], |operands| {
        let x = Rows { data: elements::<T>(operands[0])?, offsets: &offsets, classes };
        Ok(row_gradients(&x, &lse, targets, scales, smoothing))
    })
    .map(|grad| from_vec(grad, logits.shape())))
}

/// Writes the gradient of the logits `x` of one row to `grad`: `scale` times the gradient of the row's loss.
fn write_gradient<T: Elem>(grad: &mut [T], x: &[T], class: usize, lse: T::Acc, scale: T::Acc, smoothing: f64) {
    // The part of the target that smoothing gives to each class.
    let share = T::Acc::from_f64(smoothing / x.len() as f64);
    dispatch(
        #[inline(always)]
        || {
            for (g, x) in grad.iter_mut().zip(x) {
                *g = T::from_acc(scale * ((x.to_acc() - lse).exp() - share));
            }
        },
    );
    // The class of the target has the rest of the target, 1 - smoothing, in addition.
    let at_target = (x[class].to_acc() - lse).exp() - share - T::Acc::from_f64(1.0 - smoothing);
    grad[class] = T::from_acc(scale * at_target);
}

struct CrossEntropyBackward {
    logits: Saved,
    lse: Saved,
    targets: Targets,
    smoothing: f64,
    reduction: Reduction,
}

impl Backward for CrossEntropyBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        // The gradient of the result: of the losses of all rows, or of their sum or mean.
        let grad = to_f64_vec(context.grad())?;
        let scales = match self.reduction {
            Reduction::None => grad,
            Reduction::Sum => vec![grad[0]; self.targets.len()],
            Reduction::Mean => vec![grad[0] / count_labelled(&self.targets); self.targets.len()],
        };
        let grad = gradient(&self.logits.get()?, &self.lse.get()?, &self.targets, &scales, self.smoothing)?;
        context.add(0, grad)
    }
}

/// The number of targets that are not ignored.
fn count_labelled(targets: &Targets) -> f64 {
    targets.iter().flatten().count() as f64
}

/// A scalar tensor: the sum of `losses`, divided by `divisor`.
fn divided_sum(losses: &Raw, divisor: f64) -> Result<Raw> {
    let total: f64 = to_f64_vec(losses)?.iter().sum();
    Ok(from_vec(vec![total / divisor], ()).to_dtype(losses.dtype())?)
}

/// [`cross_entropy`](super::cross_entropy) of arguments that the caller has checked, except the dtype and values of the
/// targets.
pub(super) fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: i64,
    label_smoothing: f64,
    reduction: Reduction,
) -> Result<Tensor> {
    let (leading, classes) = (targets.dims(), logits.dims()[logits.rank() - 1]);
    let targets = read_targets(OP, targets, classes, ignore_index)?;
    record_with_aux(
        &CROSS_ENTROPY,
        &[logits],
        || {
            let (losses, lse) = losses(&logits.raw, &targets, label_smoothing)?;
            let result = match reduction {
                Reduction::None => losses.reshape(leading)?,
                Reduction::Sum => divided_sum(&losses, 1.0)?,
                Reduction::Mean => divided_sum(&losses, count_labelled(&targets))?,
            };
            Ok((cast(&result, logits.dtype())?, [lse].into_iter().collect()))
        },
        |saver, _, aux| CrossEntropyBackward {
            logits: saver.save(logits),
            lse: saver.save_raw(&aux[0]),
            targets: targets.clone(),
            smoothing: label_smoothing,
            reduction,
        },
    )
}
