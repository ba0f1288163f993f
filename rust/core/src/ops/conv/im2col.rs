//! Images to matrices of windows, and back.

use super::super::rows::rows_per_block;
use super::geometry::Geometry;
use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Elem, Real, dispatch};

/// The position in the image that place `k` of the kernel meets from position `o` of the result, if it is not padding.
#[inline(always)]
fn met(geometry: &Geometry, axis: usize, o: usize, k: usize) -> Option<usize> {
    let options = &geometry.options;
    (o * options.stride[axis] + k * options.dilation[axis])
        .checked_sub(options.padding[axis])
        .filter(|&i| i < geometry.input[axis])
}

/// Fill `columns`, rows of KH · KW · C / groups elements, with the windows of pixel `first` and those after it of the result,
/// in the channels of `group`.
pub(super) fn im2col<T: Elem>(columns: &mut [T], x: &[T], geometry: &Geometry, group: usize, first: usize) {
    let row_len = geometry.row_len();
    if row_len == 0 {
        return;
    }
    let rows = rows_per_block(row_len);
    par_chunks_mut(columns, rows * row_len, |piece, columns| {
        for (pixel, window) in (first + piece * rows..).zip(columns.chunks_exact_mut(row_len)) {
            copy_window(window, x, geometry, group, pixel);
        }
    });
}

/// Write what the window of one pixel of the result meets, zeros for padding.
fn copy_window<T: Elem>(window: &mut [T], x: &[T], geometry: &Geometry, group: usize, pixel: usize) {
    let ([output_height, output_width], [_, kernel_width]) = (geometry.output, geometry.kernel);
    let (channels, width) = (geometry.channels, geometry.channels_per_group());
    let (column, line) = (pixel % output_width, pixel / output_width);
    let (line, image) = (line % output_height, line / output_height);
    let zero = T::from_acc(T::Acc::ZERO);
    // Neighbouring places of the kernel meet neighbouring memory: a line of the window is one run.
    let runs = geometry.options.dilation[1] == 1 && geometry.groups() == 1;
    for (k, window) in window.chunks_exact_mut(kernel_width * width).enumerate() {
        let Some(i) = met(geometry, 0, line, k) else {
            window.fill(zero);
            continue;
        };
        let start = (image * geometry.input[0] + i) * geometry.input[1];
        if runs {
            let (left, padding) = (column * geometry.options.stride[1], geometry.options.padding[1]);
            let from = padding.saturating_sub(left).min(kernel_width);
            let to = (geometry.input[1] + padding).saturating_sub(left).min(kernel_width).max(from);
            window[..from * width].fill(zero);
            window[to * width..].fill(zero);
            if to > from {
                let start = (start + left + from - padding) * channels;
                window[from * width..to * width].copy_from_slice(&x[start..start + (to - from) * channels]);
            }
            continue;
        }
        for (k, window) in window.chunks_exact_mut(width).enumerate() {
            match met(geometry, 1, column, k) {
                Some(j) => {
                    let start = (start + j) * channels + group * width;
                    window.copy_from_slice(&x[start..start + width]);
                }
                None => window.fill(zero),
            }
        }
    }
}

/// Add to the image `x` what `columns`, laid out as by [`im2col`], hold for each of its pixels. Each pixel is summed by one
/// thread, in the order of the kernel's places.
pub(super) fn add_col2im<R: Real>(x: &mut [R], columns: &[R], geometry: &Geometry, group: usize, first: usize) {
    let height = geometry.input[0];
    let (line_len, row_len) = (geometry.input[1] * geometry.channels, geometry.row_len());
    let rows = columns.len() / row_len.max(1);
    if rows == 0 {
        return;
    }
    let per_image = geometry.output[0] * geometry.output[1];
    let (from, to) = (first / per_image, (first + rows - 1) / per_image + 1);
    let x = &mut x[from * height * line_len..to * height * line_len];
    let lines = rows_per_block(line_len);
    par_chunks_mut(x, lines * line_len, |piece, x| {
        for (line, x) in (piece * lines..).zip(x.chunks_exact_mut(line_len)) {
            let (image, i) = (from + line / height, line % height);
            dispatch(
                #[inline(always)]
                || add_line(x, columns, geometry, group, first, image, i),
            );
        }
    });
}

/// Add to line `i` of `image` what the windows that meet it hold.
#[inline(always)]
fn add_line<R: Real>(
    x: &mut [R],
    columns: &[R],
    geometry: &Geometry,
    group: usize,
    first: usize,
    image: usize,
    i: usize,
) {
    let ([output_height, output_width], [kernel_height, kernel_width]) = (geometry.output, geometry.kernel);
    let (channels, width, row_len) = (geometry.channels, geometry.channels_per_group(), geometry.row_len());
    let options = &geometry.options;
    let end = first + columns.len() / row_len;
    for k in 0..kernel_height {
        // The line of the result whose window meets line i at place k.
        let Some(steps) = (i + options.padding[0]).checked_sub(k * options.dilation[0]) else { continue };
        let line = steps / options.stride[0];
        if !steps.is_multiple_of(options.stride[0]) || line >= output_height {
            continue;
        }
        let start = (image * output_height + line) * output_width;
        for pixel in start.max(first)..(start + output_width).min(end) {
            let row = &columns[(pixel - first) * row_len + k * kernel_width * width..][..kernel_width * width];
            for (k, row) in row.chunks_exact(width).enumerate() {
                let Some(j) = met(geometry, 1, pixel - start, k) else { continue };
                let x = &mut x[j * channels + group * width..][..width];
                for (x, c) in x.iter_mut().zip(row) {
                    *x += *c;
                }
            }
        }
    }
}
