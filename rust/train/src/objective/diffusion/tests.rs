//! Compares the objective with results of diffusers in f64 (tests/golden/schedules), and with the formulas of the
//! losses, computed in f64.

use std::collections::BTreeMap;
use std::path::Path;

use trainable_candle_core::Var;
use trainable_candle_core::rng::{self, State};
use trainable_candle_io::load_tensors;

use super::*;
use crate::objective::NoiseScheduleConfig;

const CPU: Device = Device::Cpu;

fn golden() -> BTreeMap<String, Tensor> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/schedules/diffusers.safetensors");
    load_tensors(&path, &CPU).unwrap()
}

fn schedule(prediction_type: PredictionType) -> NoiseSchedule {
    NoiseSchedule::new(NoiseScheduleConfig { prediction_type, ..NoiseScheduleConfig::default() }).unwrap()
}

fn objective(prediction: PredictionType, config: DiffusionConfig) -> DiffusionObjective {
    DiffusionObjective::new(&schedule(prediction), config, &CPU).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn randn(dims: &[usize]) -> Tensor {
    Tensor::randn(0.0, 1.0, dims, DType::F32, &CPU).unwrap()
}

/// The largest |found - expected| / max(1, |expected|).
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0.0, |worst, (f, e)| worst.max((f - e).abs() / e.abs().max(1.0)))
}

#[test]
fn schedule_noise_velocity_and_weights_equal_those_of_diffusers() {
    let golden = golden();
    let [latents, noise, timesteps] = ["x0", "noise", "timesteps"].map(|name| &golden[name]);
    let alphas = schedule(PredictionType::Epsilon).alphas_cumprod().to_vec();
    assert!(difference(&alphas, &values(&golden["alphas_cumprod"])) < 1e-12);
    for (prediction, target, weight) in [
        (PredictionType::Epsilon, "noise", "min_snr_gamma5_eps_weight"),
        (PredictionType::VPrediction, "ddpm_velocity", "min_snr_gamma5_v_weight"),
    ] {
        let objective =
            objective(prediction, DiffusionConfig { min_snr_gamma: Some(5.0), ..DiffusionConfig::default() });
        let noised = objective.noise_at(latents, noise, timesteps).unwrap();
        assert!(difference(&values(&noised.sample), &values(&golden["ddpm_noised"])) < 1e-6);
        assert!(difference(&values(&noised.target), &values(&golden[target])) < 1e-6);
        // If the prediction differs from the target by 1 everywhere, the mean squared error is 1, so the loss is the
        // example's min-SNR weight.
        for (t, expected) in values(&golden[weight]).into_iter().enumerate().step_by(37) {
            let timesteps = Tensor::new(&[t as i64], &CPU).unwrap();
            let noised = objective.noise_at(&randn(&[1, 4, 2, 2]), &randn(&[1, 4, 2, 2]), &timesteps).unwrap();
            let loss = objective.loss(&noised.target.add_scalar(1.0).unwrap(), &noised, None, None).unwrap();
            assert!((loss.item().unwrap() - expected).abs() < 1e-6 * expected, "{t}");
        }
    }
}

/// The loss by its definition, element by element in f64. `dims` is the shape (batch, channels, height, width) of
/// prediction and target. `element(d, b)` is the loss of one element of example b, where d is the absolute difference
/// between the prediction and the target. `weights` has a number for each example, `mask` one for each pixel.
fn reference(
    prediction: &[f64],
    target: &[f64],
    dims: [usize; 4],
    element: impl Fn(f64, usize) -> f64,
    weights: &[f64],
    mask: Option<&[f64]>,
) -> f64 {
    let [batch, channels, height, width] = dims;
    let pixels = height * width;
    let mut total = 0.0;
    for b in 0..batch {
        let mask: Vec<f64> = mask.map_or(vec![1.0; pixels], |m| m[b * pixels..(b + 1) * pixels].to_vec());
        let area: f64 = mask.iter().sum::<f64>() * channels as f64;
        let mut sum = 0.0;
        for c in 0..channels {
            for (p, m) in mask.iter().enumerate() {
                let at = (b * channels + c) * pixels + p;
                sum += m * element((prediction[at] - target[at]).abs(), b);
            }
        }
        if area > 0.0 {
            total += weights[b] * sum / area;
        }
    }
    total / batch as f64
}

