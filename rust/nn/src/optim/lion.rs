//! Lion: each step moves every parameter by the learning rate, against the sign of an interpolation between the
//! momentum and the gradient.
//!
//! Chen et al., "Symbolic Discovery of Optimization Algorithms", <https://arxiv.org/abs/2302.06675>. The order of
//! operations is that of bitsandbytes' `Lion32bit`:
//! <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/csrc/kernels.cu#L807>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::{Real, dispatch};
use trainable_candle_core::{Result, Var};

use super::Stepper;
use super::kind::{hyper_parameters, registered};
use super::rule::{
    Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_betas, check_not_negative,
};

hyper_parameters! {
    /// Hyper-parameters of [`Lion`]; names, meaning and defaults are those of the paper's implementation and
    /// bitsandbytes.
    pub struct LionConfig {
        /// Learning rate, at least 0; usually a third to a tenth of Adam's.
        pub lr: f64,
        /// The momentum's weight in the update, and the momentum's decay rate; each in [0, 1).
        pub betas: (f64, f64),
        /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        pub weight_decay: f64,
    }
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0 }
    }
}

/// Lion, as bitsandbytes' `Lion32bit`.
pub type Lion = Stepper<LionRule>;

impl Lion {
    /// Makes a Lion that updates `params`, with the defaults of [`LionConfig`] except `lr` and `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, LionConfig { lr, weight_decay, ..LionConfig::default() })
    }
}

registered!(
    LionRule,
    "Lion (Chen et al. 2023, arXiv:2302.06675): each step moves every parameter by `lr`, against the sign of an \
     interpolation between the momentum and the gradient.",
    // `lr`, `betas` and `weight_decay` can be passed by position.
    positional: 3,
    LionConfig::default()
);

/// The arithmetic of [`Lion`].
pub struct LionRule;

impl Rule for LionRule {
    const NAME: &'static str = "Lion";
    type Config = LionConfig;
    const UPDATE: Update<LionConfig, f32> = update;
    const UPDATE_F64: Option<Update<LionConfig, f64>> = Some(update);
    const KERNELS: Option<Kernels<LionConfig>> = Some(Kernels {
        prepare: "lion",
        step: "lion",
        // No other kernel runs before `step`.
        before: &[],
        step_8bit: None,
        settings: |&LionConfig { lr, betas, weight_decay }| Settings {
            lr,
            beta1: betas.0,
            beta2: betas.1,
            weight_decay,
            ..Settings::default()
        },
    });

    fn validate(config: &LionConfig) -> Result<()> {
        check_not_negative(Self::NAME, "lr", config.lr)?;
        check_not_negative(Self::NAME, "weight_decay", config.weight_decay)?;
        check_betas(Self::NAME, config.betas)
    }

    fn states(_config: &LionConfig, _dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        smallvec![StateKind::Float.named("exp_avg")]
    }

    fn lr(config: &mut LionConfig) -> &mut f64 {
        &mut config.lr
    }
}

/// The numbers that a step of Lion computes from the hyper-parameters. The step fuses the same multiplications and
/// additions as the CUDA code of bitsandbytes, so both compute the same momentum, bit for bit.
#[derive(Clone, Copy)]
pub(crate) struct Coefficients<T> {
    pub(crate) beta1: T,
    pub(crate) beta2: T,
    pub(crate) lr: T,
    /// The factor on the parameters, `1 - lr * weight_decay`.
    pub(crate) decay: T,
}

impl<T: Real> Coefficients<T> {
    pub(crate) fn new(lr: f64, betas: (f64, f64), weight_decay: f64) -> Self {
        let (beta1, beta2, lr) = (T::from_f64(betas.0), T::from_f64(betas.1), T::from_f64(lr));
        Self { beta1, beta2, lr, decay: T::ONE - lr * T::from_f64(weight_decay) }
    }

    /// Applies weight decay to the parameter `p` and moves `p` by `lr` against the sign of `direction`, or not at all
    /// if `direction` is 0.
    #[inline(always)]
    fn descend(&self, p: T, direction: T) -> T {
        let down = if direction > T::ZERO { self.lr } else { T::ZERO };
        let up = if direction < T::ZERO { self.lr } else { T::ZERO };
        p * self.decay - down + up
    }

    /// Takes a step from the parameter `p` with the gradient `g` and the momentum `m`. Returns the new parameter and
    /// momentum.
    #[inline(always)]
    fn advance(&self, p: T, g: T, m: T) -> (T, T) {
        let direction = m.mul_add(self.beta1, (T::ONE - self.beta1) * g);
        (self.descend(p, direction), m.mul_add(self.beta2, (T::ONE - self.beta2) * g))
    }
}

fn update<T: Real>(config: &LionConfig, _step: u64, chunk: Chunk<'_, T>) {
    update_float(Coefficients::new(config.lr, config.betas, config.weight_decay), chunk);
}

/// Takes a step with a momentum that is not quantized.
pub(crate) fn update_float<T: Real>(coefficients: Coefficients<T>, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || update_elements(coefficients, chunk),
    );
}

#[inline(always)]
fn update_elements<T: Real>(coefficients: Coefficients<T>, mut chunk: Chunk<'_, T>) {
    let [StateSlice::Float(exp_avg)] = chunk.states.as_mut_slice() else {
        unreachable!("the states are those that the rule declares");
    };
    for ((p, &g), m) in chunk.param.iter_mut().zip(chunk.grad).zip(exp_avg.iter_mut()) {
        (*p, *m) = coefficients.advance(*p, g, *m);
    }
}
