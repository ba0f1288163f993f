//! Tests of the common behaviour of all optimizers: groups, states, dtypes, variables in one flat buffer, threads,
//! errors.

use trainable_candle_core::cpu::pool::set_num_threads;
use trainable_candle_core::{DType, Device, Error, FlatBuffer, Result, Tensor, Var};
use trainable_candle_nn::optim::{
    Adam, Adam8bit, AdamConfig, AdamW, KINDS, NormType, Optimizer, ParamGroup, SGD, SGDConfig, StatePlace, Value,
    clip_grad_norm_,
};

/// Without a seed, bf16 variables are not rounded stochastically.
const NO_SEED: Option<u64> = None;

/// `n` values in [-1, 1] that depend on `seed` and are the same on every machine.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 10_007) as f32 / 5003.0 - 1.0).collect()
}

fn tensor(n: usize, seed: usize, dtype: DType) -> Tensor {
    let values = Tensor::from_vec(numbers(n, seed), n, &Device::Cpu).unwrap();
    Tensor::from(values.raw().to_dtype(dtype).unwrap())
}

fn var(n: usize, seed: usize) -> Var {
    Var::from_tensor(&tensor(n, seed, DType::F32)).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.raw().to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Every optimizer of the registry, over the same variables.
fn optimizers(params: &[Var]) -> Vec<Box<dyn Optimizer>> {
    let settings = |name| match name {
        // Prodigy estimates its own learning rate, from `d0` on; with `slice_p` 3, from every third element.
        "Prodigy" => vec![("d0", Value::Number(1e-3)), ("slice_p", Value::Count(3))],
        "SGD" => vec![("lr", Value::Number(0.01)), ("momentum", Value::Number(0.9))],
        _ => vec![("lr", Value::Number(0.01)), ("weight_decay", Value::Number(0.1))],
    };
    KINDS.iter().map(|kind| kind.build(vec![(params.to_vec(), settings(kind.name))], NO_SEED).unwrap()).collect()
}

/// Takes the `steps`, with gradients that depend on the index of the step and of the variable. `step_all` keeps the
/// gradients, so callers can read those of the last step.
fn train(opt: &mut dyn Optimizer, steps: std::ops::Range<usize>) {
    for step in steps {
        for (index, var) in opt.vars().iter().enumerate() {
            var.set_grad(&tensor(var.elem_count(), 10 * step + index, var.dtype())).unwrap();
        }
        opt.step_all().unwrap();
    }
}

/// Three variables: two that fit into one chunk of an elementwise update (8192 elements), and one that does not.
fn variables(dtype: DType) -> Vec<Var> {
    let sizes = [5000, 300, 70_000];
    (0..3).map(|i| Var::from_tensor(&tensor(sizes[i], i, dtype)).unwrap()).collect()
}

fn number_of_optimizers() -> usize {
    optimizers(&variables(DType::F32)).len()
}

#[test]
fn a_loop_of_backward_and_step_finds_the_minimum() -> Result<()> {
    let x = Var::new(vec![3f32, -2.0], &Device::Cpu)?;
    for (index, mut opt) in optimizers(std::slice::from_ref(&x)).into_iter().enumerate() {
        x.set(&Tensor::new(vec![3f32, -2.0], &Device::Cpu)?)?;
        // The minimum of x² is at 0.
        for _ in 0..1500 {
            let (ones, retain_graph) = (Tensor::ones(2, DType::F32, &Device::Cpu)?, false);
            let grads = (&*x * &*x)?.backward_with(Some(&ones), retain_graph)?;
            opt.step(&grads)?;
        }
        assert!(x.grad().is_none(), "step() clears the gradients it has used");
        assert!(values(&x).iter().all(|v| v.abs() < 0.1), "{} ({index}) ends at {:?}", opt.name(), values(&x));
    }
    Ok(())
}

#[test]
fn results_do_not_depend_on_threads_or_layout() {
    for index in 0..number_of_optimizers() {
        let mut results = Vec::new();
        for (threads, flat) in [(1, false), (3, false), (3, true)] {
            set_num_threads(threads).unwrap();
            let loose = variables(DType::F32);
            let start: Vec<Tensor> = loose.iter().map(|v| v.detach()).collect();
            let params = if flat { FlatBuffer::new(&start).unwrap().vars().to_vec() } else { loose };
            let mut opt = optimizers(&params).swap_remove(index);
            train(&mut *opt, 0..3);
            results.push(params.iter().map(|v| values(v)).collect::<Vec<_>>());
        }
        assert!(results[0] == results[1] && results[0] == results[2], "optimizer {index}");
    }
}

#[test]
fn f16_and_bf16_variables_are_rounded_master_values() {
    for dtype in [DType::BF16, DType::F16] {
        for index in 0..number_of_optimizers() {
            let half_vars = variables(dtype);
            // f32 variables with the same initial values; each step gives them the same gradients.
            let f32_vars: Vec<Var> = half_vars
                .iter()
                .map(|v| Var::from_tensor(&Tensor::from(v.raw().to_dtype(DType::F32).unwrap())).unwrap())
                .collect();
            let mut opt = optimizers(&half_vars).swap_remove(index);
            let mut f32_opt = optimizers(&f32_vars).swap_remove(index);
            for step in 0..5 {
                train(&mut *opt, step..step + 1);
                for (half_var, f32_var) in half_vars.iter().zip(&f32_vars) {
                    let grad = half_var.grad().unwrap();
                    f32_var.set_grad(&Tensor::from(grad.raw().to_dtype(DType::F32).unwrap())).unwrap();
                }
                f32_opt.step_all().unwrap();
            }
            for (half_var, f32_var) in half_vars.iter().zip(&f32_vars) {
                assert_eq!(half_var.dtype(), dtype);
                let rounded = Tensor::from(f32_var.raw().to_dtype(dtype).unwrap());
                assert_eq!(values(half_var), values(&rounded), "{} in {dtype:?}", opt.name());
            }
        }
    }
}

#[test]
fn setting_a_variable_replaces_its_master_values() -> Result<()> {
    let x = Var::zeros(4, DType::BF16, &Device::Cpu)?;
    let mut opt = SGD::new(vec![x.clone()], 1.0)?;
    // The first step creates the f32 master values.
    train(&mut opt, 0..1);
    x.set(&Tensor::full(8.0, 4, DType::BF16, &Device::Cpu)?)?;
    x.set_grad(&Tensor::full(1.0, 4, DType::BF16, &Device::Cpu)?)?;
    opt.step_all()?;
    // The value 8 minus the learning rate 1 times the gradient 1.
    assert_eq!(values(&x), [7.0; 4]);
    Ok(())
}

#[test]
fn variables_without_a_gradient_keep_their_values_and_step_counts_and_get_no_states() -> Result<()> {
    for flat in [false, true] {
        let start = [tensor(3, 0, DType::F32), tensor(5, 1, DType::F32), tensor(7, 2, DType::F32)];
        let params = if flat {
            FlatBuffer::new(&start)?.vars().to_vec()
        } else {
            start.iter().map(Var::from_tensor).collect::<Result<_>>()?
        };
        let mut opt = Adam::new(params.clone(), 0.1)?;
        params[0].set_grad(&tensor(3, 5, DType::F32))?;
        params[2].set_grad(&tensor(7, 6, DType::F32))?;
        opt.step_all()?;
        assert_eq!(values(&params[1]), numbers(5, 1));
        assert!(values(&params[0]) != numbers(3, 0) && values(&params[2]) != numbers(7, 2));
        let states = opt.state_dict()?;
        assert_eq!(states["step"].to_vec::<i64>()?, [1, 0, 1]);
        assert!(!states.contains_key("1.exp_avg"));
        opt.zero_grad()?;
        assert!(params.iter().all(|p| p.grad().is_none()));
    }
    Ok(())
}

#[test]
fn groups_keep_their_own_hyper_parameters() -> Result<()> {
    let (first, second) = (AdamConfig::adamw(0.1), AdamConfig { betas: (0.5, 0.9), ..AdamConfig::adamw(0.01) });
    let (a, b) = (var(600, 0), var(600, 1));
    let mut opt = AdamW::with_groups(vec![
        ParamGroup { params: vec![a.clone()], config: first.clone() },
        ParamGroup { params: vec![b.clone()], config: second.clone() },
    ])?;
    let (a_copy, b_copy) = (var(600, 0), var(600, 1));
    let mut first_alone = AdamW::with_config(vec![a_copy.clone()], first)?;
    let mut second_alone = AdamW::with_config(vec![b_copy.clone()], second)?;
    for step in 0..4 {
        if step == 2 {
            opt.set_group_lr(1, 0.5)?;
            second_alone.set_lr(0.5)?;
        }
        train(&mut opt, step..step + 1);
        for (copy, original) in [(&a_copy, &a), (&b_copy, &b)] {
            copy.set_grad(&original.grad().unwrap())?;
        }
        first_alone.step_all()?;
        second_alone.step_all()?;
    }
    assert_eq!(opt.group_lrs(), [0.1, 0.5]);
    assert_eq!((values(&a), values(&b)), (values(&a_copy), values(&b_copy)));
    Ok(())
}

#[test]
fn a_backward_pass_that_reads_variables_saved_before_a_step_is_an_error() -> Result<()> {
    for flat in [false, true] {
        let start = [tensor(3, 0, DType::F32), tensor(3, 1, DType::F32)];
        let params = if flat {
            FlatBuffer::new(&start)?.vars().to_vec()
        } else {
            start.iter().map(Var::from_tensor).collect::<Result<_>>()?
        };
        let products: Vec<Tensor> = params.iter().map(|p| &**p * &**p).collect::<Result<_>>()?;
        train(&mut SGD::new(params, 0.1)?, 0..1);
        for product in products {
            // `false` is `retain_graph`.
            let error = product.backward_with(Some(&tensor(3, 0, DType::F32)), false).unwrap_err();
            assert!(matches!(error, Error::Autograd { .. }), "{error}");
        }
    }
    Ok(())
}

#[test]
fn eight_bit_optimizers_keep_elements_whose_gradients_are_non_finite_or_have_a_square_that_overflows() -> Result<()> {
    for (index, kind) in KINDS.iter().enumerate().filter(|(_, kind)| kind.name.ends_with("8bit")) {
        let (x, clean, initial) = (var(5000, 0), var(5000, 0), numbers(5000, 0));
        // The square of 1e30 overflows. Lion computes no squares, so its gradient has another NaN instead.
        let large = if kind.name == "Lion8bit" { f32::NAN } else { 1e30 };
        let mut grad = numbers(5000, 1);
        clean.set_grad(&Tensor::from_vec(grad.clone(), 5000, &Device::Cpu)?)?;
        for (at, bad) in [(17, f32::NAN), (300, f32::INFINITY), (4998, f32::NEG_INFINITY), (4999, large)] {
            grad[at] = bad;
        }
        x.set_grad(&Tensor::from_vec(grad.clone(), 5000, &Device::Cpu)?)?;
        optimizers(std::slice::from_ref(&x)).swap_remove(index).step_all()?;
        optimizers(std::slice::from_ref(&clean)).swap_remove(index).step_all()?;
        for (at, (found, expected)) in values(&x).into_iter().zip(values(&clean)).enumerate() {
            // NaN is not below 1e30 either.
            let expected = if grad[at].abs() < 1e30 { expected } else { initial[at] };
            assert_eq!(found, expected, "element {at}");
        }
    }
    Ok(())
}

#[test]
fn clipping_does_not_change_gradients_read_before_it() -> Result<()> {
    let x = var(4, 0);
    x.set_grad(&Tensor::full(3.0, 4, DType::F32, &Device::Cpu)?)?;
    let before = x.grad().unwrap();
    // The norm is √(4 · 3²) = 6, so clipping to 3 halves the gradients.
    let (max_norm, error_if_nonfinite) = (3.0, true);
    let norm = clip_grad_norm_(std::slice::from_ref(&x), max_norm, NormType::L2, error_if_nonfinite)?;
    assert_eq!(norm.item()?, 6.0);
    assert_eq!(values(&before), [3.0; 4]);
    assert!(values(&x.grad().unwrap()).iter().all(|g| (g - 1.5).abs() < 1e-6));
    Ok(())
}

#[test]
fn the_norm_without_gradients_is_0() -> Result<()> {
    // 1.0 is the maximum of the norm; `true` makes non-finite norms errors.
    assert_eq!(clip_grad_norm_(&[var(4, 0)], 1.0, NormType::L2, true)?.item()?, 0.0);
    Ok(())
}

#[test]
fn non_finite_norms_are_errors_on_request_and_otherwise_returned() -> Result<()> {
    // The last argument of `clip_grad_norm_` is `error_if_nonfinite`.
    let x = var(4, 0);
    x.set_grad(&Tensor::new(vec![1f32, f32::INFINITY, 0.0, 0.0], &Device::Cpu)?)?;
    let error = clip_grad_norm_(std::slice::from_ref(&x), 1.0, NormType::L2, true).unwrap_err();
    assert!(matches!(error, Error::NonFinite { .. }) && error.to_string().contains("inf"), "{error}");
    assert_eq!(values(&x.grad().unwrap())[0], 1.0);
    for norm_type in [NormType::L2, NormType::Inf] {
        x.set_grad(&Tensor::new(vec![1f32, f32::NAN, 0.0, 0.0], &Device::Cpu)?)?;
        assert!(clip_grad_norm_(std::slice::from_ref(&x), 1.0, norm_type, false)?.item()?.is_nan());
    }
    Ok(())
}

#[test]
fn clipping_rejects_a_negative_maximum_of_the_norm() {
    assert!(clip_grad_norm_(&[var(4, 0)], -1.0, NormType::L2, false).is_err());
}

#[test]
fn steps_accept_empty_variables() -> Result<()> {
    let empty = Var::zeros((0, 3), DType::F32, &Device::Cpu)?;
    empty.set_grad(&Tensor::zeros((0, 3), DType::F32, &Device::Cpu)?)?;
    for mut opt in optimizers(std::slice::from_ref(&empty)) {
        opt.step_all()?;
    }
    Ok(())
}

#[test]
fn on_the_cpu_the_place_of_states_changes_nothing() -> Result<()> {
    for number in 0..number_of_optimizers() {
        let (expected, found) = (variables(DType::F32), variables(DType::F32));
        let mut opt = optimizers(&expected).swap_remove(number);
        let mut placed = optimizers(&found).swap_remove(number);
        placed.place_states(StatePlace::Host)?;
        // On the CPU, states are created only in the first step.
        assert_eq!(placed.state_bytes(), 0);
        train(&mut *opt, 0..2);
        train(&mut *placed, 0..2);
        placed.place_states(StatePlace::Device)?;
        assert_eq!(placed.state_bytes(), opt.state_bytes());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(values(found), values(expected), "{}", opt.name());
        }
    }
    Ok(())
}

