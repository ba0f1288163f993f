//! Tests of optimizers that round bf16 variables stochastically.

use half::bf16;
use trainable_candle_core::cpu::pool::set_num_threads;
use trainable_candle_core::{DType, Device, Error, FlatBuffer, Result, Tensor, Var};
use trainable_candle_nn::optim::{AdamConfig, AdamW, KINDS, Optimizer, OptimizerKind, SGD, SGDConfig, Value};

const SIZES: [usize; 4] = [5000, 3, 0, 20_000];

fn tensor(n: usize, seed: usize) -> Tensor {
    let wave = (0..n).map(|i| ((i * 7919 + seed * 104_729) % 10_007) as f32 / 5003.0 - 1.0).collect();
    Tensor::from_vec::<f32>(wave, n, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
}

fn loose() -> Vec<Var> {
    SIZES.iter().enumerate().map(|(i, &n)| Var::from_tensor(&tensor(n, i)).unwrap()).collect()
}

fn flat() -> Vec<Var> {
    let start: Vec<Tensor> = SIZES.iter().enumerate().map(|(i, &n)| tensor(n, i)).collect();
    FlatBuffer::new(&start).unwrap().vars().to_vec()
}

fn rounding() -> impl Iterator<Item = &'static OptimizerKind> {
    KINDS.iter().filter(|kind| kind.rounds)
}

fn made(kind: &OptimizerKind, vars: &[Var], seed: u64) -> Box<dyn Optimizer> {
    let mut settings = vec![("lr", Value::Number(0.001))];
    if kind.name == "SGD" {
        settings.push(("momentum", Value::Number(0.9)));
    }
    kind.build(vec![(vars[..2].to_vec(), settings.clone()), (vars[2..].to_vec(), settings)], Some(seed)).unwrap()
}

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
fn elementwise_optimizers_can_round_stochastically() {
    let names: Vec<&str> = rounding().map(|kind| kind.name).collect();
    assert_eq!(names, ["AdamW8bit", "Adam8bit", "AdamW", "Adam", "Lion8bit", "Lion", "SGD"]);
}

#[test]
fn results_depend_on_the_seed_but_not_on_storage_and_threads() {
    for kind in rounding() {
        let results: Vec<_> = [(loose(), 1, 2), (flat(), 1, 2), (flat(), 1, 1), (flat(), 2, 2)]
            .into_iter()
            .map(|(vars, seed, threads)| {
                set_num_threads(threads).unwrap();
                train(&mut *made(kind, &vars, seed), 0..3);
                set_num_threads(2).unwrap();
                bits(&vars)
            })
            .collect();
        assert!(results[0] == results[1] && results[1] == results[2], "{}", kind.name);
        assert_ne!(results[2], results[3], "{}", kind.name);
    }
}

#[test]
fn a_resumed_run_is_bit_equal_and_takes_the_seed_from_the_states() -> Result<()> {
    for kind in rounding() {
        let (first, second) = (flat(), loose());
        let (mut whole, mut resumed) = (made(kind, &first, u64::MAX), made(kind, &second, 5));
        train(&mut *whole, 0..3);
        for (to, from) in second.iter().zip(&first) {
            to.set(&from.detach())?;
        }
        resumed.load_state_dict(&whole.state_dict()?)?;
        train(&mut *whole, 3..6);
        train(&mut *resumed, 3..6);
        assert_eq!(bits(&first), bits(&second), "{}", kind.name);
        assert_eq!(resumed.state_dict()?["seed"].to_vec::<i64>()?, [-1]);
    }
    Ok(())
}

#[test]
fn states_take_two_bytes_and_there_are_no_master_values() -> Result<()> {
    for kind in rounding() {
        let vars = loose();
        let mut opt = made(kind, &vars, 0);
        train(&mut *opt, 0..1);
        let states = opt.state_dict()?;
        assert!(states.keys().all(|key| !key.ends_with(".master")));
        let mut moments = states.iter().filter(|(key, _)| key.ends_with(".exp_avg"));
        assert!(moments.all(|(_, state)| state.dtype() == DType::BF16), "{}", kind.name);
        if kind.name != "SGD" {
            let expected: usize = SIZES.iter().map(|&size| kind.state_bytes(&[size], true)).sum();
            assert_eq!(opt.state_bytes(), expected, "{}", kind.name);
            assert!(expected < SIZES.iter().map(|&size| kind.state_bytes(&[size], false)).sum(), "{}", kind.name);
        }
    }
    Ok(())
}

