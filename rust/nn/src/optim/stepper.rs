//! [`Stepper`]: the common part of all optimizers, and [`Optimizer`], their interface.

use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashSet;
use trainable_candle_core::capture::Fixed;
use trainable_candle_core::flat::{collect_grads, zero_grads};
use trainable_candle_core::{Error, GradStore, Raw, Result, Var};

use super::cuda::OnDevice;
use super::guard::Guard;
use super::rule::Rule;
use super::state::{self, Group, Loaded, Parameter, StateDict, StatePlace};
use super::update::{self, Item};

/// The methods of all optimizers.
pub trait Optimizer: Send {
    /// The optimizer's name, `AdamW` for example.
    fn name(&self) -> &'static str;

    /// A number that identifies this optimizer in this process.
    fn id(&self) -> u64;

    /// The variables, group by group.
    fn vars(&self) -> Vec<Var>;

    /// Updates every variable that has a gradient, unless the guard skips the step. If the guard's norm is on the CUDA
    /// device of the variables, the kernels check it, so the host does not wait for the norm. The gradients are kept
    /// until [`zero_grad`](Self::zero_grad).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the states do not fit; [`Error::Argument`] if averages replace the values
    /// ([`eval`](Self::eval)), if a copy has replaced a variable ([`Var::mark_replaced`]), or if the groups of
    /// [`Prodigy`](super::Prodigy) have different learning rates above 0; [`Error::Device`] if the device fails, or if
    /// the step would change, within a captured function, which variables share a step counter.
    fn step_guarded(&mut self, guard: Guard<'_>) -> Result<()>;

    /// Updates every variable that has a gradient. The gradients are kept until [`zero_grad`](Self::zero_grad).
    ///
    /// # Errors
    /// As [`step_guarded`](Self::step_guarded).
    fn step_all(&mut self) -> Result<()> {
        self.step_guarded(Guard::default())
    }

    /// Updates the variables that the backward pass of `grads` has reached and clears their gradients, so that a
    /// training loop only needs `backward` and `step`. The step uses the accumulated gradients, so it includes those of
    /// earlier backward passes.
    ///
    /// # Errors
    /// As [`step_all`](Self::step_all).
    fn step(&mut self, grads: &GradStore) -> Result<()>;

    /// Clears the gradients of all variables.
    ///
    /// # Errors
    /// If a flat gradient buffer cannot be written.
    fn zero_grad(&self) -> Result<()> {
        zero_grads(&self.vars())
    }

    /// The learning rate of each group.
    fn group_lrs(&self) -> Vec<f64>;

    /// The learning rate of the first group.
    fn lr(&self) -> f64 {
        self.group_lrs()[0]
    }

    /// Sets the learning rate of one group.
    ///
    /// # Errors
    /// [`Error::Argument`] if `lr` is negative or not finite, or if there is no such group; [`Error::Device`] within a
    /// captured function.
    fn set_group_lr(&mut self, group: usize, lr: f64) -> Result<()>;

    /// Sets the learning rate of every group.
    ///
    /// # Errors
    /// [`Error::Argument`] if `lr` is negative or not finite; [`Error::Device`] within a captured function.
    fn set_lr(&mut self, lr: f64) -> Result<()> {
        (0..self.group_lrs().len()).try_for_each(|group| self.set_group_lr(group, lr))
    }

    /// A copy of all states. Waits for the device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the copy does not fit, [`Error::Device`] if the device fails.
    fn state_dict(&self) -> Result<StateDict>;

    /// Loads a [`state_dict`](Self::state_dict) of an optimizer of the same kind over variables of the same shapes.
    /// Captured steps continue from the loaded states.
    ///
    /// # Errors
    /// [`Error::Config`] if another kind of optimizer saved the states, if only one of the two optimizers rounds
    /// stochastically, if a state is missing or not expected, or if a number of steps is negative; [`Error::Shape`] or
    /// [`Error::DType`] if a state has another shape or dtype; [`Error::Argument`] if averages replace the values
    /// ([`eval`](Self::eval)) or a learning rate is outside its range; [`Error::Device`] within a captured function.
    /// After these errors, nothing has changed. If the copy to a device fails, the host has the loaded states, and the
    /// next step copies them again.
    fn load_state_dict(&mut self, states: &StateDict) -> Result<()>;

    /// Decides where the states of CUDA variables are; by default on the device. With [`StatePlace::Host`], this method
    /// creates the states, so that a lack of memory shows before the first step. Call this method before the first
    /// step, and after all other settings are made. On the CPU it has no effect, because the states are in the memory
    /// of the host anyway.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system gives too little pinned memory, [`Error::Argument`] if the states exist
    /// already, in the other place, [`Error::Device`] within a captured function. After an error, nothing has changed.
    fn place_states(&mut self, place: StatePlace) -> Result<()>;

    /// Replaces the variables' values by their averages over the steps, for validation or for saving. Does nothing if
    /// the optimizer keeps no averages, or if the averages have already replaced the values. As after a step, a
    /// backward pass that needs the replaced values returns an error.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if a copy of the variables does not fit, [`Error::Device`] within a captured function.
    /// After an error, nothing has changed.
    fn eval(&mut self) -> Result<()> {
        Ok(())
    }

    /// Restores the values that [`eval`](Self::eval) has replaced, bit for bit. Does nothing if `eval` has replaced
    /// none.
    ///
    /// # Errors
    /// [`Error::Device`] within a captured function.
    fn train(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether the optimizer keeps averages of its variables.
    fn averages(&self) -> bool {
        false
    }

    /// The size of all existing states and master values in bytes. The first step of a variable creates its states; on
    /// a CUDA device, the first step of any variable creates the states of all variables.
    /// [`load_state_dict`](Self::load_state_dict) and [`place_states`](Self::place_states) may create states earlier.
    fn state_bytes(&self) -> usize;
}

/// Variables with their hyper-parameters.
#[derive(Clone, Debug)]
pub struct ParamGroup<C> {
    /// The variables.
    pub params: Vec<Var>,
    /// Their hyper-parameters.
    pub config: C,
}

/// An optimizer with the arithmetic of `R`.
pub struct Stepper<R: Rule> {
    id: u64,
    pub(super) groups: Vec<Group<R::Config>>,
    /// The states of CUDA variables; the first step or `place_states` moves them here from `groups`.
    pub(super) device: Option<OnDevice>,
    /// Numbers that the steps of all variables share, such as Prodigy's estimate, for steps on the host. The first step
    /// on a device copies them to `device`.
    shared: Vec<f64>,
    /// Where the states of CUDA variables are.
    place: StatePlace,
    /// The variables' own values while averages replace them.
    pub(super) trained: Fixed<Option<Vec<Raw>>>,
    /// The seed of stochastic rounding, if bf16 variables are rounded stochastically.
    pub(super) seed: Option<u64>,
}

impl<R: Rule> Stepper<R> {
    /// An optimizer of `params` with the same hyper-parameters for all.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn with_config(params: Vec<Var>, config: R::Config) -> Result<Self> {
        Self::with_groups(vec![ParamGroup { params, config }])
    }

    /// An optimizer of several groups of variables.
    ///
    /// # Errors
    /// [`Error::Argument`] if a hyper-parameter is outside its range, if there is no group, if a group is empty, or if
    /// a variable appears twice; [`Error::DType`] if the optimizer does not support a variable's dtype on its device;
    /// [`Error::Device`] if it does not support CUDA devices, or if variables are on different devices;
    /// [`Error::OutOfMemory`] if buffers for the gradients of CUDA variables do not fit.
    pub fn with_groups(groups: Vec<ParamGroup<R::Config>>) -> Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let mut seen = FxHashSet::default();
        for (index, group) in groups.iter().enumerate() {
            R::validate(&group.config)?;
            if group.params.is_empty() {
                return Err(Error::argument(
                    R::NAME,
                    format!("parameter group {index} is empty, expected at least one Var"),
                ));
            }
            for var in &group.params {
                if !seen.insert(var.id()) {
                    let message = format!("a Var of shape {:?} in group {index} appears twice", var.dims());
                    return Err(Error::argument(R::NAME, message));
                }
                update::check_var::<R>(var)?;
            }
        }
        let vars: Vec<Var> = groups.iter().flat_map(|group| group.params.iter().cloned()).collect();
        let Some(first) = vars.first() else {
            return Err(Error::argument(R::NAME, "found no parameter groups, expected at least one"));
        };
        if let Some(other) = vars.iter().find(|var| !var.device().same_device(first.device())) {
            let message =
                format!("a Var of shape {:?} is on another device than the first Var; move it with to()", other.dims());
            return Err(Error::device(R::NAME, message));
        }
        if !first.device().is_cpu() {
            collect_grads(&vars)?;
        }
        let groups = groups
            .into_iter()
            .map(|group| Group {
                config: Fixed::new("the hyper-parameters of an optimizer", group.config),
                parameters: group.params.into_iter().map(Parameter::new).collect(),
            })
            .collect();
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            groups,
            device: None,
            shared: Vec::new(),
            place: StatePlace::Device,
            trained: Fixed::new("whether averages replace the parameters", None),
            seed: None,
        })
    }

    /// The hyper-parameters of each group.
    pub fn configs(&self) -> impl Iterator<Item = &R::Config> {
        self.groups.iter().map(|group| &*group.config)
    }

    /// Changes the hyper-parameters of one group.
    ///
    /// # Errors
    /// [`Error::Argument`] if a hyper-parameter is outside its range, if there is no such group, or if the new
    /// hyper-parameters need other states than the existing ones; [`Error::Device`] within a captured function.
    pub fn set_config(&mut self, group: usize, config: R::Config) -> Result<()> {
        R::validate(&config)?;
        let parameters = &self.group_mut(group)?.parameters;
        // Also true for parameters that have no states on the host yet.
        let host_fits = parameters.iter().all(|p| p.states_are(&R::states(&config, p.var.dims())));
        // Once the states are on a device, `groups` has none.
        let fits =
            self.device.as_ref().map_or(host_fits, |device| device.states_are::<R>(&self.groups, group, &config));
        if !fits {
            let message = "the new hyper-parameters need other states than this optimizer has; build a new optimizer";
            return Err(Error::argument(R::NAME, message));
        }
        self.configure(group, config)
    }

    /// Sets, on the host and on the device, hyper-parameters that were already checked.
    fn configure(&mut self, index: usize, config: R::Config) -> Result<()> {
        // Within a captured function, this returns an error before anything changes.
        let current = self.groups[index].config.get_mut()?;
        if let Some(device) = &self.device {
            device.configure::<R>(index, &config)?;
        }
        *current = config;
        Ok(())
    }

    /// The numbers that the steps of all variables share. If a device holds them, waits for the device.
    pub(super) fn shared(&self) -> Result<Vec<f64>> {
        self.device.as_ref().map_or_else(|| Ok(self.shared.clone()), OnDevice::shared)
    }

    /// Sets the numbers that the steps of all variables share.
    pub(super) fn set_shared(&mut self, numbers: Vec<f64>) -> Result<()> {
        if let Some(device) = &self.device {
            device.set_shared(&numbers)?;
        }
        self.shared = numbers;
        Ok(())
    }

    /// Whether the variables are on a CUDA device.
    pub(super) fn is_on_cuda(&self) -> bool {
        self.parameters().any(|parameter| parameter.var.device().is_cuda())
    }

    /// Updates the variables that are `wanted` and have a gradient, unless the guard skips the step. If `zero`, also
    /// clears the gradients of the `wanted` variables.
    pub(super) fn run(&mut self, wanted: impl Fn(&Var) -> bool, guard: Guard<'_>, zero: bool) -> Result<()> {
        self.check_training("step")?;
        if let Some(parameter) = self.parameters().find(|parameter| parameter.var.is_replaced()) {
            let message = format!(
                "step() found a variable of shape {:?} that was replaced by a copy on another device or of \
                 another dtype; move the model first, then make the optimizer",
                parameter.var.dims()
            );
            return Err(Error::argument(R::NAME, message));
        }
        if self.is_on_cuda() {
            let device = match &mut self.device {
                Some(device) => device,
                absent => absent.insert(OnDevice::new::<R>(&mut self.groups, self.place, (&self.shared, self.seed))?),
            };
            return device.step::<R>(&self.groups, wanted, (guard.norm, guard.loss_scale), zero);
        }
        debug_assert!(guard.loss_scale.is_none(), "on the CPU, divide the gradients by the scale before a step");
        if guard.allows()? {
            let seed = self.seed;
            update::run::<R>(self.items(&wanted), seed)?;
        }
        if zero {
            let vars: Vec<Var> = self.parameters().map(|p| p.var.clone()).filter(|var| wanted(var)).collect();
            zero_grads(&vars)?;
        }
        Ok(())
    }

    fn group_mut(&mut self, index: usize) -> Result<&mut Group<R::Config>> {
        let count = self.groups.len();
        let no_group = || {
            let message = format!("found group {index}, expected less than {count}, the number of groups");
            Error::argument(R::NAME, message)
        };
        self.groups.get_mut(index).ok_or_else(no_group)
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.groups.iter().flat_map(|group| &group.parameters)
    }

    /// The variables that are `wanted` and have a gradient.
    pub(super) fn items(&mut self, wanted: impl Fn(&Var) -> bool) -> Vec<Item<'_, R::Config>> {
        let mut items = Vec::new();
        for Group { config, parameters } in &mut self.groups {
            for parameter in parameters.iter_mut().filter(|p| wanted(&p.var)) {
                if let Some(grad) = parameter.var.grad_storage() {
                    items.push(Item { parameter, config: &**config, grad });
                }
            }
        }
        items
    }
}

