//! Compares optimizers, clipping and schedules with stored results of torch, bitsandbytes, prodigyopt and transformers
//! (tests/golden/optim, whose scripts describe the names of the tensors). `p0` has a variable's initial values,
//! `grad.I` its gradient for step I, and `CASE.p` its values after the last step. In prodigyopt.safetensors, which has
//! two variables V, these are `pV`, `gradV.I` and `CASE.pV`. In bitsandbytes.safetensors, which has variables of LEN
//! elements, they are `p0.LEN`, `gradI.LEN` and, after step N, `CASE.pN.LEN`.

use std::path::Path;

use safetensors::SafeTensors;
use trainable_candle_core::{DType, Device, FlatBuffer, Result, Tensor, Var};
use trainable_candle_nn::optim::quant::{Codebook, create_dynamic_map};
use trainable_candle_nn::optim::{
    Adafactor, AdafactorConfig, Adam, Adam8bit, AdamConfig, AdamW, AdamW8bit, Decay, Lion, Lion8bit, NormType,
    Optimizer, ParamGroup, Prodigy, ProdigyConfig, SGD, SGDConfig, Schedule, clip_grad_norm_,
};

/// The number of gradients `grad.I` in torch.safetensors.
const TORCH_STEPS: usize = 8;

/// The number of gradients of each variable in prodigyopt.safetensors.
const PRODIGY_STEPS: usize = 12;

/// The number of gradients of each variable in bitsandbytes.safetensors.
const BITSANDBYTES_STEPS: i32 = 6;

/// The bytes of a safetensors file of tests/golden/optim.
struct Golden(Vec<u8>);

impl Golden {
    fn open(file: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/optim").join(file);
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn tensor(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (bytes, shape) = (view.data(), view.shape());
        match view.dtype() {
            safetensors::Dtype::F32 => {
                let values: Vec<f32> = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
                Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
            }
            safetensors::Dtype::F64 => {
                let values: Vec<f64> = bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect();
                Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
            }
            safetensors::Dtype::U8 => Tensor::from_vec(bytes.to_vec(), shape, &Device::Cpu).unwrap(),
            other => panic!("{name} is {other:?}"),
        }
    }

    fn f32_values(&self, name: &str) -> Vec<f32> {
        self.tensor(name).to_vec().unwrap()
    }

    /// A variable with the values of the tensor `name`, in `dtype`.
    fn var(&self, name: &str, dtype: DType) -> Var {
        Var::from_tensor(&cast(&self.tensor(name), dtype)).unwrap()
    }
}

fn cast(tensor: &Tensor, dtype: DType) -> Tensor {
    Tensor::from(tensor.raw().to_dtype(dtype).unwrap())
}

fn values(tensor: &Tensor) -> Vec<f64> {
    cast(tensor, DType::F64).to_vec().unwrap()
}

/// The largest |found - expected| / max(1, |expected|) of the elements.
fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.dims(), expected.dims());
    let pairs = values(found).into_iter().zip(values(expected));
    pairs.map(|(f, e)| (f - e).abs() / e.abs().max(1.0)).fold(0.0, f64::max)
}

/// Takes a step with each gradient of torch.safetensors. `opt` has one variable, of dtype `dtype`.
fn train(golden: &Golden, opt: &mut dyn Optimizer, dtype: DType) -> Result<()> {
    for i in 0..TORCH_STEPS {
        opt.vars()[0].set_grad(&cast(&golden.tensor(&format!("grad.{i}")), dtype))?;
        opt.step_all()?;
    }
    Ok(())
}

