//! Feed-forward networks whose weights multiply 8-bit codes: the result of the norm before the network, the result of
//! the GEGLU and the gradient of the GEGLU's input exist as codes alone (`kernels/norm_codes.cu`,
//! `kernels/geglu_codes.cu`).

use std::cell::Cell;

use candle_core::Shape;

use super::{GEGLU, geglu, run, run_backward};
use crate::cpu::Add;
use crate::ops::activation::GeluExact;
use crate::ops::arithmetic::add_by;
use crate::ops::linear::{as_matrix, check, check_residual, forward, forward_add, linear, linear_add};
use crate::ops::lora::check_frozen;
use crate::ops::norm::{CodesNorm, CodesNormBackward, add_layer_norm, layer_norm};
use crate::quantized::weight::HeldWeight;
use crate::quantized::{Addends, WeightRef};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Quantized, Result, Tensor, checkpoint, compute};

pub(super) static GEGLU_FEED_FORWARD: OpInfo = OpInfo::expensive("geglu_feed_forward");

/// The weight and the bias of a linear map.
type Map<'a> = (WeightRef<'a>, Option<&'a Tensor>);

/// Scale and shift of a layer norm, and what is added to the variance.
type Norm<'a> = ([Option<&'a Tensor>; 2], f64);

/// s + `outer(geglu(inner(layer_norm(s))))` with [`geglu`] and [`layer_norm`], where s = x + residual, and `inner` and
/// `outer` are [`linear`] maps: `x (..., n)`, `residual (..., n)` → `(..., n)`. `inner` has 2 m results, the second
/// half of which is the gate; `outer` has m inputs and n results.
///
/// Norm and network run as one fused operation only on a GPU and outside of selective checkpoints, if norm and biases
/// are frozen, and both weights multiply codes ([`w8a8`](crate::quantized::w8a8)) and also keep the codes transposed.
/// The result has the same bits either way.
///
/// # Errors
/// As [`add_layer_norm`] and [`linear_add`].
pub fn geglu_feed_forward(
    x: &Tensor,
    residual: &Tensor,
    (affine, eps): Norm<'_>,
    inner: Map<'_>,
    outer: Map<'_>,
) -> Result<Tensor> {
    let network =
        |normed: &Tensor, sum: &Tensor| linear_add(&geglu(&linear(normed, inner.0, inner.1)?)?, outer.0, outer.1, sum);
    // `add_layer_norm` returns the error for tensors that cannot be added.
    let fits = x.dims() == residual.dims()
        && x.dtype() == residual.dtype()
        && x.device().same_device(residual.device())
        && !affine.into_iter().flatten().any(Tensor::requires_grad);
    let (Some(codes), Some(last_codes), true) = (codes_of(x, inner), codes_of(x, outer), fits) else {
        let (sum, normed) = add_layer_norm(x, residual, 1, affine[0], affine[1], eps)?;
        return network(&normed, &sum);
    };
    let norm = CodesNorm::new(x, affine, eps)?;
    let made = Cell::new(None);
    let sum = add_by(x, residual, || match norm.of_sum([&x.raw, &residual.raw], codes.has_int8_codes())? {
        Some((sum, rows, statistics)) => {
            made.set(Some((rows, statistics)));
            Ok(sum)
        }
        None => compute::binary(&x.raw, &residual.raw, Add),
    })?;
    let Some((rows, statistics)) = made.take() else {
        return network(&layer_norm(&sum, 1, affine[0], affine[1], eps)?, &sum);
    };
    let op = GEGLU_FEED_FORWARD.name;
    check(op, &sum, inner.0, inner.1)?;
    let width = codes.dims()[0] / 2;
    // `outer` is checked against a view that has the shape of the GEGLU's result and a single element of memory.
    let mut between = sum.raw.clone();
    for dim in 0..between.rank() {
        between = between.narrow(dim, 0, 1)?;
    }
    let leading = &sum.dims()[..sum.rank() - 1];
    let between = Tensor::constant(between.broadcast_as([leading, &[width]].concat())?);
    check(op, &between, outer.0, outer.1)?;
    check_residual(op, &between, outer.0, &sum)?;
    for (weight, bias) in [inner, outer] {
        check_frozen(op, weight, bias)?;
    }
    affine.into_iter().flatten().for_each(|parameter| checkpoint::reads(&[parameter]));
    let bias_of = |map: Map<'_>| map.1.map(|bias| bias.raw.clone());
    let (inner_bias, outer_bias) = (bias_of(inner), bias_of(outer));
    record_with_aux(
        &GEGLU_FEED_FORWARD,
        &[&sum],
        || {
            let y = match codes.product_of_code_rows(&rows, inner_bias.as_ref(), sum.dtype())? {
                Some(y) => y,
                None => forward(&as_matrix(&norm.values(&sum)?)?, inner.0, inner_bias.as_ref())?,
            };
            let residual = as_matrix(&sum.raw)?;
            let addends = Addends { bias: outer_bias.as_ref(), residual: Some(&residual) };
            let result = match last_codes.product_of_geglu(&y, addends)? {
                Some(result) => result,
                None => forward_add(&run(GEGLU.name, &y, width, GeluExact)?, outer.0, addends.bias, &residual)?,
            };
            Ok((result.reshape(sum.shape())?, std::iter::once(y).chain(statistics).collect()))
        },
        |saver, _, aux| FeedForward {
            norm: norm.save(saver, &sum, &aux[1..]),
            shape: sum.shape().clone(),
            y: saver.save_raw(&aux[0]),
            inner: codes.clone(),
            outer: outer.0.hold(saver),
        },
    )
}

/// The weight of a map that the fused operation supports.
fn codes_of<'a>(x: &Tensor, (weight, bias): Map<'a>) -> Option<&'a Quantized> {
    // In a selective checkpoint the maps stay operations of their own, because the checkpoint keeps the results of
    // expensive operations.
    let fits = x.elem_count() > 0 && x.device().is_cuda() && !checkpoint::is_selective();
    match weight {
        WeightRef::Quantized(weight)
            if fits
                && weight.keeps_transposed_codes()
                && weight.multiplies_codes(x.dtype(), 1)
                && !bias.is_some_and(Tensor::requires_grad) =>
        {
            Some(weight)
        }
        _ => None,
    }
}

struct FeedForward {
    norm: CodesNormBackward,
    /// The shape of the sum.
    shape: Shape,
    /// The result of the inner map, (rows, 2 m).
    y: Saved,
    inner: Quantized,
    outer: HeldWeight,
}

impl Backward for FeedForward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        if !context.needs(0) {
            return Ok(());
        }
        let (y, grad) = (self.y.get()?, context.grad().clone());
        let of_unit = self.outer.input_gradient(&as_matrix(&grad)?)?;
        let of_norm = match self.inner.input_gradient_of_geglu(&y, &of_unit)? {
            Some(product) => product,
            None => {
                let of_map = run_backward(GEGLU.name, &y, &of_unit, y.dims()[1] / 2, GeluExact)?;
                HeldWeight::Quantized(self.inner.clone()).input_gradient(&of_map)?
            }
        };
        context.add(0, grad)?;
        self.norm.run(context, &of_norm.reshape(&self.shape)?)
    }
}
