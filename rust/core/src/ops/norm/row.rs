//! Layer norm (Ba et al. 2016, arXiv:1607.06450) and RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467): each row is
//! normalised by its own statistics. RMS norm is layer norm without the mean and the shift.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Affine, SavedAffine, check_eps};
use crate::compute::contiguous;
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::ops::rows;
use crate::raw::from_vec;
use crate::tape::{Aux, Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Raw, Result, Tensor, dispatch_float};

pub(super) static LAYER_NORM: OpInfo = OpInfo::cheap("layer_norm");
pub(super) static RMS_NORM: OpInfo = OpInfo::cheap("rms_norm");

/// (x - mean) / √(var + eps) · weight + bias over the last `normalized_dims` dimensions, with the biased variance.
///
/// `weight` and `bias` have the shape of those dimensions and the dtype of `x`, or f32. Statistics are in f32 (f64 for f64).
///
/// # Errors
/// [`Error::Argument`] if `normalized_dims` is 0 or above the rank or `eps` is no number of at least 0, [`Error::Shape`],
/// [`Error::DType`], [`Error::Device`] if the operands do not fit.
pub fn layer_norm(
    x: &Tensor,
    normalized_dims: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    row_norm::<true>(&LAYER_NORM, x, normalized_dims, weight, bias, eps)
}

/// x / √(mean(x²) + eps) · weight over the last dimension.
///
/// `weight` has the size of that dimension and the dtype of `x`, or f32. Statistics are in f32 (f64 for f64).
///
/// # Errors
/// [`Error::Argument`] if `x` has no dimension or `eps` is no number of at least 0, [`Error::Shape`], [`Error::DType`],
/// [`Error::Device`] if the operands do not fit.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    row_norm::<false>(&RMS_NORM, x, 1, weight, None, eps)
}

fn row_norm<const CENTER: bool>(
    info: &'static OpInfo,
    x: &Tensor,
    normalized_dims: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    RowNorm::<CENTER>::new(info.name, x, normalized_dims, [weight, bias], eps)?.record(info, x, None)
}

/// A result, with what its backward reads of it.
pub(super) type Normalised = (Raw, Aux);

/// A norm of rows whose operands were checked.
pub(super) struct RowNorm<'a, const CENTER: bool> {
    op: &'static str,
    size: Size,
    affine: Affine<'a>,
    eps: f64,
}

impl<'a, const CENTER: bool> RowNorm<'a, CENTER> {
    /// Of tensors that are as `x`.
    pub fn new(
        op: &'static str,
        x: &Tensor,
        normalized_dims: usize,
        [weight, bias]: [Option<&'a Tensor>; 2],
        eps: f64,
    ) -> Result<Self> {
        check_eps(op, eps)?;
        if normalized_dims == 0 || normalized_dims > x.rank() {
            return Err(Error::argument(
                op,
                format!("cannot normalise the last {normalized_dims} dimensions of shape {:?}", x.dims()),
            ));
        }
        let (outer, normalized) = x.dims().split_at(x.rank() - normalized_dims);
        let size = Size::new(outer.iter().product(), normalized.iter().product());
        Ok(Self { op, size, affine: Affine::new(op, x, weight, bias, normalized)?, eps })
    }

    /// Put the norm of `x` on the tape, which `made` is if it is there already.
    pub fn record(&self, info: &'static OpInfo, x: &Tensor, made: Option<Normalised>) -> Result<Tensor> {
        record_with_aux(
            info,
            &self.affine.inputs(x),
            || made.map_or_else(|| self.forward(x), Ok),
            |saver, _, statistics| RowNormBackward::<CENTER> {
                op: info.name,
                size: self.size,
                // The gradient of the shift alone reads nothing.
                reads: (saver.needs(0) || self.affine.weight.is_some() && saver.needs(1)).then(|| Reads {
                    x: saver.save(x),
                    rstd: saver.save_raw(&statistics[0]),
                    mean: statistics.get(1).map(|mean| saver.save_raw(mean)),
                }),
                affine: self.affine.save(saver, false),
            },
        )
    }

    fn forward(&self, x: &Tensor) -> Result<Normalised> {
        let Self { op, size, affine, eps } = self;
        let raw = contiguous(&x.raw)?;
        #[cfg(feature = "cuda")]
        if raw.device().is_cuda() {
            return self.on_cuda(&raw, None).map(|(_, normalised)| normalised);
        }
        dispatch_float!(x.dtype(), op, T => {
            let (weight, bias) = (affine.scale(size.len)?, affine.shift(size.len)?);
            let (y, [mean, rstd]) = read_all(op, &[&raw], |operands| {
                let x = elements::<T>(operands[0])?;
                Ok(forward::<T, CENTER>(*size, x, &weight, &bias, Real::from_f64(*eps)))
            })?;
            let mean = CENTER.then(|| from_vec(mean, size.rows));
            let statistics = std::iter::once(from_vec(rstd, size.rows)).chain(mean).collect();
            Ok((from_vec(y, x.shape()), statistics))
        })
    }

    /// A dense tensor, or its sum with another, and the norm of that.
    #[cfg(feature = "cuda")]
    pub fn on_cuda(&self, x: &Raw, residual: Option<&Raw>) -> Result<(Raw, Normalised)> {
        let size = [self.size.rows, self.size.len];
        let cuda::norm::Rows { x, y, rstd, mean } =
            cuda::norm::rows(self.op, kind::<CENTER>(), x, residual, size, self.affine.parameters(), self.eps)?;
        Ok((x, (y, std::iter::once(rstd).chain(mean).collect())))
    }
}

#[cfg(feature = "cuda")]
const fn kind<const CENTER: bool>() -> cuda::norm::Kind {
    if CENTER { cuda::norm::Kind::Layer } else { cuda::norm::Kind::Rms }
}

#[derive(Clone, Copy)]
pub(super) struct Size {
    pub rows: usize,
    pub len: usize,
    /// How many rows, one after another, share a scale and a shift; at least 1.
    pub sharing: usize,
}

impl Size {
    /// One scale and shift for all rows.
    pub fn new(rows: usize, len: usize) -> Self {
        Self { rows, len, sharing: rows.max(1) }
    }

