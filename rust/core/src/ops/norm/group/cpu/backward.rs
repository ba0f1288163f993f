//! The gradients of group norm, in three steps: sums over the positions for each channel; sums of these channel sums
//! over the channels of each group; the gradient of the input.

use super::{Size, channel_table};
use crate::cpu::pool::SharedMut;
use crate::cpu::{Binary, Elem, Real, dispatch};
use crate::ops::activation::Silu;

pub(super) struct BackwardPass<'a, T: Elem> {
    pub size: Size,
    pub x: &'a [T],
    pub grad: &'a [T],
    pub mean: &'a [T::Acc],
    pub rstd: &'a [T::Acc],
    pub weight: &'a [T::Acc],
    pub bias: &'a [T::Acc],
}

/// The gradient of one element of the norm's result, from `g`, the gradient of the same element of the operation's
/// result. With `SILU`, the operation is SiLU of the norm. `scale` is rstd times the channel's weight.
#[inline(always)]
fn of_norm<T: Elem, const SILU: bool>(g: T, x: T, mean: T::Acc, scale: T::Acc, bias: T::Acc) -> T::Acc {
    let g = g.to_acc();
    if SILU { Silu.apply(g, (x.to_acc() - mean).mul_add(scale, bias)) } else { g }
}

impl<T: Elem> BackwardPass<'_, T> {
    /// Returns the gradient of the input (empty if not wanted), and the gradients of scale and shift.
    pub fn run<const SILU: bool>(&self, wants_input: bool) -> (Vec<T>, [Vec<T::Acc>; 2]) {
        let means = channel_table(self.size, |group, _| self.mean[group]);
        let scales = channel_table(self.size, |group, channel| self.rstd[group] * self.weight[channel]);
        let [dots, sums] = self.channel_sums::<SILU>(&means, &scales);
        let grad_x = if wants_input { self.input_gradient::<SILU>(&means, &scales, &dots, &sums) } else { Vec::new() };
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
    fn channel_sums<const SILU: bool>(&self, means: &[T::Acc], scales: &[T::Acc]) -> [Vec<T::Acc>; 2] {
        let size @ Size { channels, .. } = self.size;
        let mut partial = vec![T::Acc::ZERO; size.blocks() * 2 * channels];
        let shared = SharedMut::new(&mut partial);
        size.for_each_block(|block| {
            // SAFETY: each block writes its own range of `partial`.
            let partial = unsafe { shared.slice(block.index * 2 * channels..(block.index + 1) * 2 * channels) };
            let (dots, sums) = partial.split_at_mut(channels);
            let table = block.sample * channels..(block.sample + 1) * channels;
            let (means, scales) = (&means[table.clone()], &scales[table]);
            let (x, g) = (&self.x[block.elements.clone()], &self.grad[block.elements]);
            let rows = x.chunks_exact(channels).zip(g.chunks_exact(channels));
            dispatch(
                #[inline(always)]
                || {
                    for (x, g) in rows {
                        let sums = dots.iter_mut().zip(sums.iter_mut());
                        let constants = means.iter().zip(scales).zip(self.bias);
                        for (((dot, sum), ((mean, scale), bias)), (x, g)) in sums.zip(constants).zip(x.iter().zip(g)) {
                            let g = of_norm::<T, SILU>(*g, *x, *mean, *scale, *bias);
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
        let rstds = channel_table(size, |group, _| self.rstd[group]);
        for (dot, rstd) in tables[0].iter_mut().zip(&rstds) {
            *dot *= *rstd;
        }
        tables
    }

    /// rstd (g w - mean(g w) - x̂ mean(g w x̂)), where g is the gradient of the norm's result, w the scale and x̂ the
    /// normalised input. The two means over a group's elements come from the channel sums: Σ over the group's channels
    /// of w · `dots` and of w · `sums`, divided by the number of elements.
    fn input_gradient<const SILU: bool>(
        &self,
        means: &[T::Acc],
        scales: &[T::Acc],
        dots: &[T::Acc],
        sums: &[T::Acc],
    ) -> Vec<T> {
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
        // The gradient is scale g - b (x - mean) - c, where scale = rstd w. The tables b and c have one value for each
        // channel of each sample.
        let b = channel_table(size, |group, _| self.rstd[group] * self.rstd[group] * mean_dots[group]);
        let c = channel_table(size, |group, _| self.rstd[group] * mean_sums[group]);
        // SAFETY: every element of a block is written.
        unsafe {
            size.fill(|block, out| {
                let table = block.sample * channels..(block.sample + 1) * channels;
                let [means, scales, b, c] = [means, scales, &b, &c].map(|values| &values[table.clone()]);
                let (x, g) = (&self.x[block.elements.clone()], &self.grad[block.elements]);
                let rows = x.chunks_exact(channels).zip(g.chunks_exact(channels)).zip(out.chunks_exact_mut(channels));
                dispatch(
                    #[inline(always)]
                    || {
                        for ((x, g), out) in rows {
                            let of_forward = means.iter().zip(scales).zip(self.bias);
                            let constants = of_forward.zip(b.iter().zip(c));
                            let values = out.iter_mut().zip(x.iter().zip(g));
                            for ((o, (x, g)), (((mean, scale), bias), (b, c))) in values.zip(constants) {
                                let g = of_norm::<T, SILU>(*g, *x, *mean, *scale, *bias);
                                o.write(T::from_acc(g * *scale - (x.to_acc() - *mean) * *b - *c));
                            }
                        }
                    },
                );
            })
        }
    }
}
