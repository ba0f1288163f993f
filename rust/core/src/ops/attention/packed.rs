//! Attention over q, k and v that lie side by side in one tensor, or over q in one tensor and k and v side by side in
//! another: the layout that [`linear_group`](crate::ops::linear_group::linear_group) computes. The operation reads q, k
//! and v in place, and writes their gradients side by side.

use super::cpu::{self, SavedValues};
use super::{backward, forward};
use crate::compute::on_device;
use crate::raw::{Raw, check_allocation};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, compute};

pub(super) static PACKED: OpInfo = OpInfo::expensive("packed_attention");

/// Computes attention with `heads` heads → `(B, S, D)`. Without a context, `x (B, S, 3 D)` has q, k and v of the same
/// S tokens. With a context, `x (B, S, D)` has q, and `context (B, L, 2 D)` has k and v of L other tokens.
///
/// The D columns of each of q, k and v are those of its first head, then those of the second, and so on: D / heads
/// columns per head. With `is_causal`, query i sees only keys 0 to i. The scale is 1/√(D / heads). Saves its inputs,
/// the result and one number per head and query.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit together, or if the number of heads
/// is 0, or if `x` is not floating point; [`Error::OutOfMemory`] if the result does not fit in memory.
pub fn packed_attention(x: &Tensor, context: Option<&Tensor>, heads: usize, is_causal: bool) -> Result<Tensor> {
    let packed = Packed::new(x, context, heads, is_causal)?;
    check_allocation(PACKED.name, &packed.result, x.dtype())?;
    let with_context;
    let without_context = [x];
    let inputs: &[&Tensor] = match context {
        Some(context) => {
            with_context = [x, context];
            &with_context
        }
        None => &without_context,
    };
    record_with_aux(
        &PACKED,
        inputs,
        || {
            let operands = packed.operands(&x.raw, context.map(|context| &context.raw))?;
            let mask = None;
            let (o, log_sums) = forward(&packed.attention, operands.each_ref(), mask)?;
            Ok((o.transpose(1, 2)?.reshape(packed.result.as_slice())?, std::iter::once(log_sums).collect()))
        },
        |saver, o, log_sums| PackedBackward {
            x: saver.save(x),
            context: context.map(|context| saver.save(context)),
            result: saver.save_raw(o),
            log_sums: saver.save_raw(&log_sums[0]),
            packed: packed.clone(),
        },
    )
}

/// The sizes of an attention over packed operands.
#[derive(Clone)]
struct Packed {
    /// How many of q, k and v are in x, and how many in the context.
    parts: [usize; 2],
    heads: usize,
    /// The shape of the result: (batch, queries, width).
    result: [usize; 3],
    attention: cpu::Attention,
}

impl Packed {
    fn new(x: &Tensor, context: Option<&Tensor>, heads: usize, is_causal: bool) -> Result<Self> {
        let op = PACKED.name;
        let parts = if context.is_some() { [1, 2] } else { [3, 0] };
        // Batch, length and the width of one part.
        let sizes = |name: &str, tensor: &Tensor, parts: usize| -> Result<[usize; 3]> {
            match *tensor.dims() {
                [batch, length, width] if heads > 0 && width.is_multiple_of(parts * heads) => {
                    Ok([batch, length, width / parts])
                }
                _ => Err(Error::shape(
                    op,
                    format!(
                        "the {name} has shape {:?} and there are {heads} heads, expected at least one head and a shape \
                        (batch, length, width) whose width is a multiple of {parts} * heads",
                        tensor.dims()
                    ),
                )),
            }
        };
        let [batch, queries, width] = sizes("input", x, parts[0])?;
        let mut keys = queries;
        if let Some(context) = context {
            let [context_batch, length, part_width] = sizes("context", context, parts[1])?;
            if [context_batch, part_width] != [batch, width] {
                return Err(Error::shape(
                    op,
                    format!(
                        "the context has shape {:?}, expected ({batch}, length, {}) for an input of shape {:?}",
                        context.dims(),
                        2 * width,
                        x.dims()
                    ),
                ));
            }
            crate::ops::linear::same_kind(op, x, "context", context)?;
            keys = length;
        }
        if !crate::raw::is_float(x.dtype()) {
            return Err(Error::dtype(
                op,
                format!("expected a floating point input, found {}; convert it with to()", x.dtype().as_str()),
            ));
        }
        // `max` avoids a division by 0: a width of 0 is valid.
        let scale = 1.0 / ((width / heads).max(1) as f64).sqrt();
        // `scores` is the shape of the scores.
        let (scores, visible_keys) = (vec![batch, heads, queries, keys], cpu::VisibleKeys::of(is_causal));
        // Each head of queries has its own head of keys and values.
        let group = 1;
        let attention = cpu::Attention { scores, scale, visible_keys, group };
        Ok(Self { parts, heads, result: [batch, queries, width], attention })
    }

