//! The count of saved bytes and the random generator belong to the whole process, so the tests that read them are in a
//! process of their own and run one at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use trainable_candle_core::checkpoint::{Policy, checkpoint, checkpoint_with};
use trainable_candle_core::memory::saved_bytes;
use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::ops::gated::swiglu;
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::lora::{LoraWeights, lora_linear};
use trainable_candle_core::ops::norm::{add_rms_norm, layer_norm, rms_norm};
use trainable_candle_core::{DType, Device, Result, Tensor, Var, rng};

const CPU: Device = Device::Cpu;

/// Each test holds this lock, so that the tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A tensor of `n` different values between -1 and 1, f32; `n` is the number of elements of `shape`.
fn sines(n: usize, shape: &[usize]) -> Tensor {
    Tensor::from_vec((0..n).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>(), shape, &CPU).unwrap()
}

#[test]
fn a_frozen_layer_saves_nothing() -> Result<()> {
    let _alone = ALONE.lock();
    let x = Var::from_tensor(&sines(40, &[8, 5]))?;
    let (w, b) = (sines(30, &[6, 5]), sines(6, &[6]));
    let before = saved_bytes();
    let mut y = linear(&x, &w, Some(&b))?;
    for _ in 0..10 {
        y = linear(&y, &sines(36, &[6, 6]), None)?;
    }
    assert_eq!(saved_bytes(), before);
    y.backward_with(Some(&Tensor::ones((8, 6), DType::F32, &CPU)?), /* retain_graph */ false)?;
    assert!(x.grad().is_some());
    Ok(())
}

#[test]
fn saved_bytes_count_each_storage_once_until_the_backward_pass_frees_it() -> Result<()> {
    let _alone = ALONE.lock();
    let before = saved_bytes();
    // x is a result, because variables are not counted.
    let x = Var::from_tensor(&sines(40, &[8, 5]))?.add_scalar(1.0)?;
    let w = sines(30, &[6, 5]);
    let vars = [Var::zeros((2, 5), DType::F32, &CPU)?, Var::zeros((6, 2), DType::F32, &CPU)?];
    let lora =
        || lora_linear(&x, LoraWeights { weight: (&w).into(), bias: None, down: &vars[0], up: &vars[1], scale: 1.0 });
    let y = lora()?.add(&lora()?)?.add(&lora()?)?;
    // Values of 4 bytes: x (8, 5) is counted once, x Aᵀ (8, 2) three times, once for each call.
    assert_eq!(saved_bytes() - before, 4 * (40 + 3 * 16));
    y.backward_with(Some(&Tensor::ones((8, 6), DType::F32, &CPU)?), /* retain_graph */ false)?;
    assert_eq!(saved_bytes(), before);
    Ok(())
}

#[test]
fn recomputed_results_are_not_saved_and_change_no_gradient() -> Result<()> {
    let _alone = ALONE.lock();
    let scale = sines(8, &[8]);
    type Function = fn(&Tensor, &Tensor) -> Result<Tensor>;
    // Each function, and the number of elements of its result, which `sqr` saves unless the result is recomputed.
    let functions: [(Function, usize); 4] = [
        (|x, _| swiglu(x), 20),
        (|x, scale| rms_norm(x, Some(scale), 1e-6), 40),
        (|x, scale| layer_norm(x, /* normalized_dims */ 1, Some(scale), Some(scale), 1e-6), 40),
        // `.1` is the norm of the sum; `.0` would be the sum.
        (|x, scale| Ok(add_rms_norm(x, x, Some(scale), 1e-6)?.1), 40),
    ];
    for (index, (function, values)) in functions.into_iter().enumerate() {
        let run = |is_recomputed: bool, policy: Policy| -> Result<(usize, Vec<f32>)> {
            let var = Var::from_tensor(&sines(40, &[5, 8]))?;
            let (x, scale, before) = (var.mul_scalar(1.5)?, scale.clone(), saved_bytes());
            let squares = move |xs: &[Tensor]| {
                let y = function(&xs[0], &scale)?;
                Ok(vec![if is_recomputed { y.recomputed() } else { y }.sqr()?])
            };
            let y = checkpoint_with(policy, squares, &[&x])?.remove(0).sum_all()?;
            let kept = saved_bytes() - before;
            // Two backward passes: with a retained graph, the first keeps the values from which the second recomputes
            // the result.
            y.backward_with(None, /* retain_graph */ true)?;
            y.backward()?;
            let grad = var.grad().expect("a gradient").to_vec::<f32>()?;
            drop(y);
            assert_eq!(saved_bytes(), before, "{index} {policy:?}");
            Ok((kept, grad))
        };
        let (kept, expected) = run(false, Policy::None)?;
        assert_eq!(run(true, Policy::None)?, (kept - 4 * values, expected.clone()), "{index}");
        for policy in [Policy::Full, Policy::Selective] {
            assert_eq!(run(true, policy)?, run(false, policy)?, "{index} {policy:?}");
            assert_eq!(run(true, policy)?.1, expected, "{index} {policy:?}");
        }
    }
    Ok(())
}