#[test]
fn sgd_adam_and_adamw_follow_torch() {
    let golden = Golden::open("torch.safetensors");
    let sgd = SGDConfig { lr: 0.05, ..SGDConfig::default() };
    let nesterov = SGDConfig { momentum: 0.9, nesterov: true, weight_decay: 0.01, ..sgd.clone() };
    let dampening = SGDConfig { momentum: 0.8, dampening: 0.3, maximize: true, ..sgd.clone() };
    let adam = AdamConfig::adam(0.01);
    let l2 = AdamConfig { betas: (0.8, 0.99), eps: 1e-6, weight_decay: 0.1, ..adam.clone() };
    let amsgrad = AdamConfig { amsgrad: true, maximize: true, ..adam.clone() };
    let adamw = AdamConfig { weight_decay: 0.1, ..AdamConfig::adamw(0.01) };
    let adamw_amsgrad = AdamConfig { amsgrad: true, ..AdamConfig::adamw(0.01) };
    for (dtype, suffix, tolerance) in [(DType::F32, "", 1e-6), (DType::F64, ".f64", 1e-14)] {
        let params = || vec![golden.var("p0", dtype)];
        let cases: [(&str, Box<dyn Optimizer>); 8] = [
            ("sgd", Box::new(SGD::with_config(params(), sgd.clone()).unwrap())),
            ("sgd_nesterov", Box::new(SGD::with_config(params(), nesterov.clone()).unwrap())),
            ("sgd_dampening", Box::new(SGD::with_config(params(), dampening.clone()).unwrap())),
            ("adam", Box::new(Adam::with_config(params(), adam.clone()).unwrap())),
            ("adam_l2", Box::new(Adam::with_config(params(), l2.clone()).unwrap())),
            ("adam_amsgrad", Box::new(Adam::with_config(params(), amsgrad.clone()).unwrap())),
            ("adamw", Box::new(AdamW::with_config(params(), adamw.clone()).unwrap())),
            ("adamw_amsgrad", Box::new(AdamW::with_config(params(), adamw_amsgrad.clone()).unwrap())),
        ];
        for (name, mut opt) in cases {
            train(&golden, &mut *opt, dtype).unwrap();
            let error = difference(&opt.vars()[0], &golden.tensor(&format!("{name}{suffix}.p")));
            assert!(error <= tolerance, "{name}{suffix}: values differ by {error:e}");
            for (key, state) in opt.state_dict().unwrap() {
                // The golden file has only the states of variable 0, not entries such as the learning rate.
                let Some(key) = key.strip_prefix("0.") else { continue };
                let error = difference(&state, &golden.tensor(&format!("{name}{suffix}.{key}")));
                assert!(error <= tolerance, "{name}{suffix}: {key} differs by {error:e}");
            }
        }
    }
}

#[test]
fn adafactor_follows_torch() {
    let golden = Golden::open("torch.safetensors");
    let options = AdafactorConfig {
        lr: 0.4,
        beta2_decay: -0.5,
        eps: (Some(1e-6), 1.2),
        d: 1.01,
        weight_decay: 0.1,
        maximize: true,
    };
    let default = AdafactorConfig::default();
    // `p0` and the gradients have 37 x 29 = 1073 elements; the case with matrices uses the first 960.
    let cases: [(&str, &[usize], &AdafactorConfig); 4] = [
        ("adafactor", &[37, 29], &default),
        ("adafactor_options", &[37, 29], &options),
        ("adafactor_vector", &[1073], &default),
        ("adafactor_matrices", &[2, 16, 30], &default),
    ];
    for (dtype, suffix, tolerance) in [(DType::F32, "", 1e-6), (DType::F64, ".f64", 1e-14)] {
        for (name, dims, config) in cases {
            // The first elements of a golden tensor, as a tensor of shape `dims`.
            let reshaped = |name: &str| {
                let values = golden.f32_values(name)[..dims.iter().product()].to_vec();
                cast(&Tensor::from_vec(values, dims, &Device::Cpu).unwrap(), dtype)
            };
            let var = Var::from_tensor(&reshaped("p0")).unwrap();
            let mut opt = Adafactor::with_config(vec![var.clone()], config.clone()).unwrap();
            for i in 0..TORCH_STEPS {
                var.set_grad(&reshaped(&format!("grad.{i}"))).unwrap();
                opt.step_all().unwrap();
            }
            let error = difference(&var, &golden.tensor(&format!("{name}{suffix}.p")));
            assert!(error <= tolerance, "{name}{suffix}: values differ by {error:e}");
            for (key, state) in opt.state_dict().unwrap() {
                // The golden file has only the states of variable 0, not entries such as the learning rate.
                let Some(key) = key.strip_prefix("0.") else { continue };
                let error = difference(&state, &golden.tensor(&format!("{name}{suffix}.{key}")));
                assert!(error <= tolerance, "{name}{suffix}: {key} differs by {error:e}");
            }
        }
    }
}

