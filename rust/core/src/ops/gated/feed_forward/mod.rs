//! Feed-forward networks: two adapted linear maps of the input (the inner maps), the gated unit of their results, and
//! an adapted linear map of the unit (the outer map). On CUDA, one kernel of the backward pass,
//! `kernels/feed_forward_backward.cu`, computes all that needs the inner maps' results and the unit's gradient, so that
//! these are read only once.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::Shape;
use smallvec::SmallVec;

use super::linear::{Late, Maps, swiglu_linear_group, unit};
use super::{SWIGLU, run, run_backward};
use crate::compute::{self, on_device};
use crate::ops::activation::Silu;
use crate::ops::linear::{as_matrix, forward, with_last};
use crate::ops::linear_group::{LinearGroup, linear_group};
use crate::ops::low_rank::LowRankBackward;
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Result, Tensor, checkpoint};

pub(super) static SWIGLU_FEED_FORWARD: OpInfo = OpInfo::expensive("swiglu_feed_forward");

/// [`linear_group`] of [`swiglu_linear_group`]: `x (..., in)` → `(..., out)`. The maps of `group` have 2 n results in
/// all, the second half of which is the gate; `last` has n inputs. The function runs as one fused operation only if
/// `group` is two maps and `last` is one map, all three have low-rank products, and x and all low-rank factors need a
/// gradient. Otherwise it calls `swiglu_linear_group`, then `linear_group`.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
/// [`Error::Device`](crate::Error::Device) if the operands do not fit, [`Error::Argument`](crate::Error::Argument) if a
/// base needs a gradient or a scale is not finite.
pub fn swiglu_feed_forward(x: &Tensor, group: LinearGroup<'_>, last: LinearGroup<'_>) -> Result<Tensor> {
    group.check(SWIGLU_FEED_FORWARD.name, x)?;
    if !is_fused(x, group, last)? {
        return linear_group(&swiglu_linear_group(x, group)?.remade(), last);
    }
    let inner = group.low_ranks(x.dtype())?;
    let outer = last.low_ranks(x.dtype())?.after(&inner);
    let inputs: SmallVec<[&Tensor; 7]> = std::iter::once(x).chain(inner.factors()).chain(outer.factors()).collect();
    let are_late = x.device().is_cuda();
    record_with_aux(
        &SWIGLU_FEED_FORWARD,
        &inputs,
        || {
            let Maps { y, hidden, late } = Maps::of(&as_matrix(&x.raw)?, group, &inner, are_late)?;
            let (unit, last_hidden) = on_device!(
                y.device(),
                cuda => cuda::forward(&y, late.as_ref(), &outer)?,
                cpu => {
                    let unit = unit(&y, late.as_ref())?;
                    let hidden = outer.hidden(&unit)?;
                    (Some(unit), hidden)
                },
            );
            let result = match unit {
                Some(unit) => {
                    let result = forward(&unit, last.weight, last.bias.map(|b| &b.raw))?;
                    outer.add_last_products(&result, &last_hidden)?;
                    result
                }
                None => compute::unset(SWIGLU_FEED_FORWARD.name, &y, &[y.dims()[0], last.weight.dims()[0]])?,
            };
            let result = result.reshape(with_last(&x.raw, last.weight.dims()[0]))?;
            Ok((result, [Some(y), hidden, Some(last_hidden)].into_iter().flatten().collect()))
        },
        |saver, _, aux| FeedForward {
            inner: inner.save(saver, x, group.weight, Some(&aux[1])),
            y: saver.save_raw(&aux[0]),
            late: are_late.then(|| Late::save(saver, &aux[1], &inner)),
            outer: outer.save_without_input(saver, &Shape::from(()), last.weight, Some(&aux[2])),
        },
    )
}

