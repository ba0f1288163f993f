//! Norms with statistics of each row: layer norm (Ba et al. 2016, arXiv:1607.06450), RMS norm (Zhang & Sennrich 2019,
//! arXiv:1910.07467) and modulated layer norm, whose samples have a scale and a shift each. RMS norm is layer norm
//! without the mean and the shift. The scale is also called `weight`, the shift `bias`.

mod codes;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod modulated;
mod residual;

use std::ops::Range;

use super::{Affine, Reads, SavedAffine, check_eps};
use crate::compute::{contiguous, on_device};
use crate::cpu::{Real, elements, read_all};
use crate::raw::from_vec;
use crate::tape::{Again, Aux, Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Raw, Result, Tensor, dispatch_float};

pub(in crate::ops) use codes::{CodesNorm, CodesNormBackward};
pub use modulated::modulated_layer_norm;
pub use residual::{add_layer_norm, add_rms_norm};

#[cfg(feature = "testing")]
pub(super) use modulated::MODULATED_LAYER_NORM;
pub(super) use residual::ADD_LAYER_NORM;
#[cfg(feature = "testing")]
pub(super) use residual::ADD_RMS_NORM;

pub(super) static LAYER_NORM: OpInfo = OpInfo::cheap("layer_norm");
pub(super) static RMS_NORM: OpInfo = OpInfo::cheap("rms_norm");

/// (x - mean) / √(var + eps) · weight + bias over the last `normalized_dims` dimensions, with the biased variance.
///
/// `weight` and `bias` have the shape of the normalised dimensions, and the dtype of `x`; for a 16-bit `x` they may be
/// f32. The statistics are f32, or f64 for an f64 `x`.
///
/// # Errors
/// [`Error::Argument`] if `normalized_dims` is 0 or above the rank, or `eps` is negative or not finite;
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if `weight` or `bias` does not match `x`.
pub fn layer_norm(
    x: &Tensor,
    normalized_dims: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let norm = RowNorm::new(LAYER_NORM.name, Kind::Layer, x, normalized_dims, [weight, bias], eps)?;
    norm.record(&LAYER_NORM, x, /* computed: */ None)
}

/// x / √(mean(x²) + eps) · weight over the last dimension.
///
/// `weight` has the size of the last dimension, and the dtype of `x`; for a 16-bit `x` it may be f32. The statistics
/// are f32, or f64 for an f64 `x`.
///
/// # Errors
/// [`Error::Argument`] if `x` has no dimension or `eps` is negative or not finite, [`Error::Shape`], [`Error::DType`],
/// [`Error::Device`] if `weight` does not match `x`.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let normalized_dims = 1;
    RowNorm::new(RMS_NORM.name, Kind::Rms, x, normalized_dims, [weight, None], eps)?
        .record(&RMS_NORM, x, /* computed: */ None)
}

/// The kinds of norms of rows.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Layer,
    /// The mean is not subtracted.
    Rms,
    /// Layer norm with the factor 1 + scale; each sample has its own scale and shift.
    Modulated,
}

impl Kind {
    /// Whether the norm subtracts the mean.
    const fn centers(self) -> bool {
        !matches!(self, Self::Rms)
    }

    /// Whether backward passes may recompute the result instead of saving it. False for modulated norms: their scale
    /// and shift are results of operations, and would have to be saved for the recomputation.
    const fn is_recomputed(self) -> bool {
        !matches!(self, Self::Modulated)
    }

    /// The factors of the normalised values: the scale, or 1 + scale for a modulated norm.
    fn factors<R: Real>(self, mut scale: Vec<R>) -> Vec<R> {
        if self == Self::Modulated {
            scale.iter_mut().for_each(|scale| *scale += R::ONE);
        }
        scale
    }
}

/// The sizes of a norm.
#[derive(Clone, Copy)]
struct Size {
    /// Number of samples, each with its own scale and shift; 1 if all rows share one scale and one shift.
    samples: usize,
    /// Number of rows of a sample. They share a scale and a shift.
    sample_rows: usize,
    /// Number of elements of a row.
    len: usize,
}

impl Size {
    const fn rows(self) -> usize {
        self.samples * self.sample_rows
    }

    /// The range of the scale of `row` in the scales of all samples (samples, len). Its shift has the same range in the
    /// shifts.
    #[inline(always)]
    fn parameters(self, row: usize) -> Range<usize> {
        let sample = row / self.sample_rows.max(1);
        let start = sample * self.len;
        start..start + self.len
    }
}

/// The result of a norm, and the statistics that the backward pass reads: 1/√(var + eps) of each row, and each row's
/// mean if the norm subtracts it.
type Normalised = (Raw, Aux);

/// A norm of rows whose operands were checked.
struct RowNorm<'a> {
    op: &'static str,
    kind: Kind,
    size: Size,
    affine: Affine<'a>,
    eps: f64,
}

impl<'a> RowNorm<'a> {
    /// Checks the operands of a norm of `x` that has one scale and one shift for all rows.
    fn new(
        op: &'static str,
        kind: Kind,
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
        let size = Size { samples: 1, sample_rows: outer.iter().product(), len: normalized.iter().product() };
        Ok(Self { op, kind, size, affine: Affine::new(op, x, weight, bias, normalized)?, eps })
    }