#[test]
fn prodigy_follows_prodigyopt() {
    let golden = Golden::open("prodigyopt.safetensors");
    let default = ProdigyConfig::default();
    let cases = [
        ("default", default.clone()),
        (
            "decay",
            ProdigyConfig {
                lr: 0.5,
                betas: (0.8, 0.99),
                eps: 1e-6,
                weight_decay: 0.1,
                use_bias_correction: true,
                safeguard_warmup: true,
                d0: 1e-4,
                d_coef: 8.0,
                ..default.clone()
            },
        ),
        (
            "coupled",
            ProdigyConfig {
                betas: (0.0, 0.99),
                beta3: Some(0.9),
                weight_decay: 0.1,
                decouple: false,
                d0: 1e-3,
                d_coef: 2.0,
                growth_rate: 1.5,
                slice_p: 3,
                ..default
            },
        ),
    ];
    // The f32 tolerance is twice that of the other optimizers, because the state `s` depends on the square of the
    // estimate d, and squaring doubles relative errors.
    for (dtype, suffix, tolerance) in [(DType::F32, "", 2e-6), (DType::F64, ".f64", 1e-13)] {
        for (name, config) in &cases {
            let vars = ["p0", "p1"].map(|p| golden.var(p, dtype));
            // The two groups differ in weight decay, which Prodigy permits.
            let without_decay = ProdigyConfig { weight_decay: 0.0, ..config.clone() };
            let mut opt = Prodigy::with_groups(vec![
                ParamGroup { params: vec![vars[0].clone()], config: config.clone() },
                ParamGroup { params: vec![vars[1].clone()], config: without_decay },
            ])
            .unwrap();
            for step in 0..PRODIGY_STEPS {
                for (index, var) in vars.iter().enumerate() {
                    var.set_grad(&cast(&golden.tensor(&format!("grad{index}.{step}")), dtype)).unwrap();
                }
                opt.step_all().unwrap();
                let (d, expected) =
                    (opt.d().unwrap(), golden.tensor(&format!("{name}{suffix}.d.{step}")).item().unwrap());
                assert!((d - expected).abs() <= tolerance * expected, "{name}{suffix}: d is {d}, expected {expected}");
            }
            assert!(opt.d().unwrap() > 3.0 * config.d0, "{name}{suffix}: the estimate d has hardly grown");
            for (key, state) in opt.state_dict().unwrap() {
                // Only states of a variable have a dot in their keys, unlike entries such as the learning rate.
                let Some((index, key)) = key.split_once('.') else { continue };
                let error = difference(&state, &golden.tensor(&format!("{name}{suffix}.{index}.{key}")));
                assert!(error <= tolerance, "{name}{suffix}: {index}.{key} differs by {error:e}");
            }
            for (index, var) in vars.iter().enumerate() {
                let error = difference(var, &golden.tensor(&format!("{name}{suffix}.p{index}")));
                assert!(error <= tolerance, "{name}{suffix}: values of parameter {index} differ by {error:e}");
            }
        }
    }
}

