//! Schedule-free AdamW, as in `schedulefree`: an average of the iterates replaces a learning-rate schedule.
//!
//! Defazio et al., "The Road Less Scheduled", <https://arxiv.org/abs/2405.15682>; reference:
//! <https://github.com/facebookresearch/schedule_free/blob/main/schedulefree/adamw_schedulefree.py> (1.4).

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::{Real, dispatch};
use trainable_candle_core::{Error, Result};

use super::Stepper;
use super::kind::{hyper_parameters, registered};
use super::rule::{
    Average, Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_betas, check_not_negative,
};

hyper_parameters! {
    /// Hyper-parameters of [`AdamWScheduleFree`]; names, meaning and defaults are those of `schedulefree`.
    pub struct AdamWScheduleFreeConfig {
        /// Learning rate, at least 0; do not combine this optimizer with a learning-rate schedule.
        pub lr: f64,
        /// Two numbers below 1. The first, above 0, is the weight of the average in the point at which gradients are
        /// computed: `betas[0] * average + (1 - betas[0]) * iterate`. The second, at least 0, is the decay rate of the
        /// second moment.
        pub betas: (f64, f64),
        /// Added to the root of the second moment, at least 0.
        pub eps: f64,
        /// At least 0: `weight_decay * param` is added to the normalized gradient.
        pub weight_decay: f64,
        /// The number of warm-up steps: step k of them, from 1, has the learning rate `lr * k / warmup_steps`.
        pub warmup_steps: usize,
        /// At least 0: the iterate of step k, from 1, has the weight `k^r * lr_max^weight_lr_power` in the average,
        /// where `lr_max` is the largest learning rate so far.
        pub r: f64,
        /// At least 0; see `r`.
        pub weight_lr_power: f64,
    }
}

impl Default for AdamWScheduleFreeConfig {
    fn default() -> Self {
        Self {
            lr: 2.5e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            warmup_steps: 0,
            r: 0.0,
            weight_lr_power: 2.0,
        }
    }
}

/// Schedule-free AdamW, as `schedulefree.AdamWScheduleFree`. During training, the parameters are the point at which
/// gradients are computed. [`eval`](super::Optimizer::eval) replaces them by the average of the iterates, for
/// validation or saving; [`train`](super::Optimizer::train) restores them.
pub type AdamWScheduleFree = Stepper<AdamWScheduleFreeRule>;

registered!(
    AdamWScheduleFreeRule,
    "Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), as `schedulefree.AdamWScheduleFree`. Call `eval()` \
     before validating or saving, to replace the parameters by the average of the iterates, and `train()` before the \
     next step.",
    positional: 7, // all hyper-parameters, as in `schedulefree`
    AdamWScheduleFreeConfig::default()
);

/// The arithmetic of [`AdamWScheduleFree`].
pub struct AdamWScheduleFreeRule;

impl Rule for AdamWScheduleFreeRule {
    const NAME: &'static str = "AdamWScheduleFree";
    type Config = AdamWScheduleFreeConfig;
    const UPDATE: Update<AdamWScheduleFreeConfig, f32> = update::<f32>;
    const UPDATE_F64: Option<Update<AdamWScheduleFreeConfig, f64>> = Some(update::<f64>);
    const KERNELS: Option<Kernels<AdamWScheduleFreeConfig>> = Some(Kernels {
        // The kernel `whole_prepare` begins a step, and no other kernel runs before `schedule_free_step`.
        prepare: "whole",
        step: "schedule_free_step",
        before: &[],
        step_8bit: None,
        settings: |config| Settings {
            lr: config.lr,
            beta1: config.betas.0,
            beta2: config.betas.1,
            eps: config.eps,
            weight_decay: config.weight_decay,
            // In the order in which the kernel `schedule_free_step` reads them; it does not read the zeros.
            more: [config.warmup_steps as f64, config.r, config.weight_lr_power, 0.0, 0.0, 0.0, 0.0, 0.0],
            ..Settings::default()
        },
    });
    // The states `weight_sum` and `lr_max` belong to the whole parameter.
    const ELEMENTWISE: bool = false;
    // As in the paper, z is the iterate, x the average of the iterates, and y (the parameter) the point at which
    // gradients are computed. State 0 is z. The average x solves y = beta1 * x + (1 - beta1) * z, so
    // x = y + (1 - 1 / beta1) * (z - y).
    const AVERAGE: Option<Average<AdamWScheduleFreeConfig>> =
        Some(Average { state: 0, weight: |config| 1.0 - 1.0 / config.betas.0 });

