//! Compares the results of all cases of the registry of operations on a CUDA device with those on the CPU in f64, and
//! tests what only the CUDA code has. All tests but `registry_runs_on_cuda` need a GPU. The command is
//! `cargo test --features cuda --test cuda -- --ignored --test-threads 1`.
#![cfg(feature = "cuda")]

use std::path::PathBuf;

use trainable_candle_core::compute::{Destination, Product, products};
use trainable_candle_core::ops::Case;
use trainable_candle_core::ops::lora::{LoraLayer, LoraWeights, lora_backward_, lora_linear};
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Device, Error, FlatBuffer, Raw, Result, Tensor, device, rng};
use walk::{TOLERANCE, all_cases, close, draw, text, turned_view, value_and_gradients};

#[path = "cuda/attention.rs"]
mod attention;
#[path = "cuda/capture.rs"]
mod capture;
#[path = "walk/computed.rs"]
mod computed;
#[path = "cuda/feed_forward.rs"]
mod feed_forward;
#[path = "walk/nan.rs"]
mod nan;
#[path = "cuda/norms.rs"]
mod norms;
#[path = "cuda/products.rs"]
mod products;
#[path = "walk/sharing.rs"]
mod sharing;
#[path = "cuda/varlen.rs"]
mod varlen;
// Helpers: fixed inputs for a case (`draw`), its value and gradients, comparison within a tolerance (`close`), a view
// with the dimensions in reverse order (`turned_view`), errors as strings (`text`).
mod walk;

fn gpu() -> Result<Device> {
    let folders: Vec<PathBuf> =
        std::env::var_os("TRAINABLE_CANDLE_CUDA_LIBRARIES").iter().flat_map(std::env::split_paths).collect();
    device::cuda(0, &folders)
}

/// Copies of `inputs` on `device`, with the strides of `inputs`.
fn moved(inputs: &[Tensor], device: &Device) -> Result<Vec<Tensor>> {
    inputs.iter().map(|x| Ok(Tensor::from_raw(&x.raw().to_device(device)?))).collect()
}

/// Compare results on the GPU in every dtype with those on the CPU in f64: the value and the gradients of contiguous
/// inputs, the value of strided inputs, and the gradients of inputs that the operation reads through transposed views.
fn check(case: &Case, device: &Device) -> std::result::Result<(), String> {
    let reference = text(draw(case, DType::F64, /* strided: */ false))?;
    let (expected, expected_grads) = text(value_and_gradients(&*case.run, &reference))?;
    let expected = text(to_f64_vec(expected.raw()))?;
    for (dtype, tolerance) in TOLERANCE {
        let about = |e: String| format!("{}: {e}", dtype.as_str());
        let inputs = text(draw(case, dtype, /* strided: */ false).and_then(|inputs| moved(&inputs, device)))?;
        let (value, grads) = text(value_and_gradients(&*case.run, &inputs)).map_err(about)?;
        close(dtype.as_str(), &text(to_f64_vec(value.raw()))?, &expected, tolerance)?;
        for (index, (found, expected)) in grads.iter().zip(&expected_grads).enumerate() {
            close(&format!("{} gradient of input {index}", dtype.as_str()), found, expected, 2.0 * tolerance)?;
        }
        let strided = text(draw(case, dtype, /* strided: */ true).and_then(|inputs| moved(&inputs, device)))?;
        let value = text((case.run)(&strided)).map_err(about)?;
        close(&format!("{} strided", dtype.as_str()), &text(to_f64_vec(value.raw()))?, &expected, tolerance)?;
        let through_views = |x: &[Tensor]| -> Result<Tensor> {
            let views = x.iter().map(turned_view).collect::<Result<Vec<_>>>()?;
            (case.run)(&views)
        };
        // Contiguous tensors whose transposed views, which the operation reads, have the shapes of the case's inputs.
        let turned =
            text(inputs.iter().map(|t| turned_view(t).and_then(|v| v.contiguous())).collect::<Result<Vec<_>>>())?;
        let (_, found) = text(value_and_gradients(&through_views, &turned)).map_err(about)?;
        let (_, expected) = text(value_and_gradients(
            &through_views,
            &text(turned.iter().map(in_f64_on_the_cpu).collect::<Result<Vec<_>>>())?,
        ))?;
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            close(&format!("{} gradient of view {index}", dtype.as_str()), found, expected, 4.0 * tolerance)?;
        }
    }
    Ok(())
}

