//! Adam and AdamW, as in torch. They differ only in weight decay.
//!
//! Kingma and Ba, "Adam", <https://arxiv.org/abs/1412.6980>; Loshchilov and Hutter, "Decoupled Weight Decay
//! Regularization", <https://arxiv.org/abs/1711.05101>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::{Real, dispatch};
use trainable_candle_core::{Result, Var};

use super::Stepper;
use super::kind::{hyper_parameters, registered};
use super::rule::{
    Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_betas, check_not_negative,
};

hyper_parameters! {
    /// Hyper-parameters of [`Adam`] and [`AdamW`]; names, meaning and defaults are torch's.
    pub struct AdamConfig {
        /// Learning rate, at least 0.
        pub lr: f64,
        /// Decay rates of the first and the second moment, each in [0, 1).
        pub betas: (f64, f64),
        /// Added to the root of the second moment, at least 0.
        pub eps: f64,
        /// At least 0. Adam adds `weight_decay * param` to the gradient, an L2 penalty; AdamW leaves the gradient
        /// unchanged and multiplies the parameters by `1 - lr * weight_decay` in each step.
        pub weight_decay: f64,
        /// Divide by the root of each element's largest second moment so far, instead of its current second moment.
        pub amsgrad: bool,
        /// Ascend instead of descend.
        pub maximize: bool,
    }
}

impl AdamConfig {
    /// Returns the defaults of Adam: no weight decay.
    pub const fn adam(lr: f64) -> Self {
        Self { lr, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, amsgrad: false, maximize: false }
    }

    /// Returns the defaults of AdamW: weight decay of 0.01.
    pub const fn adamw(lr: f64) -> Self {
        Self { weight_decay: 0.01, ..Self::adam(lr) }
    }

    fn validate(&self, op: &'static str) -> Result<()> {
        check_not_negative(op, "lr", self.lr)?;
        check_not_negative(op, "eps", self.eps)?;
        check_not_negative(op, "weight_decay", self.weight_decay)?;
        check_betas(op, self.betas)
    }

    fn states(&self) -> SmallVec<[StateSpec; 4]> {
        let mut states = smallvec![StateKind::Float.named("exp_avg"), StateKind::Float.named("exp_avg_sq")];
        if self.amsgrad {
            states.push(StateKind::Float.named("max_exp_avg_sq"));
        }
        states
    }
}

/// Adam, as `torch.optim.Adam`.
pub type Adam = Stepper<AdamRule>;

/// Adam with decoupled weight decay, as `torch.optim.AdamW`.
pub type AdamW = Stepper<AdamWRule>;

impl Adam {
    /// Makes Adam on `params` with the defaults of [`AdamConfig::adam`].
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64) -> Result<Self> {
        Self::with_config(params, AdamConfig::adam(lr))
    }
}

impl AdamW {
    /// Makes AdamW on `params` with the defaults of [`AdamConfig::adamw`] except `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, AdamConfig { weight_decay, ..AdamConfig::adamw(lr) })
    }
}

// `positional`: how many hyper-parameters torch takes by position: lr, betas, eps, weight_decay and amsgrad.
registered!(
    AdamRule,
    "Adam (Kingma & Ba 2015, arXiv:1412.6980), as `torch.optim.Adam`.",
    positional: 5,
    AdamConfig::adam(1e-3)
);
registered!(
    AdamWRule,
    "Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), as `torch.optim.AdamW`.",
    positional: 5,
    AdamConfig::adamw(1e-3)
);

/// The arithmetic of [`Adam`].
pub struct AdamRule;

/// The arithmetic of [`AdamW`].
pub struct AdamWRule;

impl Rule for AdamRule {
    const NAME: &'static str = "Adam";
    type Config = AdamConfig;
    // `false`: the weight decay is an L2 penalty; AdamW has `true`, for decoupled weight decay.
    const UPDATE: Update<AdamConfig, f32> = update::<f32, false>;
    const UPDATE_F64: Option<Update<AdamConfig, f64>> = Some(update::<f64, false>);
    // Adam updates one element at a time, so no kernel has to run before the step (`before`). The states are floats, so
    // there is no kernel for 8-bit states.
    const KERNELS: Option<Kernels<AdamConfig>> =
        Some(Kernels { prepare: "adam", step: "adam", before: &[], step_8bit: None, settings: kernel_settings });

    fn validate(config: &AdamConfig) -> Result<()> {
        config.validate(Self::NAME)
    }

    fn states(config: &AdamConfig, _dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        config.states()
    }

    fn lr(config: &mut AdamConfig) -> &mut f64 {
        &mut config.lr
    }
}

impl Rule for AdamWRule {
    const NAME: &'static str = "AdamW";
    type Config = AdamConfig;
    const UPDATE: Update<AdamConfig, f32> = update::<f32, true>;
    const UPDATE_F64: Option<Update<AdamConfig, f64>> = Some(update::<f64, true>);
    // Only the coefficients differ from Adam's; the kernel that updates the elements is the same.
    const KERNELS: Option<Kernels<AdamConfig>> =
        Some(Kernels { prepare: "adamw", step: "adam", before: &[], step_8bit: None, settings: kernel_settings });