#[test]
fn losses_and_their_gradients_follow_the_definition() {
    let dims = [3, 4, 2, 5]; // batch, channels, height, width
    let [latents, noise, output] = [(); 3].map(|()| randn(&dims));
    let timesteps = Tensor::new(&[3i64, 400, 998], &CPU).unwrap();
    let mask = Tensor::rand(0.0, 1.0, (3, 1, 2, 5), DType::F32, &CPU).unwrap();
    // The mask of the last example is 0 everywhere.
    let mask = mask.mul(&Tensor::new(&[1f32, 2.0, 0.0], &CPU).unwrap().reshape((3, 1, 1, 1)).unwrap()).unwrap();
    let weights = Tensor::new(&[1f32, 0.5, 2.0], &CPU).unwrap();
    let (delta, ones) = (0.3f64, vec![1.0; 3]);
    let schedule = schedule(PredictionType::Epsilon);
    let snr = schedule.snr();
    let huber = |d: f64, delta: f64| if d < delta { d * d / 2.0 } else { delta * (d - delta / 2.0) };
    // The deltas of the three timesteps, by the formulas of the schedules `Exponential` and `Snr`.
    let by_time = [3.0f64, 400.0, 998.0].map(|t| delta.powf(t / 1000.0));
    let by_snr = [3, 400, 998].map(|t| (1.0 - delta) / (1.0 + schedule.sigmas()[t]).powi(2) + delta);
    type Element<'a> = Box<dyn Fn(f64, usize) -> f64 + 'a>;
    let constant = HuberSchedule::Constant;
    let cases: Vec<(LossFunction, HuberSchedule, Element<'_>)> = vec![
        (LossFunction::Mse, constant, Box::new(|d, _| d * d)),
        (LossFunction::L1, constant, Box::new(|d, _| d)),
        (LossFunction::Huber, constant, Box::new(|d, _| huber(d, delta))),
        (LossFunction::SmoothL1, constant, Box::new(|d, _| huber(d, delta) / delta)),
        (LossFunction::Huber, HuberSchedule::Exponential, Box::new(|d, b| huber(d, by_time[b]))),
        (LossFunction::SmoothL1, HuberSchedule::Exponential, Box::new(|d, b| huber(d, by_time[b]) / by_time[b])),
        (LossFunction::Huber, HuberSchedule::Snr, Box::new(|d, b| huber(d, by_snr[b]))),
    ];
    for (loss, huber_schedule, element) in &cases {
        for gamma in [None, Some(5.0)] {
            let config = DiffusionConfig {
                loss: *loss,
                huber_delta: delta,
                huber_schedule: *huber_schedule,
                min_snr_gamma: gamma,
                ..DiffusionConfig::default()
            };
            let objective = DiffusionObjective::new(&schedule, config, &CPU).unwrap();
            let noised = objective.noise_at(&latents, &noise, &timesteps).unwrap();
            for (mask, weights) in
                [(None, None), (Some(&mask), None), (None, Some(&weights)), (Some(&mask), Some(&weights))]
            {
                let snr_weights =
                    [3, 400, 998].map(|t: usize| gamma.map_or(1.0, |gamma: f64| snr[t].min(gamma) / snr[t]));
                let given = weights.map_or(ones.clone(), values);
                let example_weights: Vec<f64> = given.iter().zip(snr_weights).map(|(w, s)| w * s).collect();
                let mask_values = mask.map(values);
                let expected = |output: &[f64]| {
                    let mask = mask_values.as_deref();
                    reference(output, &values(&noised.target), dims, element, &example_weights, mask)
                };
                let case = format!("{loss:?} {huber_schedule:?} {gamma:?} {} {}", mask.is_some(), weights.is_some());
                let var = Var::from_tensor(&output).unwrap();
                let found = objective.loss(&var, &noised, mask, weights).unwrap();
                let value = expected(&values(&output));
                assert!((found.item().unwrap() - value).abs() < 1e-5 * value, "{case}");
                let grad = values(&found.backward().unwrap().get(&var).unwrap());
                let largest = grad.iter().fold(0.0f64, |m, g| m.max(g.abs()));
                // Central differences for every seventh element.
                for at in (0..output.elem_count()).step_by(7) {
                    let moved = |by: f64| {
                        let mut output = values(&output);
                        output[at] += by;
                        expected(&output)
                    };
                    let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    assert!((grad[at] - slope).abs() < 1e-4 * largest, "{case}: {} {slope}", grad[at]);
                }
            }
        }
    }
}

