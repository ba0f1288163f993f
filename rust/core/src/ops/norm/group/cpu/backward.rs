//! The gradients of group norm on the CPU, in three steps: sums over the positions of each channel; weighted sums of
//! these sums over the channels of each group; the gradient of the input.
//!
//! Tensors are (batch, positions, channels), in this order in memory. A block is a range of positions of one sample;
//! threads process different blocks.

use super::{Size, channel_table};
use crate::cpu::pool::SharedMut;
use crate::cpu::{Binary, Elem, Real, dispatch};
use crate::ops::activation::Silu;

/// What the backward pass reads. `mean` and `rstd` are (batch, groups).
pub(super) struct BackwardPass<'a, T: Elem> {
    pub size: Size,
    pub x: &'a [T],
    /// The gradient of the operation's result.
    pub grad: &'a [T],
    /// The mean of each group of each sample.
    pub mean: &'a [T::Acc],
    /// 1/√(var + eps) of each group of each sample.
    pub rstd: &'a [T::Acc],
    /// The scale of each channel.
    pub weight: &'a [T::Acc],
    /// The shift of each channel.
    pub bias: &'a [T::Acc],
}

/// Returns the gradient of one element of the norm's result, from `g`, the gradient of this element of the operation's
/// result. With `SILU`, the operation is SiLU of the norm. `factor` is rstd times the channel's weight.
#[inline(always)]
fn grad_of_norm<T: Elem, const SILU: bool>(g: T, x: T, mean: T::Acc, factor: T::Acc, bias: T::Acc) -> T::Acc {
    let g = g.to_acc();
    // `Silu.apply(g, y)` is g times the derivative of SiLU at y, here at the result of the norm.
    if SILU { Silu.apply(g, (x.to_acc() - mean).mul_add(factor, bias)) } else { g }
}