#[test]
fn wrong_arguments_are_errors_that_name_the_optimizer() {
    let message = |result: Result<()>| result.unwrap_err().to_string();
    let adam = |config: AdamConfig| message(Adam::with_config(vec![var(2, 0)], config).map(|_| ()));
    assert_eq!(adam(AdamConfig::adam(-1.0)), "Adam: found lr -1, expected a number of at least 0");
    let betas = AdamConfig { betas: (0.9, 1.0), ..AdamConfig::adam(0.1) };
    assert_eq!(adam(betas), "Adam: found betas (0.9, 1.0), expected both at least 0 and less than 1");
    let nesterov = SGDConfig { nesterov: true, ..SGDConfig::default() };
    assert!(message(SGD::with_config(vec![var(2, 0)], nesterov).map(|_| ())).starts_with("SGD: nesterov needs"));
    assert!(message(Adam::new(vec![], 0.1).map(|_| ())).starts_with("Adam: parameter group 0 is empty"));
    let twice = var(2, 0);
    assert!(message(Adam::new(vec![twice.clone(), twice], 0.1).map(|_| ())).contains("appears twice"));
}

#[test]
fn adam_takes_f64_variables_and_adam8bit_rejects_them() {
    let f64_var = || Var::zeros(2, DType::F64, &Device::Cpu).unwrap();
    assert!(Adam::new(vec![f64_var()], 0.1).is_ok());
    let (lr, weight_decay) = (0.1, 0.0);
    let error = Adam8bit::new(vec![f64_var()], lr, weight_decay).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::DType { .. }) && error.to_string().starts_with("Adam8bit: "), "{error}");
}