fn in_f64_on_the_cpu(x: &Tensor) -> Result<Tensor> {
    x.to_device(&Device::Cpu)?.to_dtype(DType::F64)
}

/// Run `case` in every dtype: forward and backward from contiguous and strided inputs, forward from transposed inputs.
/// The values are not checked.
fn run(case: &Case, device: &Device) -> std::result::Result<(), String> {
    for (dtype, _) in TOLERANCE {
        let about = |e: Error| format!("{}: {e}", dtype.as_str());
        for strided in [false, true] {
            let inputs = draw(case, dtype, strided).and_then(|inputs| moved(&inputs, device)).map_err(about)?;
            value_and_gradients(&*case.run, &inputs).map_err(about)?;
            // The same values in the same shape, but stored with the dimensions in reverse order.
            let transposed = |x: &Tensor| turned_view(&turned_view(x)?.contiguous()?);
            let views = inputs.iter().map(transposed).collect::<Result<Vec<_>>>().map_err(about)?;
            (case.run)(&views).map_err(about)?;
        }
    }
    Ok(())
}

/// On a simulated device this test checks that the kernels exist under their names and accept their arguments and
/// launch sizes; the simulation computes no values.
#[test]
#[ignore = "needs a CUDA device, real or simulated"]
fn registry_runs_on_cuda() {
    let device = gpu().unwrap();
    for_all_cases(|_, case| run(case, &device));
    device::synchronize(&device).unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn registry_on_cuda_equals_the_cpu() {
    let device = gpu().unwrap();
    for_all_cases(|_, case| check(case, &device));
}

/// Run `test` on every case and report all failures at once.
fn for_all_cases(test: impl Fn(&str, &Case) -> std::result::Result<(), String>) {
    let failures: Vec<String> = all_cases()
        .filter_map(|(name, case)| test(name, &case).err().map(|e| format!("{name} ({}): {e}", case.label)))
        .collect();
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
#[ignore = "needs a CUDA device"]
fn results_and_gradients_on_cuda_do_not_follow_variables_that_change() {
    let device = gpu().unwrap();
    for_all_cases(|_, case| {
        sharing::results_do_not_follow_variables(case, &device)?;
        sharing::gradients_do_not_follow_variables(case, &device)
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn checkpointed_functions_on_cuda_take_computed_tensors() {
    let device = gpu().unwrap();
    let tolerance = 1e-6;
    for_all_cases(|_, case| computed::checkpoints_take_computed_tensors(case, &device, tolerance));
}

#[test]
#[ignore = "needs a CUDA device"]
fn nan_is_never_lost_on_cuda() {
    let device = gpu().unwrap();
    for_all_cases(|name, case| nan::is_passed_on(name, case, &device));
}

#[test]
#[ignore = "needs a CUDA device"]
fn nan_is_never_lost_at_edges_of_blocks_on_cuda() {
    nan::is_passed_on_at_edges(&gpu().unwrap()).unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn random_numbers_equal_those_of_the_cpu() {
    let device = gpu().unwrap();
    for count in [1usize, 3, 4, 1001, 100_000] {
        for normal in [false, true] {
            let numbers = |device: &Device| {
                rng::manual_seed(11);
                // `parameters`: the mean and the standard deviation, or the bounds of a uniform distribution.
                let random = |parameters: [f64; 2], count: usize, dtype| {
                    let distribution = if normal { rng::normal } else { rng::uniform };
                    distribution(parameters[0], parameters[1], &count.into(), dtype, device)
                };
                let first = random([-0.5, 2.0], count, DType::F32).unwrap();
                // The second draw shows that the first one has advanced the generator equally on both devices.
                let second = random([0.0, 1.0], 5, DType::F64).unwrap();
                [to_f64_vec(&first).unwrap(), to_f64_vec(&second).unwrap()].concat()
            };
            close("numbers", &numbers(&device), &numbers(&Device::Cpu), 1e-6).unwrap();
        }
    }
}

/// An operation has several kernels, and the shape decides which of them runs: with vector or scalar loads, along rows
/// or columns, in one launch or two. The shapes here lead to each of these kernels.
#[test]
#[ignore = "needs a CUDA device"]
fn large_and_odd_shapes_equal_the_cpu() {
    type Function = fn(&Tensor) -> Result<Tensor>;
    let functions: [(&str, Function); 9] = [
        ("sum of rows", |x| x.sum(&[1], false)),
        ("sum of columns", |x| x.sum(&[0], false)),
        ("sum", |x| x.sum_all()),
        ("mean of columns", |x| x.mean(&[0], true)),
        ("max", |x| x.max_all()),
        ("exp", |x| x.exp()),
        ("row plus column", |x| x.narrow(0, 0, 1)?.add(&x.narrow(1, 0, 1)?)),
        ("transpose", |x| x.t()?.contiguous()),
        ("product", |x| x.narrow(0, 0, x.dims()[0].min(200))?.matmul(&x.narrow(0, 0, x.dims()[0].min(100))?.t()?)),
    ];
    let device = gpu().unwrap();
    for dims in [(1, 1), (3, 1000), (1000, 3), (77, 129), (70_000, 8), (2, 300_001), (513, 1280)] {
        for (dtype, tolerance) in TOLERANCE {
            let x = Tensor::randn(0.0, 0.1, dims, DType::F32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let wide = x.to_dtype(DType::F64).unwrap();
            let x = x.to_device(&device).unwrap();
            for (name, function) in functions {
                let found = to_f64_vec(function(&x).unwrap().raw()).unwrap();
                let expected = to_f64_vec(function(&wide).unwrap().raw()).unwrap();
                close(&format!("{name} of {dims:?} in {}", dtype.as_str()), &found, &expected, tolerance).unwrap();
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_is_counted_and_running_out_is_an_error_that_leaves_the_device_usable() {
    let device = gpu().unwrap();
    let before = device::memory_stats(&device).unwrap();
    // 64 Mi elements of four bytes.
    let held = Tensor::zeros(64 << 20, DType::F32, &device).unwrap();
    device::reset_peak_memory_stats(&device).unwrap();
    let during = device::memory_stats(&device).unwrap();
    assert!(during.allocated >= before.allocated + (256 << 20), "{before:?} {during:?}");
    drop(held);
    device::synchronize(&device).unwrap();
    // Twice as many f32 elements as fit in the device's memory.
    let elements = usize::try_from(during.total).unwrap() / 4 * 2;
    let small = Tensor::ones((1, 2), DType::F32, &device).unwrap();
    let error = small.broadcast_as((elements / 2, 2)).and_then(|x| x.add_scalar(1.0)).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(to_f64_vec(small.add_scalar(1.0).unwrap().raw()).unwrap(), [2.0, 2.0]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn devices_are_found_by_number() {
    let device = gpu().unwrap();
    assert!(device.same_device(&gpu().unwrap()));
    assert!(matches!(device::cuda(99, &[] as &[PathBuf]), Err(Error::Device { .. })));
}

#[test]
#[ignore = "needs a CUDA device"]
fn tensors_on_two_devices_are_an_error() {
    let device = gpu().unwrap();
    let (a, b) = (Tensor::ones(2, DType::F32, &device).unwrap(), Tensor::ones(2, DType::F32, &Device::Cpu).unwrap());
    assert!(matches!(a.add(&b), Err(Error::Device { .. })));
    assert!(matches!(a.matmul(&b), Err(Error::Device { .. })));
}

/// Multiples of 1/64 in [-1, 1), which every dtype represents exactly. Another `seed` gives other values.
fn exact(dims: &[usize], seed: usize, dtype: DType, device: &Device) -> Tensor {
    let number = |i: usize| ((i * 7919 + seed * 104_729 + 13) % 127) as f64 / 64.0 - 1.0;
    let values = Tensor::from_vec((0..dims.iter().product()).map(number).collect(), dims, &Device::Cpu);
    values.and_then(|values| values.to_dtype(dtype)?.to_device(device)).unwrap()
}

/// Products of one size run in one launch, except those that add to the same tensor and those with transposed, strided,
/// empty or f64 operands.
#[test]
#[ignore = "needs a CUDA device"]
fn many_products_in_one_call_equal_those_of_the_cpu() {
    let run = |device: &Device, dtype: DType, has_f32_results: bool| -> Vec<Vec<f64>> {
        let raw = |dims: &[usize], seed: usize| exact(dims, seed, dtype, device).raw().clone();
        let result_dtype = if has_f32_results && dtype != DType::F64 { DType::F32 } else { dtype };
        let sum = exact(&[5, 33], 90, result_dtype, device).raw().clone();
        let mut all = Vec::new();
        let mut add = |a: Raw, b: Raw, alpha, to| all.push(Product { a, b, alpha, to });
        for seed in 0..200 {
            add(raw(&[5, 64], seed), raw(&[64, 33], seed + 1), 0.5, Destination::New(result_dtype));
        }
        for seed in 0..7 {
            add(raw(&[64, 5], seed).t().unwrap(), raw(&[64, 33], seed), 1.0, Destination::Sum(sum.clone()));
            let other = raw(&[33, 64], seed).t().unwrap();
            add(raw(&[5, 64], seed), other, 2.0, Destination::New(result_dtype));
        }
        let strided = raw(&[5, 66], 3).narrow(1, 1, 64).unwrap();
        add(strided, raw(&[64, 33], 4), 0.5, Destination::New(result_dtype));
        // A factor of rank 4: columns 4 to 7 of a matrix of 8 columns. In the 16-bit dtypes, the address of the
        // factor's first element is a multiple of 8 bytes but not of 16.
        for seed in 0..3 {
            let part = raw(&[64, 8], seed).narrow(1, 4, 4).unwrap().t().unwrap();
            add(part, raw(&[64, 33], seed + 4), 0.5, Destination::New(result_dtype));
        }
        add(raw(&[5, 0], 3), raw(&[0, 33], 4), 0.5, Destination::New(result_dtype));
        add(raw(&[0, 64], 3), raw(&[64, 33], 4), 0.5, Destination::New(result_dtype));
        add(raw(&[3, 5, 64], 3), raw(&[64, 33], 4), 0.5, Destination::New(result_dtype));
        products(&all).unwrap().iter().map(|result| to_f64_vec(result).unwrap()).collect()
    };
    let device = gpu().unwrap();
    for (dtype, tolerance) in TOLERANCE {
        for has_f32_results in [false, true] {
            let tolerance = if has_f32_results && dtype != DType::F64 { 2e-5 } else { tolerance };
            let expected = run(&Device::Cpu, DType::F64, has_f32_results);
            for (index, (found, expected)) in run(&device, dtype, has_f32_results).iter().zip(&expected).enumerate() {
                close(&format!("{} product {index}", dtype.as_str()), found, expected, 4.0 * tolerance).unwrap();
            }
        }
    }
}

/// LoRA layers whose f32 factors lie in one flat buffer, in a model that computes in f32, f16 or bf16. The gradients
/// add up over two backward passes and one call of `lora_backward_`.
#[test]
#[ignore = "needs a CUDA device"]
fn lora_of_f32_factors_on_cuda_agrees_with_f64() {
    let train = |device: &Device, dtype: DType, factor_dtype: DType| -> Result<Vec<Vec<f64>>> {
        let (layers, rows, features, rank) = (6, 130, 72, 8);
        let initial: Vec<Tensor> = (0..layers)
            .flat_map(|i| [([rank, features], i), ([features, rank], i + 50)])
            .map(|(dims, seed)| exact(&dims, seed, factor_dtype, device))
            .collect();
        let vars = FlatBuffer::new(&initial)?.vars().to_vec();
        let base: Vec<Tensor> = (0..layers).map(|i| exact(&[features, features], i + 99, dtype, device)).collect();
        let inputs: Vec<Tensor> = (0..layers).map(|i| exact(&[rows, features], i + 7, dtype, device)).collect();
        for _ in 0..2 {
            let mut loss = Tensor::zeros((), dtype, device)?;
            for i in 0..layers {
                let (down, up) = (&vars[2 * i], &vars[2 * i + 1]);
                let w = LoraWeights { weight: (&base[i]).into(), bias: None, down, up, scale: 0.25 };
                // All layers share one input, as queries, keys and values of an attention do.
                loss = loss.add(&lora_linear(&inputs[0], w)?.mean_all()?)?;
            }
            loss.backward()?;
        }
        let grad_output = exact(&[rows, features], 5, dtype, device);
        let many: Vec<LoraLayer<'_>> = (0..layers)
            .map(|i| LoraLayer {
                grad_output: &grad_output,
                input: &inputs[i],
                down: &vars[2 * i],
                up: &vars[2 * i + 1],
                scale: 0.01,
            })
            .collect();
        lora_backward_(&many)?;
        vars.iter().map(|var| to_f64_vec(var.grad().unwrap().raw())).collect()
    };
    let device = gpu().unwrap();
    let expected = train(&Device::Cpu, DType::F64, DType::F64).unwrap();
    for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 6e-2)] {
        let found = train(&device, dtype, DType::F32).unwrap();
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            close(&format!("{} variable {index}", dtype.as_str()), found, expected, tolerance).unwrap();
        }
    }
}