impl<R: Rule> Optimizer for Stepper<R> {
    fn name(&self) -> &'static str {
        R::NAME
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn vars(&self) -> Vec<Var> {
        self.parameters().map(|p| p.var.clone()).collect()
    }

    fn step_guarded(&mut self, guard: Guard<'_>) -> Result<()> {
        let zero = false;
        self.run(|_| true, guard, zero)
    }

    fn step(&mut self, grads: &GradStore) -> Result<()> {
        let zero = true;
        self.run(|var| grads.contains(var), Guard::default(), zero)
    }

    fn group_lrs(&self) -> Vec<f64> {
        // `R::lr` returns a mutable reference, so it gets a copy of the hyper-parameters.
        self.groups.iter().map(|group| *R::lr(&mut R::Config::clone(&group.config))).collect()
    }

    fn set_group_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        let mut config = R::Config::clone(&self.group_mut(group)?.config);
        *R::lr(&mut config) = lr;
        R::validate(&config)?;
        self.configure(group, config)
    }

    fn state_dict(&self) -> Result<StateDict> {
        if let Some(device) = &self.device {
            let parameters = device.download(&self.groups)?;
            return state::to_dict(R::NAME, &parameters.iter().collect::<Vec<_>>(), self.group_lrs(), self.seed);
        }
        let parameters: Vec<&Parameter> = self.parameters().collect();
        state::to_dict(R::NAME, &parameters, self.group_lrs(), self.seed)
    }

    fn load_state_dict(&mut self, states: &StateDict) -> Result<()> {
        self.check_training("load_state_dict")?;
        let specs: Vec<_> = self
            .groups
            .iter()
            .flat_map(|group| group.parameters.iter().map(|p| R::states(&group.config, p.var.dims())))
            .collect();
        let Loaded { parameters, lrs, seed } = {
            let parameters: Vec<&Parameter> = self.parameters().collect();
            let rounds_stochastically = self.seed.is_some();
            state::from_dict(R::NAME, &parameters, &specs, self.groups.len(), rounds_stochastically, states)?
        };
        let configs = self.groups.iter().zip(&lrs).map(|(group, &lr)| {
            let mut config = R::Config::clone(&group.config);
            *R::lr(&mut config) = lr;
            R::validate(&config).map(|()| config)
        });
        let configs = configs.collect::<Result<Vec<_>>>()?;
        // `from_dict` returns the parameters in the order in which it got them: group by group.
        let mut parameters = parameters.into_iter();
        for (group, config) in self.groups.iter_mut().zip(configs) {
            *group.config.get_mut()? = config;
            group.parameters = parameters.by_ref().take(group.parameters.len()).collect();
        }
        self.seed = seed;
        // If no states are on a device yet, the first step moves the loaded states there.
        if let Some(device) = &mut self.device
            && let Err(error) = device.take::<R>(&mut self.groups, seed)
        {
            // The host still has all loaded states; the next step moves them to the device. Captured steps, which would
            // use the earlier states on the device, return errors from now on.
            device.retire()?;
            self.device = None;
            return Err(error);
        }
        Ok(())
    }

    fn place_states(&mut self, place: StatePlace) -> Result<()> {
        if self.is_on_cuda() && place != self.place {
            if self.device.is_some() {
                let message = "the states exist already; build a new optimizer with the states in the other place, \
                    and load this optimizer's state dict into it";
                return Err(Error::argument(R::NAME, message));
            }
            self.device = Some(OnDevice::new::<R>(&mut self.groups, place, (&self.shared, self.seed))?);
        }
        self.place = place;
        Ok(())
    }

    fn averages(&self) -> bool {
        R::AVERAGE.is_some()
    }

    fn eval(&mut self) -> Result<()> {
        self.replace_by_averages()
    }

    fn train(&mut self) -> Result<()> {
        self.restore_trained()
    }

    fn state_bytes(&self) -> usize {
        if let Some(device) = &self.device {
            return device.state_bytes();
        }
        self.parameters().map(Parameter::bytes).sum()
    }
}
