//! `SwiGLU` feed-forward networks: two adapted linear maps of the input (the inner maps), the gated unit of their
//! results, and an adapted linear map of the unit (the outer map). An adapted map of x adds the low-rank product
//! s (x Aᵀ) Bᵀ, in which s is a number, to the result of its frozen weight (its base).
//!
//! On CUDA, one kernel of the backward pass, in `kernels/feed_forward_backward.cu`, computes everything that reads the
//! inner maps' results or the unit's gradient, so that these matrices are read only once.

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

/// Computes [`linear_group`] of [`swiglu_linear_group`]: `x (..., in)` → `(..., out)`. The maps of `group` (the inner
/// maps) have 2 n results in all, the second half of which is the gate; `last` (the outer map) has n inputs. The
/// function runs as one fused operation only if `group` is two maps of n results and `last` is one map, all three have
/// low-rank products, x and all low-rank factors need a gradient, and it does not run in a selective checkpoint. On a
/// GPU, the kernels must also support the sizes and the dtype. Otherwise the function calls `swiglu_linear_group`, then
/// `linear_group`.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
/// [`Error::Device`](crate::Error::Device) if the operands do not fit, [`Error::Argument`](crate::Error::Argument) if a
/// base needs a gradient or a scale is not finite.
pub fn swiglu_feed_forward(x: &Tensor, group: LinearGroup<'_>, last: LinearGroup<'_>) -> Result<Tensor> {
    group.check(SWIGLU_FEED_FORWARD.name, x)?;
    if !is_fused(x, group, last)? {
        // `recomputed`: the unit is not saved; the backward pass computes it again.
        return linear_group(&swiglu_linear_group(x, group)?.recomputed(), last);
    }
    let inner = group.low_ranks(x.dtype())?;
    // `after`: among the inputs of the fused operation, the factors of `outer` follow those of `inner`.
    let outer = last.low_ranks(x.dtype())?.after(&inner);
    let inputs: SmallVec<[&Tensor; 7]> = std::iter::once(x).chain(inner.factors()).chain(outer.factors()).collect();
    // On CUDA, the low-rank products of the inner maps are late: they are not added to y in memory. The kernels that
    // read y add them.
    let are_late = x.device().is_cuda();
    record_with_aux(
        &SWIGLU_FEED_FORWARD,
        &inputs,
        || {
            let Maps { y, hidden, late } = Maps::of(&as_matrix(&x.raw)?, group, &inner, are_late)?;
            let (unit, outer_hidden) = on_device!(
                y.device(),
                cuda => cuda::forward(&y, late.as_ref(), &outer)?,
                cpu => {
                    let unit = unit(&y, late.as_ref())?;
                    let outer_hidden = outer.hidden(&unit)?;
                    (Some(unit), outer_hidden)
                },
            );
            let result = match unit {
                Some(unit) => {
                    let result = forward(&unit, last.weight, last.bias.map(|bias| &bias.raw))?;
                    outer.add_last_products(&result, &outer_hidden)?;
                    result
                }
                // `cuda::forward` returns no unit in a recomputation that ends with this operation: then nothing reads
                // the operation's result either.
                None => compute::unset(SWIGLU_FEED_FORWARD.name, &y, &[y.dims()[0], last.weight.dims()[0]])?,
            };
            let result = result.reshape(with_last(&x.raw, last.weight.dims()[0]))?;
            // `hidden` is not None, because both inner maps have low-rank products.
            Ok((result, [Some(y), hidden, Some(outer_hidden)].into_iter().flatten().collect()))
        },
        // `aux` has y, then the inputs of the maps times Aᵀ: x Aᵀ of the inner maps, and unit · Aᵀ of the outer map.
        |saver, _, aux| FeedForward {
            inner: inner.save(saver, x, group.weight, Some(&aux[1])),
            y: saver.save_raw(&aux[0]),
            late: are_late.then(|| Late::save(saver, &aux[1], &inner)),
            // The backward pass calls only methods of `outer` that do not read the shape.
            outer: outer.save_without_input(saver, &Shape::from(()), last.weight, Some(&aux[2])),
        },
    )
}

