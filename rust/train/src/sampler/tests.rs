//! Compares schedules, and runs of samplers in f32, with diffusers' schedulers in f64. A file of tests/golden/samplers
//! has diffusers' results; its metadata has the settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use trainable_candle_core::Device;
use trainable_candle_io::{TensorFile, load_tensors};

use super::*;
use crate::objective::NoiseScheduleConfig;

/// A run of diffusers: the kind of its sampler, the number of its steps, and the settings of its scheduler.
#[derive(Deserialize)]
struct Run {
    kind: String,
    steps: usize,
    settings: serde_json::Value,
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/samplers/diffusers.safetensors")
}

fn metadata<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let metadata = TensorFile::open(file()).unwrap().metadata();
    serde_json::from_str(&metadata[name]).unwrap()
}

fn schedule(settings: &serde_json::Value) -> NoiseSchedule {
    NoiseSchedule::new(serde_json::from_value::<NoiseScheduleConfig>(settings.clone()).unwrap()).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// The largest |found - expected| / max(1, |expected|).
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0.0, |worst, (f, e)| worst.max((f - e).abs() / e.abs().max(1.0)))
}

/// The model whose runs with diffusers' schedulers are in the golden file.
fn toy(x: &Tensor, timestep: f64, condition: &Tensor) -> Result<Tensor> {
    x.mul_scalar(0.5)?.add(&x.add(condition)?.tanh()?.mul_scalar(0.4 * timestep / 1000.0)?)
}

#[test]
fn schedules_equal_those_of_diffusers() {
    let golden = load_tensors(&file(), &Device::Cpu).unwrap();
    let schedules: BTreeMap<String, serde_json::Value> = metadata("schedules");
    assert_eq!(schedules.len(), 5);
    for (name, settings) in schedules {
        let expected = values(&golden[&format!("schedule.{name}.alphas_cumprod")]);
        let error = difference(schedule(&settings).alphas_cumprod(), &expected);
        assert!(error < 1e-12, "{name}: {error}");
    }
}

#[test]
fn runs_of_samplers_equal_those_of_diffusers() {
    let golden = load_tensors(&file(), &Device::Cpu).unwrap();
    let runs: BTreeMap<String, Run> = metadata("runs");
    let guidance_scale: f64 = metadata("scale");
    assert_eq!(runs.len(), 13);
    // One condition for both images of the noise (2, 4, 2, 3).
    let [negative, positive] = ["negative", "positive"].map(|n| {
        let condition = golden[n].broadcast_as((2, 4, 1, 1)).unwrap();
        vec![condition]
    });
    for (name, run) in runs {
        let get = |what: &str| values(&golden[&format!("{name}.{what}")]);
        let kind: SamplerKind = run.kind.parse().unwrap();
        let karras = run.settings["use_karras_sigmas"].as_bool().unwrap_or(false);
        // The two predictions of a step come from two calls of the model, or from one call with a batch of both.
        for batched in [false, true] {
            let mut sampler = kind.start(&schedule(&run.settings), run.steps, karras).unwrap();
            assert!(difference(sampler.timesteps(), &get("timesteps")) < 1e-12, "{name}: timesteps");
            assert!(difference(sampler.sigmas(), &get("sigmas")) < 1e-12, "{name}: sigmas");
            let mut model = Guided::new(
                |x: &Tensor, timestep, condition: &[Tensor]| toy(x, timestep, &condition[0]),
                positive.clone(),
                negative.clone(),
                guidance_scale,
                batched,
            )
            .unwrap();
            let mut samples = vec![sampler.init_noise(&golden["noise"]).unwrap()];
            for i in 0..run.steps {
                let x = &samples[i];
                let output = model.predict(&sampler.scale_input(x, i).unwrap(), sampler.timesteps()[i]).unwrap();
                let next = sampler.step(&output, i, x).unwrap();
                samples.push(next);
            }
            let samples = Tensor::stack(&samples.iter().collect::<Vec<_>>(), 0).unwrap();
            let error = difference(&values(&samples), &get("samples"));
            assert!(error < 2e-6, "{name}: {error}");
        }
    }
}