    fn validate(config: &AdamConfig) -> Result<()> {
        config.validate(Self::NAME)
    }

    fn states(config: &AdamConfig, _dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        config.states()
    }

    fn lr(config: &mut AdamConfig) -> &mut f64 {
        &mut config.lr
    }
}

/// `amsgrad` is not among the settings: the kernels apply it to variables that have a third state.
fn kernel_settings(config: &AdamConfig) -> Settings {
    let AdamConfig { lr, betas, eps, weight_decay, maximize, .. } = *config;
    Settings { lr, beta1: betas.0, beta2: betas.1, eps, weight_decay, maximize: maximize.into(), ..Settings::default() }
}

/// The numbers that one step computes from an [`AdamConfig`], for the CPU; `cuda/kernels/optim.cu` computes its own.
#[derive(Clone, Copy)]
struct Coefficients<T> {
    /// 1 - beta1.
    gain1: T,
    beta2: T,
    /// 1 - beta2.
    gain2: T,
    eps: T,
    /// lr / (1 - beta1^step).
    step_size: T,
    /// √(1 - beta2^step).
    root_correction2: T,
    /// The factor of the gradient: 1, or -1 to ascend.
    sign: T,
    /// The factor of the parameter: 1 - lr * weight_decay for AdamW, 1 for Adam.
    decay: T,
    /// The factor of the parameter in the L2 penalty, which is added to the gradient: weight_decay for Adam, 0 for
    /// AdamW.
    l2: T,
}

impl<T: Real> Coefficients<T> {
    fn new(config: &AdamConfig, step: u64, decoupled: bool) -> Self {
        let (beta1, beta2) = config.betas;
        let correction1 = 1.0 - beta1.powf(step as f64);
        let correction2 = 1.0 - beta2.powf(step as f64);
        let (decay, l2) =
            if decoupled { (1.0 - config.lr * config.weight_decay, 0.0) } else { (1.0, config.weight_decay) };
        Self {
            gain1: T::from_f64(1.0 - beta1),
            beta2: T::from_f64(beta2),
            gain2: T::from_f64(1.0 - beta2),
            eps: T::from_f64(config.eps),
            step_size: T::from_f64(config.lr / correction1),
            root_correction2: T::from_f64(correction2.sqrt()),
            sign: if config.maximize { -T::ONE } else { T::ONE },
            decay: T::from_f64(decay),
            l2: T::from_f64(l2),
        }
    }

    /// Returns the parameter after weight decay, and the moments updated with the gradient `g`.
    #[inline(always)]
    fn advance(&self, p: T, g: T, m: T, v: T) -> (T, T, T) {
        let p = p * self.decay;
        let g = self.sign * g + self.l2 * p;
        (p, m + self.gain1 * (g - m), v * self.beta2 + self.gain2 * g * g)
    }

    /// Returns the parameter `p` after the move along the first moment `m`, divided by the root of `v`. `v` is the
    /// second moment or, with AMSGrad, its largest value so far.
    #[inline(always)]
    fn descend(&self, p: T, m: T, v: T) -> T {
        p - self.step_size * m / (v.sqrt() / self.root_correction2 + self.eps)
    }
}

fn update<T: Real, const DECOUPLED: bool>(config: &AdamConfig, step: u64, chunk: Chunk<'_, T>) {
    let coefficients = Coefficients::new(config, step, DECOUPLED);
    dispatch(
        #[inline(always)]
        || update_elements(coefficients, chunk),
    );
}

#[inline(always)]
fn update_elements<T: Real>(coefficients: Coefficients<T>, mut chunk: Chunk<'_, T>) {
    let elements = chunk.param.iter_mut().zip(chunk.grad);
    match chunk.states.as_mut_slice() {
        [StateSlice::Float(exp_avg), StateSlice::Float(exp_avg_sq)] => {
            for ((p, &g), (m, v)) in elements.zip(exp_avg.iter_mut().zip(exp_avg_sq.iter_mut())) {
                (*p, *m, *v) = coefficients.advance(*p, g, *m, *v);
                *p = coefficients.descend(*p, *m, *v);
            }
        }
        [StateSlice::Float(exp_avg), StateSlice::Float(exp_avg_sq), StateSlice::Float(max_exp_avg_sq)] => {
            let states = exp_avg.iter_mut().zip(exp_avg_sq.iter_mut()).zip(max_exp_avg_sq.iter_mut());
            for ((p, &g), ((m, v), max)) in elements.zip(states) {
                (*p, *m, *v) = coefficients.advance(*p, g, *m, *v);
                *max = max.max(*v);
                *p = coefficients.descend(*p, *m, *max);
            }
        }
        _ => unreachable!("the states are those that the rule declares"),
    }
}
