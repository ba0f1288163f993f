//! Group norm (Wu & He 2018, arXiv:1803.08494) of channels that come last.
//!
//! A sample is walked in blocks of positions that fit in the cache. Blocks give sums for each channel, groups are sums of
//! channels, and the means and squared deviations of blocks are joined by Chan's formula, so that one pass over memory suffices
//! and nothing cancels.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Affine, SavedAffine};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, contiguous, dispatch, elements, read_all};
use crate::ops::rows;
use crate::raw::from_vec;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, dispatch_float};

pub(super) static GROUP_NORM: OpInfo = OpInfo::cheap("group_norm");

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
    let op = GROUP_NORM.name;
    let &[batch, ref positions @ .., channels] = x.dims() else {
        return Err(Error::shape(op, format!("the input has shape {:?}, expected (batch, ..., channels)", x.dims())));
    };
    if groups == 0 || channels % groups != 0 {
        return Err(Error::argument(op, format!("{channels} channels cannot be split into {groups} equal groups")));
    }
    let size = Size { batch, positions: positions.iter().product(), channels, groups };
    let affine = Affine::new(op, x, weight, bias, &[channels])?;
    record_with_aux(
        &GROUP_NORM,
        &affine.inputs(x),
        || {
            let raw = contiguous(&x.raw)?;
            dispatch_float!(x.dtype(), op, T => {
                let (weight, bias) = (affine.scale(channels)?, affine.shift(channels)?);
                let (y, statistics) = read_all(op, &[&raw], |operands| {
                    let x = elements::<T>(operands[0])?;
                    let statistics = statistics(size, x, Real::from_f64(eps));
                    Ok((forward(size, x, &statistics, &weight, &bias), statistics))
                })?;
                let statistics = [statistics.mean, statistics.rstd];
                let statistics = statistics.into_iter().map(|values| from_vec(values, (batch, groups))).collect();
                Ok((from_vec(y, x.shape()), statistics))
            })
        },
        |saver, _, statistics| GroupNormBackward {
            size,
            // The gradient of the shift alone reads nothing.
            reads: (saver.needs(0) || affine.weight.is_some() && saver.needs(1)).then(|| Reads {
                x: saver.save(x),
                mean: saver.save_raw(&statistics[0]),
                rstd: saver.save_raw(&statistics[1]),
            }),
            affine: affine.save(saver),
        },
    )
}

#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    positions: usize,
    channels: usize,
    groups: usize,
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

/// Mean and 1/√(var + eps) of each group of each sample.
struct Statistics<R> {
    mean: Vec<R>,
    rstd: Vec<R>,
}

/// Adds `f(x, constant of the channel)` of each element to the sum of its channel.
#[inline(always)]
fn add_to_channels<T: Elem>(x: &[T], constants: &[T::Acc], sums: &mut [T::Acc], f: impl Fn(T::Acc, T::Acc) -> T::Acc) {
    for row in x.chunks_exact(sums.len()) {
        for (sum, (x, c)) in sums.iter_mut().zip(row.iter().zip(constants)) {
            *sum += f(x.to_acc(), *c);
        }
    }
}

fn statistics<T: Elem>(size: Size, x: &[T], eps: T::Acc) -> Statistics<T::Acc> {
    let Size { channels, groups, .. } = size;
    let width = size.group_width();
    // Mean and sum of squared deviations of each group in each block.
    let mut partial = vec![(0.0, 0.0); size.blocks() * groups];
    let shared = SharedMut::new(&mut partial);
    size.for_each_block(|block| {
        // SAFETY: each block has its own part.
        let partial = unsafe { shared.slice(block.index * groups..(block.index + 1) * groups) };
        let x = &x[block.elements];
        let count = (x.len() / groups) as f64;
        let mut sums = vec![T::Acc::ZERO; channels];
        let mut means = vec![T::Acc::ZERO; channels];
        dispatch(
            #[inline(always)]
            || add_to_channels(x, &means, &mut sums, |x, _| x),
        );
        let of_group = |sums: &[T::Acc]| sums.iter().map(|sum| sum.to_f64()).sum::<f64>();
        for ((mean, _), (sums, means)) in partial.iter_mut().zip(sums.chunks_exact(width).zip(means.chunks_exact_mut(width))) {
            *mean = of_group(sums) / count;
            means.fill(T::Acc::from_f64(*mean));
        }
        sums.fill(T::Acc::ZERO);
        dispatch(
            #[inline(always)]
            || {
                add_to_channels(x, &means, &mut sums, |x, mean| {
                    let d = x - mean;
                    d * d
                });
            },
        );
        for ((_, squares), sums) in partial.iter_mut().zip(sums.chunks_exact(width)) {
            *squares = of_group(sums);
        }
    });
    let mut result = Statistics { mean: Vec::new(), rstd: Vec::new() };
    for sample in 0..size.batch {
        for group in 0..groups {
            let (mut count, mut mean, mut squares) = (0.0, 0.0, 0.0);
            for index in 0..size.blocks_per_sample() {
                let block = size.block(sample * size.blocks_per_sample() + index);
                let more = (block.elements.len() / groups) as f64;
                let (block_mean, block_squares) = partial[block.index * groups + group];
                let (total, distance) = (count + more, block_mean - mean);
                mean += distance * more / total;
                squares += block_squares + distance * distance * count * more / total;
                count = total;
            }
            result.mean.push(T::Acc::from_f64(mean));
            result.rstd.push(T::Acc::from_f64(1.0 / (squares / count.max(1.0) + eps.to_f64()).sqrt()));
        }
    }
    result
}

