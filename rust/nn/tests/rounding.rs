//! Tests of optimizers that round bf16 variables stochastically.

use half::bf16;
use trainable_candle_core::cpu::pool::set_num_threads;
use trainable_candle_core::{DType, Device, Error, FlatBuffer, Result, Tensor, Var};
use trainable_candle_nn::optim::{AdamConfig, AdamW, KINDS, Optimizer, OptimizerKind, SGD, SGDConfig, Value};

/// The numbers of elements of the variables. 8-bit optimizers quantize only the states of the two large variables.
const SIZES: [usize; 4] = [5000, 3, 0, 20_000];

/// `len` irregular numbers from -1 to 1 that depend on `seed`, in bf16.
fn tensor(len: usize, seed: usize) -> Tensor {
    let numbers = (0..len).map(|i| ((i * 7919 + seed * 104_729) % 10_007) as f32 / 5003.0 - 1.0).collect();
    Tensor::from_vec::<f32>(numbers, len, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
}

/// Variables with separate storage.
fn separate_vars() -> Vec<Var> {
    SIZES.iter().enumerate().map(|(i, &len)| Var::from_tensor(&tensor(len, i)).unwrap()).collect()
}

/// Variables with the values of [`separate_vars`] in one flat buffer.
fn flat_vars() -> Vec<Var> {
    let initial: Vec<Tensor> = SIZES.iter().enumerate().map(|(i, &len)| tensor(len, i)).collect();
    FlatBuffer::new(&initial).unwrap().vars().to_vec()
}

/// The optimizers that can round stochastically.
fn rounding_kinds() -> impl Iterator<Item = &'static OptimizerKind> {
    KINDS.iter().filter(|kind| kind.rounds)
}

/// An optimizer that rounds stochastically, with two variables in each of two groups. SGD has momentum, so that it has
/// a state.
fn rounding_optimizer(kind: &OptimizerKind, vars: &[Var], seed: u64) -> Box<dyn Optimizer> {
    let mut settings = vec![("lr", Value::Number(0.001))];
    if kind.name == "SGD" {
        settings.push(("momentum", Value::Number(0.9)));
    }
    kind.build(vec![(vars[..2].to_vec(), settings.clone()), (vars[2..].to_vec(), settings)], Some(seed)).unwrap()
}

/// Takes the given `steps`. The gradients depend on the number of the step.
fn train(opt: &mut dyn Optimizer, steps: std::ops::Range<usize>) {
    for step in steps {
        for (index, var) in opt.vars().iter().enumerate() {
            var.set_grad(&tensor(var.elem_count(), 10 * step + index)).unwrap();
        }
        opt.step_all().unwrap();
    }
}

fn bits(vars: &[Var]) -> Vec<Vec<u16>> {
    vars.iter().map(|var| var.to_vec::<bf16>().unwrap().into_iter().map(bf16::to_bits).collect()).collect()
}

#[test]
fn exactly_seven_optimizers_can_round_stochastically() {
    let names: Vec<&str> = rounding_kinds().map(|kind| kind.name).collect();
    assert_eq!(names, ["AdamW8bit", "Adam8bit", "AdamW", "Adam", "Lion8bit", "Lion", "SGD"]);
}

#[test]
fn results_depend_on_the_seed_but_not_on_storage_or_threads() {
    for kind in rounding_kinds() {
        let result = |vars: Vec<Var>, seed, threads| {
            set_num_threads(threads).unwrap();
            train(&mut *rounding_optimizer(kind, &vars, seed), 0..3);
            bits(&vars)
        };
        let expected = result(flat_vars(), 1, 2);
        assert!(result(separate_vars(), 1, 2) == expected, "{}: the storage has an effect", kind.name);
        assert!(result(flat_vars(), 1, 1) == expected, "{}: the number of threads has an effect", kind.name);
        assert!(result(flat_vars(), 2, 2) != expected, "{}: the seed has no effect", kind.name);
    }
}