#[test]
fn the_policies_none_selective_and_full_keep_the_documented_values() -> Result<()> {
    let _alone = ALONE.lock();
    let (first, second) = (Var::from_tensor(&sines(72, &[12, 6]))?, Var::from_tensor(&sines(72, &[6, 12]))?);
    // Two trainable layers with an activation in between and a residual connection around them.
    let block = move |x: &Tensor| {
        let hidden = linear(x, &first, None)?.gelu(Gelu::Tanh)?.mul_scalar(0.5)?;
        x.add(&linear(&hidden, &second, None)?)
    };
    // x is a result, because variables are not counted.
    let x = Var::from_tensor(&sines(30, &[5, 6]))?.add_scalar(0.0)?;
    let mut kept = Vec::new();
    for policy in [Policy::None, Policy::Selective, Policy::Full] {
        let before = saved_bytes();
        let inner = block.clone();
        let y = checkpoint_with(policy, move |xs| Ok(vec![inner(&xs[0])?]), &[&x])?;
        kept.push((saved_bytes() - before) / 4);
        drop(y);
        assert_eq!(saved_bytes(), before, "{policy:?}: a dropped graph frees what it kept");
    }
    // None: x, the first product (read by GELU), the scaled activation. Selective: x, the first product, and a number
    // that stands in for the second product. Full: x.
    assert_eq!(kept, [30 + 60 + 60, 30 + 60 + 1, 30]);
    Ok(())
}

#[test]
fn a_recomputed_dropout_repeats_its_mask_and_leaves_the_generator_unchanged() -> Result<()> {
    let _alone = ALONE.lock();
    let x = Var::from_tensor(&Tensor::ones(1000, DType::F32, &CPU)?)?;
    rng::manual_seed(7);
    let y = checkpoint(|xs| dropout(&xs[0].mul_scalar(2.0)?, 0.5, /* training */ true)?.sqr(), &[&x])?;
    let after = rng::state();
    y.backward_with(Some(&Tensor::ones(1000, DType::F32, &CPU)?), /* retain_graph */ false)?;
    assert_eq!(rng::state(), after);
    // y = (2 m x)² with m in {0, 2}: dy/dx = 8 m² x = 2 y at x = 1.
    let expected: Vec<f32> = y.to_vec::<f32>()?.into_iter().map(|v| 2.0 * v).collect();
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, expected);
    Ok(())
}

/// A checkpointed function with two dropouts; after each dropout another thread draws, in the first run and in the
/// recomputation.
#[test]
fn a_recomputation_and_draws_of_other_threads_are_independent() -> Result<()> {
    let _alone = ALONE.lock();
    let elsewhere = || std::thread::spawn(|| rng::uniform_vec(8)).join().unwrap();
    let (drawn, x) = (Arc::new(Mutex::new(Vec::new())), Var::from_tensor(&Tensor::ones(1000, DType::F32, &CPU)?)?);
    rng::manual_seed(7);
    let noted = drawn.clone();
    let function = move |xs: &[Tensor]| {
        let first = dropout(&xs[0].mul_scalar(2.0)?, 0.5, /* training */ true)?;
        noted.lock().unwrap().push(elsewhere());
        let second = dropout(&first, 0.5, /* training */ true)?;
        noted.lock().unwrap().push(elsewhere());
        second.sqr()
    };
    let y = checkpoint(function, &[&x])?;
    let after = rng::state();
    y.backward_with(Some(&Tensor::ones(1000, DType::F32, &CPU)?), /* retain_graph */ false)?;
    // y = (2 m x)² with the product m of both masks: dy/dx = 2 y at x = 1.
    let expected: Vec<f32> = y.to_vec::<f32>()?.into_iter().map(|v| 2.0 * v).collect();
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, expected, "the recomputation draws the same masks");
    // A draw of 8 numbers takes two blocks of four random words from the generator. Since `after`, the other thread has
    // drawn twice.
    let (drawn, blocks) = (drawn.lock().unwrap().clone(), 2);
    assert_eq!(drawn.len(), 4, "two in the first run, two in the recomputation");
    for (index, values) in drawn.iter().enumerate() {
        assert!(!drawn[..index].contains(values), "draw {index} of the other thread repeats an earlier one");
    }
    assert_eq!(
        rng::state(),
        rng::State { offset: after.offset + 2 * blocks, ..after },
        "only the first run and the other thread's draws advance the generator"
    );
    Ok(())
}

#[test]
fn a_recomputation_that_draws_something_else_is_an_error() -> Result<()> {
    let _alone = ALONE.lock();
    let (calls, x) = (AtomicUsize::new(0), Var::from_tensor(&Tensor::ones(1000, DType::F32, &CPU)?)?);
    let function = move |xs: &[Tensor]| {
        // 0 in the first run, 100 in the recomputation.
        let more = calls.fetch_add(1, Ordering::Relaxed) * 100;
        rng::uniform_vec(4 + more);
        xs[0].mul(&Tensor::from_vec(rng::normal_vec(1000), 1000, &CPU)?)?.sqr()
    };
    let error = checkpoint(function, &[&x])?.sum_all()?.backward().unwrap_err();
    assert!(error.to_string().contains("computed something else"), "{error}");
    Ok(())
}