#[test]
fn sample_computes_the_same_as_the_steps_one_by_one() {
    let schedule = NoiseSchedule::sdxl().unwrap();
    let noise = Tensor::randn(0.0, 1.0, (2, 4, 3), DType::F32, &Device::Cpu).unwrap();
    let model = |x: &Tensor, timestep: f64| x.mul_scalar(0.3 + timestep / 2000.0);
    let (steps, karras) = (5, false);
    for kind in [SamplerKind::Euler, SamplerKind::DpmSolver] {
        let mut sampler = kind.start(&schedule, steps, karras).unwrap();
        // The second run uses the same sampler, because step 0 starts a new run.
        let runs = [(); 2].map(|()| sample(&mut *sampler, &noise, model).unwrap().to_vec::<f32>().unwrap());
        let mut x = sampler.init_noise(&noise).unwrap();
        for i in 0..steps {
            let output = model(&sampler.scale_input(&x, i).unwrap(), sampler.timesteps()[i]).unwrap();
            x = sampler.step(&output, i, &x).unwrap();
        }
        assert_eq!(runs[0], x.to_vec::<f32>().unwrap());
        assert_eq!(runs[0], runs[1]);
    }
}

#[test]
fn guidance_of_1_calls_the_model_with_the_prompt_alone() {
    let x = Tensor::randn(0.0, 1.0, (2, 3), DType::F32, &Device::Cpu).unwrap();
    let condition = |value: f64| vec![Tensor::full(value, (2, 1), DType::F32, &Device::Cpu).unwrap()];
    let mut calls = 0;
    let model = |x: &Tensor, _: f64, condition: &[Tensor]| {
        calls += 1;
        x.add(&condition[0])
    };
    let (positive, negative) = (condition(1.0), condition(-1.0));
    let (guidance_scale, batched) = (1.0, true);
    let mut guided = Guided::new(model, positive, negative, guidance_scale, batched).unwrap();
    let expected = x.add_scalar(1.0).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(guided.predict(&x, 0.0).unwrap().to_vec::<f32>().unwrap(), expected);
    drop(guided);
    assert_eq!(calls, 1);
}

#[test]
fn prompts_with_unequal_numbers_of_tensors_are_rejected() {
    let condition = vec![Tensor::ones((2, 1), DType::F32, &Device::Cpu).unwrap()];
    let nothing = |x: &Tensor, _: f64, _: &[Tensor]| Ok(x.clone());
    let (guidance_scale, batched) = (2.0, true);
    assert!(Guided::new(nothing, condition, vec![], guidance_scale, batched).is_err());
}

#[test]
fn invalid_steps_and_inputs_are_rejected() {
    let schedule = NoiseSchedule::sdxl().unwrap();
    // `start` takes the schedule, the number of steps, and whether noise levels are spaced as in Karras et al. 2022.
    for kind in [SamplerKind::Euler, SamplerKind::DpmSolver] {
        assert!(kind.start(&schedule, 0, false).is_err());
        // More steps than the schedule's 1000 timesteps.
        assert!(kind.start(&schedule, 1001, false).is_err());
    }
    let x = Tensor::zeros((1, 4), DType::F32, &Device::Cpu).unwrap();
    let mut sampler = SamplerKind::DpmSolver.start(&schedule, 4, false).unwrap();
    // `step` takes the model's output, the number of the step, and the sample.
    sampler.step(&x, 0, &x).unwrap();
    let message = sampler.step(&x, 2, &x).unwrap_err().to_string();
    assert_eq!(message, "sampler: found step 2, expected step 1; steps go in order");
    // The steps of the sampler are 0 to 3.
    assert!(sampler.step(&x, 4, &x).is_err());
    let wide = Tensor::zeros((1, 5), DType::F32, &Device::Cpu).unwrap();
    assert!(matches!(sampler.step(&wide, 1, &x), Err(Error::Shape { .. })));
    // The error lists the names of the supported samplers.
    assert!("ddim".parse::<SamplerKind>().unwrap_err().to_string().contains("dpmpp_2m"));
}
