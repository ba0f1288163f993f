//! Tests of saving and loading the states of optimizers, and of the loss scaler.

use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var};
use trainable_candle_nn::optim::{
    Adam, AdamConfig, AdamW, AdamW8bit, GradScaler, GradScalerConfig, Lion8bit, Optimizer, Prodigy, SGD, SGDConfig,
    StateDict,
};

/// `len` irregular numbers from -1 to 1 that depend on `seed`.
fn tensor(len: usize, seed: usize, dtype: DType) -> Tensor {
    let numbers = (0..len).map(|i| ((i * 7919 + seed * 104_729) % 10_007) as f32 / 5003.0 - 1.0).collect();
    let values = Tensor::from_vec::<f32>(numbers, len, &Device::Cpu).unwrap();
    Tensor::from(values.raw().to_dtype(dtype).unwrap())
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.raw().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Two variables: 8-bit optimizers quantize the states of the large one, but not of the small one.
fn params(dtype: DType) -> Vec<Var> {
    [(6000, 0), (40, 1)].map(|(len, seed)| Var::from_tensor(&tensor(len, seed, dtype)).unwrap()).to_vec()
}

/// Takes the given `steps`. The gradients depend on the number of the step.
fn train(opt: &mut dyn Optimizer, steps: std::ops::Range<usize>) {
    for step in steps {
        for (index, var) in opt.vars().iter().enumerate() {
            var.set_grad(&tensor(var.elem_count(), 10 * step + index, var.dtype())).unwrap();
        }
        opt.step_all().unwrap();
    }
}

/// Optimizers with different states, each with its own [`params`]. The numbers after the parameters are the learning
/// rate and, if there are two, the weight decay.
fn optimizers(dtype: DType) -> Vec<Box<dyn Optimizer>> {
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
fn a_resumed_run_is_bit_equal_to_an_uninterrupted_run() {
    for dtype in [DType::F32, DType::BF16] {
        for (mut uninterrupted, mut resumed) in optimizers(dtype).into_iter().zip(optimizers(dtype)) {
            train(&mut *uninterrupted, 0..3);
            uninterrupted.set_lr(0.02).unwrap();
            for (to, from) in resumed.vars().iter().zip(uninterrupted.vars()) {
                to.set(&from.detach()).unwrap();
            }
            resumed.load_state_dict(&uninterrupted.state_dict().unwrap()).unwrap();
            assert_eq!(resumed.lr(), 0.02);
            train(&mut *uninterrupted, 3..6);
            train(&mut *resumed, 3..6);
            for (expected, found) in uninterrupted.vars().iter().zip(resumed.vars()) {
                assert_eq!(values(expected), values(&found));
            }
            let (expected, found) = (uninterrupted.state_dict().unwrap(), resumed.state_dict().unwrap());
            assert!(expected.keys().eq(found.keys()));
            assert!(expected.iter().all(|(key, state)| values(state) == values(&found[key])));
        }
    }
}

#[test]
fn a_state_dict_is_a_snapshot() {
    for mut opt in optimizers(DType::F32) {
        train(&mut *opt, 0..1);
        let states = opt.state_dict().unwrap();
        let before: Vec<Vec<f64>> = states.values().map(values).collect();
        train(&mut *opt, 1..3);
        assert!(states.values().map(values).eq(before), "{}", opt.name());
    }
}

#[test]
fn state_bytes_count_states_and_master_values() {
    // The variables have 6000 and 40 elements. An f32 state takes 4 bytes for each element. An 8-bit state of the 6000
    // elements takes 1 byte for each element, and an f32 scale for each block of 256 elements; its 40 other elements
    // are f32.
    let f32_state = 4 * (6000 + 40);
    let state_8bit = 6000 + 4 * 6000usize.div_ceil(256) + 4 * 40;
    // The numbers of states of SGD (1: momentum), Adam with amsgrad (3), AdamW8bit (2), Lion8bit (1) and Prodigy (4).
    let expected = [f32_state, 3 * f32_state, 2 * state_8bit, state_8bit, 4 * f32_state];
    // For an f16 variable, an optimizer also keeps the master values: a copy of the variable in f32.
    for (dtype, master_bytes) in [(DType::F32, 0), (DType::F16, f32_state)] {
        for (mut opt, state_bytes) in optimizers(dtype).into_iter().zip(expected) {
            assert_eq!(opt.state_bytes(), 0);
            train(&mut *opt, 0..1);
            assert_eq!(opt.state_bytes(), state_bytes + master_bytes, "{}", opt.name());
        }
    }
}

#[test]
fn wrong_states_are_rejected_and_change_nothing() -> Result<()> {
    let mut source = AdamW::new(params(DType::F32), 0.01, 0.1)?;
    train(&mut source, 0..2);
    let valid = source.state_dict()?;
    // The learning rate differs from that of `source`. A load would replace it, so it shows that no load took place.
    let mut opt = AdamW::new(params(DType::F32), 0.5, 0.1)?;
    train(&mut opt, 0..1);
    let before = opt.state_dict()?;
    let changed = |change: &dyn Fn(&mut StateDict)| {
        let mut states = valid.clone();
        change(&mut states);
        states
    };
    let zeros = |len: usize, dtype| Tensor::zeros(len, dtype, &Device::Cpu).unwrap();
    let of_sgd = SGD::new(params(DType::F32), 0.01)?.state_dict()?;
    let cases: [(StateDict, &str); 8] = [
        (changed(&|s| drop(s.remove("1.exp_avg_sq"))), "load_state_dict: AdamW: the state \"1.exp_avg_sq\" is missing"),
        (changed(&|s| drop(s.insert("1.extra".into(), zeros(40, DType::F32)))), "the first: 1.extra"),
        (changed(&|s| drop(s.insert("0.exp_avg".into(), zeros(7, DType::F32)))), "has shape [7], expected [6000]"),
        (changed(&|s| drop(s.insert("0.exp_avg".into(), zeros(6000, DType::U8)))), "is u8, expected f32"),
        // "step" has one number for each of the two variables.
        (changed(&|s| drop(s.insert("step".into(), zeros(3, DType::I64)))), "\"step\" has shape [3], expected [2]"),
        (changed(&|s| drop(s.remove("step"))), "the state \"step\" is missing"),
        (StateDict::new(), "the entry \"kind\" is missing"),
        (of_sgd, "load_state_dict: AdamW: the states were saved by SGD"),
    ];
    for (states, expected) in cases {
        let message = opt.load_state_dict(&states).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let mut adamw_8bit = AdamW8bit::new(params(DType::F32), 0.01, 0.1)?;
    assert!(matches!(adamw_8bit.load_state_dict(&valid), Err(Error::Config(_))));
    let after = opt.state_dict()?;
    assert!(before.iter().all(|(key, state)| values(state) == values(&after[key])));
    assert_eq!(opt.lr(), 0.5);
    // Without a change, the states are valid.
    opt.load_state_dict(&valid)?;
    assert_eq!(opt.lr(), 0.01);
    Ok(())
}

/// SGD with learning rate 1 of a variable [0, 0] with the gradient [`first`, 1].
fn sgd_with_grad(first: f32) -> Result<SGD> {
    let x = Var::zeros(2, DType::F32, &Device::Cpu)?;
    x.set_grad(&Tensor::new(vec![first, 1.0], &Device::Cpu)?)?;
    SGD::new(vec![x], 1.0)
}

#[test]
fn the_scale_grows_and_backs_off_and_steps_with_non_finite_gradients_are_skipped() -> Result<()> {
    let config = GradScalerConfig { init_scale: 4.0, growth_interval: 2, ..GradScalerConfig::default() };
    let mut scaler = GradScaler::new(config)?;
    assert_eq!(scaler.scale(&Tensor::full(3.0, (), DType::F32, &Device::Cpu)?)?.item()?, 12.0);
    let mut scales = Vec::new();
    for grad in [8.0, 8.0, f32::INFINITY, 8.0, f32::NAN, 8.0, 8.0] {
        let mut opt = sgd_with_grad(grad)?;
        let scale = scaler.get_scale()? as f32;
        let stepped = scaler.step(&mut opt)? == Some(true); // `None` occurs only on CUDA devices
        assert_eq!(stepped, grad.is_finite());
        // With learning rate 1, a step subtracts the unscaled gradients from [0, 0].
        let expected = if stepped { [-8.0 / scale, -1.0 / scale] } else { [0.0; 2] };
        assert_eq!(opt.vars()[0].to_vec::<f32>()?, expected);
        scaler.update()?;
        scales.push(scaler.get_scale()?);
    }
    // The scale doubles after two finite gradients in a row, and halves after a non-finite one.
    assert_eq!(scales, [4.0, 8.0, 4.0, 4.0, 2.0, 2.0, 4.0]);
    Ok(())
}

#[test]
fn the_scaler_rejects_calls_out_of_order() -> Result<()> {
    let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    assert!(scaler.update().is_err());
    // The gradient equals the default scale, so the unscaled gradient is 1.
    let mut opt = sgd_with_grad(65536.0)?;
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
fn a_disabled_scaler_has_scale_1_and_steps_with_non_finite_gradients() -> Result<()> {
    let mut scaler = GradScaler::new(GradScalerConfig { enabled: false, ..GradScalerConfig::default() })?;
    assert_eq!(scaler.step(&mut sgd_with_grad(f32::INFINITY)?)?, Some(true));
    assert_eq!(scaler.get_scale()?, 1.0);
    scaler.update()
}
