//! Group norm (Wu & He 2018, arXiv:1803.08494) of channels that come last, alone and followed by SiLU.
//!
//! A sample is walked in blocks of positions that fit in the cache. Blocks give sums for each channel, groups are sums of
//! channels, and the means and squared deviations of blocks are joined by Chan's formula, so that one pass over memory suffices
//! and nothing cancels.

mod backward;
mod forward;

use std::mem::MaybeUninit;
use std::ops::Range;

use backward::BackwardPass;
use forward::{forward, statistics};

use super::{Affine, SavedAffine, check_eps};
use crate::compute::contiguous;
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::ops::rows;
use crate::raw::from_vec;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, dispatch_float};

pub(super) static GROUP_NORM: OpInfo = OpInfo::cheap("group_norm");
pub(super) static GROUP_NORM_SILU: OpInfo = OpInfo::cheap("group_norm_silu");

/// (x - mean) / √(var + eps) · weight + bias with the statistics of each of `groups` equal groups of neighbouring channels of
/// a sample: `x (batch, ..., channels)`, `weight` and `bias` of size channels in the dtype of `x`, or f32. The variance is
/// biased; statistics are in f32 (f64 for f64).
///
/// # Errors
/// [`Error::Argument`] if `groups` does not divide the channels, [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the
/// operands do not fit.
pub fn group_norm(
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    apply::<false>(&GROUP_NORM, x, groups, weight, bias, eps)
}

/// SiLU of [`group_norm`], in one operation: saves what the norm saves, and no result of it.
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
            #[cfg(feature = "cuda")]
            if raw.device().is_cuda() {
                let (y, mean, rstd) = cuda::norm::groups(op, SILU, &raw, size.into(), affine.parameters(), eps)?;
                return Ok((y, [mean, rstd].into_iter().collect()));
            }
            dispatch_float!(x.dtype(), op, T => {
                let (weight, bias) = (affine.scale(channels)?, affine.shift(channels)?);
                let (y, statistics) = read_all(op, &[&raw], |operands| {
                    let x = elements::<T>(operands[0])?;
                    let statistics = statistics(size, x, Real::from_f64(eps));
                    Ok((forward::<T, SILU>(size, x, &statistics, &weight, &bias), statistics))
                })?;
                let statistics = [statistics.mean, statistics.rstd];
                let statistics = statistics.into_iter().map(|values| from_vec(values, (batch, groups))).collect();
                Ok((from_vec(y, x.shape()), statistics))
            })
        },
        |saver, _, statistics| GroupNormBackward::<SILU> {
            op,
            size,
            // The gradient of the norm's shift alone reads nothing.
            reads: (SILU || saver.needs(0) || affine.weight.is_some() && saver.needs(1)).then(|| Reads {
                x: saver.save(x),
                mean: saver.save_raw(&statistics[0]),
                rstd: saver.save_raw(&statistics[1]),
            }),
            affine: affine.save(saver, SILU),
        },
    )
}

struct GroupNormBackward<const SILU: bool> {
    op: &'static str,
    size: Size,
    reads: Option<Reads>,
    affine: SavedAffine,
}

struct Reads {
    x: Saved,
    mean: Saved,
    rstd: Saved,
}