impl<T: Elem> BackwardPass<'_, T> {
    /// Returns the gradient of the input (empty if not wanted), and the gradients of scale and shift.
    pub fn run<const SILU: bool>(&self, wants_input: bool) -> (Vec<T>, [Vec<T::Acc>; 2]) {
        // `channel_table` makes (batch, channels). Its `group` counts the groups of all samples.
        let means = channel_table(self.size, |group, _| self.mean[group]);
        let factors = channel_table(self.size, |group, channel| self.rstd[group] * self.weight[channel]);
        let [dots, sums] = self.channel_sums::<SILU>(&means, &factors);
        let grad_x = if wants_input { self.input_gradient::<SILU>(&means, &factors, &dots, &sums) } else { Vec::new() };
        let sum_over_samples = |table: &[T::Acc]| {
            let mut total = vec![T::Acc::ZERO; self.size.channels];
            for sample in table.chunks_exact(self.size.channels.max(1)) {
                for (t, s) in total.iter_mut().zip(sample) {
                    *t += *s;
                }
            }
            total
        };
        (grad_x, [sum_over_samples(&dots), sum_over_samples(&sums)])
    }

    /// Returns Σ g (x - mean) rstd and Σ g over the positions, for each channel of each sample; g is the gradient of
    /// the norm's result. `means` and `factors` (rstd · weight) have a value for each channel of each sample.
    fn channel_sums<const SILU: bool>(&self, means: &[T::Acc], factors: &[T::Acc]) -> [Vec<T::Acc>; 2] {
        let size @ Size { channels, .. } = self.size;
        // For each block: Σ g (x - mean) by channel, then Σ g by channel.
        let mut partial = vec![T::Acc::ZERO; size.blocks() * 2 * channels];
        let shared = SharedMut::new(&mut partial);
        size.for_each_block(|block| {
            // SAFETY: each block writes its own range of `partial`.
            let partial = unsafe { shared.slice(block.index * 2 * channels..(block.index + 1) * 2 * channels) };
            let (dots, sums) = partial.split_at_mut(channels);
            let of_sample = block.sample * channels..(block.sample + 1) * channels;
            let (means, factors) = (&means[of_sample.clone()], &factors[of_sample]);
            let (x, g) = (&self.x[block.elements.clone()], &self.grad[block.elements]);
            let rows = x.chunks_exact(channels).zip(g.chunks_exact(channels));
            dispatch(
                #[inline(always)]
                || {
                    for (x, g) in rows {
                        let totals = dots.iter_mut().zip(sums.iter_mut());
                        let constants = means.iter().zip(factors).zip(self.bias);
                        for (((dot, sum), ((mean, factor), bias)), (x, g)) in totals.zip(constants).zip(x.iter().zip(g))
                        {
                            let g = grad_of_norm::<T, SILU>(*g, *x, *mean, *factor, *bias);
                            *dot += g * (x.to_acc() - *mean);
                            *sum += g;
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
        // The first table has Σ g (x - mean) so far; rstd multiplies these sums only now, once for each channel.
        let rstds = channel_table(size, |group, _| self.rstd[group]);
        for (dot, rstd) in tables[0].iter_mut().zip(&rstds) {
            *dot *= *rstd;
        }
        tables
    }

    /// Computes rstd (g w - mean(g w) - x̂ mean(g w x̂)), where g is the gradient of the norm's result, w the weight
    /// and x̂ = (x - mean) rstd. mean(g w) and mean(g w x̂) are means over a group's elements: Σ w · `sums` and Σ w ·
    /// `dots` over the group's channels, divided by the number of elements. `dots` and `sums` are the results of
    /// [`channel_sums`](Self::channel_sums).
    fn input_gradient<const SILU: bool>(
        &self,
        means: &[T::Acc],
        factors: &[T::Acc],
        dots: &[T::Acc],
        sums: &[T::Acc],
    ) -> Vec<T> {
        let size @ Size { channels, .. } = self.size;
        let width = size.group_width();
        // The number of elements of a group.
        let count = T::Acc::from_f64((size.positions * width) as f64);
        // `table` has a row of channels for each sample, so its pieces of `width` values are the groups of all samples.
        let group_means = |table: &[T::Acc]| -> Vec<T::Acc> {
            let groups = table.chunks_exact(width.max(1)).enumerate();
            groups
                .map(|(group, values)| {
                    let weight = &self.weight[group % size.groups * width..];
                    values.iter().zip(weight).map(|(v, w)| *v * *w).sum::<T::Acc>() / count
                })
                .collect()
        };
        let (mean_dots, mean_sums) = (group_means(dots), group_means(sums));
        // The gradient is factor g - b (x - mean) - c. The tables b and c have one value for each channel of each
        // sample.
        let b = channel_table(size, |group, _| self.rstd[group] * self.rstd[group] * mean_dots[group]);
        let c = channel_table(size, |group, _| self.rstd[group] * mean_sums[group]);
        // SAFETY: every element of a block is written.
        unsafe {
            size.fill(|block, out| {
                let of_sample = block.sample * channels..(block.sample + 1) * channels;
                let [means, factors, b, c] = [means, factors, &b, &c].map(|values| &values[of_sample.clone()]);
                let (x, g) = (&self.x[block.elements.clone()], &self.grad[block.elements]);
                let rows = x.chunks_exact(channels).zip(g.chunks_exact(channels)).zip(out.chunks_exact_mut(channels));
                dispatch(
                    #[inline(always)]
                    || {
                        for ((x, g), out) in rows {
                            let of_forward = means.iter().zip(factors).zip(self.bias);
                            let constants = of_forward.zip(b.iter().zip(c));
                            let values = out.iter_mut().zip(x.iter().zip(g));
                            for ((o, (x, g)), (((mean, factor), bias), (b, c))) in values.zip(constants) {
                                let g = grad_of_norm::<T, SILU>(*g, *x, *mean, *factor, *bias);
                                o.write(T::from_acc(g * *factor - (x.to_acc() - *mean) * *b - *c));
                            }
                        }
                    },
                );
            })
        }
    }
}