/// `value(group of the sample, channel)` for each channel of each sample.
fn channel_table<R: Real>(size: Size, value: impl Fn(usize, usize) -> R) -> Vec<R> {
    let of_sample = |sample| (0..size.channels).map(move |channel| (sample * size.groups, channel));
    (0..size.batch)
        .flat_map(of_sample)
        .map(|(first_group, channel)| value(first_group + channel / size.group_width(), channel))
        .collect()
}

fn forward<T: Elem>(
    size: Size,
    x: &[T],
    statistics: &Statistics<T::Acc>,
    weight: &[T::Acc],
    bias: &[T::Acc],
) -> Vec<T> {
    let channels = size.channels;
    let means = channel_table(size, |group, _| statistics.mean[group]);
    let scales = channel_table(size, |group, channel| statistics.rstd[group] * weight[channel]);
    // SAFETY: every element of a block is written.
    unsafe {
        size.fill(|block, out| {
            let table = block.sample * channels..(block.sample + 1) * channels;
            let (x, means, scales) = (&x[block.elements], &means[table.clone()], &scales[table]);
            dispatch(
                #[inline(always)]
                || {
                    for (x, out) in x.chunks_exact(channels).zip(out.chunks_exact_mut(channels)) {
                        let constants = means.iter().zip(scales).zip(bias);
                        for ((o, x), ((mean, scale), bias)) in out.iter_mut().zip(x).zip(constants) {
                            o.write(T::from_acc((x.to_acc() - *mean).mul_add(*scale, *bias)));
                        }
                    }
                },
            );
        })
    }
}

struct GroupNormBackward {
    size: Size,
    reads: Option<Reads>,
    affine: SavedAffine,
}

struct Reads {
    x: Saved,
    mean: Saved,
    rstd: Saved,
}

impl Backward for GroupNormBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let size = self.size;
        let rows = size.batch * size.positions;
        let Some(Reads { x, mean, rstd }) = &self.reads else {
            return self.affine.add_shift_only(context, &context.grad().reshape((rows, size.channels))?);
        };
        let x = x.get()?;
        let shape = x.shape().clone();
        let x = contiguous(&x)?;
        let (mean, rstd) = (mean.get()?, rstd.get()?);
        let grad = contiguous(context.grad())?;
        dispatch_float!(x.dtype(), GROUP_NORM.name, T => {
            let weight = self.affine.scale(size.channels)?;
            let wants_input = context.needs(0);
            let (grad_x, [grad_weight, grad_bias]) =
                read_all(GROUP_NORM.name, &[&x, &grad, &mean, &rstd], |operands| {
                    let pass = BackwardPass::<T> {
                        size,
                        x: elements(operands[0])?,
                        grad: elements(operands[1])?,
                        mean: elements(operands[2])?,
                        rstd: elements(operands[3])?,
                        weight: &weight,
                    };
                    Ok(pass.run(wants_input))
                })?;
            if wants_input {
                context.add(0, from_vec(grad_x, shape))?;
            }
            self.affine.add(context, grad_weight, grad_bias)
        })
    }
}

struct BackwardPass<'a, T: Elem> {
    size: Size,
    x: &'a [T],
    grad: &'a [T],
    mean: &'a [T::Acc],
    rstd: &'a [T::Acc],
    weight: &'a [T::Acc],
}

