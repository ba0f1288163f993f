//! Compares optimizers on a CUDA device with those on the CPU: the updates bit for bit, norms and averages up to
//! rounding. Needs a GPU: `cargo test -p trainable-candle-nn --features cuda --test cuda -- --ignored`.
#![cfg(feature = "cuda")]

use std::path::PathBuf;

use trainable_candle_core::{DType, Device, Error, FlatBuffer, Result, Tensor, Var, device};
use trainable_candle_nn::optim::{
    Adam, Adam8bit, Adam8bitConfig, AdamConfig, AdamW, AdamW8bit, EMA, EMAConfig, GradScaler, GradScalerConfig, Guard,
    Lion, Lion8bit, Lion8bitConfig, LionConfig, NormType, Optimizer, ParamGroup, Rule, SGD, SGDConfig, StateDict,
    Stepper, clip_grad_norm_, grad_norm,
};

const STEPS: usize = 5;
/// For `clip_grad_norm_`: whether a norm that is infinite or NaN is an error.
const ERROR_IF_NONFINITE: bool = true;

/// The numbers of elements of the variables. They are below and above the sizes of quantized blocks and of the pieces
/// of a launch; some are too small for 8-bit states, and one is 0.
const SIZES: [usize; 7] = [1, 300, 4099, 0, 1024, 20_000, 4096];

fn gpu() -> Device {
    let folders: Vec<PathBuf> =
        std::env::var_os("TRAINABLE_CANDLE_CUDA_LIBRARIES").iter().flat_map(std::env::split_paths).collect();
    device::cuda(0, &folders).unwrap()
}

/// `n` values in [-1, 1] that depend on `seed`.
fn tensor(n: usize, seed: usize, dtype: DType, device: &Device) -> Tensor {
    let wave = (0..n).map(|i| ((i * 7919 + seed * 104_729) % 10_007) as f32 / 5003.0 - 1.0).collect();
    let values = Tensor::from_vec::<f32>(wave, n, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    values.to_device(device).unwrap()
}

/// The layout of variables in memory: in one flat buffer, or each in its own storage.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Flat,
    Loose,
}

fn variables(dtype: DType, layout: Layout, device: &Device) -> Vec<Var> {
    let start: Vec<Tensor> = SIZES.iter().enumerate().map(|(i, &n)| tensor(n, i, dtype, device)).collect();
    match layout {
        Layout::Flat => FlatBuffer::new(&start).unwrap().vars().to_vec(),
        Layout::Loose => start.iter().map(|t| Var::from_tensor(t).unwrap()).collect(),
    }
}

/// Two groups: the first three variables with `config`, the others with what `change` makes of `config`.
fn groups<C: Clone>(vars: &[Var], config: C, change: impl Fn(&mut C)) -> Vec<ParamGroup<C>> {
    let mut second = config.clone();
    change(&mut second);
    let (first, rest) = vars.split_at(3);
    vec![ParamGroup { params: first.to_vec(), config }, ParamGroup { params: rest.to_vec(), config: second }]
}

/// Every optimizer whose updates are bitwise the same on CUDA devices and the CPU, with different options in its two
/// groups. With a `seed`, the optimizers round bf16 variables stochastically.
fn optimizers(vars: &[Var], seed: Option<u64>) -> Vec<Box<dyn Optimizer>> {
    fn boxed<R: Rule>(optimizer: Result<Stepper<R>>, seed: Option<u64>) -> Box<dyn Optimizer> {
        let optimizer = optimizer.unwrap();
        match seed {
            Some(seed) => Box::new(optimizer.with_stochastic_rounding(seed).unwrap()),
            None => Box::new(optimizer),
        }
    }
    let sgd = SGDConfig { lr: 0.01, weight_decay: 0.1, maximize: true, ..SGDConfig::default() };
    let momentum = SGDConfig { momentum: 0.9, dampening: 0.2, maximize: false, ..sgd.clone() };
    let adam = AdamConfig { weight_decay: 0.1, ..AdamConfig::adam(0.01) };
    let adam8 = Adam8bitConfig::adamw(0.01);
    let lion = LionConfig { lr: 0.01, weight_decay: 0.1, ..LionConfig::default() };
    let lion8 = Lion8bitConfig { lr: 0.01, weight_decay: 0.1, ..Lion8bitConfig::default() };
    vec![
        boxed(SGD::with_groups(groups(vars, sgd, |c| c.lr = 0.5)), seed),
        boxed(SGD::with_groups(groups(vars, momentum, |c| (c.nesterov, c.dampening) = (true, 0.0))), seed),
        boxed(Adam::with_groups(groups(vars, adam.clone(), |c| c.amsgrad = true)), seed),
        boxed(AdamW::with_groups(groups(vars, adam, |c| (c.lr, c.maximize) = (0.5, true))), seed),
        boxed(Adam8bit::with_groups(groups(vars, adam8.clone(), |c| c.lr = 0.5)), seed),
        boxed(AdamW8bit::with_groups(groups(vars, adam8, |c| c.min_8bit_size = 256)), seed),
        boxed(Lion::with_groups(groups(vars, lion, |c| c.lr = 0.5)), seed),
        boxed(Lion8bit::with_groups(groups(vars, lion8, |c| c.min_8bit_size = 256)), seed),
    ]
}

