//! The CPU form of the group norm. Tensors are (batch, positions, channels), with the channels next to each other in
//! memory.
//!
//! A sample is processed in blocks of positions that fit in the cache. Within a block, elements are summed by channel,
//! then the sums of a group's channels are added. Chan's formula joins the means and the sums of squared deviations of
//! a sample's blocks. So the statistics read x from memory once, and do not lose digits to cancellation.

mod backward;
mod forward;

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Affine, GroupNormBackward, Size};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, elements, read_all};
use crate::ops::rows;
use crate::raw::from_vec;
use crate::tape::{Aux, BackwardContext};
use crate::{Raw, Result, dispatch_float};
use backward::BackwardPass;

/// Returns the norm of a dense tensor, followed by SiLU if `SILU`; and 1/√(var + eps) and the mean of each group, each
/// (batch, groups).
pub(super) fn forward<const SILU: bool>(
    op: &'static str,
    raw: &Raw,
    size: Size,
    affine: &Affine<'_>,
    eps: f64,
) -> Result<(Raw, Aux)> {
    dispatch_float!(raw.dtype(), op, T => {
        let (weight, bias) = (affine.scale(size.channels)?, affine.shift(size.channels)?);
        let (y, [rstd, mean]) = read_all(op, &[raw], |operands| {
            let x = elements::<T>(operands[0])?;
            let statistics = forward::statistics(size, x, Real::from_f64(eps));
            let y = forward::forward::<T, SILU>(size, x, &statistics, &weight, &bias);
            Ok((y, [statistics.rstd, statistics.mean]))
        })?;
        let statistics = [rstd, mean].into_iter().map(|values| from_vec(values, (size.batch, size.groups))).collect();
        Ok((from_vec(y, raw.shape()), statistics))
    })
}

/// Adds those gradients of `x`, scale (`weight`) and shift (`bias`) that are needed. The tensors are dense.
pub(super) fn backward<const SILU: bool>(
    norm: &GroupNormBackward<SILU>,
    context: &mut BackwardContext<'_>,
    [x, grad, mean, rstd]: [&Raw; 4],
) -> Result<()> {
    let size = norm.size;
    dispatch_float!(x.dtype(), norm.op, T => {
        let (weight, bias) = (norm.affine.scale(size.channels)?, norm.affine.shift(size.channels)?);
        // Input 0 is x.
        let wants_input = context.needs(0);
        let (grad_x, [grad_weight, grad_bias]) =
            read_all(norm.op, &[x, grad, mean, rstd], |operands| {
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
            context.add(0, from_vec(grad_x, x.shape()))?;
        }
        norm.affine.add(context, grad_weight, grad_bias)
    })
}

/// A range of neighbouring positions of one sample.
struct Block {
    sample: usize,
    /// Index among the blocks of all samples.
    index: usize,
    /// The range of the block's elements in the tensor.
    elements: Range<usize>,
}

impl Size {
    /// The number of channels of a group.
    fn group_width(self) -> usize {
        self.channels / self.groups
    }

    /// The number of positions of a block; the last block of a sample may have fewer.
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
        let end = self.positions.min(first + self.block_positions());
        let sample_start = sample * self.positions;
        let elements = (sample_start + first) * self.channels..(sample_start + end) * self.channels;
        Block { sample, index, elements }
    }

    /// Calls `f` for each block, on several threads.
    fn for_each_block(self, f: impl Fn(Block) + Sync) {
        // If each sample is one block, a thread takes several blocks at a time.
        let sample_len = self.positions * self.channels;
        let grain = if self.blocks_per_sample() > 1 { 1 } else { rows::rows_per_block(sample_len) };
        par_ranges(self.blocks(), grain, |range| range.for_each(|index| f(self.block(index))));
    }

    /// Returns a new buffer of the input's size, which `write` fills block by block.
    ///
    /// # Safety
    /// `write` must initialise every element of the slice that it is given.
    unsafe fn fill<T: Elem>(self, write: impl Fn(Block, &mut [MaybeUninit<T>]) + Sync) -> Vec<T> {
        let total = self.batch * self.positions * self.channels;
        let mut result = Vec::with_capacity(total);
        let shared = SharedMut::new(&mut result.spare_capacity_mut()[..total]);
        self.for_each_block(|block| {
            // SAFETY: blocks do not overlap.
            let out = unsafe { shared.slice(block.elements.clone()) };
            write(block, out);
        });
        // SAFETY: the blocks cover all elements, and `write` has initialised every one of them.
        unsafe { result.set_len(total) };
        result
    }
}

/// Returns `value(group, channel)` for each channel of each sample, (batch, channels). `group` is the index of the
/// channel's group among the groups of all samples.
fn channel_table<R: Real>(size: Size, value: impl Fn(usize, usize) -> R) -> Vec<R> {
    let of_sample = |sample| (0..size.channels).map(move |channel| (sample * size.groups, channel));
    (0..size.batch)
        .flat_map(of_sample)
        .map(|(first_group, channel)| value(first_group + channel / size.group_width(), channel))
        .collect()
}