/// Whether the fused operation supports the operands.
fn is_fused(x: &Tensor, group: LinearGroup<'_>, last: LinearGroup<'_>) -> Result<bool> {
    let ([Some(features), Some(gate)], [Some(down)], &[width, of_gate]) = (group.low_rank, last.low_rank, group.sizes)
    else {
        return Ok(false);
    };
    let all = [features, gate, down];
    let needs = |tensor: &Tensor| tensor.node.is_some();
    let fits = x.elem_count() > 0
        && width == of_gate
        && last.weight.dims() == [last.sizes[0], width]
        && needs(x)
        && all.iter().all(|product| needs(&product.down) && needs(&product.up));
    // One kernel adds to the gradients of these three factors at once, so they must be different variables.
    let summed = [&features.up, &gate.up, &down.down].map(|factor| factor.node.as_ref().map(|node| node.id()));
    let are_apart = summed[0] != summed[1] && !summed[..2].contains(&summed[2]);
    // In a selective checkpoint the maps stay operations of their own, because the checkpoint keeps the results of
    // expensive operations.
    if !fits || !are_apart || checkpoint::is_selective() {
        return Ok(false);
    }
    // `last` is checked against a view that has the shape of the unit and a single element of memory.
    let mut unit = x.raw.clone();
    for dim in 0..unit.rank() {
        unit = unit.narrow(dim, 0, 1)?;
    }
    let unit = unit.broadcast_as(with_last(&unit, width))?;
    last.check(SWIGLU_FEED_FORWARD.name, &Tensor::constant(unit))?;
    on_device!(x.device(), cuda => cuda::takes(x, width, all), cpu => Ok(true))
}

struct FeedForward {
    /// The inner maps.
    inner: LowRankBackward,
    /// The inner maps' results, (rows, 2 n), without the low-rank products in `late`.
    y: Saved,
    /// On CUDA, the low-rank products that are not added to `y`.
    late: Option<Late<Saved>>,
    /// The outer map.
    outer: LowRankBackward,
}

/// The gradient g of the inner maps' results, (rows, 2 n), and s g B of their low-rank products, (rows, Σ rank).
type InnerGradients = (Raw, Raw);

impl FeedForward {
    /// Returns the inner gradients. `unit` is the part of the unit's gradient that comes through the outer map's base.
    /// `outer` is s g B of the outer map's low-rank product; the function adds the other part of the unit's gradient,
    /// `outer` times A, to `unit`. It adds the gradients of B of the two inner maps, and that of A of the outer map, to
    /// those in `context`.
    fn on_cpu(&self, context: &mut BackwardContext<'_>, unit: &Raw, outer: &Raw) -> Result<InnerGradients> {
        let mut y = self.y.get()?;
        if let Some(late) = &self.late {
            y = late.get()?.added_to(&y)?;
        }
        let width = unit.dims()[1];
        if let Some(down) = self.outer.down_operand(0)? {
            compute::write_products(&[[unit, outer, &down]], 1.0, true)?;
        }
        let remade = run(SWIGLU.name, &y, width, Silu)?;
        let (index, shape) = (self.outer.down(0), (outer.dims()[1], width));
        context.add_product(index, shape, self.outer.dtypes(0)[0], [&outer.t()?, &remade], 1.0)?;
        let grad = run_backward(SWIGLU.name, &y, unit, width, Silu)?;
        self.inner.add_up_gradients(context, &grad)?;
        let hidden = self.inner.hidden_gradient(&grad)?;
        Ok((grad, hidden))
    }
}

impl Backward for FeedForward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = as_matrix(context.grad())?;
        self.outer.add_up_gradients(context, &grad)?;
        let Some(unit) = self.outer.base_gradient(&grad)? else { return Ok(()) };
        let outer = self.outer.hidden_gradient(&grad)?;
        let (grad, hidden) = on_device!(
            grad.device(),
            cuda => cuda::backward(self, context, &unit, &outer)?,
            cpu => self.on_cpu(context, &unit, &outer)?,
        );
        drop(unit);
        self.inner.add_from_hidden(context, &grad, &hidden)
    }
}
