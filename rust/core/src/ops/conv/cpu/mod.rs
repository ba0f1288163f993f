//! The CPU form of `conv2d` and of its gradients. All tensors are contiguous: images (B, H, W, C), weights (O, KH, KW,
//! C / groups), where B is the batch, O the output channels and KH, KW the kernel's size. Each pass has three forms:
//! pointwise (a 1 × 1 kernel without stride, padding or groups: one matrix product over all pixels), depthwise (each
//! channel by itself), and general. A [`Stencil`] says which elements of its input a pass sums at each kernel tap; the
//! general form of the gradient of the weights is in the module `weight`.

mod depthwise;
pub(super) mod patch;
pub(super) mod stencil;
mod weight;

use smallvec::SmallVec;
use stencil::Stencil;

use super::CONV2D;
use super::geometry::Geometry;
use crate::compute::{cast, contiguous};
use crate::cpu::{Elem, MatMut, MatRef, Real, elements, gemm, read_all};
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// The result of the convolution of `x`, in the dtype of `x`.
pub(super) fn forward(geometry: &Geometry, x: &Raw, weight: &Raw, bias: Option<&Raw>) -> Result<Raw> {
    let (x, weight) = (contiguous(x)?, contiguous(weight)?);
    let bias = bias.map(contiguous).transpose()?;
    let operands: SmallVec<[&Raw; 3]> = [&x, &weight].into_iter().chain(&bias).collect();
    let sums = dispatch_float!(x.dtype(), CONV2D.name, T => read_all(CONV2D.name, &operands, |operands| {
        // The operand after the image and the weight, if there is a bias.
        let bias = operands.get(2).map(|&bias| elements::<T>(bias)).transpose()?;
        Ok(product(geometry, elements::<T>(operands[0])?, elements(operands[1])?, bias))
    })
    .map(|y| from_vec(y, geometry.result_dims().as_slice())))?;
    cast(&sums, x.dtype())
}

/// The gradient of the input, from `grad`, the gradient of the result.
pub(super) fn grad_input(geometry: &Geometry, grad: &Raw, weight: &Raw) -> Result<Raw> {
    let (grad, weight) = (contiguous(grad)?, contiguous(weight)?);
    let sums = dispatch_float!(grad.dtype(), CONV2D.name, T => read_all(CONV2D.name, &[&grad, &weight], |operands| {
        Ok(input_product(geometry, elements::<T>(operands[0])?, elements(operands[1])?))
    })
    .map(|grad_x| from_vec(grad_x, geometry.input_dims().as_slice())))?;
    cast(&sums, grad.dtype())
}

/// The gradient of the weight, from `grad`, the gradient of the result, and the input `x`.
pub(super) fn grad_weight(geometry: &Geometry, grad: &Raw, x: &Raw) -> Result<Raw> {
    let (grad, x) = (contiguous(grad)?, contiguous(x)?);
    let sums = dispatch_float!(grad.dtype(), CONV2D.name, T => read_all(CONV2D.name, &[&grad, &x], |operands| {
        Ok(weight_product(geometry, elements::<T>(operands[0])?, elements(operands[1])?))
    })
    .map(|grad_weight| from_vec(grad_weight, geometry.weight_dims().as_slice())))?;
    cast(&sums, grad.dtype())
}

/// The result of the convolution, in the accumulator type.
fn product<T: Elem>(geometry: &Geometry, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T::Acc>
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
    // `chunks_exact_mut` panics for a length of 0.
    if let Some(bias) = bias.filter(|_| out > 0) {
        y.chunks_exact_mut(out).for_each(|y| y.iter_mut().zip(bias).for_each(|(y, b)| *y = b.to_acc()));
    }
    let (x, weight) = (MatRef::row_major(x, pixels, channels), MatRef::row_major(weight, out, channels));
    // With a bias, the product is added to it.
    let (alpha, accumulate) = (1.0, bias.is_some());
    gemm(MatMut::row_major(&mut y, pixels, out), x, weight.t(), alpha, accumulate);
    y
}

/// The gradient of the input, in the accumulator type.
fn input_product<T: Elem>(geometry: &Geometry, grad: &[T], weight: &[T]) -> Vec<T::Acc>
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
    let (alpha, accumulate) = (1.0, false);
    gemm(MatMut::row_major(&mut grad_x, pixels, channels), grad, weight, alpha, accumulate);
    grad_x
}

/// The gradient of the weight, in the accumulator type.
fn weight_product<T: Elem>(geometry: &Geometry, grad: &[T], x: &[T]) -> Vec<T::Acc>
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
    let (alpha, accumulate) = (1.0, false);
    gemm(MatMut::row_major(&mut grad_weight, out, channels), grad.t(), x, alpha, accumulate);
    grad_weight
}
