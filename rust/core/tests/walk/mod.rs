//! Helpers for tests that run the cases of all registered operations: fixed inputs, weighted results, comparisons.

use trainable_candle_core::ops::{Case, Domain, REGISTRY};
use trainable_candle_core::raw::{from_vec, to_f64_vec};
use trainable_candle_core::{DType, Raw, Result, Tensor, Var, grad};

/// For each dtype, the largest allowed difference between an element of the result in this dtype and the same element
/// of the f64 result, divided by `max(1, largest absolute element of the f64 result)`.
pub const TOLERANCE: [(DType, f64); 4] =
    [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 6e-2)];

/// One tensor of fixed values for each input of `case`, inside the input's domain. Two inputs of a case get different
/// values. If `strided`, the tensors are transposed views of larger tensors.
pub fn draw(case: &Case, dtype: DType, strided: bool) -> Result<Vec<Tensor>> {
    case.inputs
        .iter()
        .enumerate()
        .map(|(index, input)| {
            let n: usize = input.dims.iter().product();
            let values: Vec<f64> = (0..n)
                .map(|i| {
                    // A low-discrepancy sequence. The values below are rounded to fractions that every dtype represents
                    // exactly.
                    let u = ((i as f64 + 1.0) * 0.618_033_988_7 + index as f64 * 0.377).fract();
                    match input.domain {
                        Domain::Normal => ((u - 0.5) * 4.0 * 64.0).round() / 64.0,
                        Domain::Positive => 0.5 + (u * 1.5 * 64.0).round() / 64.0,
                        Domain::Distinct => {
                            // Multiples of 0.5 in a mixed order, plus 0.25, so that none is zero. If 7 divides n + 4,
                            // they repeat; otherwise none comes twice. The last term keeps values of different inputs
                            // apart.
                            let multiple = (i * 7 + 3 * index) % (n + 4);
                            let magnitude = multiple as f64 * 0.5 + 0.25 + index as f64 * 0.125;
                            if i % 2 == 0 { magnitude } else { -magnitude }
                        }
                    }
                })
                .collect();
            let tensor = from_vec(values, input.dims.as_slice()).to_dtype(dtype)?;
            let tensor = if strided { strided_copy(&tensor)? } else { tensor };
            Ok(Tensor::from_raw(&tensor))
        })
        .collect()
}

/// A view with the values of `tensor`, but with strides in reverse order and a storage offset. A scalar or empty
/// `tensor` is returned as it is.
pub fn strided_copy(tensor: &Raw) -> Result<Raw> {
    let rank = tensor.rank();
    if rank == 0 || tensor.elem_count() == 0 {
        return Ok(tensor.clone());
    }
    let reversed: Vec<usize> = (0..rank).rev().collect();
    let turned = tensor.permute(reversed.as_slice())?.contiguous()?;
    // One zero before and two behind: the view below leaves them out, so it begins at an offset.
    let padded = turned.pad_with_zeros(rank - 1, 1, 2)?;
    Ok(padded.narrow(rank - 1, 1, turned.dim(rank - 1)?)?.permute(reversed.as_slice())?)
}

/// The cases of all registered operations, each with the operation's name.
pub fn all_cases() -> impl Iterator<Item = (&'static str, Case)> {
    REGISTRY.iter().flat_map(|entries| entries.iter()).flat_map(|entry| {
        let cases = (entry.cases)();
        assert!(!cases.is_empty(), "{} has no cases", entry.info.name);
        cases.into_iter().map(|case| (entry.info.name, case))
    })
}

/// The value of `run`, and for each input the gradient of `sum(value * weights_like(value))`. The gradient is zeros for
/// an input that `run` does not use.
pub fn value_and_gradients(
    run: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
) -> Result<(Tensor, Vec<Vec<f64>>)> {
    let vars = inputs.iter().map(leaf).collect::<Result<Vec<_>>>()?;
    let result = run(&vars)?;
    let weights = weights_like(&result)?;
    let leaves: Vec<&Tensor> = vars.iter().collect();
    // The weights are the gradient of that sum with respect to the value.
    let retain_graph = false;
    let gradients = grad(&result, &leaves, Some(&weights), retain_graph)?;
    let gradients = gradients
        .iter()
        .zip(inputs)
        .map(|(g, input)| g.as_ref().map_or_else(|| Ok(vec![0.0; input.elem_count()]), |g| to_f64_vec(g.raw())))
        .collect::<Result<_>>()?;
    Ok((result, gradients))
}

/// Fixed numbers from -0.75 to 0.75 with the shape, the dtype and the device of `result`.
pub fn weights_like(result: &Tensor) -> Result<Tensor> {
    let weights: Vec<f64> = (0..result.elem_count()).map(|i| ((i * 5 % 7) as f64 - 3.0) / 4.0).collect();
    let weights = from_vec(weights, result.shape().clone()).to_dtype(result.dtype())?;
    Tensor::from_raw(&weights).to_device(result.device())
}

/// A variable with the values of `tensor`, as a contiguous leaf tensor.
pub fn leaf(tensor: &Tensor) -> Result<Tensor> {
    Ok(Var::from_tensor(tensor)?.into_inner())
}

/// An error that names the first element of `found` that differs from `expected` by more than
/// `tolerance * max(1, largest absolute expected element)`. NaN equals NaN.
pub fn close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) -> std::result::Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{what}: {} elements, expected {}", found.len(), expected.len()));
    }
    let scale = expected.iter().fold(1.0f64, |m, e| m.max(e.abs()));
    for (index, (f, e)) in found.iter().zip(expected).enumerate() {
        let both_nan = f.is_nan() && e.is_nan();
        let off = (f - e).abs();
        if !both_nan && (off.is_nan() || off > tolerance * scale) {
            return Err(format!("{what}: entry {index} is {f}, expected {e}"));
        }
    }
    Ok(())
}

/// `result` with its error converted to a message.
pub fn text<T>(result: Result<T>) -> std::result::Result<T, String> {
    result.map_err(|e| e.to_string())
}

/// A view of `tensor` with the dimensions in reverse order. Two calls give the original order again.
pub fn turned_view(tensor: &Tensor) -> Result<Tensor> {
    let reversed: Vec<usize> = (0..tensor.rank()).rev().collect();
    tensor.permute(&reversed)
}
