//! Stochastic gradient descent with momentum, as `torch.optim.SGD`.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::{Real, dispatch};
use trainable_candle_core::{Error, Result, Var};

use super::Stepper;
use super::kind::{hyper_parameters, registered};
use super::rule::{Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_not_negative};

hyper_parameters! {
    /// Hyper-parameters of [`SGD`]; names, meaning and defaults are torch's.
    pub struct SGDConfig {
        /// Learning rate, at least 0.
        pub lr: f64,
        /// At least 0: the factor by which each step multiplies the momentum buffer; with 0 there is no buffer.
        pub momentum: f64,
        /// Each step after the first adds `1 - dampening` times the gradient to the momentum buffer.
        pub dampening: f64,
        /// L2 penalty, at least 0: `weight_decay * param` is added to the gradient, after `maximize` has negated it.
        pub weight_decay: f64,
        /// Use Nesterov momentum. Needs `momentum > 0` and `dampening == 0`.
        pub nesterov: bool,
        /// Ascend instead of descend.
        pub maximize: bool,
    }
}

impl Default for SGDConfig {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false }
    }
}

/// Stochastic gradient descent, as `torch.optim.SGD`.
pub type SGD = Stepper<SGDRule>;

impl SGD {
    /// Plain gradient descent on `params` with learning rate `lr`, without momentum.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64) -> Result<Self> {
        Self::with_config(params, SGDConfig { lr, ..SGDConfig::default() })
    }
}

registered!(
    SGDRule,
    "Stochastic gradient descent with momentum, as `torch.optim.SGD`.",
    positional: 5, // `lr` to `nesterov`, as in torch
    SGDConfig::default()
);

/// The arithmetic of [`SGD`].
pub struct SGDRule;

impl Rule for SGDRule {
    const NAME: &'static str = "SGD";
    type Config = SGDConfig;
    const UPDATE: Update<SGDConfig, f32> = update;
    const UPDATE_F64: Option<Update<SGDConfig, f64>> = Some(update);
    const KERNELS: Option<Kernels<SGDConfig>> = Some(Kernels {
        // The kernel `sgd_prepare` begins a step; `sgd_step` (with stochastic rounding, `sgd_rounded`) updates variables.
        prepare: "sgd",
        step: "sgd",
        before: &[], // no further kernels between `prepare` and `step`
        step_8bit: None,
        settings: |&SGDConfig { lr, momentum, dampening, weight_decay, nesterov, maximize }| Settings {
            lr,
            // SGD's kernels read momentum and dampening from the fields for betas.
            beta1: momentum,
            beta2: dampening,
            weight_decay,
            maximize: maximize.into(),
            nesterov: nesterov.into(),
            ..Settings::default()
        },
    });

    fn validate(config: &SGDConfig) -> Result<()> {
        check_not_negative(Self::NAME, "lr", config.lr)?;
        check_not_negative(Self::NAME, "momentum", config.momentum)?;
        check_not_negative(Self::NAME, "weight_decay", config.weight_decay)?;
        if config.nesterov && (config.momentum == 0.0 || config.dampening != 0.0) {
            let found = format!("momentum {} and dampening {}", config.momentum, config.dampening);
            return Err(Error::argument(
                Self::NAME,
                format!("nesterov needs momentum > 0 and dampening 0, found {found}"),
            ));
        }
        Ok(())
    }

    fn states(config: &SGDConfig, _dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        if config.momentum == 0.0 { smallvec![] } else { smallvec![StateKind::Float.named("momentum_buffer")] }
    }

    fn lr(config: &mut SGDConfig) -> &mut f64 {
        &mut config.lr
    }
}

/// Updates the elements of a chunk with the widest SIMD instructions of the processor (`dispatch`).
fn update<T: Real>(config: &SGDConfig, step: u64, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || update_elements(config, step, chunk),
    );
}

#[inline(always)]
fn update_elements<T: Real>(config: &SGDConfig, step: u64, mut chunk: Chunk<'_, T>) {
    let sign = if config.maximize { -T::ONE } else { T::ONE };
    let (lr, weight_decay) = (T::from_f64(config.lr), T::from_f64(config.weight_decay));
    let (momentum, gain) = (T::from_f64(config.momentum), T::from_f64(1.0 - config.dampening));
    let elements = chunk.param.iter_mut().zip(chunk.grad);
    let [StateSlice::Float(buffer)] = chunk.states.as_mut_slice() else {
        // Without momentum there is no buffer.
        for (p, &g) in elements {
            *p -= lr * (sign * g + weight_decay * *p);
        }
        return;
    };
    for ((p, &g), b) in elements.zip(buffer.iter_mut()) {
        let g = sign * g + weight_decay * *p;
        // The first step copies the gradient to the buffer, without dampening.
        *b = if step == 1 { g } else { momentum * *b + gain * g };
        let direction = if config.nesterov { g + momentum * *b } else { *b };
        *p -= lr * direction;
    }
}