/// Compares an optimizer of one variable with `len` elements with the case `name` of bitsandbytes, after the first and
/// the last step. `make` makes the optimizer with learning rate `lr`.
///
/// bitsandbytes computes Adam's bias corrections with CUDA's `__powf`, whose error changes an update by a fraction of
/// about 5e-5. An update is at most about `lr`, so it may differ by 5e-5 · `lr`. The states do not depend on `__powf`
/// and must be equal bit for bit.
fn follows_bitsandbytes(name: &str, len: usize, lr: f64, make: impl Fn(Vec<Var>) -> Box<dyn Optimizer>) {
    let golden = Golden::open("bitsandbytes.safetensors");
    let mut opt = make(vec![golden.var(&format!("p0.{len}"), DType::F32)]);
    for step in 1..=BITSANDBYTES_STEPS {
        let grad = golden.tensor(&format!("grad{}.{len}", step - 1));
        opt.vars()[0].set_grad(&grad).unwrap();
        opt.step_all().unwrap();
        // The golden file has the values only after the first and the last step.
        if [1, BITSANDBYTES_STEPS].contains(&step) {
            let error = difference(&opt.vars()[0], &golden.tensor(&format!("{name}.p{step}.{len}")));
            // Each step also rounds the values. The rounding error is at most half a unit in the last place, which is
            // 1.2e-7 for values below 4.
            let allowed = f64::from(step) * (5e-5 * lr + 1.2e-7);
            assert!(error <= allowed, "{name}: values differ by {error:e} after step {step}, {allowed:e} allowed");
        }
    }
    for (key, state) in opt.state_dict().unwrap() {
        let Some(key) = key.strip_prefix("0.") else { continue };
        let expected = golden.tensor(&format!("{name}.{key}.{len}"));
        let different = values(&state).iter().zip(values(&expected)).filter(|(s, e)| **s != *e).count();
        assert_eq!(different, 0, "{name}: {different} of {} elements of {key} differ", state.elem_count());
    }
}

#[test]
fn eight_bit_optimizers_follow_bitsandbytes() {
    // 5000 elements are 19 full blocks of 256 elements and one partial block. `new` takes the learning rate and
    // the weight decay.
    follows_bitsandbytes("adamw8bit", 5000, 0.01, |params| Box::new(AdamW8bit::new(params, 0.01, 0.1).unwrap()));
    follows_bitsandbytes("adam8bit", 5000, 0.01, |params| Box::new(Adam8bit::new(params, 0.01, 0.0).unwrap()));
    follows_bitsandbytes("lion8bit", 5000, 0.001, |params| Box::new(Lion8bit::new(params, 0.001, 0.1).unwrap()));
}

#[test]
fn small_parameters_keep_f32_states_as_in_bitsandbytes() {
    // 1000 elements are fewer than `min_8bit_size`, 4096.
    follows_bitsandbytes("adamw8bit", 1000, 0.01, |params| Box::new(AdamW8bit::new(params, 0.01, 0.1).unwrap()));
    follows_bitsandbytes("lion8bit", 1000, 0.001, |params| Box::new(Lion8bit::new(params, 0.001, 0.1).unwrap()));
}

#[test]
fn lion_follows_bitsandbytes() {
    // bitsandbytes' Lion8bit keeps f32 states for a parameter of only 1000 elements, so it computes what Lion computes.
    let golden = Golden::open("bitsandbytes.safetensors");
    let mut opt = Lion::new(vec![golden.var("p0.1000", DType::F32)], 0.001, 0.1).unwrap();
    for i in 0..BITSANDBYTES_STEPS {
        opt.vars()[0].set_grad(&golden.tensor(&format!("grad{i}.1000"))).unwrap();
        opt.step_all().unwrap();
    }
    // The values after step 6, the last, and bitsandbytes' only state of Lion.
    assert!(difference(&opt.vars()[0], &golden.tensor("lion8bit.p6.1000")) <= 1e-6);
    let exp_avg = &opt.state_dict().unwrap()["0.exp_avg"];
    assert_eq!(exp_avg.to_vec::<f32>().unwrap(), golden.f32_values("lion8bit.state1.1000"));
}

