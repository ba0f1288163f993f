//! Walks the registry: every operation, every case, against independent oracles.

use std::collections::BTreeSet;

use trainable_candle_core::checkpoint::{Policy, checkpoint_with};
use trainable_candle_core::gradcheck::{Tolerance, gradcheck};
use trainable_candle_core::ops::{Case, Domain, REGISTRY};
use trainable_candle_core::raw::{from_vec, to_f64_vec};
use trainable_candle_core::{DType, Result, Tensor, Var, grad};

/// How far a result in a dtype may be from the one in f64, relative to the largest value.
const TOLERANCE: [(DType, f64); 4] = [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 6e-2)];

/// Fixed values of a domain, different for each input. `strided` values lie transposed in a larger tensor.
fn draw(case: &Case, dtype: DType, strided: bool) -> Result<Vec<Tensor>> {
    case.inputs
        .iter()
        .enumerate()
        .map(|(index, input)| {
            let n: usize = input.dims.iter().product();
            let values: Vec<f64> = (0..n)
                .map(|i| {
                    // A low-discrepancy sequence, coarse enough to be exact in every dtype.
                    let u = ((i as f64 + 1.0) * 0.618_033_988_7 + index as f64 * 0.377).fract();
                    match input.domain {
                        Domain::Normal => ((u - 0.5) * 4.0 * 64.0).round() / 64.0,
                        Domain::Positive => 0.5 + (u * 1.5 * 64.0).round() / 64.0,
                        Domain::Distinct => {
                            let rank = ((i * 7 + 3 * index) % (n + 4)) as f64 * 0.5 + 0.25 + index as f64 * 0.125;
                            if i % 2 == 0 { rank } else { -rank }
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

/// The same values behind other strides and an offset.
fn strided_copy(tensor: &trainable_candle_core::Raw) -> Result<trainable_candle_core::Raw> {
    let rank = tensor.rank();
    if rank == 0 || tensor.elem_count() == 0 {
        return Ok(tensor.clone());
    }
    let reversed: Vec<usize> = (0..rank).rev().collect();
    let turned = tensor.permute(reversed.as_slice())?.contiguous()?;
    let padded = turned.pad_with_zeros(rank - 1, 1, 2)?;
    Ok(padded.narrow(rank - 1, 1, turned.dim(rank - 1)?)?.permute(reversed.as_slice())?)
}

fn all_cases() -> impl Iterator<Item = (&'static str, Case)> {
    REGISTRY.iter().flat_map(|entries| entries.iter()).flat_map(|entry| {
        let cases = (entry.cases)();
        assert!(!cases.is_empty(), "{} brings no cases", entry.info.name);
        cases.into_iter().map(|case| (entry.info.name, case))
    })
}

/// Run `check` on every case and report all failures at once.
fn walk(check: impl Fn(&Case) -> std::result::Result<(), String>) {
    let failures: Vec<String> = all_cases()
        .filter_map(|(name, case)| check(&case).err().map(|e| format!("{name} ({}): {e}", case.label)))
        .collect();
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// Value and gradients of `run`, the result weighted with fixed numbers.
fn value_and_gradients(
    run: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
) -> Result<(Tensor, Vec<Vec<f64>>)> {
    let vars = inputs.iter().map(leaf).collect::<Result<Vec<_>>>()?;
    let result = run(&vars)?;
    let weights: Vec<f64> = (0..result.elem_count()).map(|i| ((i * 5 % 7) as f64 - 3.0) / 4.0).collect();
    let weights = Tensor::from_raw(&from_vec(weights, result.shape().clone()).to_dtype(result.dtype())?);
    let leaves: Vec<&Tensor> = vars.iter().collect();
    let gradients = grad(&result, &leaves, Some(&weights), false)?;
    let gradients = gradients
        .iter()
        .zip(inputs)
        .map(|(g, input)| g.as_ref().map_or_else(|| Ok(vec![0.0; input.elem_count()]), |g| to_f64_vec(g.raw())))
        .collect::<Result<_>>()?;
    Ok((result, gradients))
}

/// A leaf with the strides of `tensor`: a view of a variable would be on the tape, so its strides come from a view.
fn leaf(tensor: &Tensor) -> Result<Tensor> {
    Ok(Var::from_tensor(tensor)?.into_inner())
}

fn close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) -> std::result::Result<(), String> {
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

fn text<T>(result: Result<T>) -> std::result::Result<T, String> {
    result.map_err(|e| e.to_string())
}

#[test]
fn names_are_unique() {
    let names: Vec<&str> = REGISTRY.iter().flat_map(|e| e.iter()).map(|e| e.info.name).collect();
    let unique: BTreeSet<&str> = names.iter().copied().collect();
    assert_eq!(names.len(), unique.len(), "{names:?}");
    assert!(names.len() > 40, "the registry is nearly empty: {names:?}");
}

#[test]
fn gradients_match_finite_differences() {
    walk(|case| {
        let inputs = text(draw(case, DType::F64, false))?;
        text(gradcheck(|x| (case.run)(x), &inputs, Tolerance::default()))
    });
}

#[test]
fn fused_equals_plain_in_value_and_gradient() {
    walk(|case| {
        let Some(plain) = &case.plain else { return Ok(()) };
        let inputs = text(draw(case, DType::F64, false))?;
        let (fused, fused_grads) = text(value_and_gradients(&*case.run, &inputs))?;
        let (expected, expected_grads) = text(value_and_gradients(&**plain, &inputs))?;
        if fused.dims() != expected.dims() {
            return Err(format!("shape {:?}, expected {:?}", fused.dims(), expected.dims()));
        }
        close("value", &text(to_f64_vec(fused.raw()))?, &text(to_f64_vec(expected.raw()))?, 1e-10)?;
        for (index, (f, e)) in fused_grads.iter().zip(&expected_grads).enumerate() {
            close(&format!("gradient of input {index}"), f, e, 1e-10)?;
        }
        Ok(())
    });
}

#[test]
fn every_dtype_agrees_with_f64_and_keeps_its_dtype() {
    walk(|case| {
        let reference = text(draw(case, DType::F64, false))?;
        let (expected, expected_grads) = text(value_and_gradients(&*case.run, &reference))?;
        let cast = expected.dtype() == DType::F64 && case.label.starts_with("to f64");
        for (dtype, tolerance) in TOLERANCE {
            let inputs = text(draw(case, dtype, false))?;
            let (value, grads) =
                text(value_and_gradients(&*case.run, &inputs)).map_err(|e| format!("{}: {e}", dtype.as_str()))?;
            if value.dtype() != dtype && !cast {
                return Err(format!("{} became {}", dtype.as_str(), value.dtype().as_str()));
            }
            close(dtype.as_str(), &text(to_f64_vec(value.raw()))?, &text(to_f64_vec(expected.raw()))?, tolerance)?;
            for (index, (f, e)) in grads.iter().zip(&expected_grads).enumerate() {
                close(&format!("{} gradient of input {index}", dtype.as_str()), f, e, 2.0 * tolerance)?;
            }
        }
        Ok(())
    });
}

#[test]
fn strided_inputs_give_what_contiguous_ones_give() {
    walk(|case| {
        let contiguous = text(draw(case, DType::F64, false))?;
        let strided = text(draw(case, DType::F64, true))?;
        let expected = text((case.run)(&contiguous))?;
        let found = text((case.run)(&strided))?;
        close("value", &text(to_f64_vec(found.raw()))?, &text(to_f64_vec(expected.raw()))?, 1e-12)?;
        // Gradients through transposed views of the variables.
        let through_views = |x: &[Tensor]| -> Result<Tensor> {
            let views = x.iter().map(turned_view).collect::<Result<Vec<_>>>()?;
            (case.run)(&views)
        };
        let turned =
            text(contiguous.iter().map(|t| turned_view(t).and_then(|v| v.contiguous())).collect::<Result<Vec<_>>>())?;
        let (_, found) = text(value_and_gradients(&through_views, &turned))?;
        let (_, expected) = text(value_and_gradients(&*case.run, &contiguous))?;
        for (index, (f, e)) in found.iter().zip(&expected).enumerate() {
            let shape: Vec<usize> = case.inputs[index].dims.clone();
            let e = text(
                turned_view(&Tensor::from_raw(&from_vec(e.clone(), shape)))
                    .and_then(|t| to_f64_vec(t.contiguous()?.raw())),
            )?;
            close(&format!("gradient of input {index}"), f, &e, 1e-12)?;
        }
        Ok(())
    });
}

/// Dimensions in reverse order: its own inverse.
fn turned_view(tensor: &Tensor) -> Result<Tensor> {
    let reversed: Vec<usize> = (0..tensor.rank()).rev().collect();
    tensor.permute(&reversed)
}

#[test]
fn checkpointed_equals_not_bit_for_bit() {
    walk(|case| {
        let inputs = text(draw(case, DType::F32, false))?;
        let (value, grads) = text(value_and_gradients(&*case.run, &inputs))?;
        for policy in [Policy::Full, Policy::Selective] {
            let run = |x: &[Tensor]| -> Result<Tensor> {
                let inner = case.run.clone();
                let inputs: Vec<&Tensor> = x.iter().collect();
                Ok(checkpoint_with(policy, move |xs| Ok(vec![inner(xs)?]), &inputs)?.remove(0))
            };
            let (again, again_grads) = text(value_and_gradients(&run, &inputs))?;
            if text(to_f64_vec(value.raw()))?
                .iter()
                .map(|v| v.to_bits())
                .ne(text(to_f64_vec(again.raw()))?.iter().map(|v| v.to_bits()))
            {
                return Err(format!("{policy:?}: another value"));
            }
            for (index, (a, b)) in grads.iter().zip(&again_grads).enumerate() {
                if a.iter().map(|v| v.to_bits()).ne(b.iter().map(|v| v.to_bits())) {
                    return Err(format!("{policy:?}: another gradient of input {index}"));
                }
            }
        }
        Ok(())
    });
}