#[test]
fn a_resumed_run_is_bit_equal_to_an_uninterrupted_run_and_takes_the_seed_from_the_states() -> Result<()> {
    for kind in rounding_kinds() {
        let (vars, resumed_vars) = (flat_vars(), separate_vars());
        let mut uninterrupted = rounding_optimizer(kind, &vars, u64::MAX);
        let mut resumed = rounding_optimizer(kind, &resumed_vars, 5);
        train(&mut *uninterrupted, 0..3);
        for (to, from) in resumed_vars.iter().zip(&vars) {
            to.set(&from.detach())?;
        }
        resumed.load_state_dict(&uninterrupted.state_dict()?)?;
        train(&mut *uninterrupted, 3..6);
        train(&mut *resumed, 3..6);
        assert_eq!(bits(&resumed_vars), bits(&vars), "{}", kind.name);
        // State dicts store the seed as an i64, so u64::MAX becomes -1.
        assert_eq!(resumed.state_dict()?["seed"].to_vec::<i64>()?, [-1]);
    }
    Ok(())
}

#[test]
fn unquantized_states_are_bf16_and_there_are_no_master_values() -> Result<()> {
    for kind in rounding_kinds() {
        let mut opt = rounding_optimizer(kind, &separate_vars(), 0);
        train(&mut *opt, 0..1);
        let states = opt.state_dict()?;
        assert!(states.keys().all(|key| !key.ends_with(".master")));
        let mut moments = states.iter().filter(|(key, _)| key.ends_with(".exp_avg"));
        assert!(moments.all(|(_, state)| state.dtype() == DType::BF16), "{}", kind.name);
        // `OptimizerKind::state_bytes` is for default hyper-parameters, with which SGD has no state.
        if kind.name != "SGD" {
            let bytes = |rounded: bool| SIZES.iter().map(|&size| kind.state_bytes(&[size], rounded)).sum::<usize>();
            assert_eq!(opt.state_bytes(), bytes(true), "{}", kind.name);
            assert!(bytes(true) < bytes(false), "{}", kind.name);
        }
    }
    Ok(())
}

/// The distance between neighbouring bf16 numbers in [0.5, 1] is 2⁻⁸. Each of the 512 updates is an eighth of this
/// distance, so together the updates are 64 times this distance.
#[test]
fn small_updates_take_effect_on_average_although_rounding_to_nearest_loses_them() -> Result<()> {
    const COUNT: usize = 4096;
    const STEPS: i32 = 512;
    let (distance, update) = (2f64.powi(-8), 2f64.powi(-11));
    let one = Tensor::ones(COUNT, DType::BF16, &Device::Cpu)?;
    let var = Var::from_tensor(&one)?;
    let config = SGDConfig { lr: update, ..SGDConfig::default() };
    let mut opt = SGD::with_config(vec![var.clone()], config)?.with_stochastic_rounding(3)?;
    let mut nearest = bf16::ONE;
    for _ in 0..STEPS {
        var.set_grad(&one)?;
        opt.step_all()?;
        nearest = bf16::from_f64(nearest.to_f64() - update);
    }
    assert_eq!(nearest, bf16::ONE);
    let expected = 1.0 - f64::from(STEPS) * update;
    let values = var.to_vec::<bf16>()?;
    let mean = values.iter().map(|value| value.to_f64()).sum::<f64>() / COUNT as f64;
    // The rounding error of a step takes one of two values that are at most `distance` apart, so its standard deviation
    // is at most `distance` / 2. Errors of different steps and elements are uncorrelated. The bound is six standard
    // deviations of the mean.
    let bound = 6.0 * distance / 2.0 * (f64::from(STEPS) / COUNT as f64).sqrt();
    assert!((mean - expected).abs() < bound, "{mean}, expected {expected} to within {bound}");
    Ok(())
}