    fn validate(config: &AdamWScheduleFreeConfig) -> Result<()> {
        let &AdamWScheduleFreeConfig { lr, betas, eps, weight_decay, r, weight_lr_power, .. } = config;
        check_betas(Self::NAME, betas)?;
        if betas.0 == 0.0 {
            return Err(Error::argument(Self::NAME, "found betas[0] 0, expected a number above 0 and less than 1"));
        }
        for (name, value) in
            [("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("r", r), ("weight_lr_power", weight_lr_power)]
        {
            check_not_negative(Self::NAME, name, value)?;
        }
        Ok(())
    }

    fn states(_config: &AdamWScheduleFreeConfig, _dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        smallvec![
            StateKind::Float.named("z"),
            StateKind::Float.named("exp_avg_sq"),
            ONE.named("weight_sum"),
            ONE.named("lr_max"),
        ]
    }

    fn lr(config: &mut AdamWScheduleFreeConfig) -> &mut f64 {
        &mut config.lr
    }
}

/// A state of a single number, however many elements the parameter has: `Every(n)` has one number per n elements.
const ONE: StateKind = StateKind::Every(usize::MAX);

fn update<T: Real>(config: &AdamWScheduleFreeConfig, step: u64, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || update_all(config, step, chunk),
    );
}

/// Updates all elements of a parameter. z is the iterate, x the average of the iterates, and y (the parameter) the
/// point at which gradients are computed: y = beta1 * x + (1 - beta1) * z. x is not stored.
#[inline(always)]
fn update_all<T: Real>(config: &AdamWScheduleFreeConfig, step: u64, mut chunk: Chunk<'_, T>) {
    let [StateSlice::Float(z), StateSlice::Float(square), StateSlice::Float(weight_sum), StateSlice::Float(lr_max)] =
        chunk.states.as_mut_slice()
    else {
        unreachable!("the states are those that the rule declares")
    };
    if step == 1 {
        z.copy_from_slice(chunk.param);
    }
    let step = step as f64;
    let warmup = config.warmup_steps as f64;
    let lr = config.lr * if step <= warmup { step / warmup } else { 1.0 };
    lr_max[0] = T::from_f64(lr_max[0].to_f64().max(lr));
    let weight = step.powf(config.r) * lr_max[0].to_f64().powf(config.weight_lr_power);
    let sum = weight_sum[0].to_f64() + weight;
    weight_sum[0] = T::from_f64(sum);
    // The share of the new z in the average. All weights so far may be 0, if the learning rates were 0.
    let share = if sum == 0.0 { 0.0 } else { weight / sum };

    let (beta1, beta2) = config.betas;
    let correction = T::from_f64((1.0 - beta2.powf(step)).sqrt());
    let (old_weight, new_weight) = (T::from_f64(beta2), T::from_f64(1.0 - beta2));
    let (eps, decay, share_of_z) = (T::from_f64(config.eps), T::from_f64(config.weight_decay), T::from_f64(share));
    // z moves by -lr * direction, then x by share * (z - x), with the new z. Put into the formula of y, this moves y by
    // share * (z - y) + lr * (beta1 * (1 - share) - 1) * direction, with the old z and y.
    let (rate_z, rate_y) = (T::from_f64(lr), T::from_f64(lr * (beta1 * (1.0 - share) - 1.0)));
    let elements = chunk.param.iter_mut().zip(chunk.grad).zip(z.iter_mut().zip(square.iter_mut()));
    for ((y, &g), (z, v)) in elements {
        *v = *v * old_weight + new_weight * g * g;
        let direction = g / (v.sqrt() / correction + eps) + decay * *y;
        *y = *y + share_of_z * (*z - *y) + rate_y * direction;
        *z -= rate_z * direction;
    }
}