    /// Records the norm of `x` on the tape. `computed` is the norm, if the caller has already computed it.
    fn record(&self, info: &'static OpInfo, x: &Tensor, computed: Option<Normalised>) -> Result<Tensor> {
        record_with_aux(
            info,
            &self.affine.inputs(x),
            || computed.map_or_else(|| self.forward(x), Ok),
            |saver, _, statistics| RowNormBackward {
                op: info.name,
                kind: self.kind,
                size: self.size,
                // Inputs 0 and 1 are `x` and the scale; without a scale, input 1 is the shift. The gradient of the
                // shift needs no saved values.
                reads: (saver.needs(0) || self.affine.weight.is_some() && saver.needs(1))
                    .then(|| Reads::save(saver, x, statistics)),
                affine: self.affine.save(saver, self.kind.is_recomputed()),
                eps: self.eps,
            },
        )
    }

    fn forward(&self, x: &Tensor) -> Result<Normalised> {
        let x = contiguous(&x.raw)?;
        on_device!(x.device(), cuda => cuda::forward(self, &x), cpu => self.on_cpu(&x))
    }

    fn on_cpu(&self, raw: &Raw) -> Result<Normalised> {
        let Self { op, kind, size, affine, eps } = self;
        dispatch_float!(raw.dtype(), op, T => {
            let (weight, bias) = (kind.factors(affine.scale(size.len)?), affine.shift(size.len)?);
            let (y, [mean, rstd]) = read_all(op, &[raw], |operands| {
                let (x, eps) = (elements::<T>(operands[0])?, Real::from_f64(*eps));
                Ok(match kind.centers() {
                    true => cpu::forward::<T, true>(*size, x, &weight, &bias, eps),
                    false => cpu::forward::<T, false>(*size, x, &weight, &bias, eps),
                })
            })?;
            let mean = kind.centers().then(|| from_vec(mean, size.rows()));
            let statistics = std::iter::once(from_vec(rstd, size.rows())).chain(mean).collect();
            Ok((from_vec(y, raw.shape()), statistics))
        })
    }
}

struct RowNormBackward {
    op: &'static str,
    kind: Kind,
    size: Size,
    /// `None` if only the gradient of the shift is needed.
    reads: Option<Reads>,
    affine: SavedAffine,
    eps: f64,
}

impl Backward for RowNormBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = contiguous(context.grad())?;
        self.run(context, &grad)
    }

    // Recomputes the result from the saved input, scale and shift.
    fn again(&self) -> Option<Again<'_>> {
        let &Self { op, kind, size, ref affine, eps, .. } = self;
        let x = &self.reads.as_ref().filter(|_| kind.is_recomputed())?.x;
        Some(Box::new(move || {
            let parameter =
                |saved: &Option<Saved>| Ok(saved.as_ref().map(Saved::get).transpose()?.map(Tensor::constant));
            let (weight, bias): (Result<_>, Result<_>) = (parameter(&affine.scale), parameter(&affine.shift));
            let (weight, bias) = (weight?, bias?);
            let affine = Affine { weight: weight.as_ref(), bias: bias.as_ref() };
            Ok(RowNorm { op, kind, size, affine, eps }.forward(&Tensor::constant(x.get()?))?.0)
        }))
    }
}

impl RowNormBackward {
    /// Adds the gradients of the norm's inputs, from `grad`, the dense gradient of its result.
    fn run(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        let Size { samples, sample_rows, len } = self.size;
        let Some(Reads { x, rstd, mean }) = &self.reads else {
            return self.affine.add_shift_only(context, &grad.reshape((samples, sample_rows, len))?);
        };
        let x = contiguous(&x.get()?)?;
        let (rstd, mean) = (rstd.get()?, mean.as_ref().map(Saved::get).transpose()?);
        on_device!(
            x.device(),
            cuda => cuda::backward(self, context, [&x, grad, &rstd], mean.as_ref()),
            cpu => self.on_cpu(context, [&x, grad, &rstd], mean.as_ref()),
        )
    }

    fn on_cpu(&self, context: &mut BackwardContext<'_>, [x, grad, rstd]: [&Raw; 3], mean: Option<&Raw>) -> Result<()> {
        // RMS norm has no mean, and its `BackwardPass` does not read the field `mean`, so any tensor can be passed.
        let mean = mean.unwrap_or(rstd);
        dispatch_float!(x.dtype(), self.op, T => {
            let scale = self.kind.factors(self.affine.scale(self.size.len)?);
            let (wants_input, wants_affine) = (context.needs(0), self.affine.needs_grad(context));
            let (grad_x, [grad_weight, grad_bias]) = read_all(self.op, &[x, grad, mean, rstd], |operands| {
                let pass = cpu::BackwardPass::<T> {
                    size: self.size,
                    x: elements(operands[0])?,
                    grad: elements(operands[1])?,
                    mean: elements(operands[2])?,
                    rstd: elements(operands[3])?,
                    scale: &scale,
                };
                Ok(match self.kind.centers() {
                    true => pass.run::<true>(wants_input, wants_affine),
                    false => pass.run::<false>(wants_input, wants_affine),
                })
            })?;
            if wants_input {
                context.add(0, from_vec(grad_x, x.shape()))?;
            }
            self.affine.add(context, grad_weight, grad_bias)
        })
    }
}
