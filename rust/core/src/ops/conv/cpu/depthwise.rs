//! Depthwise convolutions: each channel is convolved separately. The lanes of a SIMD vector are adjacent channels.
//! [`stencil`](super::stencil) explains what source, target and phase are.

use super::super::geometry::Geometry;
use super::patch::Axis;
use super::stencil::Stencil;
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, dispatch};
use crate::ops::rows::rows_per_block;

/// Number of channels whose weight gradients one thread sums at a time.
const CHANNELS: usize = 128;

/// The source position that target position `position` of the phase reads at the kernel tap with `offset`; `None` if it
/// is in the padding.
fn source_position(axis: &Axis, position: usize, offset: isize) -> Option<usize> {
    usize::try_from((position * axis.step) as isize + offset).ok().filter(|&found| found < axis.source)
}

/// The target (batch, height, width, channels) of a stencil in which each channel is a group.
pub(super) fn run<T: Elem>(
    stencil: &Stencil,
    geometry: &Geometry,
    source: &[T],
    weight: &[T],
    bias: Option<&[T]>,
) -> Vec<T::Acc> {
    let ([source_height, source_width, channels], [height, width, _]) = (stencil.source, stencil.target);
    let places = geometry.kernel[0] * geometry.kernel[1];
    let by_place: Vec<T::Acc> =
        (0..places * channels).map(|i| weight[i % channels * places + i / channels].to_acc()).collect();
    let mut target = vec![T::Acc::ZERO; stencil.batch * height * width * channels];
    if let Some(bias) = bias {
        target.chunks_exact_mut(channels).for_each(|y| y.iter_mut().zip(bias).for_each(|(y, b)| *y = b.to_acc()));
    }
    let line_len = width * channels;
    let shared = SharedMut::new(&mut target);
    for [lines, columns] in &stencil.phases {
        let work = |index: usize| {
            let (image, position) = (index / lines.count, index % lines.count);
            let line = image * height + lines.first + position * lines.stride;
            // SAFETY: no two indices have the same line of the target.
            let target = unsafe { shared.slice(line * line_len..(line + 1) * line_len) };
            for (column, y) in target.chunks_exact_mut(channels).skip(columns.first).step_by(columns.stride).enumerate()
            {
                for &(i, offset) in &lines.places {
                    let Some(line) = source_position(lines, position, offset) else { continue };
                    for &(j, offset) in &columns.places {
                        let Some(column) = source_position(columns, column, offset) else { continue };
                        let pixel = (image * source_height + line) * source_width + column;
                        let x = &source[pixel * channels..(pixel + 1) * channels];
                        let place = i * geometry.kernel[1] + j;
                        let terms = y.iter_mut().zip(x.iter().zip(&by_place[place * channels..(place + 1) * channels]));
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
        let block = rows_per_block(columns.count * channels * places);
        par_ranges(stencil.batch * lines.count, block, |range| range.for_each(work));
    }
    target
}

pub(super) fn grad_weight<T: Elem>(geometry: &Geometry, grad: &[T], x: &[T]) -> Vec<T::Acc> {
    let stencil = Stencil::forward(geometry);
    let [lines, columns] = &stencil.phases[0];
    let (channels, [height, width]) = (geometry.channels, geometry.input);
    let places = geometry.kernel[0] * geometry.kernel[1];
    let mut result = vec![T::Acc::ZERO; channels * places];
    let shared = SharedMut::new(&mut result);
    par_ranges(channels, CHANNELS, |range| {
        // The sums are (kernel taps, channels), so that the lanes of a vector are adjacent channels.
        let mut sums = vec![T::Acc::ZERO; places * range.len()];
        for (at, pixel) in grad.chunks_exact(channels).enumerate() {
            let (image, line, column) =
                (at / columns.count / lines.count, at / columns.count % lines.count, at % columns.count);
            let g = &pixel[range.clone()];
            for &(i, offset) in &lines.places {
                let Some(line) = source_position(lines, line, offset) else { continue };
                for &(j, offset) in &columns.places {
                    let Some(column) = source_position(columns, column, offset) else { continue };
                    let pixel = (image * height + line) * width + column;
                    let x = &x[pixel * channels..(pixel + 1) * channels][range.clone()];
                    let place = i * geometry.kernel[1] + j;
                    let terms = sums[place * range.len()..(place + 1) * range.len()].iter_mut().zip(x.iter().zip(g));
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
        let result = unsafe { shared.slice(range.start * places..range.end * places) };
        for (channel, result) in result.chunks_exact_mut(places).enumerate() {
            for (place, result) in result.iter_mut().enumerate() {
                *result = sums[place * range.len() + channel];
            }
        }
    });
    result
}
