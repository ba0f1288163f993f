//! The logarithms of the targets' probabilities, for losses that compare texts (DPO, Rafailov et al. 2023,
//! arXiv:2305.18290).

use super::{Head, Matrix, OpInfo, check, chunk_rows, inputs};
use crate::compute::on_device;
use crate::quantized::weight::{HeldWeight, WeightRef};
use crate::tape::{Backward, BackwardContext, Saved, record};
use crate::{Result, Tensor};

pub(in crate::ops::loss) static LOG_PROBS: OpInfo = OpInfo::cheap("linear_log_probs");
const OP: &str = LOG_PROBS.name;

/// log softmax(h Wᵀ) at the targets: hidden states `h (N, D)`, W = `weight (V, D)`, `targets (N)` → (N) in f32 (f64 for
/// f64); 0 where the target is [`IGNORE_INDEX`](super::super::IGNORE_INDEX). The forward pass computes the
/// logits in chunks of rows. The backward pass computes them again: the gradient of a row's logits depends on the
/// gradient of the row's result, which is unknown in the forward pass.
///
/// # Errors
/// As [`linear_cross_entropy`](super::linear_cross_entropy), except those about its argument `weights`, which this
/// function lacks. On CUDA a target out of range makes only the result of its row NaN.
pub fn linear_log_probs<'a>(h: &Tensor, weight: impl Into<WeightRef<'a>>, targets: &Tensor) -> Result<Tensor> {
    let weight = weight.into();
    check(OP, h, weight, targets)?;
    // Number of rows of a chunk.
    let rows = chunk_rows(h, weight);
    record(
        &LOG_PROBS,
        &inputs(h, weight),
        || {
            // The forward pass computes no gradient, neither of h nor of the weight.
            let wanted = [false; 2];
            let head = Head { h: &h.raw, weight: Matrix::of(OP, weight)?, rows, wanted };
            on_device!(
                h.device(),
                cuda => super::cuda::log_probs(OP, &head, targets),
                cpu => super::cpu::log_probs(OP, &head, targets),
            )
        },
        |saver, _| LogProbsBackward { h: saver.save(h), weight: weight.hold(saver), targets: targets.detach(), rows },
    )
}

struct LogProbsBackward {
    h: Saved,
    weight: HeldWeight,
    targets: Tensor,
    /// Number of rows of a chunk.
    rows: usize,
}

impl Backward for LogProbsBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let h = self.h.get()?;
        let plain_weight = match &self.weight {
            HeldWeight::Plain(weight) => Some(weight.get()?),
            HeldWeight::Quantized(_) | HeldWeight::Streamed(_) => None,
        };
        let weight = match (&plain_weight, &self.weight) {
            (None, HeldWeight::Quantized(weight)) => Matrix::Quantized(weight),
            (Some(weight), _) => Matrix::Plain(weight),
            (None, HeldWeight::Plain(_)) => unreachable!("the values of a plain weight are read above"),
            (None, HeldWeight::Streamed(_)) => return Err(super::streamed_error(OP)),
        };
        // Input 0 is h. Input 1 is the weight, unless it is quantized.
        let wanted = [context.needs(0), plain_weight.is_some() && context.needs(1)];
        let head = Head { h: &h, weight, rows: self.rows, wanted };
        let grad = context.grad().clone();
        let gradients = on_device!(
            h.device(),
            cuda => super::cuda::log_probs_backward(OP, &head, &self.targets, &grad)?,
            cpu => super::cpu::log_probs_backward(OP, &head, &self.targets, &grad)?,
        );
        // `h.dtype()` is the dtype of both gradients: a weight that needs one has the dtype of h.
        for (index, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                context.add(index, crate::compute::cast(&gradient, h.dtype())?)?;
            }
        }
        Ok(())
    }
}
