//! Checks, for an operation's test case, what happens if a variable changes after the operation used it: the result
//! keeps its old values, or a backward pass through the result is an error.

use trainable_candle_core::ops::Case;
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var, grad};

use super::walk::{close, draw, text, weights_like};

/// The result of a check, with an error as a message. [`text`] converts errors of the library to messages.
type Checked = std::result::Result<(), String>;

/// Values of the argument `retain_graph`: whether a backward pass keeps the tape for another backward pass.
const RETAIN: bool = true;
const RELEASE: bool = false;

fn variables(case: &Case, device: &Device) -> Result<Vec<Var>> {
    let strided = false;
    draw(case, DType::F32, strided)?.iter().map(|x| Var::from_tensor(&x.to_device(device)?)).collect()
}

fn run(case: &Case, vars: &[Var]) -> Result<Tensor> {
    (case.run)(&vars.iter().map(|var| var.as_tensor().clone()).collect::<Vec<_>>())
}

/// Overwrites `var` with other values.
fn change(var: &Var) -> Result<()> {
    var.set(&var.detach().mul_scalar(-3.0)?.add_scalar(0.125)?)
}

/// The stored gradient of each variable, zeros for a variable without one.
fn gradients(vars: &[Var]) -> Result<Vec<Vec<f64>>> {
    vars.iter()
        .map(|var| match var.grad() {
            Some(grad) => to_f64_vec(grad.raw()),
            None => Ok(vec![0.0; var.elem_count()]),
        })
        .collect()
}

/// An error if `found` and `expected` (lists of tensors' values) differ. `what` names them in the error.
fn same(what: &str, found: &[Vec<f64>], expected: &[Vec<f64>]) -> Checked {
    found.iter().zip(expected).enumerate().try_for_each(|(index, (f, e))| close(&format!("{what} {index}"), f, e, 1e-6))
}

/// True if a backward pass succeeded, false if it reported a changed variable (`Error::Autograd`). The tests accept
/// that report in place of the right gradient. Any other error is an error here too.
fn succeeded(outcome: Result<impl Sized>) -> std::result::Result<bool, String> {
    match outcome {
        Ok(_) => Ok(true),
        Err(Error::Autograd { .. }) => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

/// Changes each input of `case` in turn after the result was computed. Every backward pass that succeeds must give the
/// gradients of the unchanged inputs. The result may change with the input only if it is a view of the variable. Such a
/// view shares the variable's version (its count of changes), so a backward pass that needs the result must fail.
pub fn results_do_not_follow_variables(case: &Case, device: &Device) -> Checked {
    // `weights_like` returns fixed numbers, here the gradient of the result.
    let expected = {
        let vars = text(variables(case, device))?;
        let y = text(run(case, &vars))?;
        text(y.backward_with(Some(&text(weights_like(&y))?), RELEASE))?;
        text(gradients(&vars))?
    };
    for changed in 0..case.inputs.len() {
        let vars = text(variables(case, device))?;
        let y = text(run(case, &vars))?;
        let before = text(to_f64_vec(y.raw()))?;
        // The gradient of `factor` is `y`, with the values that `y` had before the change.
        let factor = text(Tensor::ones(y.shape(), y.dtype(), device).and_then(|ones| Var::from_tensor(&ones)))?;
        let product = text(factor.mul(&y.detach()))?;
        text(change(&vars[changed]))?;
        let follows = text(to_f64_vec(y.raw()))? != before;
        let ones = text(Tensor::ones(y.shape(), y.dtype(), device))?;
        if name_input(changed, succeeded(product.backward_with(Some(&ones), RELEASE)))? {
            if follows {
                return Err(format!(
                    "the result changed with input {changed}, but a backward pass that uses the result succeeded"
                ));
            }
            same("gradient of the factor", &text(gradients(std::slice::from_ref(&factor)))?, &[before])?;
        }
        let weights = text(weights_like(&y))?;
        if name_input(changed, succeeded(y.backward_with(Some(&weights), RELEASE)))? {
            same(&format!("input {changed} changed: gradient"), &text(gradients(&vars))?, &expected)?;
        }
    }
    Ok(())
}

/// `result`, with the number of the changed input in the error.
fn name_input<T>(input: usize, result: std::result::Result<T, String>) -> std::result::Result<T, String> {
    result.map_err(|error| format!("input {input} changed: {error}"))
}

/// A gradient shares no storage with the inputs. It also shares none with `seed`, the variable that was passed to the
/// backward pass as the gradient of the result, either itself or as a reshaped view.
pub fn gradients_do_not_follow_variables(case: &Case, device: &Device) -> Checked {
    for as_view in [false, true] {
        let vars = text(variables(case, device))?;
        let y = text(run(case, &vars))?;
        let seed = text(weights_like(&y).and_then(|weights| Var::from_tensor(&weights)))?;
        let result_grad = if as_view { text(seed.reshape(y.shape()))? } else { seed.as_tensor().clone() };
        text(y.backward_with(Some(&result_grad), RETAIN))?;
        let leaves: Vec<&Tensor> = vars.iter().map(|var| &**var).collect();
        let found = text(grad(&y, &leaves, Some(&result_grad), RELEASE))?;
        let found: Vec<Tensor> = found.into_iter().flatten().chain(vars.iter().filter_map(Var::grad)).collect();
        let values = || text(found.iter().map(|grad| to_f64_vec(grad.raw())).collect::<Result<Vec<_>>>());
        let before = values()?;
        for var in std::iter::once(&seed).chain(&vars) {
            text(change(var))?;
        }
        same("gradient", &values()?, &before)?;
    }
    Ok(())
}