/// Whether the fused operation supports the operands.
fn is_fused(x: &Tensor, group: LinearGroup<'_>, last: LinearGroup<'_>) -> Result<bool> {
    let ([Some(features), Some(gate)], [Some(outer)], &[width, gate_width]) =
        (group.low_rank, last.low_rank, group.sizes)
    else {
        return Ok(false);
    };
    let products = [features, gate, outer];
    let needs_grad = |tensor: &Tensor| tensor.node.is_some();
    let fits = x.elem_count() > 0
        && width == gate_width
        && last.weight.dims() == [last.sizes[0], width]
        && needs_grad(x)
        && products.iter().all(|product| needs_grad(&product.down) && needs_grad(&product.up));
    // One kernel adds to the gradients of these three factors at once, so they must be different tensors.
    let ids = [&features.up, &gate.up, &outer.down].map(|factor| factor.node.as_ref().map(|node| node.id()));
    let are_distinct = ids[0] != ids[1] && !ids[..2].contains(&ids[2]);
    // In a selective checkpoint, which keeps the results of expensive operations, the maps stay separate operations.
    if !fits || !are_distinct || checkpoint::is_selective() {
        return Ok(false);
    }
    // `last` is checked against a view that has the shape of the unit and a single element of memory.
    let mut unit = x.raw.clone();
    for dim in 0..unit.rank() {
        unit = unit.narrow(dim, 0, 1)?;
    }
    let unit = unit.broadcast_as(with_last(&unit, width))?;
    last.check(SWIGLU_FEED_FORWARD.name, &Tensor::constant(unit))?;
    on_device!(x.device(), cuda => cuda::supports(x, width, products), cpu => Ok(true))
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

/// The gradient g of the inner maps' results, (rows, 2 n), and s g B of their low-rank products side by side, (rows, Σ
/// rank).
type InnerGradients = (Raw, Raw);

impl FeedForward {
    /// The part of the backward pass, on the CPU, that reads the inner maps' results. Returns the inner gradients.
    /// `unit_grad` is the part of the unit's gradient that comes through the outer map's base. `outer_hidden_grad` is
    /// s g B of the outer map's low-rank product, where g is the gradient of its result. The function adds the other
    /// part of the unit's gradient, `outer_hidden_grad` times A, to `unit_grad` in place. To the gradients in `context`
    /// it adds those of B of the two inner maps and that of A of the outer map.
    fn on_cpu(
        &self,
        context: &mut BackwardContext<'_>,
        unit_grad: &Raw,
        outer_hidden_grad: &Raw,
    ) -> Result<InnerGradients> {
        let mut y = self.y.get()?;
        // On the CPU no products are late: `late` is None.
        if let Some(late) = &self.late {
            y = late.get()?.added_to(&y)?;
        }
        let width = unit_grad.dims()[1];
        // A of the outer map is always kept, because the unit needs a gradient.
        if let Some(down) = self.outer.down_operand(0)? {
            compute::write_products(
                &[[unit_grad, outer_hidden_grad, &down]],
                /* alpha: */ 1.0,
                /* accumulate: */ true,
            )?;
        }
        let unit = run(SWIGLU.name, &y, width, Silu)?;
        // A of the outer map, which has only adapter number 0. `outer_hidden_grad` already has the factor s.
        let (index, shape) = (self.outer.down(0), (outer_hidden_grad.dims()[1], width));
        let [down_dtype, _up_dtype] = self.outer.dtypes(0);
        let alpha = 1.0;
        context.add_product(index, shape, down_dtype, [&outer_hidden_grad.t()?, &unit], alpha)?;
        let grad = run_backward(SWIGLU.name, &y, unit_grad, width, Silu)?;
        self.inner.add_up_gradients(context, &grad)?;
        let hidden_grad = self.inner.hidden_gradient(&grad)?;
        Ok((grad, hidden_grad))
    }
}

impl Backward for FeedForward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = as_matrix(context.grad())?;
        self.outer.add_up_gradients(context, &grad)?;
        let Some(unit_grad) = self.outer.base_gradient(&grad)? else { return Ok(()) };
        let outer_hidden_grad = self.outer.hidden_gradient(&grad)?;
        let (inner_grad, hidden_grad) = on_device!(
            grad.device(),
            cuda => cuda::backward(self, context, &unit_grad, &outer_hidden_grad)?,
            cpu => self.on_cpu(context, &unit_grad, &outer_hidden_grad)?,
        );
        drop(unit_grad);
        self.inner.add_from_hidden(context, &inner_grad, &hidden_grad)
    }
}
