//! Tests of saving and loading the states of optimizers, and of the loss scaler.

use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var};
use trainable_candle_nn::optim::{
    Adam, AdamConfig, AdamW, AdamW8bit, GradScaler, GradScalerConfig, Lion8bit, Optimizer, Prodigy, SGD, SGDConfig,
    StateDict,
};

fn tensor(n: usize, seed: usize, dtype: DType) -> Tensor {
    let wave = (0..n).map(|i| ((i * 7919 + seed * 104_729) % 10_007) as f32 / 5003.0 - 1.0).collect();
    let values = Tensor::from_vec::<f32>(wave, n, &Device::Cpu).unwrap();
    Tensor::from(values.raw().to_dtype(dtype).unwrap())
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.raw().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn params(dtype: DType) -> Vec<Var> {
    [(6000, 0), (40, 1)].map(|(n, seed)| Var::from_tensor(&tensor(n, seed, dtype)).unwrap()).to_vec()
}

fn train(opt: &mut dyn Optimizer, steps: std::ops::Range<usize>) {
    for step in steps {
        for (index, var) in opt.vars().iter().enumerate() {
            var.set_grad(&tensor(var.elem_count(), 10 * step + index, var.dtype())).unwrap();
        }
        opt.step_all().unwrap();
    }
}

fn all(dtype: DType) -> Vec<Box<dyn Optimizer>> {
    let sgd = SGDConfig { lr: 0.01, momentum: 0.9, ..SGDConfig::default() };
    let amsgrad = AdamConfig { amsgrad: true, ..AdamConfig::adam(0.01) };
    vec![
        Box::new(SGD::with_config(params(dtype), sgd).unwrap()),
        Box::new(Adam::with_config(params(dtype), amsgrad).unwrap()),
        Box::new(AdamW8bit::new(params(dtype), 0.01, 0.1).unwrap()),
        Box::new(Lion8bit::new(params(dtype), 0.01, 0.1).unwrap()),
        Box::new(Prodigy::new(params(dtype), 1.0).unwrap()),
    ]
}

#[test]
fn a_resumed_run_is_bit_equal() {
    for dtype in [DType::F32, DType::BF16] {
        for (mut whole, mut resumed) in all(dtype).into_iter().zip(all(dtype)) {
            train(&mut *whole, 0..3);
            whole.set_lr(0.02).unwrap();
            let states = whole.state_dict().unwrap();
            for (to, from) in resumed.vars().iter().zip(whole.vars()) {
                to.set(&from.detach()).unwrap();
            }
            resumed.load_state_dict(&states).unwrap();
            assert_eq!(resumed.lr(), 0.02);
            train(&mut *whole, 3..6);
            train(&mut *resumed, 3..6);
            for (whole, resumed) in whole.vars().iter().zip(resumed.vars()) {
                assert_eq!(values(whole), values(&resumed));
            }
            let (whole, resumed) = (whole.state_dict().unwrap(), resumed.state_dict().unwrap());
            assert!(whole.keys().eq(resumed.keys()));
            assert!(whole.iter().all(|(key, state)| values(state) == values(&resumed[key])));
        }
    }
}

#[test]
fn a_state_dict_is_a_snapshot() {
    for mut opt in all(DType::F32) {
        train(&mut *opt, 0..1);
        let states = opt.state_dict().unwrap();
        let before: Vec<Vec<f64>> = states.values().map(values).collect();
        train(&mut *opt, 1..3);
        assert!(states.values().map(values).eq(before), "{}", opt.name());
    }
}

#[test]
fn state_bytes_count_states_and_master_values() {
    // One variable has 6000 elements, the other one has 40. 8-bit optimizers store codes and one f32 scale per block of
    // 256 codes for the 6000 elements, and f32 states for the 40.
    let blocks = 6000usize.div_ceil(256);
    let expected =
        [4 * 6040, 3 * 4 * 6040, 2 * (6000 + 4 * blocks) + 2 * 4 * 40, 6000 + 4 * blocks + 4 * 40, 4 * 4 * 6040];
    for (dtype, master) in [(DType::F32, 0), (DType::F16, 4 * 6040)] {
        for (mut opt, expected) in all(dtype).into_iter().zip(expected) {
            assert_eq!(opt.state_bytes(), 0);
            train(&mut *opt, 0..1);
            assert_eq!(opt.state_bytes(), expected + master, "{}", opt.name());
        }
    }
}

#[test]
fn states_that_do_not_fit_are_rejected_and_change_nothing() -> Result<()> {
    let mut source = AdamW::new(params(DType::F32), 0.01, 0.1)?;
    train(&mut source, 0..2);
    let good = source.state_dict()?;
    let mut opt = AdamW::new(params(DType::F32), 0.5, 0.1)?;
    train(&mut opt, 0..1);
    let before = opt.state_dict()?;
    let with = |change: &dyn Fn(&mut StateDict)| {
        let mut states = good.clone();
        change(&mut states);
        states
    };
    let zeros = |n: usize, dtype| Tensor::zeros(n, dtype, &Device::Cpu).unwrap();
    let of_sgd = SGD::new(params(DType::F32), 0.01)?.state_dict()?;
    let cases: [(StateDict, &str); 8] = [
        (with(&|s| drop(s.remove("1.exp_avg_sq"))), "load_state_dict: AdamW: the state \"1.exp_avg_sq\" is missing"),
        (with(&|s| drop(s.insert("1.extra".into(), zeros(40, DType::F32)))), "the first: 1.extra"),
        (with(&|s| drop(s.insert("0.exp_avg".into(), zeros(7, DType::F32)))), "has shape [7], expected [6000]"),
        (with(&|s| drop(s.insert("0.exp_avg".into(), zeros(6000, DType::U8)))), "is u8, expected f32"),
        (with(&|s| drop(s.insert("step".into(), zeros(3, DType::I64)))), "\"step\" has shape [3], expected [2]"),
        (with(&|s| drop(s.remove("step"))), "the state \"step\" is missing"),
        (StateDict::new(), "the entry \"kind\" is missing"),
        (of_sgd, "load_state_dict: AdamW: the states were saved by SGD"),
    ];
    for (states, expected) in cases {
        let message = opt.load_state_dict(&states).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let mut other = AdamW8bit::new(params(DType::F32), 0.01, 0.1)?;
    assert!(matches!(other.load_state_dict(&good), Err(Error::Config(_))));
    let after = opt.state_dict()?;
    assert!(before.iter().all(|(key, state)| values(state) == values(&after[key])));
    assert_eq!(opt.lr(), 0.5);
    opt.load_state_dict(&good)?;
    assert_eq!(opt.lr(), 0.01);
    Ok(())
}

fn with_grad(value: f32) -> Result<SGD> {
    let x = Var::zeros(2, DType::F32, &Device::Cpu)?;
    x.set_grad(&Tensor::new(vec![value, 1.0], &Device::Cpu)?)?;
    SGD::new(vec![x], 1.0)
}

#[test]
fn the_scale_grows_and_backs_off_and_steps_with_non_finite_gradients_are_skipped() -> Result<()> {
    let config = GradScalerConfig { init_scale: 4.0, growth_interval: 2, ..GradScalerConfig::default() };
    let mut scaler = GradScaler::new(config)?;
    assert_eq!(scaler.scale(&Tensor::full(3.0, (), DType::F32, &Device::Cpu)?)?.item()?, 12.0);
    let mut scales = Vec::new();
    for grad in [8.0, 8.0, f32::INFINITY, 8.0, f32::NAN, 8.0, 8.0] {
        let mut opt = with_grad(grad)?;
        let stepped = scaler.step(&mut opt)? == Some(true);
        assert_eq!(stepped, grad.is_finite());
        let scale = scaler.get_scale()? as f32;
        let expected = if stepped { [-8.0 / scale, -1.0 / scale] } else { [0.0; 2] };
        assert_eq!(opt.vars()[0].to_vec::<f32>()?, expected);
        scaler.update()?;
        scales.push(scaler.get_scale()?);
    }
    assert_eq!(scales, [4.0, 8.0, 4.0, 4.0, 2.0, 2.0, 4.0]);
    Ok(())
}

#[test]
fn the_scaler_rejects_calls_out_of_order() -> Result<()> {
    let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    assert!(scaler.update().is_err());
    let mut opt = with_grad(65536.0)?;
    scaler.unscale(&opt)?;
    assert_eq!(opt.vars()[0].grad().unwrap().to_vec::<f32>()?[0], 1.0);
    assert!(scaler.unscale(&opt).is_err());
    assert_eq!(scaler.step(&mut opt)?, Some(true));
    let message = scaler.step(&mut opt).unwrap_err().to_string();
    assert!(message.starts_with("GradScaler: step() was already called for this SGD"), "{message}");
    scaler.update()?;
    scaler.unscale(&opt)?;
    Ok(())
}

#[test]
fn the_scaler_rejects_a_growth_factor_of_1() {
    assert!(GradScaler::new(GradScalerConfig { growth_factor: 1.0, ..GradScalerConfig::default() }).is_err());
}

#[test]
fn a_disabled_scaler_takes_every_step() -> Result<()> {
    let mut off = GradScaler::new(GradScalerConfig { enabled: false, ..GradScalerConfig::default() })?;
    assert_eq!(off.step(&mut with_grad(f32::INFINITY)?)?, Some(true));
    assert_eq!(off.get_scale()?, 1.0);
    off.update()
}
