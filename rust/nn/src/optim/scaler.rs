//! Dynamic loss scaling for f16, as `torch.amp.GradScaler`.

use rustc_hash::FxHashMap;
use trainable_candle_core::capture::{Fixed, HostState};
use trainable_candle_core::raw::{is_float, own_copy};
use trainable_candle_core::{Device, Error, Result, Tensor};

use super::clip::{NormType, clip, cuda_device, host_norm, rescale};
use super::cuda::LossScale;
use super::guard::Guard;
use super::stepper::Optimizer;

const OP: &str = "GradScaler";
/// The limit with which `clip` computes the norm of gradients and clips nothing.
const NO_LIMIT: f64 = f64::INFINITY;

/// The settings of a [`GradScaler`]; names and defaults are torch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerConfig {
    /// The initial scale, above 0.
    pub init_scale: f64,
    /// The scale is multiplied by this factor after `growth_interval` steps in a row with finite gradients; above 1.
    pub growth_factor: f64,
    /// The scale is multiplied by this factor after a step with an infinite or NaN gradient; in (0, 1).
    pub backoff_factor: f64,
    /// The number of steps in a row with finite gradients after which the scale grows, at least 1.
    pub growth_interval: u64,
    /// If false, the scaler changes neither losses nor gradients and takes every step.
    pub enabled: bool,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, enabled: true }
    }
}

/// Scales the loss so that f16 gradients do not vanish, and skips steps whose gradients overflowed.
///
/// An iteration calls `scaler.scale(&loss)?.backward()?`, then optionally [`unscale`](Self::unscale) and clipping, then
/// [`step`](Self::step) and [`update`](Self::update).
///
/// If losses and variables are on a CUDA device, the scale is there too, and the device decides whether to skip a step,
/// so the host does not wait.
#[derive(Debug)]
pub struct GradScaler {
    config: GradScalerConfig,
    /// The scale and the counter of steps with finite gradients. On CUDA, they must be on the device before a capture,
    /// because captured functions read them there.
    state: Fixed<State>,
    /// What was done for each optimizer since the last call of [`update`](Self::update). The keys are the optimizers'
    /// ids.
    stages: HostState<FxHashMap<u64, Stage>>,
}

impl Clone for GradScaler {
    fn clone(&self) -> Self {
        Self { config: self.config, state: self.state.clone(), stages: new_stages(self.stages.get()) }
    }
}

/// Makes the host state that holds `stages`.
fn new_stages(stages: FxHashMap<u64, Stage>) -> HostState<FxHashMap<u64, Stage>> {
    HostState::new("which gradients are unscaled", stages)
}

/// The scale, and the number of steps with finite gradients since the last step with a non-finite gradient or the last
/// growth of the scale.
#[derive(Clone, Debug)]
enum State {
    Host(f64, u64),
    Device(LossScale),
}

/// What was done for an optimizer since the last call of [`GradScaler::update`]: its gradients were unscaled, or
/// [`GradScaler::step`] was called.
#[derive(Clone, Debug)]
struct Stage {
    /// The largest magnitude of all gradients before they were unscaled, as a tensor of one element. It is non-finite
    /// if a gradient is.
    norm: Tensor,
    /// Whether [`GradScaler::step`] was called.
    stepped: bool,
}

