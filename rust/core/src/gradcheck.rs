//! Checks gradients against finite differences in f64.

use candle_core::DType;

use crate::raw::{from_vec, to_f64_vec};
use crate::tape::no_grad;
use crate::{Error, Result, Tensor, Var, grad};

/// Step and tolerances of [`gradcheck`]; the defaults are torch's.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Step of the central difference: an entry is moved by this much in both directions.
    pub eps: f64,
    /// Absolute tolerance.
    pub atol: f64,
    /// Tolerance relative to the finite difference.
    pub rtol: f64,
}

impl Default for Tolerance {
    fn default() -> Self {
        Self { eps: 1e-6, atol: 1e-5, rtol: 1e-3 }
    }
}

/// Check every entry of the gradient of `function` at `inputs` against central differences:
/// `|analytic - numeric| <= atol + rtol * |numeric|`. The result of `function` may have any shape: its elements are
/// summed with fixed, distinct weights, so that errors of different elements do not cancel.
///
/// # Errors
/// [`Error::DType`] if an input is not f64; the errors of `function` and of its backward pass; [`Error::Autograd`],
/// which names the worst entry, if a difference exceeds the tolerance or is NaN.
pub fn gradcheck(
    function: impl Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    tolerance: Tolerance,
) -> Result<()> {
    let Tolerance { eps, atol, rtol } = tolerance;
    let mut vars = Vec::with_capacity(inputs.len());
    for (index, input) in inputs.iter().enumerate() {
        if input.dtype() != DType::F64 {
            return Err(Error::dtype(
                "gradcheck",
                format!("input {index} is {}; finite differences need f64", input.dtype().as_str()),
            ));
        }
        vars.push(Var::from_tensor(input)?);
    }
    let on_tape: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let result = function(&on_tape)?;
    let weights = weights(&result)?;
    let leaves: Vec<&Tensor> = on_tape.iter().collect();
    let retain_graph = false;
    let analytic = grad(&result, &leaves, Some(&weights), retain_graph)?;

    let weights = to_f64_vec(weights.raw())?;
    let objective = |values: &[Tensor]| -> Result<f64> {
        let _guard = no_grad();
        let elements = to_f64_vec(function(values)?.raw())?;
        Ok(elements.iter().zip(&weights).map(|(element, weight)| element * weight).sum())
    };
    // The largest excess over the tolerance, and the message about its entry.
    let mut worst: Option<(f64, String)> = None;
    for (index, input) in inputs.iter().enumerate() {
        let original = to_f64_vec(input.raw())?;
        let analytic = match &analytic[index] {
            Some(gradient) => to_f64_vec(gradient.raw())?,
            None => vec![0.0; original.len()],
        };
        for entry in 0..original.len() {
            let at = |delta: f64| -> Result<f64> {
                let mut moved = original.clone();
                moved[entry] += delta;
                let mut values: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
                values[index] = Tensor::from_raw(&from_vec(moved, input.shape().clone()));
                objective(&values)
            };
            let numeric = (at(eps)? - at(-eps)?) / (2.0 * eps);
            let difference = (analytic[entry] - numeric).abs();
            let excess = difference - (atol + rtol * numeric.abs());
            if excess.is_nan() || excess > worst.as_ref().map_or(0.0, |(largest, _)| *largest) {
                let message = format!(
                    "input {index}, entry {entry} of shape {:?}: gradient {:.6e}, finite difference {numeric:.6e}",
                    input.dims(),
                    analytic[entry],
                );
                worst = Some((if excess.is_nan() { f64::INFINITY } else { excess }, message));
            }
        }
    }
    match worst {
        None => Ok(()),
        Some((_, message)) => Err(Error::autograd("gradcheck", message)),
    }
}

/// Distinct weights between 0.5 and 1.5 in the shape of `result`, the same at each call.
fn weights(result: &Tensor) -> Result<Tensor> {
    const GOLDEN_RATIO: f64 = 1.618_033_988_7;
    let values: Vec<f64> = (0..result.elem_count()).map(|i| 1.0 + 0.5 * ((i as f64) * GOLDEN_RATIO).sin()).collect();
    Ok(Tensor::from_raw(&from_vec(values, result.shape().clone()).to_dtype(result.dtype())?))
}