#[test]
fn timesteps_fill_their_range_and_follow_the_seed() {
    let config = DiffusionConfig { min_timestep: 200, max_timestep: Some(210), ..DiffusionConfig::default() };
    let objective = objective(PredictionType::Epsilon, config);
    let draw = |seed| {
        // Until `_stream` is dropped, random numbers come from this state.
        let _stream = Stream::enter(State { seed, offset: 0 });
        objective.draw_timesteps(5000).unwrap().to_vec::<i64>().unwrap()
    };
    let drawn = draw(5);
    for t in 200..210 {
        // 500 are expected: 5000 draws over ten timesteps.
        let count = drawn.iter().filter(|&&d| d == t).count();
        assert!((400..600).contains(&count), "{t}: {count}");
    }
    assert_eq!(drawn.iter().filter(|t| !(200..210).contains(*t)).count(), 0);
    assert_eq!(draw(5), drawn);
    assert_ne!(draw(6), drawn);
}

#[test]
fn offset_noise_is_the_same_over_a_channel() {
    let config = DiffusionConfig { noise_offset: 10.0, ..DiffusionConfig::default() };
    let noised = objective(PredictionType::Epsilon, config).noise(&randn(&[2, 3, 40, 40])).unwrap();
    // The target is the noise: in each channel, independent numbers of variance 1 plus one number of deviation 10.
    let (keepdim, correction) = (false, 0.0);
    let means = values(&noised.target.mean(&[2, 3], keepdim).unwrap());
    let variances = values(&noised.target.var(&[2, 3], keepdim, correction).unwrap());
    assert!(variances.iter().all(|v| (v - 1.0).abs() < 0.2), "{variances:?}");
    assert!(means.iter().any(|m| m.abs() > 1.0) && means.iter().all(|m| m.abs() < 50.0), "{means:?}");
}

#[test]
fn multiresolution_noise_has_large_structures_and_deviation_1() {
    let latents = randn(&[8, 4, 32, 48]);
    let noise = |multires_noise_iterations| {
        let config =
            DiffusionConfig { multires_noise_iterations, multires_noise_discount: 0.9, ..DiffusionConfig::default() };
        objective(PredictionType::Epsilon, config).noise(&latents).unwrap().target
    };
    let keepdim = false;
    // Each square of 8 x 8 pixels has a mean; this is the variance of these means. For independent pixels of variance
    // 1, it is 1 / 64.
    let coarse = |noise: &Tensor| {
        // (batch, channels, 4 * 8 rows, 6 * 8 columns)
        let means = noise.reshape((8, 4, 4, 8, 6, 8)).unwrap().mean(&[3, 5], keepdim).unwrap();
        let correction = 0.0;
        means.var(&[0, 1, 2, 3], keepdim, correction).unwrap().item().unwrap()
    };
    let (plain, multires) = (noise(0), noise(10));
    assert!(coarse(&plain) < 0.03 && coarse(&multires) > 0.1, "{} {}", coarse(&plain), coarse(&multires));
    // The objective divides by the deviation that it computes with this correction.
    let correction = 1.0;
    for variance in values(&multires.var(&[1, 2, 3], keepdim, correction).unwrap()) {
        assert!((variance - 1.0).abs() < 1e-5, "{variance}");
    }
}

#[test]
fn the_number_of_a_sample_determines_its_noise_and_timestep() {
    let config = DiffusionConfig { noise_offset: 0.3, multires_noise_iterations: 4, ..DiffusionConfig::default() };
    let objective = objective(PredictionType::Epsilon, config);
    let (latents, before) = (Tensor::zeros((4, 3, 2, 2), DType::F32, &CPU).unwrap(), rng::state());
    let (numbers, seed) = ([6, 7, 8, 9], 2);
    let all = objective.noise_for(&latents, &numbers, seed).unwrap();
    for start in 0..3 {
        let samples = &numbers[start..start + 2];
        let pair = objective.noise_for(&latents.narrow(0, 0, 2).unwrap(), samples, seed).unwrap();
        assert_eq!(values(&pair.target), values(&all.target.narrow(0, start, 2).unwrap()));
        assert_eq!(values(&pair.timesteps), values(&all.timesteps.narrow(0, start, 2).unwrap()));
    }
    let other = objective.noise_for(&latents, &numbers, seed + 1).unwrap();
    assert_ne!(values(&other.target), values(&all.target));
    assert_eq!(rng::state(), before, "the library's generator does not advance");
    assert!(objective.noise_for(&latents, &[6], seed).unwrap_err().to_string().contains("found 1 sample numbers"));
}

