//! The three products of a convolution on the CPU, over contiguous slices: images (B, H, W, C), weights (O, KH, KW, C / groups).

use super::geometry::Geometry;
use super::stencil::Stencil;
use super::{depthwise, weight};
use crate::cpu::{Elem, MatMut, MatRef, Real, gemm};

/// The result, in the type of arithmetic.
pub(super) fn forward<T: Elem>(geometry: &Geometry, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T::Acc>
where
    T::Acc: Elem<Acc = T::Acc>,
{
    if geometry.is_depthwise() {
        return depthwise::run(&Stencil::forward(geometry), geometry, x, weight, bias);
    }
    if !geometry.is_pointwise() {
        return Stencil::forward(geometry).run(x, weight, bias);
    }
    let (pixels, channels, out) = (geometry.pixels(), geometry.channels, geometry.out_channels);
    let mut y = vec![T::Acc::ZERO; pixels * out];
    if let Some(bias) = bias.filter(|_| out > 0) {
        y.chunks_exact_mut(out).for_each(|y| y.iter_mut().zip(bias).for_each(|(y, b)| *y = b.to_acc()));
    }
    let (x, weight) = (MatRef::row_major(x, pixels, channels), MatRef::row_major(weight, out, channels));
    gemm(MatMut::row_major(&mut y, pixels, out), x, weight.t(), 1.0, bias.is_some());
    y
}

/// The gradient of the image, in the type of arithmetic.
pub(super) fn grad_input<T: Elem>(geometry: &Geometry, grad: &[T], weight: &[T]) -> Vec<T::Acc>
where
    T::Acc: Elem<Acc = T::Acc>,
{
    if geometry.is_depthwise() {
        return depthwise::run(&Stencil::transposed(geometry), geometry, grad, weight, None);
    }
    if !geometry.is_pointwise() {
        return Stencil::transposed(geometry).run(grad, weight, None);
    }
    let (pixels, channels, out) = (geometry.pixels(), geometry.channels, geometry.out_channels);
    let mut grad_x = vec![T::Acc::ZERO; pixels * channels];
    let (grad, weight) = (MatRef::row_major(grad, pixels, out), MatRef::row_major(weight, out, channels));
    gemm(MatMut::row_major(&mut grad_x, pixels, channels), grad, weight, 1.0, false);
    grad_x
}

/// The gradient of the weight, in the type of arithmetic.
pub(super) fn grad_weight<T: Elem>(geometry: &Geometry, grad: &[T], x: &[T]) -> Vec<T::Acc>
where
    T::Acc: Elem<Acc = T::Acc>,
{
    if geometry.is_depthwise() {
        return depthwise::grad_weight(geometry, grad, x);
    }
    if !geometry.is_pointwise() {
        return weight::grad_weight(geometry, grad, x);
    }
    let (pixels, channels, out) = (geometry.pixels(), geometry.channels, geometry.out_channels);
    let mut grad_weight = vec![T::Acc::ZERO; out * channels];
    let (grad, x) = (MatRef::row_major(grad, pixels, out), MatRef::row_major(x, pixels, channels));
    gemm(MatMut::row_major(&mut grad_weight, out, channels), grad.t(), x, 1.0, false);
    grad_weight
}
