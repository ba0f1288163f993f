//! The logarithms of the targets' probabilities, of which losses that compare texts are made (DPO, Rafailov et al. 2023,
//! arXiv:2305.18290).

use super::{Head, OpInfo, check, chunk_rows};
use crate::compute::on_device;
use crate::tape::{Backward, BackwardContext, Saved, record};
use crate::{Result, Tensor};

pub(in crate::ops::loss) static LOG_PROBS: OpInfo = OpInfo::cheap("linear_log_probs");
const OP: &str = LOG_PROBS.name;

/// log softmax(h Wᵀ) at the targets: `h (N, D)`, `weight (V, D)`, `targets (N)` → (N) in f32 (f64 for f64); 0 where the target is
/// [`IGNORE_INDEX`](super::super::IGNORE_INDEX). Logits are made in chunks, again in the backward, which is given a number for each row.
///
/// # Errors
/// As [`linear_cross_entropy`](super::linear_cross_entropy).
pub fn linear_log_probs(h: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    check(OP, h, weight, targets)?;
    let rows = chunk_rows(h, weight);
    record(
        &LOG_PROBS,
        &[h, weight],
        || {
            let head = Head { h: &h.raw, weight: &weight.raw, rows, wanted: [false; 2] };
            on_device!(
                h.device(),
                cuda => super::cuda::log_probs(OP, &head, targets),
                cpu => super::cpu::log_probs(OP, &head, targets),
            )
        },
        |saver, _| LogProbsBackward { h: saver.save(h), weight: saver.hold(weight), targets: targets.detach(), rows },
    )
}

struct LogProbsBackward {
    h: Saved,
    weight: Saved,
    targets: Tensor,
    rows: usize,
}

impl Backward for LogProbsBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (h, weight) = (self.h.get()?, self.weight.get()?);
        let wanted = [context.needs(0), context.needs(1)];
        let head = Head { h: &h, weight: &weight, rows: self.rows, wanted };
        let grad = context.grad().clone();
        let gradients = on_device!(
            h.device(),
            cuda => super::cuda::log_probs_backward(OP, &head, &self.targets, &grad)?,
            cpu => super::cpu::log_probs_backward(OP, &head, &self.targets, &grad)?,
        );
        for (index, (gradient, input)) in gradients.into_iter().zip([&h, &weight]).enumerate() {
            if let Some(gradient) = gradient {
                context.add(index, crate::compute::cast(&gradient, input.dtype())?)?;
            }
        }
        Ok(())
    }
}
