//! Tests every case of every operation in the registry against finite differences, plain forms, results in f64 and runs
//! without checkpoints.

use std::collections::BTreeSet;
use std::path::Path;

use trainable_candle_core::checkpoint::{Policy, checkpoint_with};
use trainable_candle_core::gradcheck::{Tolerance, gradcheck};
use trainable_candle_core::ops::{Case, REGISTRY};
use trainable_candle_core::raw::{from_vec, to_f64_vec};
use trainable_candle_core::{DType, Device, Result, Tensor};

use walk::{TOLERANCE, all_cases, close, draw, text, turned_view, value_and_gradients};

#[path = "walk/computed.rs"]
mod computed;
#[path = "walk/nan.rs"]
mod nan;
#[path = "walk/sharing.rs"]
mod sharing;
mod walk;

// In this file, `text` converts an error to a message, and `close(name, found, expected, tolerance)` compares the
// elements of two tensors.

/// Run `check` on every case and report all failures at once.
fn for_all_cases(check: impl Fn(&Case) -> std::result::Result<(), String>) {
    let failures: Vec<String> = all_cases()
        .filter_map(|(name, case)| check(&case).err().map(|e| format!("{name} ({}): {e}", case.label)))
        .collect();
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn names_are_unique() {
    let names: Vec<&str> = REGISTRY.iter().flat_map(|e| e.iter()).map(|e| e.info.name).collect();
    let unique: BTreeSet<&str> = names.iter().copied().collect();
    assert_eq!(names.len(), unique.len(), "{names:?}");
}

/// The names of the `OpInfo` statics in the sources below `folder`, except those that a macro declares.
fn declared(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            declared(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path).unwrap();
            // The name is the first argument, as in `OpInfo::cheap("NAME")`.
            found.extend(source.match_indices("OpInfo::").filter_map(|(at, _)| {
                let (_, arguments) = source[at..].split_once('(')?;
                arguments.strip_prefix('"')?.split_once('"').map(|(name, _)| name.to_owned())
            }));
        }
    }
}

/// Every declared operation is in the registry and has cases. An operation without cases would never be tested.
#[test]
fn every_operation_has_cases() {
    // First the names of all declared operations; the loop removes those in the registry.
    let mut missing = BTreeSet::new();
    declared(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops"), &mut missing);
    assert!(missing.len() > 40, "the sources declare few operations: {missing:?}");
    for entry in REGISTRY.iter().flat_map(|entries| entries.iter()) {
        assert!(!(entry.cases)().is_empty(), "{} has no cases", entry.info.name);
        missing.remove(entry.info.name);
    }
    assert!(missing.is_empty(), "operations without an entry in the registry: {missing:?}");
}

#[test]
fn gradients_match_finite_differences() {
    for_all_cases(|case| {
        let inputs = text(draw(case, DType::F64, /* strided */ false))?;
        text(gradcheck(|x| (case.run)(x), &inputs, Tolerance::default()))
    });
}

#[test]
fn fused_equals_plain_in_value_and_gradient() {
    for_all_cases(|case| {
        let Some(plain) = &case.plain else { return Ok(()) };
        let inputs = text(draw(case, DType::F64, /* strided */ false))?;
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
fn results_have_the_dtype_of_the_inputs_and_agree_with_f64() {
    for_all_cases(|case| {
        let reference = text(draw(case, DType::F64, /* strided */ false))?;
        let (expected, expected_grads) = text(value_and_gradients(&*case.run, &reference))?;
        // `to_dtype` has cases whose result is f64 for inputs of every dtype.
        let converts_to_f64 = expected.dtype() == DType::F64 && case.label.starts_with("to f64");
        for (dtype, tolerance) in TOLERANCE {
            let inputs = text(draw(case, dtype, /* strided */ false))?;
            let (value, grads) =
                text(value_and_gradients(&*case.run, &inputs)).map_err(|e| format!("{}: {e}", dtype.as_str()))?;
            if value.dtype() != dtype && !converts_to_f64 {
                return Err(format!("the result for {} inputs is {}", dtype.as_str(), value.dtype().as_str()));
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
fn strided_and_contiguous_inputs_give_equal_results() {
    for_all_cases(|case| {
        let contiguous = text(draw(case, DType::F64, /* strided */ false))?;
        let strided = text(draw(case, DType::F64, /* strided */ true))?;
        let expected = text((case.run)(&contiguous))?;
        let found = text((case.run)(&strided))?;
        close("value", &text(to_f64_vec(found.raw()))?, &text(to_f64_vec(expected.raw()))?, 1e-12)?;
        // Next, the gradients. `turned_view` is a view with the dimensions reversed. `turned` has dense copies of the
        // reversed inputs, and `through_views` reverses them again: the operation sees the same inputs, now strided.
        // The gradients of `turned` are then those of the inputs with the dimensions reversed.
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

#[test]
fn checkpointing_changes_no_bit() {
    for_all_cases(|case| {
        let inputs = text(draw(case, DType::F32, /* strided */ false))?;
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
                return Err(format!("{policy:?}: the value differs from that without a checkpoint"));
            }
            for (index, (a, b)) in grads.iter().zip(&again_grads).enumerate() {
                if a.iter().map(|v| v.to_bits()).ne(b.iter().map(|v| v.to_bits())) {
                    return Err(format!(
                        "{policy:?}: the gradient of input {index} differs from that without a checkpoint"
                    ));
                }
            }
        }
        Ok(())
    });
}

/// The inputs of a case are usually variables. Here they are computed from variables: before the checkpoint, or in the
/// function under the checkpoint.
#[test]
fn checkpointed_functions_take_computed_tensors() {
    for_all_cases(|case| computed::checkpoints_take_computed_tensors(case, &Device::Cpu, /* tolerance */ 0.0));
}

/// If a variable is changed after the forward pass, backward passes that succeed still give the gradients of the old
/// value.
#[test]
fn results_do_not_follow_variables_that_change() {
    for_all_cases(|case| sharing::results_do_not_follow_variables(case, &Device::Cpu));
}

/// A gradient shares no storage with a variable, so it keeps its values if the variable is changed in place.
#[test]
fn gradients_do_not_follow_variables_that_change() {
    for_all_cases(|case| sharing::gradients_do_not_follow_variables(case, &Device::Cpu));
}

#[test]
fn nan_is_never_lost() {
    let failures: Vec<String> = all_cases()
        .filter_map(|(name, case)| {
            let checked = nan::is_passed_on(name, &case, &Device::Cpu);
            checked.err().map(|e| format!("{name} ({}): {e}", case.label))
        })
        .collect();
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// Writes NaNs where warps and thread blocks of the CUDA kernels, and vectorized loops, begin and end in a row. The CPU
/// forms get the same inputs.
#[test]
fn nan_is_never_lost_at_edges_of_blocks() {
    nan::is_passed_on_at_edges(&Device::Cpu).unwrap();
}