impl<T: Elem> BackwardPass<'_, T> {
    /// The gradients of the input (empty if not wanted) and of scale and shift.
    fn run(&self, wants_input: bool) -> (Vec<T>, [Vec<T::Acc>; 2]) {
        let means = channel_table(self.size, |group, _| self.mean[group]);
        let [dots, sums] = self.channel_sums(&means);
        let grad_x = if wants_input { self.input_gradient(&means, &dots, &sums) } else { Vec::new() };
        let over_samples = |table: &[T::Acc]| {
            let mut total = vec![T::Acc::ZERO; self.size.channels];
            for sample in table.chunks_exact(self.size.channels.max(1)) {
                for (t, s) in total.iter_mut().zip(sample) {
                    *t += *s;
                }
            }
            total
        };
        (grad_x, [over_samples(&dots), over_samples(&sums)])
    }

    /// Σ g (x - mean) rstd and Σ g over the positions, for each channel of each sample.
    fn channel_sums(&self, means: &[T::Acc]) -> [Vec<T::Acc>; 2] {
        let size @ Size { channels, .. } = self.size;
        let mut partial = vec![T::Acc::ZERO; size.blocks() * 2 * channels];
        let shared = SharedMut::new(&mut partial);
        size.for_each_block(|block| {
            // SAFETY: each block has its own part.
            let partial = unsafe { shared.slice(block.index * 2 * channels..(block.index + 1) * 2 * channels) };
            let (dots, sums) = partial.split_at_mut(channels);
            let means = &means[block.sample * channels..(block.sample + 1) * channels];
            let (x, g) = (&self.x[block.elements.clone()], &self.grad[block.elements]);
            dispatch(
                #[inline(always)]
                || {
                    for (x, g) in x.chunks_exact(channels).zip(g.chunks_exact(channels)) {
                        let sums = dots.iter_mut().zip(sums.iter_mut());
                        for (((dot, sum), mean), (x, g)) in sums.zip(means).zip(x.iter().zip(g)) {
                            *dot += g.to_acc() * (x.to_acc() - *mean);
                            *sum += g.to_acc();
                        }
                    }
                },
            );
        });
        let mut tables = [0, 1].map(|_| vec![T::Acc::ZERO; size.batch * channels]);
        for index in 0..size.blocks() {
            let start = size.block(index).sample * channels;
            let partial = &partial[index * 2 * channels..(index + 1) * 2 * channels];
            for (table, partial) in tables.iter_mut().zip(partial.chunks_exact(channels)) {
                for (t, p) in table[start..start + channels].iter_mut().zip(partial) {
                    *t += *p;
                }
            }
        }
        let rstds = channel_table(size, |group, _| self.rstd[group]);
        for (dot, rstd) in tables[0].iter_mut().zip(&rstds) {
            *dot *= *rstd;
        }
        tables
    }

    /// rstd (g w - mean(g w) - x̂ mean(g w x̂)) with the means over a group, from the sums over the channels.
    fn input_gradient(&self, means: &[T::Acc], dots: &[T::Acc], sums: &[T::Acc]) -> Vec<T> {
        let size @ Size { channels, .. } = self.size;
        let width = size.group_width();
        let count = T::Acc::from_f64((size.positions * width) as f64);
        let of_groups = |table: &[T::Acc]| -> Vec<T::Acc> {
            let groups = table.chunks_exact(width.max(1)).enumerate();
            groups
                .map(|(group, values)| {
                    let weight = &self.weight[group % size.groups * width..];
                    values.iter().zip(weight).map(|(v, w)| *v * *w).sum::<T::Acc>() / count
                })
                .collect()
        };
        let (mean_dots, mean_sums) = (of_groups(dots), of_groups(sums));
        // The gradient is a g - b (x - mean) - c with these for each channel.
        let a = channel_table(size, |group, channel| self.rstd[group] * self.weight[channel]);
        let b = channel_table(size, |group, _| self.rstd[group] * self.rstd[group] * mean_dots[group]);
        let c = channel_table(size, |group, _| self.rstd[group] * mean_sums[group]);
        // SAFETY: every element of a block is written.
        unsafe {
            size.fill(|block, out| {
                let table = block.sample * channels..(block.sample + 1) * channels;
                let [means, a, b, c] = [means, &a, &b, &c].map(|values| &values[table.clone()]);
                let (x, g) = (&self.x[block.elements.clone()], &self.grad[block.elements]);
                dispatch(
                    #[inline(always)]
                    || {
                        let rows = x.chunks_exact(channels).zip(g.chunks_exact(channels));
                        for ((x, g), out) in rows.zip(out.chunks_exact_mut(channels)) {
                            let constants = means.iter().zip(a).zip(b.iter().zip(c));
                            for ((o, (x, g)), ((mean, a), (b, c))) in out.iter_mut().zip(x.iter().zip(g)).zip(constants) {
                                o.write(T::from_acc(g.to_acc() * *a - (x.to_acc() - *mean) * *b - *c));
                            }
                        }
                    },
                );
            })
        }
    }
}
