//! The CPU form of nearest-neighbour resizing. It works line by line; a line is one row of pixels of one image. Lines
//! are numbered over all images of a batch. Images are (batch, height, width, channels); `input` and `output` are the
//! [height, width] of an image before and after resizing.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::rows;
use super::{Resize, UPSAMPLE_NEAREST2D, copies, sources};
use crate::compute::contiguous;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// The resized images: each output pixel copies its source.
pub(super) fn forward(&Resize { batch, channels, input, output }: &Resize, x: &Raw) -> Result<Raw> {
    let x = contiguous(x)?;
    // The input line (column) that each output line (column) of an image copies.
    let (source_lines, source_columns) = (sources(input[0], output[0]), sources(input[1], output[1]));
    let (input_line_len, output_line_len) = (input[1] * channels, output[1] * channels);
    dispatch_float!(x.dtype(), UPSAMPLE_NEAREST2D.name, T => read_all(UPSAMPLE_NEAREST2D.name, &[&x], |operands| {
        let x = elements::<T>(operands[0])?;
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            for (line, out) in range.zip(out.chunks_exact_mut(output_line_len)) {
                let image = line / output[0];
                let source = image * input[0] + source_lines[line % output[0]];
                let x = &x[source * input_line_len..(source + 1) * input_line_len];
                for (&column, out) in source_columns.iter().zip(out.chunks_exact_mut(channels)) {
                    for (out, x) in out.iter_mut().zip(&x[column * channels..(column + 1) * channels]) {
                        out.write(*x);
                    }
                }
            }
        };
        // SAFETY: each line is written as a whole.
        Ok(unsafe { rows::fill_rows(batch * output[0], output_line_len, rows::rows_per_block(output_line_len), write) })
    })
    .map(|y| from_vec(y, &[batch, output[0], output[1], channels][..])))
}

/// The gradient of an input pixel is the sum of the gradients of the output pixels that copy it.
pub(super) fn backward(&Resize { batch, channels, input, output }: &Resize, grad: &Raw) -> Result<Raw> {
    let grad = contiguous(grad)?;
    // The range of the output lines (columns) that copy each input line (column) of an image.
    let (copy_lines, copy_columns) = (copies(input[0], output[0]), copies(input[1], output[1]));
    let (input_line_len, output_line_len) = (input[1] * channels, output[1] * channels);
    let op = UPSAMPLE_NEAREST2D.name;
    dispatch_float!(grad.dtype(), op, T => read_all(op, &[&grad], |operands| {
        let g = elements::<T>(operands[0])?;
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let mut sum = vec![<T as Elem>::Acc::ZERO; input_line_len];
            for (line, out) in range.zip(out.chunks_exact_mut(input_line_len)) {
                let image = line / input[0];
                let first_output_line = image * output[0];
                sum.fill(Real::ZERO);
                for image_line in copy_lines[line % input[0]].clone() {
                    let copy = first_output_line + image_line;
                    let g = &g[copy * output_line_len..(copy + 1) * output_line_len];
                    let sums = sum.chunks_exact_mut(channels).zip(&copy_columns);
                    // `dispatch` compiles the loop for the SIMD instructions of the processor.
                    dispatch(
                        #[inline(always)]
                        || {
                            for (sum, columns) in sums {
                                let g = &g[columns.start * channels..columns.end * channels];
                                for g in g.chunks_exact(channels) {
                                    for (sum, g) in sum.iter_mut().zip(g) {
                                        *sum += g.to_acc();
                                    }
                                }
                            }
                        },
                    );
                }
                for (out, sum) in out.iter_mut().zip(&sum) {
                    out.write(T::from_acc(*sum));
                }
            }
        };
        let block = rows::rows_per_block(input_line_len);
        // SAFETY: each line is written as a whole.
        Ok(unsafe { rows::fill_rows(batch * input[0], input_line_len, block, write) })
    })
    .map(|grad_x| from_vec(grad_x, &[batch, input[0], input[1], channels][..])))
}