/// Sets gradients that depend on `step` and the variable, times `scale`.
fn set_grads(vars: &[Var], step: usize, scale: f32) {
    for (index, var) in vars.iter().enumerate() {
        // The second variable has a gradient in even steps only.
        if index != 1 || step.is_multiple_of(2) {
            let grad = tensor(var.elem_count(), 10 * step + index, DType::F32, &Device::Cpu);
            let grad = grad.mul_scalar(f64::from(scale)).unwrap().to_dtype(var.dtype()).unwrap();
            var.set_grad(&grad.to_device(var.device()).unwrap()).unwrap();
        }
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
}

fn assert_same(what: &str, found: &[Var], expected: &[Var]) {
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (found, expected) = (bits(found), bits(expected));
        let wrong = found.iter().zip(&expected).position(|(f, e)| f != e);
        let mismatch = wrong.map(|i| (i, f32::from_bits(found[i]), f32::from_bits(expected[i])));
        assert!(mismatch.is_none(), "{what}: variable {index}: (element, found, expected) {mismatch:?}");
    }
}

fn assert_same_states(what: &str, found: &StateDict, expected: &StateDict) {
    assert!(found.keys().eq(expected.keys()), "{what}: {:?}, expected {:?}", found.keys(), expected.keys());
    for (name, state) in found {
        let wide = |state: &Tensor| state.raw().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>();
        let (found, expected) = (wide(state).unwrap(), wide(&expected[name]).unwrap());
        assert!(found.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits())), "{what}: {name}");
    }
}