    /// Where the scale and the shift of a row are.
    #[inline(always)]
    fn parameters(self, row: usize) -> Range<usize> {
        let start = row / self.sharing * self.len;
        start..start + self.len
    }
}

/// The result, and mean (if it is taken off) and 1/√(var + eps) of each row.
pub(super) fn forward<T: Elem, const CENTER: bool>(
    size @ Size { rows, len, .. }: Size,
    x: &[T],
    weight: &[T::Acc],
    bias: &[T::Acc],
    eps: T::Acc,
) -> (Vec<T>, [Vec<T::Acc>; 2]) {
    let mut statistics = [vec![T::Acc::ZERO; if CENTER { rows } else { 0 }], vec![T::Acc::ZERO; rows]];
    let [means, rstds] = statistics.each_mut().map(|values| SharedMut::new(values));
    let count = T::Acc::from_f64(len as f64);
    let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
        // SAFETY: ranges of rows do not overlap.
        let rstds = unsafe { rstds.slice(range.clone()) };
        // SAFETY: as above.
        let mut means = unsafe { means.slice(if CENTER { range.clone() } else { 0..0 }) }.iter_mut();
        let x = x[range.start * len..range.end * len].chunks_exact(len);
        dispatch(
            #[inline(always)]
            || {
                let results = out.chunks_exact_mut(len).zip(rstds.iter_mut());
                for (row, (x, (out, rstd))) in range.zip(x.zip(results)) {
                    let center = if CENTER { rows::sum(x, |x: T| x.to_acc()) / count } else { T::Acc::ZERO };
                    let squares = rows::sum(x, |x: T| {
                        let d = x.to_acc() - center;
                        d * d
                    });
                    let scale = T::Acc::ONE / (squares / count + eps).sqrt();
                    let (weight, bias) = (&weight[size.parameters(row)], &bias[size.parameters(row)]);
                    for ((o, x), (w, b)) in out.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
                        o.write(T::from_acc(((x.to_acc() - center) * scale).mul_add(*w, *b)));
                    }
                    *rstd = scale;
                    if let Some(mean) = means.next() {
                        *mean = center;
                    }
                }
            },
        );
    };
    // SAFETY: each row is written as a whole.
    let y = unsafe { rows::fill_rows(rows, len, rows::rows_per_block(len), write) };
    (y, statistics)
}

struct RowNormBackward<const CENTER: bool> {
    op: &'static str,
    size: Size,
    reads: Option<Reads>,
    affine: SavedAffine,
}

struct Reads {
    x: Saved,
    rstd: Saved,
    /// Layer norm only.
    mean: Option<Saved>,
}

