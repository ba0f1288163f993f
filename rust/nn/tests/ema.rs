//! Tests of the moving averages of variables ([`EMA`]): their definition, computed in f64; swapping; resuming; and
//! errors.

use trainable_candle_core::{DType, Device, Error, FlatBuffer, Tensor};
use trainable_candle_nn::optim::{Adam, EMA, EMAConfig, Optimizer, StateDict};

/// Three variables with random values.
fn buffer() -> FlatBuffer {
    let shapes = [vec![3, 4], vec![2], vec![5, 1]];
    let values = shapes.map(|dims| Tensor::randn(0.0, 1.0, dims, DType::F32, &Device::Cpu).unwrap());
    FlatBuffer::new(&values).unwrap()
}

fn values(buffer: &FlatBuffer) -> Vec<f32> {
    buffer.vars().iter().flat_map(|var| var.to_vec::<f32>().unwrap()).collect()
}

/// The averages in a state dict of an [`EMA`], in the order of the variables. Their names are `0.average`, `1.average`
/// and so on.
fn averages(state: &StateDict) -> Vec<f32> {
    let averages = state.iter().filter(|(name, _)| name.ends_with(".average"));
    averages.flat_map(|(_, average)| average.to_vec::<f32>().unwrap()).collect()
}

/// Adds random numbers to every variable, as a stand-in for a training step.
fn train(buffer: &FlatBuffer) {
    for var in buffer.vars() {
        let step = Tensor::randn(0.0, 1.0, var.shape(), DType::F32, &Device::Cpu).unwrap();
        var.set(&var.detach().add(&step).unwrap()).unwrap();
    }
}

#[test]
fn averages_follow_the_definition() {
    for warmup in [false, true] {
        let buffer = buffer();
        let mut ema = EMA::new(&buffer, EMAConfig { decay: 0.7, warmup }).unwrap();
        let mut expected: Vec<f64> = values(&buffer).into_iter().map(f64::from).collect();
        for updates_before in 0..40 {
            train(&buffer);
            ema.update().unwrap();
            let n = f64::from(updates_before);
            // As documented for `EMAConfig::warmup`.
            let decay = if warmup { 0.7f64.min((1.0 + n) / (10.0 + n)) } else { 0.7 };
            for (average, value) in expected.iter_mut().zip(values(&buffer)) {
                *average = decay * *average + (1.0 - decay) * f64::from(value);
            }
        }
        let found = averages(&ema.state_dict().unwrap());
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((f64::from(found) - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
}

#[test]
fn swapping_in_sets_the_averages_and_swapping_out_restores_the_bits() {
    let buffer = buffer();
    let mut ema = EMA::new(&buffer, EMAConfig::default()).unwrap();
    for _ in 0..3 {
        train(&buffer);
        ema.update().unwrap();
    }
    let (trained, expected) = (values(&buffer), averages(&ema.state_dict().unwrap()));
    ema.swap_in().unwrap();
    assert_eq!(values(&buffer), expected);
    assert_eq!(averages(&ema.state_dict().unwrap()), expected);
    ema.swap_out().unwrap();
    assert_eq!(values(&buffer), trained);
}

#[test]
fn swapping_in_makes_values_saved_for_backward_stale() {
    let buffer = buffer();
    let mut ema = EMA::new(&buffer, EMAConfig::default()).unwrap();
    let loss = buffer.vars()[0].sqr().unwrap().sum_all().unwrap();
    ema.swap_in().unwrap();
    assert!(matches!(loss.backward(), Err(Error::Autograd { .. })), "the variable saved for backward has changed");
}

#[test]
fn updating_or_swapping_in_while_swapped_in_is_an_error_as_is_swapping_out_twice() {
    let mut ema = EMA::new(&buffer(), EMAConfig::default()).unwrap();
    ema.swap_in().unwrap();
    assert!(matches!(ema.update(), Err(Error::Argument { .. })));
    assert!(matches!(ema.swap_in(), Err(Error::Argument { .. })));
    ema.swap_out().unwrap();
    assert!(matches!(ema.swap_out(), Err(Error::Argument { .. })));
}

#[test]
fn swapping_and_resuming_do_not_change_a_run() {
    let start: Vec<Tensor> = buffer().vars().iter().map(|var| var.detach()).collect();
    let run = |interrupted: bool| {
        let mut buffer = FlatBuffer::new(&start).unwrap();
        let mut ema = EMA::new(&buffer, EMAConfig::default()).unwrap();
        let mut adam = Adam::new(buffer.vars().to_vec(), 1e-2).unwrap();
        for step in 0..12 {
            let losses = buffer.vars().iter().map(|var| var.sqr()?.sum_all());
            let loss = losses.reduce(|a, b| a?.add(&b?)).unwrap().unwrap();
            adam.step(&loss.backward().unwrap()).unwrap();
            ema.update().unwrap();
            if interrupted && step == 4 {
                ema.swap_in().unwrap();
                ema.swap_out().unwrap();
            }
            if interrupted && step == 7 {
                let (ema_state, adam_state) = (ema.state_dict().unwrap(), adam.state_dict().unwrap());
                let copies: Vec<Tensor> = buffer.vars().iter().map(|var| var.detach()).collect();
                buffer = FlatBuffer::new(&copies).unwrap();
                ema = EMA::new(&buffer, EMAConfig::default()).unwrap();
                ema.load_state_dict(&ema_state).unwrap();
                adam = Adam::new(buffer.vars().to_vec(), 1e-2).unwrap();
                adam.load_state_dict(&adam_state).unwrap();
            }
        }
        (values(&buffer), averages(&ema.state_dict().unwrap()), ema.updates())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn decays_outside_their_range_and_bf16_variables_are_rejected() {
    let buffer = buffer();
    for decay in [1.0, -0.1, f64::NAN] {
        assert!(EMA::new(&buffer, EMAConfig { decay, warmup: true }).is_err());
    }
    let bf16 = Tensor::zeros((2, 2), DType::BF16, &Device::Cpu).unwrap();
    assert!(matches!(EMA::new(&FlatBuffer::new(&[bf16]).unwrap(), EMAConfig::default()), Err(Error::DType { .. })));
}

#[test]
fn states_that_do_not_fit_are_rejected_and_change_nothing() {
    let buffer = buffer();
    let mut ema = EMA::new(&buffer, EMAConfig::default()).unwrap();
    let before = averages(&ema.state_dict().unwrap());
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    // The name of an entry and its new value; None removes the entry. The buffer has the variables 0, 1 and 2, and the
    // last one has shape (5, 1).
    let changes: [(&str, Option<Tensor>); 6] = [
        ("0.average", None),
        ("updates", None),
        ("2.average", Some(zeros(&[1, 5], DType::F32))),
        ("2.average", Some(zeros(&[5, 1], DType::F64))),
        ("3.average", Some(zeros(&[1], DType::F32))),
        ("updates", Some(Tensor::new(&[-1i64], &Device::Cpu).unwrap())),
    ];
    for (name, change) in changes {
        let mut state: StateDict = ema.state_dict().unwrap();
        // All averages differ from the present ones, so that a partial load would show.
        for average in state.values_mut().filter(|value| value.dtype() == DType::F32) {
            *average = average.add_scalar(1.0).unwrap();
        }
        match change {
            Some(tensor) => state.insert(name.into(), tensor),
            None => state.remove(name),
        };
        let message = ema.load_state_dict(&state).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
        assert_eq!(averages(&ema.state_dict().unwrap()), before);
    }
}
