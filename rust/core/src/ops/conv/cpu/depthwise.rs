//! Depthwise convolutions on the CPU: each channel is convolved separately. The lanes of a SIMD vector are adjacent
//! channels.
//!
//! As in [`stencil`](super::stencil), a kernel tap is an element of the kernel's height x width. The source is what the
//! sums over the taps read, the target what they are written to: image and result in the forward pass, gradient of the
//! result and gradient of the image in the backward pass. A phase is a set of target positions that use the same taps.

use super::super::geometry::Geometry;
use super::patch::Axis;
use super::stencil::Stencil;
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, dispatch};
use crate::ops::rows::rows_per_block;

/// Number of channels whose weight gradients one thread sums at a time.
const CHANNELS: usize = 128;

/// The position in the source, along `axis`, that the position `target` in the target reads at the kernel tap with
/// `offset`; `None` if it reads the padding. A position is a line or a column; `target` is counted in its phase.
/// Neighbouring target positions of a phase read source positions at a distance of `axis.step`; the source has
/// `axis.source` positions.
fn source_position(axis: &Axis, target: usize, offset: isize) -> Option<usize> {
    usize::try_from((target * axis.step) as isize + offset).ok().filter(|&position| position < axis.source)
}

/// Computes the target (batch, height, width, channels) of a stencil in which each channel is a group. `weight` is
/// (channels, kernel taps).
pub(super) fn run<T: Elem>(
    stencil: &Stencil,
    geometry: &Geometry,
    source: &[T],
    weight: &[T],
    bias: Option<&[T]>,
) -> Vec<T::Acc> {
    let ([source_height, source_width, channels], [height, width, _]) = (stencil.source, stencil.target);
    let taps = geometry.kernel[0] * geometry.kernel[1];
    // The weight as (kernel taps, channels), so that the lanes of a vector are adjacent channels.
    let weight: Vec<T::Acc> =
        (0..taps * channels).map(|i| weight[i % channels * taps + i / channels].to_acc()).collect();
    let mut target = vec![T::Acc::ZERO; stencil.batch * height * width * channels];
    if let Some(bias) = bias {
        target.chunks_exact_mut(channels).for_each(|y| y.iter_mut().zip(bias).for_each(|(y, b)| *y = b.to_acc()));
    }
    let line_len = width * channels;
    let shared = SharedMut::new(&mut target);
    for [lines, columns] in &stencil.phases {
        let work = |index: usize| {
            // `line` and `column` are counted in the phase.
            let (image, line) = (index / lines.count, index % lines.count);
            let target_line = image * height + lines.first + line * lines.stride;
            // SAFETY: no two indices have the same line of the target.
            let target = unsafe { shared.slice(target_line * line_len..(target_line + 1) * line_len) };
            for (column, y) in target.chunks_exact_mut(channels).skip(columns.first).step_by(columns.stride).enumerate()
            {
                // A kernel tap of the phase is a line i of the kernel, from `lines.taps`, and a column j, from
                // `columns.taps`. Each of the two has an offset in the source.
                for &(i, offset) in &lines.taps {
                    let Some(source_line) = source_position(lines, line, offset) else { continue };
                    for &(j, offset) in &columns.taps {
                        let Some(source_column) = source_position(columns, column, offset) else { continue };
                        let pixel = (image * source_height + source_line) * source_width + source_column;
                        let x = &source[pixel * channels..(pixel + 1) * channels];
                        let tap = i * geometry.kernel[1] + j;
                        let terms = y.iter_mut().zip(x.iter().zip(&weight[tap * channels..(tap + 1) * channels]));
                        dispatch(
                            #[inline(always)]
                            || {
                                for (y, (x, w)) in terms {
                                    *y = x.to_acc().mul_add(*w, *y);
                                }
                            },
                        );
                    }
                }
            }
        };
        let block = rows_per_block(columns.count * channels * taps);
        par_ranges(stencil.batch * lines.count, block, |range| range.for_each(work));
    }
    target
}

/// Computes the gradient of the weight (channels, kernel taps), from `grad`, the gradient of the result, and the image
/// `x`.
pub(super) fn grad_weight<T: Elem>(geometry: &Geometry, grad: &[T], x: &[T]) -> Vec<T::Acc> {
    let stencil = Stencil::forward(geometry);
    // The forward pass has a single phase: the positions of the result.
    let [lines, columns] = &stencil.phases[0];
    let (channels, [height, width]) = (geometry.channels, geometry.input);
    let taps = geometry.kernel[0] * geometry.kernel[1];
    let mut result = vec![T::Acc::ZERO; channels * taps];
    let shared = SharedMut::new(&mut result);
    par_ranges(channels, CHANNELS, |range| {
        // The sums of the channels in `range`, as (kernel taps, channels), so that the lanes of a vector are adjacent
        // channels.
        let mut sums = vec![T::Acc::ZERO; taps * range.len()];
        for (index, g) in grad.chunks_exact(channels).enumerate() {
            let (image, line, column) =
                (index / columns.count / lines.count, index / columns.count % lines.count, index % columns.count);
            let g = &g[range.clone()];
            for &(i, offset) in &lines.taps {
                let Some(source_line) = source_position(lines, line, offset) else { continue };
                for &(j, offset) in &columns.taps {
                    let Some(source_column) = source_position(columns, column, offset) else { continue };
                    let pixel = (image * height + source_line) * width + source_column;
                    let x = &x[pixel * channels..(pixel + 1) * channels][range.clone()];
                    let tap = i * geometry.kernel[1] + j;
                    let terms = sums[tap * range.len()..(tap + 1) * range.len()].iter_mut().zip(x.iter().zip(g));
                    dispatch(
                        #[inline(always)]
                        || {
                            for (sum, (x, g)) in terms {
                                *sum = x.to_acc().mul_add(g.to_acc(), *sum);
                            }
                        },
                    );
                }
            }
        }
        // SAFETY: ranges of channels do not overlap.
        let range_result = unsafe { shared.slice(range.start * taps..range.end * taps) };
        for (channel, channel_result) in range_result.chunks_exact_mut(taps).enumerate() {
            for (tap, sum) in channel_result.iter_mut().enumerate() {
                *sum = sums[tap * range.len() + channel];
            }
        }
    });
    result
}