    /// Part `index` of the `parts` that lie side by side in `tensor`: a view (batch, heads, length, width of a head).
    fn part(&self, tensor: &Raw, index: usize, parts: usize) -> Result<Raw> {
        let [batch, _, width] = self.result;
        let by_head = tensor.reshape((batch, tensor.dims()[1], parts * self.heads, width / self.heads))?;
        Ok(by_head.narrow(2, index * self.heads, self.heads)?.transpose(1, 2)?)
    }

    /// q, k and v as views of x and of the context, which must be contiguous.
    fn split(&self, x: &Raw, context: Option<&Raw>) -> Result<[Raw; 3]> {
        let [in_x, in_context] = self.parts;
        let part = |index: usize| match context {
            Some(context) if index >= in_x => self.part(context, index - in_x, in_context),
            _ => self.part(x, index, in_x),
        };
        Ok([part(0)?, part(1)?, part(2)?])
    }

    /// Writes the gradients of q, k and v, side by side, to `grad_x` and `grad_context`, from `grad`, the gradient of
    /// the result. Where the destination is `None`, computes no gradient.
    fn write(&self, saved: &SavedValues, grad: &Raw, [grad_x, grad_context]: [Option<&Raw>; 2]) -> Result<()> {
        let [in_x, in_context] = self.parts;
        // For each of q, k and v: the tensor that its gradient is written to, its index among the parts of this tensor,
        // and the number of parts.
        let places = [0, 1, 2].map(|index| match index < in_x {
            true => grad_x.map(|grad_x| (grad_x, index, in_x)),
            false => grad_context.map(|grad_context| (grad_context, index - in_x, in_context)),
        });
        on_device!(
            grad.device(),
            cuda => {
                let mut parts = [None, None, None];
                for (part, place) in parts.iter_mut().zip(places) {
                    *part = place.map(|(tensor, index, count)| self.part(tensor, index, count)).transpose()?;
                }
                let parts = parts.each_ref().map(Option::as_ref);
                super::cuda::Attention::from(&self.attention).backward_into(saved, grad, parts)
            },
            cpu => {
                let grads = backward(&self.attention, saved, grad, places.map(|place| place.is_some()))?;
                let [batch, _, width] = self.result;
                for (place, part) in places.into_iter().zip(grads) {
                    if let (Some((tensor, index, _)), Some(part)) = (place, part) {
                        // The heads of a token are adjacent in `part`, so the transpose is contiguous already and is
                        // not copied.
                        let tokens = compute::contiguous(&part.transpose(1, 2)?)?;
                        let tokens = tokens.reshape((batch, tensor.dims()[1], width))?;
                        compute::copy_into(&tensor.narrow(2, index * width, width)?, &tokens)?;
                    }
                }
                Ok(())
            },
        )
    }

    /// q, k and v as views of x and of the context, or of contiguous copies of those that are not contiguous.
    fn operands(&self, x: &Raw, context: Option<&Raw>) -> Result<[Raw; 3]> {
        let context = context.map(compute::contiguous).transpose()?;
        self.split(&compute::contiguous(x)?, context.as_ref())
    }
}

struct PackedBackward {
    x: Saved,
    context: Option<Saved>,
    result: Saved,
    /// The log-sum-exp of the scores of each query.
    log_sums: Saved,
    packed: Packed,
}

impl Backward for PackedBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let packed = &self.packed;
        let (x, keys_and_values) = (self.x.get()?, self.context.as_ref().map(Saved::get).transpose()?);
        // The result and its gradient (B, S, D) are one part each.
        let (index, parts) = (0, 1);
        let saved = SavedValues {
            inputs: packed.operands(&x, keys_and_values.as_ref())?,
            mask: None,
            result: packed.part(&self.result.get()?, index, parts)?,
            log_sums: self.log_sums.get()?,
        };
        let grad = packed.part(&compute::contiguous(context.grad())?, index, parts)?;
        let unset_like = |input: &Raw| compute::unset(PACKED.name, input, input.dims());
        let grad_x = context.needs(0).then(|| unset_like(&x)).transpose()?;
        let grad_context = keys_and_values.as_ref().filter(|_| context.needs(1)).map(unset_like).transpose()?;
        packed.write(&saved, &grad, [grad_x.as_ref(), grad_context.as_ref()])?;
        for (index, grad) in [grad_x, grad_context].into_iter().enumerate() {
            if let Some(grad) = grad {
                context.add(index, grad)?;
            }
        }
        Ok(())
    }
}
