//! Feed-forward networks with a GEGLU, whose two weights are quantized to 8-bit codes and multiply inputs that are
//! rounded to codes too (W8A8). Three matrices exist only as codes: the result of the norm before the network, the
//! result of the GEGLU and the gradient of the GEGLU's input (`kernels/norm_codes.cu`, `kernels/geglu_codes.cu`).

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

/// The operands of a layer norm: scale and shift (`affine`), and the number that is added to the variance (`eps`).
type Norm<'a> = ([Option<&'a Tensor>; 2], f64);

/// Computes s + `outer(geglu(inner(layer_norm(s))))` with [`geglu`] and [`layer_norm`], where s = x + residual, and
/// `inner` and `outer` are [`linear`] maps: `x (..., n)`, `residual (..., n)` → `(..., n)`. `inner` has 2 m results,
/// the second half of which is the gate; `outer` has m inputs and n results.
///
/// Norm and network run as one fused operation only on a GPU and outside of selective checkpoints, and only if norm and
/// biases are frozen, and both weights multiply codes ([`w8a8`](crate::quantized::w8a8)) and also keep the codes
/// transposed. Otherwise they run as separate operations. The result has the same bits either way.
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
    // If x and residual cannot be added, `add_layer_norm` returns the error.
    let fits = x.dims() == residual.dims()
        && x.dtype() == residual.dtype()
        && x.device().same_device(residual.device())
        && !affine.into_iter().flatten().any(Tensor::requires_grad);
    // Everything runs as separate operations unless the fused operation supports both weights and the norm.
    let (Some(inner_weight), Some(outer_weight), true) = (fusable_weight(x, inner), fusable_weight(x, outer), fits)
    else {
        // The 1, here and below, is the number of normalized dimensions: the last one.
        let (sum, normed) = add_layer_norm(x, residual, 1, affine[0], affine[1], eps)?;
        return network(&normed, &sum);
    };
    let norm = CodesNorm::new(x, affine, eps)?;
    // The kernel that adds x and residual also computes the codes of the norm. The tape records the sum alone, so this
    // cell takes the codes (`code_rows`: codes with their scales) and the norm's statistics out of the closure.
    let norm_codes = Cell::new(None);
    let sum = add_by(x, residual, || match norm.of_sum([&x.raw, &residual.raw], inner_weight.has_int8_codes())? {
        Some((sum, code_rows, statistics)) => {
            norm_codes.set(Some((code_rows, statistics)));
            Ok(sum)
        }
        None => compute::binary(&x.raw, &residual.raw, Add),
    })?;
    // Without codes (the kernel does not support these tensors), the rest runs as separate operations.
    let Some((code_rows, statistics)) = norm_codes.take() else {
        return network(&layer_norm(&sum, 1, affine[0], affine[1], eps)?, &sum);
    };
    let op = GEGLU_FEED_FORWARD.name;
    check(op, &sum, inner.0, inner.1)?;
    // The columns of the GEGLU's result, m.
    let width = inner_weight.dims()[0] / 2;
    // `outer` is checked against a view that has the shape of the GEGLU's result and a single element of memory.
    let mut geglu_view = sum.raw.clone();
    for dim in 0..geglu_view.rank() {
        geglu_view = geglu_view.narrow(dim, 0, 1)?;
    }
    let leading = &sum.dims()[..sum.rank() - 1];
    let geglu_view = Tensor::constant(geglu_view.broadcast_as([leading, &[width]].concat())?);
    check(op, &geglu_view, outer.0, outer.1)?;
    check_residual(op, &geglu_view, outer.0, &sum)?;
    for (weight, bias) in [inner, outer] {
        check_frozen(op, weight, bias)?;
    }
    // Scale and shift are no inputs on the tape, but a checkpoint must know that the operation reads them.
    affine.into_iter().flatten().for_each(|parameter| checkpoint::reads(&[parameter]));
    let bias_of = |map: Map<'_>| map.1.map(|bias| bias.raw.clone());
    let (inner_bias, outer_bias) = (bias_of(inner), bias_of(outer));
    record_with_aux(
        &GEGLU_FEED_FORWARD,
        &[&sum],
        || {
            // A product of codes is `None` if the device does not support it. Values are then multiplied instead.
            let y = match inner_weight.product_of_code_rows(&code_rows, inner_bias.as_ref(), sum.dtype())? {
                Some(y) => y,
                None => forward(&as_matrix(&norm.values(&sum)?)?, inner.0, inner_bias.as_ref())?,
            };
            // The outer map adds the sum to its result.
            let sum_rows = as_matrix(&sum.raw)?;
            let addends = Addends { bias: outer_bias.as_ref(), residual: Some(&sum_rows) };
            let result = match outer_weight.product_of_geglu(&y, addends)? {
                Some(result) => result,
                None => forward_add(&run(GEGLU.name, &y, width, GeluExact)?, outer.0, addends.bias, &sum_rows)?,
            };
            Ok((result.reshape(sum.shape())?, std::iter::once(y).chain(statistics).collect()))
        },
        // `aux` has y, the result of `inner`, then the norm's statistics.
        |saver, _, aux| FeedForward {
            norm: norm.save(saver, &sum, &aux[1..]),
            shape: sum.shape().clone(),
            y: saver.save_raw(&aux[0]),
            inner: inner_weight.clone(),
            outer: outer.0.hold(saver),
        },
    )
}

/// Returns the quantized weight of a map; `None` if the fused operation does not support the map.
fn fusable_weight<'a>(x: &Tensor, (weight, bias): Map<'a>) -> Option<&'a Quantized> {
    // In a selective checkpoint, which keeps the results of expensive operations, the maps stay separate operations.
    let fits = x.elem_count() > 0 && x.device().is_cuda() && !checkpoint::is_selective();
    match weight {
        WeightRef::Quantized(weight)
            if fits
                && weight.keeps_transposed_codes()
                && weight.multiplies_codes(x.dtype(), 1) // any number of rows above 0 gives the same answer
                && !bias.is_some_and(Tensor::requires_grad) =>
        {
            Some(weight)
        }
        _ => None,
    }
}

/// The backward pass of [`geglu_feed_forward`] as one operation, whose only input is the sum.
struct FeedForward {
    norm: CodesNormBackward,
    /// The shape of the sum.
    shape: Shape,
    /// The result of the inner map, which is the input of the GEGLU: (rows, 2 m), with one row for each vector of n
    /// elements along the last dimension of the sum.
    y: Saved,
    inner: Quantized,
    outer: HeldWeight,
}

impl Backward for FeedForward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let sum = 0; // the index of the input
        if !context.needs(sum) {
            return Ok(());
        }
        let (y, grad) = (self.y.get()?, context.grad().clone());
        let geglu_grad = self.outer.input_gradient(&as_matrix(&grad)?)?;
        let norm_grad = match self.inner.input_gradient_of_geglu(&y, &geglu_grad)? {
            Some(product) => product,
            None => {
                let inner_grad = run_backward(GEGLU.name, &y, &geglu_grad, y.dims()[1] / 2, GeluExact)?;
                HeldWeight::Quantized(self.inner.clone()).input_gradient(&inner_grad)?
            }
        };
        // The sum reaches the result directly, and through the norm. `norm.run` adds the gradient through the norm.
        context.add(sum, grad)?;
        self.norm.run(context, &norm_grad.reshape(&self.shape)?)
    }
}