/// Each of the 512 updates is an eighth of the distance between neighbouring bf16 numbers in [0.5, 1]. The updates are
/// 64 times that distance in total.
#[test]
fn small_updates_take_effect_on_average_where_rounding_to_nearest_stalls() -> Result<()> {
    const COUNT: usize = 4096;
    const STEPS: i32 = 512;
    let (unit, update) = (2f64.powi(-8), 2f64.powi(-11));
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
    // The error of a step takes one of two values that are at most one unit apart, so its standard deviation is at most
    // unit / 2. Errors of different steps and elements are uncorrelated. The bound is six standard deviations of the mean.
    let bound = 6.0 * unit / 2.0 * (f64::from(STEPS) / COUNT as f64).sqrt();
    assert!((mean - expected).abs() < bound, "{mean}, expected {expected} to within {bound}");
    Ok(())
}

#[test]
fn adamw_in_bf16_follows_f32() -> Result<()> {
    const COUNT: usize = 65_536;
    const STEPS: usize = 200;
    let config = AdamConfig::adamw(1e-4);
    let moved = |dtype: DType, rounds: bool| -> Result<f64> {
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
    let (expected, found) = (moved(DType::F32, false)?, moved(DType::BF16, true)?);
    // The first term bounds the rounding of the parameter, as in the test above, with units of 2⁻⁸. The second term
    // bounds the rounding of the states, which changes single steps, but hardly their mean. In a step, the second
    // moment decays by the factor 0.999, and rounding adds an error with a relative standard deviation of at most 2⁻⁷ /
    // 2. After 200 steps, the relative standard deviation of the second moment is at most σ = 2⁻⁷ / 2 · √(Σ 0.999²ᵏ) =
    // 5.0%. This raises the mean of the second moment's inverse square root by the fraction 3 / 8 · σ², which is less
    // than 0.1%.
    let bound = 6.0 * 2f64.powi(-9) * (STEPS as f64 / COUNT as f64).sqrt() + 0.001 * expected;
    assert!((found - expected).abs() < bound, "{found}, expected {expected} to within {bound}");
    assert!(expected > 10.0 * bound, "{expected} {bound}");
    Ok(())
}

fn f32_variables() -> Vec<Var> {
    vec![Var::zeros(3, DType::F32, &Device::Cpu).unwrap()]
}

#[test]
fn optimizers_and_dtypes_that_cannot_round_are_rejected() -> Result<()> {
    for kind in KINDS.iter().filter(|kind| !kind.rounds) {
        let Err(error) = kind.build(vec![(loose(), Vec::new())], Some(0)) else { panic!("{}", kind.name) };
        assert!(matches!(error, Error::Argument { .. }), "{error}");
        assert!(error.to_string().contains("such as AdamW"), "{error}");
    }
    let error = AdamW::new(f32_variables(), 0.1, 0.0)?.with_stochastic_rounding(0).err().unwrap();
    assert!(error.to_string().contains("such as f32; convert them to bf16"), "{error}");
    Ok(())
}

#[test]
fn f32_variables_beside_bf16_variables_are_updated_as_without_rounding() -> Result<()> {
    let (with, without) = (f32_variables(), f32_variables());
    let mut opts = [
        AdamW::new([loose(), with.clone()].concat(), 0.1, 0.0)?.with_stochastic_rounding(0)?,
        AdamW::new(without.clone(), 0.1, 0.0)?,
    ];
    for (opt, vars) in opts.iter_mut().zip([&with, &without]) {
        vars[0].set_grad(&Tensor::ones(3, DType::F32, &Device::Cpu)?)?;
        opt.step_all()?;
    }
    assert_eq!(with[0].to_vec::<f32>()?, without[0].to_vec::<f32>()?);
    Ok(())
}

#[test]
fn an_optimizer_rejects_states_if_only_one_of_the_two_was_rounded_stochastically() -> Result<()> {
    let (mut rounded, mut plain) = (made(&KINDS[2], &loose(), 0), AdamW::new(loose(), 0.001, 0.0)?);
    train(&mut *rounded, 0..1);
    train(&mut plain, 0..1);
    let error = plain.load_state_dict(&rounded.state_dict()?).unwrap_err().to_string();
    assert!(error.contains("saved with stochastic rounding; build the optimizer with"), "{error}");
    let error = rounded.load_state_dict(&plain.state_dict()?).unwrap_err().to_string();
    assert!(error.contains("saved without stochastic rounding; build the optimizer with"), "{error}");
    Ok(())
}