impl<const CENTER: bool> Backward for RowNormBackward<CENTER> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let Size { rows, len, .. } = self.size;
        let Some(Reads { x, rstd, mean }) = &self.reads else {
            return self.affine.add_shift_only(context, &contiguous(context.grad())?.reshape((rows, len))?, 0);
        };
        let x = x.get()?;
        let shape = x.shape().clone();
        let x = contiguous(&x)?;
        let grad = contiguous(context.grad())?;
        let rstd = rstd.get()?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let (mean, weight) =
                (mean.as_ref().map(Saved::get).transpose()?, self.affine.scale.as_ref().map(Saved::get).transpose()?);
            let saved = cuda::norm::Saved {
                x: &x,
                grad: &grad,
                mean: mean.as_ref(),
                rstd: &rstd,
                weight: weight.as_ref(),
                bias: None,
            };
            let wants = self.affine.wants(context);
            let before = context.take_pending(0, x.dtype());
            let grads = cuda::norm::rows_backward(self.op, kind::<CENTER>(), &saved, [rows, len], wants, before)?;
            return self.affine.add_gradients(context, grads);
        }
        // RMS norm takes off nothing; any tensor stands in.
        let mean = mean.as_ref().map_or_else(|| Ok(rstd.clone()), Saved::get)?;
        dispatch_float!(x.dtype(), self.op, T => {
            let scale = self.affine.scale(len)?;
            let (wants_input, wants_affine) = (context.needs(0), self.affine.needs_grad(context));
            let (grad_x, [grad_weight, grad_bias]) =
                read_all(self.op, &[&x, &grad, &mean, &rstd], |operands| {
                    let pass = BackwardPass::<T> {
                        size: self.size,
                        x: elements(operands[0])?,
                        grad: elements(operands[1])?,
                        mean: elements(operands[2])?,
                        rstd: elements(operands[3])?,
                        scale: &scale,
                    };
                    Ok(pass.run::<CENTER>(wants_input, wants_affine))
                })?;
            if wants_input {
                context.add(0, from_vec(grad_x, shape))?;
            }
            self.affine.add(context, grad_weight, grad_bias)
        })
    }
}

pub(super) struct BackwardPass<'a, T: Elem> {
    pub size: Size,
    pub x: &'a [T],
    pub grad: &'a [T],
    pub mean: &'a [T::Acc],
    pub rstd: &'a [T::Acc],
    pub scale: &'a [T::Acc],
}

/// Rows whose parameter gradients are summed one after another, at least; bounds the memory for the partial sums.
pub(super) const MIN_BLOCK: usize = 16;

impl<T: Elem> BackwardPass<'_, T> {
    /// The gradients of the input and of scale and shift, each empty if not wanted.
    fn run<const CENTER: bool>(&self, wants_input: bool, wants_affine: bool) -> (Vec<T>, [Vec<T::Acc>; 2]) {
        let Size { rows, len, .. } = self.size;
        let mut block = rows::rows_per_block(len);
        if wants_affine {
            block = block.max(MIN_BLOCK);
        }
        let width = if wants_affine { 2 * len } else { 0 };
        let mut partial = vec![T::Acc::ZERO; rows.div_ceil(block) * width];
        let shared = SharedMut::new(&mut partial);
        let work = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let index = range.start / block;
            // SAFETY: blocks do not overlap.
            let partial = unsafe { shared.slice(index * width..(index + 1) * width) };
            dispatch(
                #[inline(always)]
                || self.block::<CENTER>(range, out, partial),
            );
        };
        let grad_x = if wants_input {
            // SAFETY: `block` writes every row that it is given.
            unsafe { rows::fill_rows(rows, len, block, work) }
        } else {
            par_ranges(rows, block, |range| work(range, &mut []));
            Vec::new()
        };
        let mut sums = [vec![T::Acc::ZERO; width / 2], vec![T::Acc::ZERO; width / 2]];
        for halves in partial.chunks_exact(len.max(1)).collect::<Vec<_>>().chunks_exact(2) {
            for (sum, half) in sums.iter_mut().zip(halves) {
                for (s, p) in sum.iter_mut().zip(*half) {
                    *s += *p;
                }
            }
        }
        (grad_x, sums)
    }

    /// Rows of the input's gradient into `out`, and the rows' share of scale's and shift's gradients into `partial`,
    /// unless empty.
    #[inline(always)]
    pub fn block<const CENTER: bool>(&self, range: Range<usize>, out: &mut [MaybeUninit<T>], partial: &mut [T::Acc]) {
        let len = self.size.len;
        let count = T::Acc::from_f64(len as f64);
        let (grad_scale, grad_shift) = partial.split_at_mut(partial.len() / 2);
        let mut out = out.chunks_exact_mut(len);
        for row in range {
            let (x, g) = (&self.x[row * len..(row + 1) * len], &self.grad[row * len..(row + 1) * len]);
            let (mean, rstd) = (if CENTER { self.mean[row] } else { T::Acc::ZERO }, self.rstd[row]);
            let normal = |x: T| (x.to_acc() - mean) * rstd;
            for ((dw, db), (x, g)) in grad_scale.iter_mut().zip(&mut *grad_shift).zip(x.iter().zip(g)) {
                *dw += g.to_acc() * normal(*x);
                *db += g.to_acc();
            }
            let Some(out) = out.next() else { continue };
            let scale = &self.scale[self.size.parameters(row)];
            let sum = if CENTER { rows::sum_pairs(g, scale, |g: T, w| g.to_acc() * w) / count } else { T::Acc::ZERO };
            let dot = rows::sum_triples(x, g, scale, |x, g: T, w| g.to_acc() * w * normal(x)) / count;
            for ((o, x), (g, w)) in out.iter_mut().zip(x).zip(g.iter().zip(scale)) {
                o.write(T::from_acc(rstd * (g.to_acc() * *w - sum - normal(*x) * dot)));
            }
        }
    }
}