impl GradScaler {
    /// Makes a scaler.
    ///
    /// # Errors
    /// [`Error::Argument`] if a setting is outside its range.
    pub fn new(config: GradScalerConfig) -> Result<Self> {
        let GradScalerConfig { init_scale, growth_factor, backoff_factor, growth_interval, .. } = config;
        let wrong = |name: &str, found: String, expected: &str| {
            Err(Error::argument(OP, format!("found {name} {found}, expected {expected}")))
        };
        if !(init_scale.is_finite() && init_scale > 0.0) {
            return wrong("init_scale", init_scale.to_string(), "a number above 0");
        }
        if !(growth_factor.is_finite() && growth_factor > 1.0) {
            return wrong("growth_factor", growth_factor.to_string(), "a number above 1");
        }
        if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
            return wrong("backoff_factor", backoff_factor.to_string(), "a number between 0 and 1");
        }
        if growth_interval == 0 {
            return wrong("growth_interval", growth_interval.to_string(), "at least 1");
        }
        let state =
            Fixed::new("the device of the loss scale (the first use moves the scale)", State::Host(init_scale, 0));
        Ok(Self { config, state, stages: new_stages(FxHashMap::default()) })
    }

    /// Returns the current scale; 1 if the scaler is not enabled. Waits for a CUDA device.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn get_scale(&self) -> Result<f64> {
        if self.config.enabled { Ok(self.read()?.0) } else { Ok(1.0) }
    }

    /// Returns the number of steps with finite gradients since the last step with a non-finite gradient or the last
    /// growth of the scale. Waits for a CUDA device.
    ///
    /// # Errors
    /// As [`get_scale`](Self::get_scale).
    pub fn growth_tracker(&self) -> Result<u64> {
        Ok(self.read()?.1)
    }

    /// Returns the scale and the growth tracker. Waits for a CUDA device.
    fn read(&self) -> Result<(f64, u64)> {
        match &*self.state {
            State::Host(scale, growth_tracker) => Ok((*scale, *growth_tracker)),
            State::Device(state) => state.read(),
        }
    }

    /// Returns the state on the CUDA device `device`; the first call moves it there.
    fn on_device(&mut self, device: &Device) -> Result<LossScale> {
        if let State::Device(state) = &*self.state {
            return Ok(state.clone());
        }
        let (scale, growth_tracker) = self.read()?;
        let host_state = self.state.get_mut()?;
        let device_state = LossScale::new(device, scale, growth_tracker)?;
        *host_state = State::Device(device_state.clone());
        Ok(device_state)
    }

    /// Returns the loss times the scale.
    ///
    /// # Errors
    /// [`Error::DType`] if the loss is not floating point; [`Error::Device`] if a captured function is the first to use
    /// the scale on a CUDA device; the errors of [`Tensor::mul`].
    pub fn scale(&mut self, loss: &Tensor) -> Result<Tensor> {
        if !is_float(loss.dtype()) {
            let message = format!("the loss is {}, expected a floating point tensor", loss.dtype().as_str());
            return Err(Error::dtype(OP, message));
        }
        if !self.config.enabled {
            return Ok(loss.clone());
        }
        if loss.device().is_cuda() {
            // The factor is a copy, because the backward pass reads it, and `update` may change the state before the
            // backward pass.
            let scale = Tensor::from_raw(&own_copy(&self.on_device(loss.device())?.scale()?)?);
            return loss.mul(&scale.to_dtype(loss.dtype())?);
        }
        loss.mul_scalar(self.read()?.0)
    }

    /// Divides the gradients of the optimizer's variables by the scale, to clip or read them before the step.
    ///
    /// # Errors
    /// [`Error::Argument`] if `unscale` or `step` was already called for this optimizer since the last
    /// [`update`](Self::update); [`Error::Device`] if gradients are on different devices, or if a captured function is
    /// the first to use the scale on a CUDA device.
    pub fn unscale(&mut self, optimizer: &dyn Optimizer) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        if let Some(stage) = self.stage(optimizer) {
            let done = if stage.stepped { "step() was already called" } else { "the gradients were already unscaled" };
            let message = format!("{done} for this {} since the last update()", optimizer.name());
            return Err(Error::argument(OP, message));
        }
        let vars = optimizer.vars();
        if let Some(device) = cuda_device(&vars) {
            let state = self.on_device(&device)?;
            let norm = clip(OP, &vars, &device, NO_LIMIT, NormType::Inf)?.norm()?;
            let clipping = None;
            rescale(OP, &vars, clipping, Some(&state))?;
            self.set_stage(optimizer, Stage { norm: Tensor::from_raw(&norm), stepped: false });
            return Ok(());
        }
        let norm = Tensor::new(host_norm(&vars, NormType::Inf)?, &Device::Cpu)?;
        let scale = self.read()?.0;
        for var in &vars {
            var.scale_grad(1.0 / scale)?;
        }
        self.set_stage(optimizer, Stage { norm, stepped: false });
        Ok(())
    }

    /// Takes a step with the gradients divided by the scale, unless a gradient is infinite or NaN. Returns whether the
    /// step was taken; on a CUDA device returns None, because the answer would need synchronization.
    ///
    /// If [`unscale`](Self::unscale) has already divided the gradients, they are not divided again. Otherwise, on a
    /// CUDA device, the optimizer divides gradients while it reads them, and the stored gradients do not change.
    ///
    /// # Errors
    /// [`Error::Argument`] if `step` was already called for this optimizer since the last [`update`](Self::update);
    /// [`Error::Device`] as [`unscale`](Self::unscale); the errors of the optimizer's step.
    pub fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result<Option<bool>> {
        if !self.config.enabled {
            optimizer.step_all()?;
            return Ok(Some(true));
        }
        if let (None, Some(device)) = (self.stage(optimizer), cuda_device(&optimizer.vars())) {
            let state = self.on_device(&device)?;
            let norm = clip(OP, &optimizer.vars(), &device, NO_LIMIT, NormType::Inf)?.norm()?;
            let norm = Tensor::from_raw(&norm);
            optimizer.step_guarded(Guard { norm: Some(&norm), loss_scale: Some(&state) })?;
            self.set_stage(optimizer, Stage { norm, stepped: true });
            return Ok(None);
        }
        if self.stage(optimizer).is_none() {
            self.unscale(optimizer)?;
        }
        // `unscale` has set the stage, so there always is one here.
        let Some(stage) = self.stage(optimizer) else { return Ok(Some(false)) };
        if stage.stepped {
            let message = format!("step() was already called for this {} since the last update()", optimizer.name());
            return Err(Error::argument(OP, message));
        }
        self.set_stage(optimizer, Stage { stepped: true, ..stage.clone() });
        let guard = Guard::finite(&stage.norm)?;
        optimizer.step_guarded(guard)?;
        if stage.norm.device().is_cpu() { Ok(Some(guard.allows()?)) } else { Ok(None) }
    }

    /// Returns what was done for an optimizer since the last update.
    fn stage(&self, optimizer: &dyn Optimizer) -> Option<Stage> {
        // `get` returns a copy of the stages, so `remove` leaves the stages of the scaler as they are.
        self.stages.get().remove(&optimizer.id())
    }

    /// Sets what was done for an optimizer since the last update.
    fn set_stage(&self, optimizer: &dyn Optimizer, stage: Stage) {
        self.stages.change(|stages| stages.insert(optimizer.id(), stage));
    }

    /// Ends the iteration: the scale falls if a gradient was infinite or NaN, and grows after `growth_interval` steps
    /// in a row with finite gradients.
    ///
    /// # Errors
    /// [`Error::Argument`] if neither `unscale` nor `step` was called since the last call; [`Error::Device`] within a
    /// captured function if the scale is on the host.
    pub fn update(&mut self) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        if self.stages.get().is_empty() {
            return Err(Error::argument(
                OP,
                "update() needs unscaled gradients or a step() before it, but there were none since the last update()",
            ));
        }
        let norms: Vec<Tensor> = self.stages.change(std::mem::take).into_values().map(|stage| stage.norm).collect();
        if let State::Device(state) = &*self.state {
            let device = state.scale()?.device().clone();
            // The sum of the norms is finite exactly if all norms are, because finite norms are far below the largest
            // f64.
            let mut sum: Option<Tensor> = None;
            for norm in norms {
                let norm = norm.to_device(&device)?;
                sum = Some(sum.map_or_else(|| Ok(norm.clone()), |sum| sum.add(&norm))?);
            }
            let GradScalerConfig { growth_factor, backoff_factor, growth_interval, .. } = self.config;
            let update_state = |sum: Tensor| state.update(sum.raw(), growth_factor, backoff_factor, growth_interval);
            return sum.map_or(Ok(()), update_state);
        }
        let mut found_non_finite = false;
        for norm in norms {
            found_non_finite |= !norm.item()?.is_finite();
        }
        let (mut scale, mut growth_tracker) = self.read()?;
        if found_non_finite {
            *self.state.get_mut()? = State::Host(scale * self.config.backoff_factor, 0);
            return Ok(());
        }
        growth_tracker += 1;
        if growth_tracker == self.config.growth_interval {
            let grown = scale * self.config.growth_factor;
            // A scale that f32 cannot hold would make every loss infinite.
            if grown <= f64::from(f32::MAX) {
                scale = grown;
            }
            growth_tracker = 0;
        }
        *self.state.get_mut()? = State::Host(scale, growth_tracker);
        Ok(())
    }

    /// Sets the scale and the counter of steps with finite gradients to those of a saved run.
    ///
    /// # Errors
    /// [`Error::Argument`] if the scale is not a finite number above 0; [`Error::Device`] within a captured function if
    /// the scale is on the host; [`Error::OutOfMemory`] if a CUDA device is full.
    pub fn restore(&mut self, scale: f64, growth_tracker: u64) -> Result<()> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::argument(OP, format!("found scale {scale}, expected a number above 0")));
        }
        match &*self.state {
            State::Device(state) => state.set(scale, growth_tracker)?,
            State::Host(..) => *self.state.get_mut()? = State::Host(scale, growth_tracker),
        }
        Ok(())
    }
}
