//! Prodigy, as in `prodigyopt`: Adam whose step size is an estimate of the distance to the solution.
//!
//! Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", <https://arxiv.org/abs/2306.06101>;
//! reference:
//! <https://github.com/konstmish/prodigy/blob/3efb213ee8af5a6bf76f28726398433a847b38e9/prodigyopt/prodigy.py#L101>.

mod rule;

use smallvec::SmallVec;
use trainable_candle_core::{DType, Device, Error, GradStore, Result, Tensor, Var};

use super::guard::Guard;
use super::kind::{Registered, hyper_parameters};
use super::rule::{Rule, StateSpec, check_betas, check_not_negative};
use super::state::{StateDict, StatePlace};
use super::stepper::{Optimizer, ParamGroup, Stepper};
use super::update;
// On the CPU, `Observe` is the first half of a step and `Apply` the second; on CUDA, `Observe` does a whole step.
use rule::{Apply, Observe, StepConfig, states};

const NAME: &str = "Prodigy";
/// The entry of the state dict with the four numbers of [`Estimate`].
const ESTIMATE: &str = "estimate";

hyper_parameters! {
    /// Hyper-parameters of [`Prodigy`]; names, meaning and defaults are those of `prodigyopt`.
    pub struct ProdigyConfig {
        /// Factor on the estimated step size, at least 0; 1 unless a schedule changes it. It must be the same in all
        /// groups, except that a group may have 0; the variables of such a group do not change.
        pub lr: f64,
        /// Decay rates of the first and the second moment, each in [0, 1); a first rate of 0 keeps no first moment.
        pub betas: (f64, f64),
        /// Decay rate of the sums that give the estimate, in [0, 1); default: the square root of the second beta.
        pub beta3: Option<f64>,
        /// Above 0: eps times the estimate is added to the root of the second moment.
        pub eps: f64,
        /// At least 0; see `decouple`.
        pub weight_decay: f64,
        /// Decay weights as AdamW does; otherwise add an L2 penalty to the gradient.
        pub decouple: bool,
        /// Use Adam's bias correction in the first steps.
        pub use_bias_correction: bool,
        /// Leave `lr` and bias correction out of the estimate's denominator: a warm-up would make the denominator too
        /// small.
        pub safeguard_warmup: bool,
        /// The first estimate, above 0.
        pub d0: f64,
        /// Factor on the estimate, above 0; tune the method with it, for example 0.5 or 2.
        pub d_coef: f64,
        /// At least 1: the largest factor by which the estimate grows in a step; no limit while the estimate is `d0`.
        pub growth_rate: f64,
        /// At least 1: the estimate is computed from every `slice_p`-th element; 11 saves almost half of the states'
        /// memory.
        // Two of a variable's four states have only these elements.
        pub slice_p: usize,
    }
}

impl Default for ProdigyConfig {
    fn default() -> Self {
        Self {
            lr: 1.0,
            betas: (0.9, 0.999),
            beta3: None,
            eps: 1e-8,
            weight_decay: 0.0,
            decouple: true,
            use_bias_correction: false,
            safeguard_warmup: false,
            d0: 1e-6,
            d_coef: 1.0,
            growth_rate: f64::INFINITY,
            slice_p: 1,
        }
    }
}

impl ProdigyConfig {
    /// Checks the ranges of the hyper-parameters.
    fn validate(&self) -> Result<()> {
        check_not_negative(NAME, "lr", self.lr)?;
        check_not_negative(NAME, "weight_decay", self.weight_decay)?;
        check_betas(NAME, self.betas)?;
        let fail = |name: &str, found: f64, expected: &str| {
            Err(Error::argument(NAME, format!("found {name} {found}, expected a number {expected}")))
        };
        if let Some(beta3) = self.beta3.filter(|beta3| !(0.0..1.0).contains(beta3)) {
            return fail("beta3", beta3, "of at least 0 and less than 1");
        }
        for (name, value) in [("eps", self.eps), ("d0", self.d0), ("d_coef", self.d_coef)] {
            if !(value > 0.0 && value.is_finite()) {
                return fail(name, value, "above 0");
            }
        }
        if self.growth_rate.is_nan() || self.growth_rate < 1.0 {
            return fail("growth_rate", self.growth_rate, "of at least 1");
        }
        if self.slice_p == 0 {
            return fail("slice_p", 0.0, "of at least 1");
        }
        Ok(())
    }

    /// Returns the third beta, or its default.
    fn beta3(&self) -> f64 {
        self.beta3.unwrap_or_else(|| self.betas.1.sqrt())
    }
}

/// Prodigy, as `prodigyopt.Prodigy`: AdamW that estimates its step size.
///
/// In addition to each variable's states, its state dict has the entry `estimate` with four f64 numbers: the estimate
/// d, its maximum, its numerator and the number of steps.
pub struct Prodigy {
    /// The stepper's `shared` numbers are those of [`Estimate::to_shared`].
    stepper: Stepper<Observe>,
}