#[test]
fn flat_buffers_quantize_each_variable_separately() {
    // 5000 elements get 8-bit states, 1000 get f32 states. Neither is a multiple of 256, the elements of a block of
    // states, so blocks over the whole flat buffer would mix variables.
    const SIZES: [usize; 3] = [5000, 1000, 5000];
    let golden = Golden::open("bitsandbytes.safetensors");
    let initial = SIZES.map(|size| golden.tensor(&format!("p0.{size}")));
    let flat_vars = FlatBuffer::new(&initial).unwrap().vars().to_vec();
    let separate_vars = initial.iter().map(|tensor| Var::from_tensor(tensor).unwrap()).collect();
    let mut flat = AdamW8bit::new(flat_vars, 0.01, 0.1).unwrap();
    let mut separate = AdamW8bit::new(separate_vars, 0.01, 0.1).unwrap();
    for i in 0..BITSANDBYTES_STEPS {
        for opt in [&mut flat, &mut separate] {
            for (var, size) in opt.vars().iter().zip(SIZES) {
                var.set_grad(&golden.tensor(&format!("grad{i}.{size}"))).unwrap();
            }
            opt.step_all().unwrap();
        }
    }
    for (flat_var, separate_var) in flat.vars().iter().zip(separate.vars()) {
        assert_eq!(flat_var.to_vec::<f32>().unwrap(), separate_var.to_vec::<f32>().unwrap());
    }
    let (states, expected) = (flat.state_dict().unwrap(), separate.state_dict().unwrap());
    assert!(states.keys().eq(expected.keys()));
    for (key, state) in &states {
        assert_eq!(values(state), values(&expected[key]), "{key}");
    }
}

#[test]
fn dynamic_maps_are_those_of_bitsandbytes() {
    let golden = Golden::open("bitsandbytes.safetensors");
    for (signed, name, codebook) in
        [(true, "map.signed", Codebook::signed()), (false, "map.unsigned", Codebook::unsigned())]
    {
        let expected: Vec<u32> = golden.f32_values(name).into_iter().map(f32::to_bits).collect();
        assert_eq!(create_dynamic_map(signed).map(f32::to_bits).to_vec(), expected, "{name}");
        assert_eq!(codebook.values().map(f32::to_bits).to_vec(), expected, "{name}");
    }
}

#[test]
fn clipping_follows_torch() {
    const MAX_NORM: f64 = 1.5;
    const ERROR_IF_NONFINITE: bool = false;
    let golden = Golden::open("torch.safetensors");
    for (norm_type, name) in [(NormType::L2, "2"), (NormType::Inf, "inf")] {
        for dtype in [DType::F32, DType::F64] {
            // The gradients of all steps, here of as many variables.
            let grads: Vec<Tensor> =
                (0..TORCH_STEPS).map(|i| cast(&golden.tensor(&format!("grad.{i}")), dtype)).collect();
            let vars: Vec<Var> =
                grads.iter().map(|g| Var::zeros(g.shape().clone(), dtype, &Device::Cpu).unwrap()).collect();
            vars.iter().zip(&grads).for_each(|(var, grad)| var.set_grad(grad).unwrap());
            let norm = clip_grad_norm_(&vars, MAX_NORM, norm_type, ERROR_IF_NONFINITE).unwrap().item().unwrap();
            let expected = golden.tensor(&format!("clip.{name}.norm")).item().unwrap();
            assert!((norm / expected - 1.0).abs() < 1e-6, "norm {norm}, expected {expected}");
            // Of the clipped gradients, the golden file has only number 3.
            let expected = cast(&golden.tensor(&format!("clip.{name}.grad.3")), dtype);
            let error = difference(&vars[3].grad().unwrap(), &expected);
            assert!(error < 1e-7, "clipped gradients differ by {error:e}");
        }
    }
}

#[test]
fn schedules_follow_transformers() {
    let golden = Golden::open("torch.safetensors");
    // (name, warmup steps, decay).
    let cases = [
        ("constant", 10, Decay::Constant),
        ("linear", 10, Decay::Linear { total_steps: 60 }),
        ("cosine", 10, Decay::Cosine { total_steps: 60, cycles: 0.5 }),
        ("cosine_cycles", 0, Decay::Cosine { total_steps: 60, cycles: 1.75 }),
        ("polynomial", 10, Decay::Polynomial { total_steps: 60, end: 0.1, power: 2.0 }),
    ];
    for (name, warmup_steps, decay) in cases {
        let schedule = Schedule::new(warmup_steps, decay).unwrap();
        let expected = values(&golden.tensor(&format!("schedule.{name}")));
        for (step, expected) in expected.into_iter().enumerate() {
            let found = schedule.factor(step as u64);
            assert!((found - expected).abs() < 1e-12, "{name}: {found} at step {step}, expected {expected}");
        }
    }
}
