//! The arithmetic of the optimizer Prodigy, which estimates the distance from the initial values to the solution. The
//! first half of a step updates the moments, and computes two sums of each variable; the sums of all variables give a
//! new estimate. The second half updates the variables.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::Result;
use trainable_candle_core::cpu::{Real, dispatch};

use super::{NAME, ProdigyConfig};
use crate::optim::rule::{Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update};

/// The configuration of a group during a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepConfig {
    pub(super) config: ProdigyConfig,
    /// The estimate of the distance from the initial values to the solution.
    pub(super) d: f64,
    /// The step size: the estimate times the learning rate, with bias correction if that is used.
    pub(super) dlr: f64,
}

/// The first half of a step on the CPU, which updates the moments and computes the sums for the estimate. On a CUDA
/// device, this rule's kernels do the whole step.
pub(super) struct Observe;

/// The second half of a step on the CPU, which updates the variables.
pub(super) struct Apply;

/// Returns the states that are kept for a parameter: `s`, a decaying sum of the gradients, and `p0`, the initial
/// values, both for every `slice_p`-th element only; and Adam's moments for all elements.
pub(super) fn states(config: &ProdigyConfig) -> SmallVec<[StateSpec; 4]> {
    let sampled = StateKind::Every(config.slice_p);
    let mut states = smallvec![sampled.named("s"), sampled.named("p0"), StateKind::Float.named("exp_avg_sq")];
    if config.betas.0 > 0.0 {
        states.push(StateKind::Float.named("exp_avg"));
    }
    states
}

impl Rule for Observe {
    const NAME: &'static str = NAME;
    type Config = StepConfig;
    const UPDATE: Update<StepConfig, f32> = observe::<f32>;
    const UPDATE_F64: Option<Update<StepConfig, f64>> = Some(observe::<f64>);
    const KERNELS: Option<Kernels<StepConfig>> = Some(Kernels {
        // The kernel `whole_prepare` begins a step.
        prepare: "whole",
        step: "prodigy_step",
        // The sums, with a block of threads for each variable (false); then the estimate from the sums of all
        // variables, with one block for all (true).
        before: &[("prodigy_observe", false), ("prodigy_estimate", true)],
        step_8bit: None,
        settings: |StepConfig { config, .. }| Settings {
            lr: config.lr,
            beta1: config.betas.0,
            beta2: config.betas.1,
            eps: config.eps,
            weight_decay: config.weight_decay,
            more: [
                config.beta3(),
                config.d0,
                config.d_coef,
                config.growth_rate,
                config.slice_p as f64,
                f64::from(u8::from(config.decouple)),
                f64::from(u8::from(config.use_bias_correction)),
                f64::from(u8::from(config.safeguard_warmup)),
            ],
            ..Settings::default()
        },
    });
    // The sums are those of a whole variable.
    const ELEMENTWISE: bool = false;

    fn validate(step_config: &StepConfig) -> Result<()> {
        step_config.config.validate()
    }

    fn states(step_config: &StepConfig, _dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        states(&step_config.config)
    }

    /// Returns the size of a variable's scratch memory on a CUDA device, in f32 values: its two f64 sums.
    fn scratch(_dims: &[usize]) -> usize {
        4
    }

    fn lr(step_config: &mut StepConfig) -> &mut f64 {
        &mut step_config.config.lr
    }
}

impl Rule for Apply {
    const NAME: &'static str = NAME;
    type Config = StepConfig;
    const UPDATE: Update<StepConfig, f32> = apply::<f32>;
    const UPDATE_F64: Option<Update<StepConfig, f64>> = Some(apply::<f64>);
    // `s` and `p0` have fewer elements than the variable, so they cannot be split into chunks together with it.
    const ELEMENTWISE: bool = false;
    // The first half has counted the step.
    const COUNTS: bool = false;

    fn validate(step_config: &StepConfig) -> Result<()> {
        Observe::validate(step_config)
    }

    fn states(step_config: &StepConfig, dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        Observe::states(step_config, dims)
    }

    fn lr(step_config: &mut StepConfig) -> &mut f64 {
        Observe::lr(step_config)
    }
}

fn observe<T: Real>(step_config: &StepConfig, step: u64, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || observe_elements(step_config, step, chunk),
    );
}