/// Runs `train` with every optimizer, dtype and layout on both devices, and compares variables and states afterwards.
/// One of the cases rounds bf16 variables stochastically, with a seed of more than 32 bits.
fn compare(train: impl Fn(&mut dyn Optimizer)) {
    let device = gpu();
    for (dtype, seed) in [(DType::F32, None), (DType::BF16, None), (DType::F16, None), (DType::BF16, Some(1 << 40 | 7))]
    {
        for layout in [Layout::Flat, Layout::Loose] {
            let count = optimizers(&variables(dtype, layout, &Device::Cpu), seed).len();
            for number in 0..count {
                let (on_cpu, on_gpu) = (variables(dtype, layout, &Device::Cpu), variables(dtype, layout, &device));
                let mut expected = optimizers(&on_cpu, seed).swap_remove(number);
                let mut found = optimizers(&on_gpu, seed).swap_remove(number);
                train(&mut *expected);
                train(&mut *found);
                let what = format!("{} ({number}) of {} {seed:?} {layout:?}", found.name(), dtype.as_str());
                assert_same(&what, &on_gpu, &on_cpu);
                assert_same_states(&what, &found.state_dict().unwrap(), &expected.state_dict().unwrap());
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn steps_equal_those_of_the_cpu() {
    compare(|opt| {
        for step in 0..STEPS {
            opt.zero_grad().unwrap();
            set_grads(&opt.vars(), step, 1.0);
            opt.step_all().unwrap();
            if step == 2 {
                opt.set_lr(0.02).unwrap();
            }
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn clipped_steps_and_steps_skipped_by_norms_equal_those_of_the_cpu() {
    compare(|opt| {
        for step in 0..STEPS {
            opt.zero_grad().unwrap();
            set_grads(&opt.vars(), step, if step == 3 { f32::INFINITY } else { 1.0 });
            let norm = clip_grad_norm_(&opt.vars(), 2.0, NormType::L2, !ERROR_IF_NONFINITE).unwrap();
            opt.step_guarded(Guard::finite(&norm).unwrap()).unwrap();
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn scaled_steps_and_their_scales_equal_those_of_the_cpu() {
    for unscale in [false, true] {
        compare(|opt| {
            let config = GradScalerConfig { init_scale: 4.0, growth_interval: 2, ..GradScalerConfig::default() };
            let mut scaler = GradScaler::new(config).unwrap();
            let device = opt.vars()[0].device().clone();
            let mut scales = Vec::new();
            for step in 0..STEPS {
                opt.zero_grad().unwrap();
                // The scale, as the factor between a loss and the scaled loss.
                let loss = Tensor::full(3.0, (), DType::F32, &device).unwrap();
                let scale = scaler.scale(&loss).unwrap().item().unwrap() as f32 / 3.0;
                set_grads(&opt.vars(), step, if step == 1 { f32::NAN } else { scale });
                if unscale {
                    scaler.unscale(opt).unwrap();
                    clip_grad_norm_(&opt.vars(), 2.0, NormType::Inf, !ERROR_IF_NONFINITE).unwrap();
                }
                scaler.step(opt).unwrap();
                scaler.update().unwrap();
                scales.push(scaler.get_scale().unwrap());
            }
            // The NaN of step 1 halves the scale. Steps 2 and 3 double it, and step 4 is the first of the next two.
            assert_eq!(scales, [4.0, 2.0, 2.0, 4.0, 4.0]);
            assert_eq!(scaler.growth_tracker().unwrap(), 1);
            scaler.restore(32.0, 1).unwrap();
            assert_eq!((scaler.get_scale().unwrap(), scaler.growth_tracker().unwrap()), (32.0, 1));
        });
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn norms_equal_those_of_the_cpu_up_to_rounding() {
    let device = gpu();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for norm_type in [NormType::L2, NormType::Inf] {
            let norm = |device: &Device| {
                let mut vars = variables(dtype, Layout::Flat, device);
                vars.extend(variables(dtype, Layout::Loose, device));
                set_grads(&vars, 1, 3.0);
                grad_norm(&vars, norm_type).unwrap().item().unwrap()
            };
            let (found, expected) = (norm(&device), norm(&Device::Cpu));
            // Both devices sum in f64, in different orders.
            assert!((found / expected - 1.0).abs() < 1e-12, "{found}, expected {expected}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_norm_without_gradients_is_0_on_the_device() {
    let vars = variables(DType::F32, Layout::Loose, &gpu());
    let norm = grad_norm(&vars, NormType::L2).unwrap();
    assert!(norm.device().is_cuda());
    assert_eq!(norm.item().unwrap(), 0.0);
}

#[test]
#[ignore = "needs a CUDA device"]
fn clipping_rejects_nan_gradients_on_request() {
    let device = gpu();
    let vars = variables(DType::F32, Layout::Loose, &device);
    vars[5].set_grad(&tensor(SIZES[5], 0, DType::F32, &device).mul_scalar(f64::NAN).unwrap()).unwrap();
    assert!(matches!(clip_grad_norm_(&vars, 1.0, NormType::L2, ERROR_IF_NONFINITE), Err(Error::NonFinite { .. })));
}

#[test]
#[ignore = "needs a CUDA device"]
fn saved_runs_continue_on_either_device() {
    let device = gpu();
    for (dtype, seeds) in [(DType::F32, None), (DType::BF16, None), (DType::BF16, Some([3, 4]))] {
        for number in 0..optimizers(&variables(dtype, Layout::Flat, &Device::Cpu), None).len() {
            for (from, to) in [(&device, &Device::Cpu), (&Device::Cpu, &device), (&device, &device)] {
                let train = |opt: &mut dyn Optimizer, steps: std::ops::Range<usize>| {
                    for step in steps {
                        opt.zero_grad().unwrap();
                        set_grads(&opt.vars(), step, 1.0);
                        opt.step_all().unwrap();
                    }
                };
                let (vars, copies) = (variables(dtype, Layout::Flat, from), variables(dtype, Layout::Loose, to));
                let mut uninterrupted = optimizers(&vars, seeds.map(|seeds| seeds[0])).swap_remove(number);
                // Loading the states below replaces this seed by the seed of `uninterrupted`.
                let mut resumed = optimizers(&copies, seeds.map(|seeds| seeds[1])).swap_remove(number);
                train(&mut *uninterrupted, 0..3);
                for (copy, var) in copies.iter().zip(&vars) {
                    copy.set(&var.detach().to_device(to).unwrap()).unwrap();
                }
                resumed.load_state_dict(&uninterrupted.state_dict().unwrap()).unwrap();
                train(&mut *uninterrupted, 3..STEPS);
                train(&mut *resumed, 3..STEPS);
                assert_same(resumed.name(), &copies, &vars);
                let (expected, found) = (uninterrupted.state_dict().unwrap(), resumed.state_dict().unwrap());
                assert_same_states(resumed.name(), &found, &expected);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn compute_copies_follow_steps_and_set_values() -> Result<()> {
    let device = gpu();
    for (dtype, layout) in [(DType::BF16, Layout::Flat), (DType::F16, Layout::Loose)] {
        for number in 0..optimizers(&variables(DType::F32, layout, &device), None).len() {
            let vars = variables(DType::F32, layout, &device);
            let mut opt = optimizers(&vars, None).swap_remove(number);
            let copies: Vec<Tensor> = vars.iter().map(|var| var.compute_copy(dtype)).collect::<Result<_>>()?;
            for step in 0..3 {
                set_grads(&vars, step, 1.0);
                opt.step_all()?;
            }
            vars[4].set(&Tensor::ones(SIZES[4], DType::F32, &device)?)?;
            for (index, (var, copy)) in vars.iter().zip(&copies).enumerate() {
                assert_eq!(bits(copy), bits(&var.detach().to_dtype(dtype)?), "{} variable {index}", opt.name());
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_step_with_a_grad_store_clears_only_the_gradients_it_has_used() -> Result<()> {
    let device = gpu();
    let vars = variables(DType::F32, Layout::Flat, &device);
    let mut opt = AdamW::new(vars.clone(), 0.01, 0.1)?;
    set_grads(&vars, 0, 1.0);
    // The backward pass reaches variables 0 and 2 only, and adds to the gradients that they have. The step updates
    // these two variables and clears their gradients.
    let grads = vars[0].sqr()?.sum_all()?.add(&vars[2].sqr()?.sum_all()?)?.backward()?;
    opt.step(&grads)?;
    assert!(vars[0].grad().is_none() && vars[2].grad().is_none() && vars[4].grad().is_some());
    vars[2].sum_all()?.backward()?;
    assert_eq!(vars[2].grad().unwrap().to_vec::<f32>()?, [1.0; SIZES[2]]);
    assert_eq!(opt.state_dict()?["step"].to_vec::<i64>()?, [1, 0, 1, 0, 0, 0, 0]);
    Ok(())
}

#[test]
#[ignore = "needs a CUDA device"]
fn moving_averages_equal_those_of_the_cpu_up_to_rounding() -> Result<()> {
    let mut results = Vec::new();
    for device in [Device::Cpu, gpu()] {
        let start: Vec<Tensor> = SIZES.iter().enumerate().map(|(i, &n)| tensor(n, i, DType::F32, &device)).collect();
        let buffer = FlatBuffer::new(&start)?;
        let copy = buffer.vars()[2].compute_copy(DType::BF16)?;
        let mut ema = EMA::new(&buffer, EMAConfig::default())?;
        let mut opt = SGD::new(buffer.vars().to_vec(), 0.1)?;
        for step in 0..STEPS {
            set_grads(buffer.vars(), step, 1.0);
            opt.step_all()?;
            ema.update()?;
        }
        let saved = ema.state_dict()?;
        ema.load_state_dict(&saved)?;
        ema.swap_in()?;
        let averages: Vec<Vec<f32>> = buffer.vars().iter().map(|var| var.to_vec()).collect::<Result<_>>()?;
        // On a GPU, a copy follows its variable at once; on the CPU, only when `compute_copy` is called again.
        if device.is_cuda() {
            assert_eq!(bits(&copy), bits(&buffer.vars()[2].detach().to_dtype(DType::BF16)?));
        }
        ema.swap_out()?;
        let trained: Vec<Vec<u32>> = buffer.vars().iter().map(|var| bits(var)).collect();
        // Also compare one average in the state dict: that of variable 5.
        results.push((averages.concat(), trained, saved["5.average"].to_vec::<f32>()?));
    }
    // The CPU's results are the expected ones.
    let [(averages, trained, saved), (found_averages, found_trained, found_saved)] = &results[..] else {
        return Err(Error::argument("test", "two devices have two results"));
    };
    assert!(found_trained == trained);
    for (found, expected) in [(found_averages, averages), (found_saved, saved)] {
        // The GPU computes an average with a fused multiply-add, which rounds once instead of twice.
        assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() <= 1e-6 * e.abs().max(1.0)));
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA device"]
fn set_config_rejects_only_other_states_after_a_state_dict_is_loaded() -> Result<()> {
    let vars = variables(DType::F32, Layout::Flat, &gpu());
    let mut opt = Adam::new(vars.clone(), 0.1)?;
    set_grads(&vars, 0, 1.0);
    opt.step_all()?;
    let states = opt.state_dict()?;
    opt.load_state_dict(&states)?;
    // `eps` changes no state, `amsgrad` needs one more.
    opt.set_config(0, AdamConfig { eps: 1e-6, ..AdamConfig::adam(0.1) })?;
    assert!(opt.set_config(0, AdamConfig { amsgrad: true, ..AdamConfig::adam(0.1) }).is_err());
    Ok(())
}

#[test]
#[ignore = "needs a CUDA device"]
fn f64_variables_and_mixed_devices_are_errors() {
    let device = gpu();
    let vars = variables(DType::F32, Layout::Loose, &device);
    let wide = Var::zeros(3, DType::F64, &device).unwrap();
    assert!(matches!(Adam::new(vec![wide], 0.1), Err(Error::DType { .. })));
    let mixed = vec![vars[0].clone(), Var::zeros(3, DType::F32, &Device::Cpu).unwrap()];
    assert!(matches!(Adam::new(mixed, 0.1), Err(Error::Device { .. })));
}