impl<const SILU: bool> Backward for GroupNormBackward<SILU> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let size = self.size;
        let rows = size.batch * size.positions;
        let Some(Reads { x, mean, rstd }) = &self.reads else {
            return self.affine.add_shift_only(
                context,
                &contiguous(context.grad())?.reshape((rows, size.channels))?,
                0,
            );
        };
        let x = x.get()?;
        let shape = x.shape().clone();
        let x = contiguous(&x)?;
        let (mean, rstd) = (mean.get()?, rstd.get()?);
        let grad = contiguous(context.grad())?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let [weight, bias] = self.affine.parameters()?;
            let saved = cuda::norm::Saved {
                x: &x,
                grad: &grad,
                mean: Some(&mean),
                rstd: &rstd,
                weight: weight.as_ref(),
                bias: bias.as_ref(),
            };
            let wants = self.affine.wants(context);
            let before = context.take_pending(0, x.dtype());
            let grads = cuda::norm::groups_backward(self.op, SILU, &saved, size.into(), wants, before)?;
            return self.affine.add_gradients(context, grads);
        }
        dispatch_float!(x.dtype(), self.op, T => {
            let (weight, bias) = (self.affine.scale(size.channels)?, self.affine.shift(size.channels)?);
            let wants_input = context.needs(0);
            let (grad_x, [grad_weight, grad_bias]) =
                read_all(self.op, &[&x, &grad, &mean, &rstd], |operands| {
                    let pass = BackwardPass::<T> {
                        size,
                        x: elements(operands[0])?,
                        grad: elements(operands[1])?,
                        mean: elements(operands[2])?,
                        rstd: elements(operands[3])?,
                        weight: &weight,
                        bias: &bias,
                    };
                    Ok(pass.run::<SILU>(wants_input))
                })?;
            if wants_input {
                context.add(0, from_vec(grad_x, shape))?;
            }
            self.affine.add(context, grad_weight, grad_bias)
        })
    }
}

#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    positions: usize,
    channels: usize,
    groups: usize,
}

#[cfg(feature = "cuda")]
impl From<Size> for cuda::norm::Groups {
    fn from(Size { batch, positions, channels, groups }: Size) -> Self {
        Self { batch, positions, channels, groups }
    }
}

/// A few positions of one sample.
struct Block {
    sample: usize,
    /// Index among all blocks of all samples.
    index: usize,
    /// Where its elements are.
    elements: Range<usize>,
}

impl Size {
    fn group_width(self) -> usize {
        self.channels / self.groups
    }

    fn block_positions(self) -> usize {
        rows::rows_per_block(self.channels)
    }

    fn blocks_per_sample(self) -> usize {
        if self.channels == 0 { 0 } else { self.positions.div_ceil(self.block_positions()) }
    }

    fn blocks(self) -> usize {
        self.batch * self.blocks_per_sample()
    }

    fn block(self, index: usize) -> Block {
        let sample = index / self.blocks_per_sample();
        let first = index % self.blocks_per_sample() * self.block_positions();
        let last = self.positions.min(first + self.block_positions());
        let position = sample * self.positions;
        Block { sample, index, elements: (position + first) * self.channels..(position + last) * self.channels }
    }

    /// Calls `f` for each block, on several threads.
    fn for_each_block(self, f: impl Fn(Block) + Sync) {
        // Small samples are handed out together.
        let sample = (self.positions * self.channels).max(1);
        let grain = if self.blocks_per_sample() > 1 { 1 } else { rows::rows_per_block(sample) };
        par_ranges(self.blocks(), grain, |range| range.for_each(|index| f(self.block(index))));
    }

    /// A new buffer in the shape of the input, which `write` fills block by block.
    ///
    /// # Safety
    /// `write` must initialise every element that it is given.
    unsafe fn fill<T: Elem>(self, write: impl Fn(Block, &mut [MaybeUninit<T>]) + Sync) -> Vec<T> {
        let total = self.batch * self.positions * self.channels;
        let mut result = Vec::with_capacity(total);
        let shared = SharedMut::new(&mut result.spare_capacity_mut()[..total]);
        self.for_each_block(|block| {
            // SAFETY: blocks do not overlap.
            let out = unsafe { shared.slice(block.elements.clone()) };
            write(block, out);
        });
        // SAFETY: the blocks cover everything, and `write` has initialised all of it.
        unsafe { result.set_len(total) };
        result
    }
}

/// `value(group of the sample, channel)` for each channel of each sample.
fn channel_table<R: Real>(size: Size, value: impl Fn(usize, usize) -> R) -> Vec<R> {
    let of_sample = |sample| (0..size.channels).map(move |channel| (sample * size.groups, channel));
    (0..size.batch)
        .flat_map(of_sample)
        .map(|(first_group, channel)| value(first_group + channel / size.group_width(), channel))
        .collect()
}