#[test]
fn a_rejected_learning_rate_or_group_changes_nothing() {
    let mut opt = Adam::new(vec![var(2, 0)], 0.1).unwrap();
    assert!(opt.set_lr(f64::NAN).is_err() && opt.set_group_lr(1, 0.1).is_err());
    assert_eq!(opt.lr(), 0.1);
}

#[test]
fn set_config_rejects_only_hyper_parameters_that_need_other_states() {
    let mut opt = Adam::new(vec![var(2, 0)], 0.1).unwrap();
    train(&mut opt, 0..1);
    assert!(opt.set_config(0, AdamConfig { amsgrad: true, ..AdamConfig::adam(0.1) }).is_err());
    assert!(opt.set_config(0, AdamConfig { eps: 1e-6, ..AdamConfig::adam(0.1) }).is_ok());
}

#[test]
fn load_state_dict_rejects_an_entry_whose_index_is_not_in_its_usual_form() -> Result<()> {
    let mut opt = Adam::new(vec![var(2, 0)], 0.1)?;
    train(&mut opt, 0..1);
    for name in ["00.exp_avg", "+0.exp_avg"] {
        let mut states = opt.state_dict()?;
        let state = states["0.exp_avg"].clone();
        states.insert(name.into(), state);
        let error = opt.load_state_dict(&states).unwrap_err();
        assert!(matches!(error, Error::Config(_)) && error.to_string().contains(name), "{error}");
    }
    Ok(())
}

#[test]
fn an_unknown_setting_or_a_value_of_another_type_is_an_error_that_names_the_setting() {
    for kind in KINDS {
        for setting in [("speed", Value::Number(1.0)), ("lr", Value::Switch(true))] {
            let Err(error) = kind.build(vec![(vec![var(3, 0)], vec![setting])], NO_SEED) else {
                panic!("{}", kind.name)
            };
            assert!(matches!(error, Error::Argument { .. }), "{error}");
            assert!(error.to_string().starts_with(&format!("{}: found {} = ", kind.name, setting.0)), "{error}");
        }
    }
}
