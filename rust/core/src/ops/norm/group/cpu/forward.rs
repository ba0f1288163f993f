//! The forward pass of group norm on the CPU: its statistics and its result. Tensors are (batch, positions, channels),
//! and a block is a range of neighbouring positions of one sample.

use super::{Size, channel_table};
use crate::cpu::pool::SharedMut;
use crate::cpu::{Elem, Real, Unary, dispatch};
use crate::ops::activation::Silu;

/// Mean and 1/√(var + eps) of each group of each sample, (batch, groups).
pub(super) struct Statistics<R> {
    pub mean: Vec<R>,
    pub rstd: Vec<R>,
}

/// Adds `f(element, constants[channel])` to `sums[channel]` for each element of `x`, whose channels are last.
#[inline(always)]
fn add_to_channels<T: Elem>(x: &[T], constants: &[T::Acc], sums: &mut [T::Acc], f: impl Fn(T::Acc, T::Acc) -> T::Acc) {
    for row in x.chunks_exact(sums.len()) {
        for (sum, (x, c)) in sums.iter_mut().zip(row.iter().zip(constants)) {
            *sum += f(x.to_acc(), *c);
        }
    }
}

/// Computes the statistics of each group in two steps: means and squared deviations of the blocks, on several threads;
/// then, in f64, those of all blocks of a sample together (Chan's formula).
pub(super) fn statistics<T: Elem>(size: Size, x: &[T], eps: T::Acc) -> Statistics<T::Acc> {
    let Size { channels, groups, .. } = size;
    let width = size.group_width();
    // For each block and group: the mean, and the sum of squared deviations from this mean.
    let mut partial = vec![(0.0, 0.0); size.blocks() * groups];
    let shared = SharedMut::new(&mut partial);
    size.for_each_block(|block| {
        // SAFETY: each block writes its own range of `partial`.
        let partial = unsafe { shared.slice(block.index * groups..(block.index + 1) * groups) };
        let x = &x[block.elements];
        let count = (x.len() / groups) as f64; // the elements of each group in this block
        let mut sums = vec![T::Acc::ZERO; channels];
        let mut means = vec![T::Acc::ZERO; channels];
        dispatch(
            #[inline(always)]
            // `means` is not set yet: these sums do not use it.
            || add_to_channels(x, &means, &mut sums, |x, _| x),
        );
        let sum_channels = |sums: &[T::Acc]| sums.iter().map(|sum| sum.to_f64()).sum::<f64>();
        for ((mean, _), (sums, means)) in
            partial.iter_mut().zip(sums.chunks_exact(width).zip(means.chunks_exact_mut(width)))
        {
            *mean = sum_channels(sums) / count;
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
            *squares = sum_channels(sums);
        }
    });
    // `squares` below are sums of squared deviations.
    let mut result = Statistics { mean: Vec::new(), rstd: Vec::new() };
    for sample in 0..size.batch {
        for group in 0..groups {
            let (mut count, mut mean, mut squares) = (0.0, 0.0, 0.0);
            for index in 0..size.blocks_per_sample() {
                let block = size.block(sample * size.blocks_per_sample() + index);
                let block_count = (block.elements.len() / groups) as f64;
                let (block_mean, block_squares) = partial[block.index * groups + group];
                let (total, distance) = (count + block_count, block_mean - mean);
                mean += distance * block_count / total;
                squares += block_squares + distance * distance * count * block_count / total;
                count = total;
            }
            result.mean.push(T::Acc::from_f64(mean));
            result.rstd.push(T::Acc::from_f64(1.0 / (squares / count.max(1.0) + eps.to_f64()).sqrt()));
        }
    }
    result
}

/// Returns the norm of `x` with scale and shift, followed by SiLU if `SILU`.
pub(super) fn forward<T: Elem, const SILU: bool>(
    size: Size,
    x: &[T],
    statistics: &Statistics<T::Acc>,
    weight: &[T::Acc],
    bias: &[T::Acc],
) -> Vec<T> {
    let channels = size.channels;
    // (batch, channels); `group` counts the groups of all samples.
    let means = channel_table(size, |group, _| statistics.mean[group]);
    let factors = channel_table(size, |group, channel| statistics.rstd[group] * weight[channel]);
    // SAFETY: every element of a block is written.
    unsafe {
        size.fill(|block, out| {
            let of_sample = block.sample * channels..(block.sample + 1) * channels;
            let (x, means, factors) = (&x[block.elements], &means[of_sample.clone()], &factors[of_sample]);
            let rows = x.chunks_exact(channels).zip(out.chunks_exact_mut(channels));
            dispatch(
                #[inline(always)]
                || {
                    for (x, out) in rows {
                        let constants = means.iter().zip(factors).zip(bias);
                        for ((o, x), ((mean, factor), bias)) in out.iter_mut().zip(x).zip(constants) {
                            let y = (x.to_acc() - *mean).mul_add(*factor, *bias);
                            o.write(T::from_acc(if SILU { Silu.apply(y) } else { y }));
                        }
                    }
                },
            );
        })
    }
}
