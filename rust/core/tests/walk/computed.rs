//! Tests checkpointed functions whose inputs are results of operations or views, not variables.

use trainable_candle_core::checkpoint::{Policy, checkpoint_with};
use trainable_candle_core::ops::Case;
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Device, Result, Tensor};

use super::walk::{close, draw, text, turned_view, value_and_gradients};

/// How an input is computed from the variable.
#[derive(Clone, Copy, Debug)]
enum Derived {
    /// By an operation with a result in storage of its own.
    Computed,
    /// As a view, which shares the variable's storage.
    View,
}

impl Derived {
    fn apply(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Computed => x.mul_scalar(2.0),
            // Turned twice, the view has the original order of dimensions.
            Self::View => turned_view(&turned_view(x)?),
        }
    }
}

/// Where a checkpointed function gets its tensors from.
#[derive(Clone, Copy, Debug)]
enum InputsFrom {
    /// They are computed before the checkpoint and passed as arguments.
    Arguments,
    /// They are computed before the checkpoint and captured by the function.
    Outside,
    /// The function computes them from its arguments.
    Inside,
}

/// Check that the value and the gradients through a checkpoint equal those without a checkpoint if one input of the
/// operation, or all inputs, are computed from variables. `tolerance` is that of [`close`].
pub fn checkpoints_take_computed_tensors(
    case: &Case,
    device: &Device,
    tolerance: f64,
) -> std::result::Result<(), String> {
    let strided = false;
    // `text` converts errors to messages.
    let drawn = text(draw(case, DType::F32, strided))?;
    let inputs = text(drawn.iter().map(|x| x.to_device(device)).collect::<Result<Vec<_>>>())?;
    // The index of the input that is computed from a variable; `None`: all inputs are.
    let chosen = std::iter::once(None).chain((0..inputs.len()).map(Some));
    for (chosen, derived) in chosen.flat_map(|chosen| [(chosen, Derived::Computed), (chosen, Derived::View)]) {
        let derive = move |x: &[Tensor]| -> Result<Vec<Tensor>> {
            let is_chosen = |index| chosen.is_none_or(|chosen| chosen == index);
            x.iter().enumerate().map(|(i, x)| if is_chosen(i) { derived.apply(x) } else { Ok(x.clone()) }).collect()
        };
        let (value, grads) = text(value_and_gradients(&|x| (case.run)(&derive(x)?), &inputs))?;
        let value = text(to_f64_vec(value.raw()))?;
        for policy in [Policy::Full, Policy::Selective] {
            for from in [InputsFrom::Arguments, InputsFrom::Outside, InputsFrom::Inside] {
                let run = |x: &[Tensor]| -> Result<Tensor> {
                    let inner = case.run.clone();
                    let outputs = match from {
                        InputsFrom::Arguments => {
                            let inputs = derive(x)?;
                            checkpoint_with(policy, move |xs| Ok(vec![inner(xs)?]), &inputs.iter().collect::<Vec<_>>())
                        }
                        InputsFrom::Outside => {
                            let inputs = derive(x)?;
                            checkpoint_with(policy, move |_| Ok(vec![inner(&inputs)?]), &[])
                        }
                        InputsFrom::Inside => {
                            let inputs: Vec<&Tensor> = x.iter().collect();
                            checkpoint_with(policy, move |xs| Ok(vec![inner(&derive(xs)?)?]), &inputs)
                        }
                    };
                    Ok(outputs?.remove(0))
                };
                let about = |e: String| format!("{policy:?}, input {chosen:?} {derived:?}, from {from:?}: {e}");
                let (again, again_grads) = text(value_and_gradients(&run, &inputs)).map_err(about)?;
                close("value", &text(to_f64_vec(again.raw()))?, &value, tolerance).map_err(about)?;
                for (index, (found, expected)) in again_grads.iter().zip(&grads).enumerate() {
                    close(&format!("gradient of input {index}"), found, expected, tolerance).map_err(about)?;
                }
            }
        }
    }
    Ok(())
}