/// Updates the states of a variable, and writes two sums over its sampled elements to `chunk.sums`: the sum of
/// `g * (p0 - p)` for the estimate's numerator, and the sum of the magnitudes of `s` for the estimate's denominator.
#[inline(always)]
fn observe_elements<T: Real>(step_config: &StepConfig, step: u64, mut chunk: Chunk<'_, T>) {
    let StepConfig { config, d, dlr } = step_config;
    let l2 = T::from_f64(if config.decouple { 0.0 } else { config.weight_decay });
    let Chunk { param, grad, states, sums, .. } = &mut chunk;
    let [StateSlice::Float(s), StateSlice::Float(p0), StateSlice::Float(exp_avg_sq), exp_avg @ ..] =
        states.as_mut_slice()
    else {
        unreachable!("the states are those that the rule declares")
    };
    let sampled = param.iter().zip(grad.iter()).step_by(config.slice_p);
    let beta3 = T::from_f64(config.beta3());
    // The weight of this step's gradient in `s`, which is independent of `lr` with `safeguard_warmup`.
    let gain3 = T::from_f64(d / config.d0 * if config.safeguard_warmup { *d } else { *dlr });
    let [mut numerator, mut denominator] = [0f64; 2];
    for ((&p, &g), (s, p0)) in sampled.zip(s.iter_mut().zip(p0.iter_mut())) {
        // `p0` holds the initial values of the parameters.
        if step == 1 {
            *p0 = p;
        }
        let g = g + l2 * p;
        numerator += (g * (*p0 - p)).to_f64();
        *s = beta3 * *s + gain3 * g;
        denominator += s.abs().to_f64();
    }
    if let Some(sums) = sums {
        **sums = [numerator, denominator];
    }
    let (beta1, beta2) = config.betas;
    let (gain1, gain2) = (T::from_f64(d * (1.0 - beta1)), T::from_f64(d * d * (1.0 - beta2)));
    let (beta1, beta2) = (T::from_f64(beta1), T::from_f64(beta2));
    for ((&p, &g), v) in param.iter().zip(grad.iter()).zip(exp_avg_sq.iter_mut()) {
        let g = g + l2 * p;
        *v = beta2 * *v + gain2 * g * g;
    }
    if let [StateSlice::Float(exp_avg)] = exp_avg {
        for ((&p, &g), m) in param.iter().zip(grad.iter()).zip(exp_avg.iter_mut()) {
            *m = beta1 * *m + gain1 * (g + l2 * p);
        }
    }
}

fn apply<T: Real>(step_config: &StepConfig, _step: u64, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || apply_elements(step_config, chunk),
    );
}

/// Updates the elements of a variable with the states that the first half of the step has updated.
#[inline(always)]
fn apply_elements<T: Real>(step_config: &StepConfig, mut chunk: Chunk<'_, T>) {
    let StepConfig { config, d, dlr } = step_config;
    let (decay, l2) = if config.decouple { (config.weight_decay, 0.0) } else { (0.0, config.weight_decay) };
    // The decay is subtracted, as in prodigyopt: rounding a factor 1 - decay · dlr would remove most digits of
    // decay · dlr while the estimate is small.
    let (decay, l2) = (T::from_f64(decay * dlr), T::from_f64(l2));
    let (step_size, eps, d) = (T::from_f64(*dlr), T::from_f64(d * config.eps), T::from_f64(*d));
    let elements = chunk.param.iter_mut().zip(chunk.grad);
    match chunk.states.as_mut_slice() {
        [_, _, StateSlice::Float(exp_avg_sq), StateSlice::Float(exp_avg)] => {
            for ((p, _), (v, m)) in elements.zip(exp_avg_sq.iter().zip(exp_avg.iter())) {
                // The first moment already contains the factor d and the L2 term.
                *p = *p - decay * *p - step_size * *m / (v.sqrt() + eps);
            }
        }
        [_, _, StateSlice::Float(exp_avg_sq)] => {
            for ((p, &g), v) in elements.zip(exp_avg_sq.iter()) {
                let g = g + l2 * *p;
                *p = *p - decay * *p - step_size * d * g / (v.sqrt() + eps);
            }
        }
        _ => unreachable!("the states are those that the rule declares"),
    }
}
