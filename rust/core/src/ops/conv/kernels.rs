//! The three products of a convolution on the CPU, over contiguous slices: images (B, H, W, C), weights (O, KH, KW, C / groups).

use std::ops::Range;

use super::geometry::Geometry;
use super::im2col::{add_col2im, im2col};
use crate::cpu::{Elem, MatMut, MatRef, Real, gemm};

/// Upper limit of the memory that holds a part of the im2col matrix (a single row may be larger).
const PART_BYTES: usize = 16 << 20;

/// The pixels of the result, in parts whose im2col matrix of elements `T` fits in [`PART_BYTES`]. A matrix that is the image
/// itself needs no memory.
pub(super) fn parts<T>(geometry: &Geometry) -> impl Iterator<Item = Range<usize>> {
    let pixels = geometry.pixels();
    let row_bytes = geometry.row_len().max(1) * size_of::<T>();
    let step = if geometry.is_pointwise() { pixels.max(1) } else { (PART_BYTES / row_bytes).max(1) };
    (0..pixels).step_by(step).map(move |start| start..pixels.min(start + step))
}

/// Memory for the largest part of the im2col matrix.
fn buffer<T: Elem>(geometry: &Geometry) -> Vec<T> {
    let rows = parts::<T>(geometry).next().map_or(0, |part| part.len());
    let len = if geometry.is_pointwise() { 0 } else { rows * geometry.row_len() };
    vec![T::from_acc(T::Acc::ZERO); len]
}

/// A part of the im2col matrix: of the image itself, or made in `buffer`.
fn columns<'a, T: Elem>(
    geometry: &Geometry,
    x: &'a [T],
    buffer: &'a mut [T],
    group: usize,
    part: &Range<usize>,
) -> MatRef<'a, T> {
    let row_len = geometry.row_len();
    if geometry.is_pointwise() {
        return MatRef::row_major(&x[part.start * row_len..], part.len(), row_len);
    }
    let columns = &mut buffer[..part.len() * row_len];
    im2col(columns, x, geometry, group, part.start);
    MatRef::row_major(columns, part.len(), row_len)
}

/// The rows of the weight for the output channels of `group`.
fn kernels_of<'a, T>(geometry: &Geometry, weight: &'a [T], group: usize) -> MatRef<'a, T> {
    let (rows, row_len) = (geometry.out_channels_per_group(), geometry.row_len());
    MatRef::row_major(&weight[group * rows * row_len..], rows, row_len)
}

/// The pixels of `part` in the output channels of `group`.
fn pixels_of<'a, T>(geometry: &Geometry, y: &'a [T], group: usize, part: &Range<usize>) -> MatRef<'a, T> {
    let (out, width) = (geometry.out_channels, geometry.out_channels_per_group());
    MatRef::new(&y[part.start * out + group * width..], [part.len(), width], [out, 1])
}

/// y = columns · weightᵀ + bias.
pub(super) fn forward<T: Elem>(geometry: &Geometry, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
    let (out, width) = (geometry.out_channels, geometry.out_channels_per_group());
    let mut y = vec![T::from_acc(T::Acc::ZERO); geometry.pixels() * out];
    if y.is_empty() {
        return y;
    }
    if let Some(bias) = bias {
        y.chunks_exact_mut(out).for_each(|y| y.copy_from_slice(&bias[..out]));
    }
    let mut buffer = buffer(geometry);
    for part in parts::<T>(geometry) {
        for group in 0..geometry.groups() {
            let columns = columns(geometry, x, &mut buffer, group, &part);
            let y = MatMut::new(&mut y[part.start * out + group * width..], [part.len(), width], [out, 1]);
            gemm(y, columns, kernels_of(geometry, weight, group).t(), 1.0, bias.is_some());
        }
    }
    y
}

/// The gradient of the image: columns = g · weight, each added to the pixels that it came from. Windows overlap, so the sum is
/// in the type of arithmetic.
pub(super) fn grad_input<T: Elem>(geometry: &Geometry, g: &[T], weight: &[T]) -> Vec<T::Acc>
where
    T::Acc: Elem<Acc = T::Acc>,
{
    let row_len = geometry.row_len();
    let mut grad_x = vec![T::Acc::ZERO; geometry.input_dims().iter().product()];
    if grad_x.is_empty() || g.is_empty() {
        return grad_x;
    }
    if geometry.is_pointwise() {
        let (all, rows) = (0..geometry.pixels(), geometry.pixels());
        let grad = MatMut::row_major(&mut grad_x, rows, row_len);
        gemm(grad, pixels_of(geometry, g, 0, &all), kernels_of(geometry, weight, 0), 1.0, false);
        return grad_x;
    }
    let mut buffer = buffer::<T::Acc>(geometry);
    for part in parts::<T::Acc>(geometry) {
        for group in 0..geometry.groups() {
            let columns = &mut buffer[..part.len() * row_len];
            let product = MatMut::row_major(columns, part.len(), row_len);
            gemm(product, pixels_of(geometry, g, group, &part), kernels_of(geometry, weight, group), 1.0, false);
            add_col2im(&mut grad_x, columns, geometry, group, part.start);
        }
    }
    grad_x
}

/// The gradient of the weight: gᵀ · columns, summed over the parts in the type of arithmetic.
pub(super) fn grad_weight<T: Elem>(geometry: &Geometry, g: &[T], x: &[T]) -> Vec<T::Acc>
where
    T::Acc: Elem<Acc = T::Acc>,
{
    let (row_len, width) = (geometry.row_len(), geometry.out_channels_per_group());
    let mut grad_weight = vec![T::Acc::ZERO; geometry.out_channels * row_len];
    if grad_weight.is_empty() || g.is_empty() {
        return grad_weight;
    }
    let mut buffer = buffer(geometry);
    for part in parts::<T>(geometry) {
        for group in 0..geometry.groups() {
            let columns = columns(geometry, x, &mut buffer, group, &part);
            let sum = MatMut::row_major(&mut grad_weight[group * width * row_len..], width, row_len);
            gemm(sum, pixels_of(geometry, g, group, &part).t(), columns, 1.0, true);
        }
    }
    grad_weight
}
