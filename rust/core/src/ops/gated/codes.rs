//! Feed-forward networks whose weights multiply 8-bit codes: the values between the GEGLU and the products next to it, and their
//! gradients, exist as codes alone (`kernels/geglu_codes.cu`).

use candle_core::Shape;

use super::{GEGLU, geglu, run, run_backward};
use crate::ops::activation::GeluExact;
use crate::ops::linear::{as_matrix, check, check_residual, forward, forward_add, linear, linear_add, with_last};
use crate::quantized::weight::HeldWeight;
use crate::quantized::{Addends, WeightRef};
use crate::tape::backward::Pending;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Quantized, Result, Tensor, checkpoint};

pub(super) static GEGLU_FEED_FORWARD: OpInfo = OpInfo::expensive("geglu_feed_forward");

/// The weight and the bias of a linear map.
type Map<'a> = (WeightRef<'a>, Option<&'a Tensor>);

/// [`linear`] of [`geglu`] of [`linear`], plus `residual`: `x (..., in)`, `residual (..., out)` → `(..., out)`. The map `inner` has 2 n results, the second half of which is the
/// gate; the map `outer` has n inputs. The function runs as one fused operation only on a GPU, if both weights multiply codes
/// ([`w8a8`](crate::quantized::w8a8)) and keep them transposed, too. The result has the same bits either way.
///
/// # Errors
/// As [`linear_add`].
pub fn geglu_feed_forward(x: &Tensor, inner: Map<'_>, outer: Map<'_>, residual: &Tensor) -> Result<Tensor> {
    let (Some(codes), Some(last_codes)) = (codes_of(x, inner), codes_of(x, outer)) else {
        return linear_add(&geglu(&linear(x, inner.0, inner.1)?)?, outer.0, outer.1, residual);
    };
    let op = GEGLU_FEED_FORWARD.name;
    check(op, x, inner.0, inner.1)?;
    let width = codes.dims()[0] / 2;
    // `outer` is checked against a view that has the shape of the GEGLU and a single element of memory.
    let mut between = x.raw.clone();
    for dim in 0..between.rank() {
        between = between.narrow(dim, 0, 1)?;
    }
    let between = between.broadcast_as(with_last(&between, width))?;
    let between = Tensor::constant(between);
    check(op, &between, outer.0, outer.1)?;
    check_residual(op, &between, outer.0, residual)?;
    let bias_of = |map: Map<'_>| map.1.map(|bias| bias.raw.clone());
    let (inner_bias, outer_bias) = (bias_of(inner), bias_of(outer));
    record_with_aux(
        &GEGLU_FEED_FORWARD,
        &[x, residual],
        || {
            let y = forward(&as_matrix(&x.raw)?, inner.0, inner_bias.as_ref())?;
            let rows = as_matrix(&residual.raw)?;
            let addends = Addends { bias: outer_bias.as_ref(), residual: Some(&rows) };
            let result = match last_codes.product_of_geglu(&y, addends)? {
                Some(result) => result,
                None => forward_add(&run(GEGLU.name, &y, width, GeluExact)?, outer.0, addends.bias, &rows)?,
            };
            Ok((result.reshape(residual.shape())?, std::iter::once(y).collect()))
        },
        |saver, _, aux| FeedForward {
            shape: x.raw.shape().clone(),
            y: saver.save_raw(&aux[0]),
            inner: codes.clone(),
            outer: outer.0.hold(saver),
        },
    )
}

/// The weight of a map that the fused operation supports.
fn codes_of<'a>(x: &Tensor, (weight, bias): Map<'a>) -> Option<&'a Quantized> {
    // In a selective checkpoint the maps stay operations of their own, because the checkpoint keeps the results of expensive operations.
    let fits = x.elem_count() > 0 && x.device().is_cuda() && !checkpoint::is_selective();
    match weight {
        WeightRef::Quantized(weight)
            if fits && weight.keeps_transposed_codes() && !bias.is_some_and(Tensor::requires_grad) =>
        {
            Some(weight)
        }
        _ => None,
    }
}

struct FeedForward {
    /// The shape of x.
    shape: Shape,
    /// The results of the inner maps, (rows, 2 n).
    y: Saved,
    inner: Quantized,
    outer: HeldWeight,
}

impl Backward for FeedForward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        if context.needs(1) {
            context.add(1, context.grad().clone())?;
        }
        if !context.needs(0) {
            return Ok(());
        }
        let y = self.y.get()?;
        let grad = self.outer.input_gradient(&as_matrix(context.grad())?)?;
        if let Some(dx) = self.inner.input_gradient_of_geglu(&y, &grad)? {
            return context.add_pending(0, Pending::new(dx.reshape(&self.shape)?, true));
        }
        let grad = run_backward(GEGLU.name, &y, &grad, y.dims()[1] / 2, GeluExact)?;
        HeldWeight::Quantized(self.inner.clone()).add_input_gradient(context, &self.shape, &grad)
    }
}