/// The estimate and what it is computed from. The steps of all variables share these numbers.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    /// The estimate of the distance to the solution.
    d: f64,
    /// The largest estimate so far, without the limit that `growth_rate` sets for `d`.
    d_max: f64,
    /// The numerator of the estimate: a decaying sum over the steps.
    numerator: f64,
    /// The number of steps in which an estimate was computed; f64, as kernels read it.
    steps: f64,
}

impl Estimate {
    /// Returns the fields in the order that kernels read, followed by room for the two sums and the step size of one
    /// step.
    fn to_shared(self) -> Vec<f64> {
        vec![self.d, self.d_max, self.numerator, self.steps, 0.0, 0.0, 0.0]
    }

    /// Reads the fields from the numbers of [`to_shared`](Self::to_shared).
    fn of(shared: &[f64]) -> Self {
        Self { d: shared[0], d_max: shared[1], numerator: shared[2], steps: shared[3] }
    }
}

impl Prodigy {
    /// Makes a Prodigy that updates `params`, with the defaults of [`ProdigyConfig`] except `lr`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64) -> Result<Self> {
        Self::with_config(params, ProdigyConfig { lr, ..ProdigyConfig::default() })
    }

    /// Makes a Prodigy that updates `params`, with the same hyper-parameters for all.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn with_config(params: Vec<Var>, config: ProdigyConfig) -> Result<Self> {
        Self::with_groups(vec![ParamGroup { params, config }])
    }

    /// Makes a Prodigy that updates several groups of variables, with one estimate for all.
    ///
    /// # Errors
    /// As [`Stepper::with_groups`]; [`Error::Argument`] if groups differ in a hyper-parameter that must be the same in
    /// all.
    pub fn with_groups(groups: Vec<ParamGroup<ProdigyConfig>>) -> Result<Self> {
        let first_config = groups.first().map(|group| group.config.clone()).unwrap_or_default();
        for (index, ParamGroup { config, .. }) in groups.iter().enumerate() {
            let ProdigyConfig { lr, weight_decay, eps, .. } = *config;
            if *config != (ProdigyConfig { lr, weight_decay, eps, ..first_config.clone() }) {
                let message = format!(
                    "group {index} has other hyper-parameters than the first; only weight_decay and eps may differ, \
                     and lr may be 0"
                );
                return Err(Error::argument(NAME, message));
            }
        }
        // On the CPU, `run` sets `d` and `dlr` before each use.
        let groups = groups.into_iter().map(|ParamGroup { params, config }| ParamGroup {
            params,
            config: StepConfig { config, d: 0.0, dlr: 0.0 },
        });
        let mut stepper = Stepper::with_groups(groups.collect())?;
        let start = Estimate { d: first_config.d0, d_max: first_config.d0, numerator: 0.0, steps: 0.0 };
        stepper.set_shared(start.to_shared())?;
        let prodigy = Self { stepper };
        // The comparison above leaves out the learning rates; this call checks them.
        prodigy.common_lr()?;
        Ok(prodigy)
    }

    /// Returns the estimate d of the distance to the solution. Without bias correction, a step has the size d · lr.
    /// On CUDA, waits until the device has done all steps.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn d(&self) -> Result<f64> {
        Ok(Estimate::of(&self.stepper.shared()?).d)
    }

    /// Returns the learning rate of all groups whose learning rate is not 0, or 0 if there is no such group. Returns an
    /// error if these groups differ.
    fn common_lr(&self) -> Result<f64> {
        let lrs = self.group_lrs();
        let largest = lrs.iter().copied().fold(0.0, f64::max);
        match lrs.into_iter().find(|&lr| lr != largest && lr != 0.0) {
            Some(other) => Err(Error::argument(
                NAME,
                format!("found groups with the learning rates {largest} and {other}, expected the same for all, or 0"),
            )),
            None => Ok(largest),
        }
    }

    /// Takes a step on the CPU: updates the variables that are `wanted` and have a gradient.
    fn step_where(&mut self, wanted: impl Fn(&Var) -> bool) -> Result<()> {
        let lr = self.common_lr()?;
        let config = self.stepper.groups[0].config.config.clone();
        let mut current = Estimate::of(&self.stepper.shared()?);
        let step = current.steps + 1.0;
        let correction = if config.use_bias_correction {
            (1.0 - config.betas.1.powf(step)).sqrt() / (1.0 - config.betas.0.powf(step))
        } else {
            1.0
        };
        let dlr = current.d * lr * correction;
        for parameter in self.stepper.groups.iter_mut().flat_map(|group| &mut group.parameters) {
            parameter.sums = [0.0; 2];
        }
        // Updates the moments, and writes each variable's terms of the numerator and of the denominator to `sums`.
        self.run::<Observe>(&wanted, current.d, dlr)?;
        let (mut numerator, mut denominator) = (current.numerator * config.beta3(), 0.0);
        for parameter in self.stepper.groups.iter().flat_map(|group| &group.parameters) {
            numerator += current.d / config.d0 * dlr * parameter.sums[0];
            denominator += parameter.sums[1];
        }
        // If there is no gradient, or if all gradients so far are zero, nothing can be estimated.
        if denominator == 0.0 {
            return Ok(());
        }
        let estimate = config.d_coef * numerator / denominator;
        // As in `prodigyopt`, `growth_rate` does not limit the growth from `d0`.
        if current.d == config.d0 {
            current.d = current.d.max(estimate);
        }
        current.d_max = current.d_max.max(estimate);
        let d = current.d_max.min(current.d * config.growth_rate);
        self.stepper.set_shared(Estimate { d, numerator, steps: step, ..current }.to_shared())?;
        // Updates the variables. As in `prodigyopt`, `dlr` is still that of the previous estimate.
        self.run::<Apply>(&wanted, d, dlr)
    }

    /// Applies a rule to the variables that are `wanted` and have a gradient and a learning rate above 0. `d` is the
    /// estimate, `dlr` the step size.
    fn run<R: Rule<Config = StepConfig>>(&mut self, wanted: &impl Fn(&Var) -> bool, d: f64, dlr: f64) -> Result<()> {
        for group in &mut self.stepper.groups {
            let step_config = group.config.get_mut()?;
            (step_config.d, step_config.dlr) = (d, dlr);
        }
        let mut items = self.stepper.items(wanted);
        items.retain(|item| item.config.config.lr > 0.0);
        // Prodigy does not round stochastically, so there is no seed.
        update::run::<R>(items, None)
    }
}

