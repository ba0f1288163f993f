//! Group norm (Wu & He 2018, arXiv:1803.08494) of channels-last tensors, alone and followed by SiLU.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::{Affine, Reads, SavedAffine, check_eps};
use crate::compute::{contiguous, on_device};
use crate::tape::{Backward, BackwardContext, OpInfo, record_with_aux};
use crate::{Error, Result, Tensor};

pub(super) static GROUP_NORM: OpInfo = OpInfo::cheap("group_norm");
pub(super) static GROUP_NORM_SILU: OpInfo = OpInfo::cheap("group_norm_silu");

/// Computes (x - mean) / √(var + eps) · weight + bias, for `x (batch, ..., channels)`; without `weight` or `bias`, the
/// factor or the summand is left out. The channels of each sample are divided into `groups` equal groups of neighbours,
/// and each group has its own mean and its own (biased) variance. The statistics are f32, or f64 for an f64 `x`.
///
/// `weight` and `bias` have one element per channel, and the dtype of `x`; for a 16-bit `x` they may be f32.
///
/// # Errors
/// [`Error::Argument`] if `groups` is 0 or does not divide the number of channels, or `eps` is negative or not finite;
/// [`Error::Shape`] if `x` has fewer than two dimensions; [`Error::Shape`], [`Error::DType`], [`Error::Device`] if
/// `weight` or `bias` does not match `x`; [`Error::DType`] if `x` is not floating point.
pub fn group_norm(
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    apply::<false>(&GROUP_NORM, x, groups, weight, bias, eps)
}

/// Computes SiLU of [`group_norm`] in one operation. Saves `x` and the statistics, but not the result of the norm.
///
/// # Errors
/// As [`group_norm`].
pub fn group_norm_silu(
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    apply::<true>(&GROUP_NORM_SILU, x, groups, weight, bias, eps)
}

fn apply<const SILU: bool>(
    info: &'static OpInfo,
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let op = info.name;
    check_eps(op, eps)?;
    let &[batch, ref positions @ .., channels] = x.dims() else {
        return Err(Error::shape(op, format!("the input has shape {:?}, expected (batch, ..., channels)", x.dims())));
    };
    if groups == 0 || channels % groups != 0 {
        return Err(Error::argument(op, format!("{channels} channels cannot be split into {groups} equal groups")));
    }
    let size = Size { batch, positions: positions.iter().product(), channels, groups };
    let affine = Affine::new(op, x, weight, bias, &[channels])?;
    record_with_aux(
        info,
        &affine.inputs(x),
        || {
            let raw = contiguous(&x.raw)?;
            on_device!(
                raw.device(),
                cuda => cuda::forward(op, SILU, &raw, size, &affine, eps),
                cpu => cpu::forward::<SILU>(op, &raw, size, &affine, eps),
            )
        },
        |saver, _, statistics| GroupNormBackward::<SILU> {
            op,
            size,
            // Input 0 is `x`; input 1 is the scale (`weight`), if there is one. Without SiLU, the gradient of the shift
            // (`bias`) needs no saved values.
            reads: (SILU || saver.needs(0) || affine.weight.is_some() && saver.needs(1))
                .then(|| Reads::save(saver, x, statistics)),
            // With SiLU, the backward pass recomputes the result of the norm, so it needs the scale and the shift.
            affine: affine.save(saver, SILU),
        },
    )
}

struct GroupNormBackward<const SILU: bool> {
    op: &'static str,
    size: Size,
    /// The saved `x` and statistics. `None` if only the gradient of the shift is needed, and computing it needs no saved
    /// values.
    reads: Option<Reads>,
    affine: SavedAffine,
}

impl<const SILU: bool> Backward for GroupNormBackward<SILU> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let size = self.size;
        let grad = contiguous(context.grad())?;
        let Some(Reads { x, rstd, mean: Some(mean) }) = &self.reads else {
            // Nothing was saved, because only the gradient of the shift is needed. If group norm saves anything, it
            // also saves the mean. All positions of all samples have the same shift, so they count as one sample.
            return self
                .affine
                .add_shift_only(context, &grad.reshape((1, size.batch * size.positions, size.channels))?);
        };
        let x = contiguous(&x.get()?)?;
        let (rstd, mean) = (rstd.get()?, mean.get()?);
        on_device!(
            x.device(),
            cuda => cuda::backward(self, context, [&x, &grad, &mean, &rstd]),
            cpu => cpu::backward(self, context, [&x, &grad, &mean, &rstd]),
        )
    }
}

/// The sizes of the input.
#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    /// Number of positions of a sample: the product of the dimensions between batch and channels.
    positions: usize,
    channels: usize,
    groups: usize,
}