#[test]
fn adamw_with_stochastic_rounding_follows_f32_on_average() -> Result<()> {
    const COUNT: usize = 65_536;
    const STEPS: usize = 200;
    let config = AdamConfig::adamw(1e-4);
    // The mean decrease of the parameters, which are 1 at the start.
    let mean_decrease = |dtype: DType, rounds: bool| -> Result<f64> {
        let var = Var::from_tensor(&Tensor::ones(COUNT, dtype, &Device::Cpu)?)?;
        let mut opt = AdamW::with_config(vec![var.clone()], config.clone())?;
        if rounds {
            opt = opt.with_stochastic_rounding(11)?;
        }
        for step in 0..STEPS {
            // Gradients of both signs with a mean of 0.25.
            let grad = if step % 4 == 3 { -0.5 } else { 0.5 };
            var.set_grad(&Tensor::full(grad, COUNT, dtype, &Device::Cpu)?)?;
            opt.step_all()?;
        }
        let values = var.to_dtype(DType::F32)?.to_vec::<f32>()?;
        Ok(1.0 - values.iter().map(|&value| f64::from(value)).sum::<f64>() / COUNT as f64)
    };
    let (expected, found) = (mean_decrease(DType::F32, false)?, mean_decrease(DType::BF16, true)?);
    // The first term bounds the effect of rounding the parameters, as in the test above: between 0.5 and 1, bf16
    // numbers are 2⁻⁸ apart, and 2⁻⁹ is half of this distance.
    // The second term bounds the effect of rounding the states. An update is the first moment times the inverse square
    // root of the second moment. Errors of the first moment have the mean 0, so they do not change the mean update.
    // Errors of the second moment do: in each step, it is multiplied by 0.999, and rounding adds an error with a
    // relative standard deviation of at most 2⁻⁷ / 2. After 200 steps, the sum of these errors has a relative standard
    // deviation of at most σ = 2⁻⁷ / 2 · √(Σ 0.999²ᵏ) = 5.0%, with k from 0 to 199. It raises the mean of the inverse
    // square root by the fraction 3 / 8 · σ², which is less than 0.1%.
    let bound = 6.0 * 2f64.powi(-9) * (STEPS as f64 / COUNT as f64).sqrt() + 0.001 * expected;
    assert!((found - expected).abs() < bound, "{found}, expected {expected} to within {bound}");
    assert!(expected > 10.0 * bound, "the bound {bound} is not small compared with {expected}");
    Ok(())
}

/// A list with one f32 variable.
fn f32_variables() -> Vec<Var> {
    vec![Var::zeros(3, DType::F32, &Device::Cpu).unwrap()]
}

#[test]
fn optimizers_and_dtypes_that_cannot_round_are_rejected() -> Result<()> {
    for kind in KINDS.iter().filter(|kind| !kind.rounds) {
        let result = kind.build(vec![(separate_vars(), Vec::new())], Some(0));
        let Err(error) = result else { panic!("{} rounds stochastically", kind.name) };
        assert!(matches!(error, Error::Argument { .. }), "{error}");
        assert!(error.to_string().contains("such as AdamW"), "{error}");
    }
    // The learning rate is 0.1, the weight decay 0. At least one variable must be bf16.
    let error = AdamW::new(f32_variables(), 0.1, 0.0)?.with_stochastic_rounding(0).err().unwrap();
    assert!(error.to_string().contains("such as f32; convert them to bf16"), "{error}");
    Ok(())
}

#[test]
fn a_rounding_optimizer_updates_f32_variables_as_without_rounding() -> Result<()> {
    let (beside_bf16, alone) = (f32_variables(), f32_variables());
    let mut opts = [
        AdamW::new([separate_vars(), beside_bf16.clone()].concat(), 0.1, 0.0)?.with_stochastic_rounding(0)?,
        AdamW::new(alone.clone(), 0.1, 0.0)?,
    ];
    for (opt, vars) in opts.iter_mut().zip([&beside_bf16, &alone]) {
        vars[0].set_grad(&Tensor::ones(3, DType::F32, &Device::Cpu)?)?;
        opt.step_all()?;
    }
    assert_eq!(beside_bf16[0].to_vec::<f32>()?, alone[0].to_vec::<f32>()?);
    Ok(())
}

#[test]
fn states_of_optimizers_with_and_without_stochastic_rounding_are_not_interchangeable() -> Result<()> {
    let mut rounded = AdamW::new(separate_vars(), 0.001, 0.0)?.with_stochastic_rounding(0)?;
    let mut plain = AdamW::new(separate_vars(), 0.001, 0.0)?;
    train(&mut rounded, 0..1);
    train(&mut plain, 0..1);
    let error = plain.load_state_dict(&rounded.state_dict()?).unwrap_err().to_string();
    assert!(error.contains("saved with stochastic rounding; build the optimizer with"), "{error}");
    let error = rounded.load_state_dict(&plain.state_dict()?).unwrap_err().to_string();
    assert!(error.contains("saved without stochastic rounding; build the optimizer with"), "{error}");
    Ok(())
}