#[test]
fn validation_noise_belongs_to_the_example_and_its_timesteps_are_spread_evenly() {
    let objective = objective(PredictionType::VPrediction, DiffusionConfig::default());
    let latents = randn(&[4, 4, 3, 3]);
    let before = rng::state();
    let (examples, seed) = ([0, 1, 2, 7], 42);
    let all = objective.validation_noise(&latents, &examples, seed).unwrap();
    let part = objective.validation_noise(&latents.narrow(0, 1, 2).unwrap(), &examples[1..3], seed).unwrap();
    let other = objective.validation_noise(&latents, &examples, seed + 1).unwrap();
    assert_eq!(rng::state(), before);
    let middle = |x: &Tensor| values(&x.narrow(0, 1, 2).unwrap());
    assert_eq!(middle(&all.sample), values(&part.sample));
    assert_eq!(middle(&all.timesteps), values(&part.timesteps));
    assert_ne!(values(&all.sample), values(&other.sample));
    // 50 examples over 1000 timesteps: five are expected in each tenth.
    let timesteps: Vec<f64> = (0..50)
        .map(|n| values(&objective.validation_noise(&latents.narrow(0, 0, 1).unwrap(), &[n], 0).unwrap().timesteps)[0])
        .collect();
    for tenth in 0..10 {
        let range = f64::from(tenth) * 100.0..f64::from(tenth + 1) * 100.0;
        let count = timesteps.iter().filter(|t| range.contains(t)).count();
        assert!((4..=6).contains(&count), "{range:?}: {count}");
    }
}

#[test]
fn samples_keep_the_dtype_of_the_latents_and_targets_are_f32() {
    let objective = objective(PredictionType::Epsilon, DiffusionConfig::default());
    let noised = objective.noise(&randn(&[2, 4, 2, 2]).to_dtype(DType::BF16).unwrap()).unwrap();
    assert_eq!((noised.sample.dtype(), noised.target.dtype()), (DType::BF16, DType::F32));
    let loss = objective.loss(&noised.sample, &noised, None, None).unwrap();
    assert_eq!((loss.dtype(), loss.dims()), (DType::F32, &[][..]));
}

#[test]
fn wrong_settings_and_inputs_are_rejected() {
    let rejection = |prediction, config: DiffusionConfig| {
        DiffusionObjective::new(&schedule(prediction), config, &CPU).unwrap_err().to_string()
    };
    let default = DiffusionConfig::default;
    let epsilon = PredictionType::Epsilon;
    assert!(
        rejection(epsilon, DiffusionConfig { min_timestep: 500, max_timestep: Some(500), ..default() }).contains("500")
    );
    assert!(rejection(epsilon, DiffusionConfig { max_timestep: Some(1001), ..default() }).contains("1001"));
    assert!(rejection(epsilon, DiffusionConfig { min_snr_gamma: Some(0.0), ..default() }).contains("min_snr_gamma"));
    assert!(rejection(epsilon, DiffusionConfig { noise_offset: f64::NAN, ..default() }).contains("noise_offset"));
    for multires_noise_discount in [0.0, 1.0, f64::NAN] {
        let message = rejection(epsilon, DiffusionConfig { multires_noise_discount, ..default() });
        assert!(message.contains("expected above 0 and below 1"), "{message}");
    }
    assert!(rejection(epsilon, DiffusionConfig { huber_delta: -1.0, ..default() }).contains("huber_delta"));
    // At the last timestep of such a schedule the sample is noise alone, so predicting the noise teaches nothing.
    let zero_snr = NoiseScheduleConfig { rescale_betas_zero_snr: true, ..NoiseScheduleConfig::default() };
    let zero_snr = NoiseSchedule::new(zero_snr).unwrap();
    assert!(DiffusionObjective::new(&zero_snr, default(), &CPU).unwrap_err().to_string().contains("v_prediction"));
    let objective = objective(epsilon, default());
    assert!(matches!(objective.noise(&randn(&[4])), Err(Error::Shape { .. })));
    // Multi-resolution noise needs latents with four dimensions: it resizes noise in height and width.
    let multires = DiffusionObjective::new(
        &schedule(epsilon),
        DiffusionConfig { multires_noise_iterations: 6, ..default() },
        &CPU,
    );
    assert!(matches!(multires.unwrap().noise(&randn(&[2, 4, 8])), Err(Error::Shape { .. })));
    assert!(matches!(objective.noise(&Tensor::zeros((1, 4), DType::I64, &CPU).unwrap()), Err(Error::DType { .. })));
    let latents = randn(&[2, 4, 2, 2]);
    let past_the_last = Tensor::new(&[0i64, 1000], &CPU).unwrap(); // the last timestep is 999
    assert!(matches!(objective.noise_at(&latents, &latents, &past_the_last), Err(Error::Index { .. })));
    let noised = objective.noise(&latents).unwrap();
    let message = objective.loss(&latents, &noised, Some(&latents), None).unwrap_err().to_string();
    assert!(message.contains("mask") && message.contains("[2, 1, 2, 2]"), "{message}");
    assert!(objective.loss(&latents, &noised, None, Some(&randn(&[3]))).unwrap_err().to_string().contains("weights"));
}
