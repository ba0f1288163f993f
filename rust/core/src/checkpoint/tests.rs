//! Tests which operation is the last of a recomputation. A checkpoint runs its function again in the backward pass only
//! up to the last operation that saves values.

use std::sync::{Arc, Mutex};

use super::{checkpoint, ends_here};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Result, Tensor, Var};

static COPY: OpInfo = OpInfo::cheap("copy");

struct CopyBackward(Option<Saved>);

impl Backward for CopyBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        if let Some(saved) = &self.0 {
            saved.get()?;
        }
        let grad = context.grad().clone();
        context.add(0, grad)
    }
}

/// Whether an operation saves its input for the backward pass.
const SAVES: bool = true;
const SAVES_NOTHING: bool = false;

/// Answers of [`ends_here`], which tells whether a recomputation ends with the running operation. They are in the order
/// of the operations.
type Answers = Arc<Mutex<Vec<bool>>>;

/// Runs an operation that returns `x` unchanged and, if `saves`, saves `x` for the backward pass.
fn copy(x: &Tensor, saves: bool, answers: &Answers) -> Result<Tensor> {
    let forward = || {
        answers.lock().unwrap().push(ends_here());
        Ok(x.raw.clone())
    };
    record(&COPY, &[x], forward, |saver, _| CopyBackward(saves.then(|| saver.save(x))))
}

/// The answers in the forward and in the backward pass of a checkpoint over `function`.
fn forward_and_backward_answers(function: fn(&Tensor, &Answers) -> Result<Tensor>) -> Result<[Vec<bool>; 2]> {
    let x = Var::from_tensor(&Tensor::from_vec(vec![1.0, 2.0], 2, &candle_core::Device::Cpu)?)?;
    let answers = Answers::default();
    let shared = answers.clone();
    let y = checkpoint(move |x| function(&x[0], &shared), &[&x])?;
    let forward = std::mem::take(&mut *answers.lock().unwrap());
    y.sum(&[0], false)?.backward()?;
    let backward = std::mem::take(&mut *answers.lock().unwrap());
    Ok([forward, backward])
}

#[test]
fn a_recomputation_ends_with_the_last_operation_that_saves() -> Result<()> {
    let [forward, backward] = forward_and_backward_answers(|x, answers| {
        let y = copy(&copy(x, SAVES, answers)?, SAVES, answers)?;
        copy(&y, SAVES_NOTHING, answers)
    })?;
    assert_eq!(forward, [false; 3]);
    assert_eq!(backward, [false, true], "the third operation, which saves nothing, does not run again");
    Ok(())
}

#[test]
fn a_recomputation_does_not_end_with_the_operation_whose_result_an_inner_checkpoint_reads() -> Result<()> {
    let [forward, backward] = forward_and_backward_answers(|x, answers| {
        let (y, answers) = (copy(x, SAVES, answers)?, answers.clone());
        checkpoint(move |y| copy(&y[0], SAVES, &answers), &[&y])
    })?;
    assert_eq!(forward, [false; 2]);
    // The outer recomputation runs both copies, the second one inside the inner checkpoint. What the second copy saves
    // belongs to the inner checkpoint. The last value that belongs to the outer one is the input of the inner
    // checkpoint, which the inner checkpoint itself saves, before its function runs. So the outer recomputation ends
    // with neither copy. Then the inner recomputation runs the second copy again, and ends with it.
    assert_eq!(backward, [false, false, true], "two operations of the outer recomputation, then one of the inner one");
    Ok(())
}