impl Optimizer for Prodigy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn id(&self) -> u64 {
        self.stepper.id()
    }

    fn vars(&self) -> Vec<Var> {
        self.stepper.vars()
    }

    fn step_guarded(&mut self, guard: Guard<'_>) -> Result<()> {
        if self.stepper.is_on_cuda() {
            self.common_lr()?;
            return self.stepper.step_guarded(guard);
        }
        if guard.allows()? { self.step_where(|_| true) } else { Ok(()) }
    }

    fn step(&mut self, grads: &GradStore) -> Result<()> {
        if self.stepper.is_on_cuda() {
            self.common_lr()?;
            return self.stepper.step(grads);
        }
        self.step_where(|var| grads.contains(var))?;
        // Unlike `step_guarded`, `step` also clears the gradients that it has used.
        self.vars().iter().filter(|var| grads.contains(var)).try_for_each(Var::zero_grad)
    }

    fn group_lrs(&self) -> Vec<f64> {
        self.stepper.group_lrs()
    }

    fn set_group_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        self.stepper.set_group_lr(group, lr)
    }

    fn state_dict(&self) -> Result<StateDict> {
        let mut states = self.stepper.state_dict()?;
        let estimate = self.stepper.shared()?[..4].to_vec();
        states.insert(ESTIMATE.into(), Tensor::from_vec(estimate, 4, &Device::Cpu)?);
        Ok(states)
    }

    fn load_state_dict(&mut self, states: &StateDict) -> Result<()> {
        let mut states = states.clone();
        let estimate = states.remove(ESTIMATE).filter(|entry| entry.dtype() == DType::F64 && entry.dims() == [4]);
        let estimate = estimate.map(|estimate| estimate.to_vec::<f64>()).transpose()?.unwrap_or_default();
        let [d, d_max, numerator, steps] = estimate[..] else {
            let message = format!(
                "load_state_dict: {NAME}: found no entry {ESTIMATE:?} of four f64; were the states saved by {NAME}?"
            );
            return Err(Error::Config(message));
        };
        self.stepper.load_state_dict(&states)?;
        self.stepper.set_shared(Estimate { d, d_max, numerator, steps }.to_shared())
    }

    fn place_states(&mut self, place: StatePlace) -> Result<()> {
        self.stepper.place_states(place)
    }

    fn state_bytes(&self) -> usize {
        self.stepper.state_bytes()
    }
}

impl Registered for Prodigy {
    type Config = ProdigyConfig;
    const NAME: &'static str = NAME;
    const ABOUT: &'static str = "Prodigy (Mishchenko & Defazio 2023, arXiv:2306.06101), as `prodigyopt.Prodigy`: AdamW \
        that estimates its step size. All groups share one estimate d. Only weight_decay and eps may differ between \
        groups, and a group's lr may be 0. The state dict has `estimate` (4), f64: d, its maximum, its numerator and \
        the number of steps.";
    // All but `slice_p`, which follows another parameter in `prodigyopt`.
    const POSITIONAL: usize = 11;

    fn defaults() -> ProdigyConfig {
        ProdigyConfig::default()
    }

    fn states(config: &ProdigyConfig, _dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        states(config)
    }

    fn build(groups: Vec<ParamGroup<ProdigyConfig>>, seed: Option<u64>) -> Result<Self> {
        // A seed asks for stochastic rounding.
        seed.map_or_else(|| Self::with_groups(groups), |_| Err(super::rounding::no_rounding(NAME)))
    }
}
