//! Dynamic loss scaling for f16, as `torch.amp.GradScaler`.

use rustc_hash::FxHashMap;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{Error, Result, Tensor};

use super::clip::{NormType, grad_norm};
use super::stepper::Optimizer;

const OP: &str = "GradScaler";

/// The parameters of a [`GradScaler`]; names and defaults are torch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerConfig {
    /// The first scale.
    pub init_scale: f64,
    /// The scale is multiplied by this after `growth_interval` good steps in a row; above 1.
    pub growth_factor: f64,
    /// The scale is multiplied by this after a step with an infinity or a NaN; in (0, 1).
    pub backoff_factor: f64,
    /// Good steps in a row before the scale grows.
    pub growth_interval: u64,
    /// If not set, losses and gradients stay as they are and every step is taken.
    pub enabled: bool,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, enabled: true }
    }
}

/// Scales the loss so that f16 gradients do not vanish, and skips steps whose gradients overflowed.
///
/// One iteration: `scaler.scale(&loss)?.backward()?`, optionally [`unscale`](Self::unscale) and clip,
/// [`step`](Self::step), [`update`](Self::update).
#[derive(Clone, Debug)]
pub struct GradScaler {
    config: GradScalerConfig,
    scale: f64,
    growth_tracker: u64,
    /// By optimizer, since the last update.
    stages: FxHashMap<u64, Stage>,
}

#[derive(Clone, Copy, Debug)]
struct Stage {
    found_inf: bool,
    stepped: bool,
}

impl GradScaler {
    /// A scaler.
    ///
    /// # Errors
    /// [`Error::Argument`] if a parameter is outside its range.
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
        Ok(Self { config, scale: init_scale, growth_tracker: 0, stages: FxHashMap::default() })
    }

    /// The current scale; 1 if not enabled.
    pub const fn get_scale(&self) -> f64 {
        if self.config.enabled { self.scale } else { 1.0 }
    }

    /// Good steps in a row so far.
    pub const fn growth_tracker(&self) -> u64 {
        self.growth_tracker
    }

    /// The loss times the scale.
    ///
    /// # Errors
    /// Those of a multiplication.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !is_float(loss.dtype()) {
            let message = format!("the loss is {}, expected a floating point tensor", loss.dtype().as_str());
            return Err(Error::dtype(OP, message));
        }
        if self.config.enabled { loss.mul_scalar(self.scale) } else { Ok(loss.clone()) }
    }

    /// Divides the gradients of the optimizer's variables by the scale, to clip or look at them before the step.
    ///
    /// # Errors
    /// [`Error::Argument`] if that was done since the last [`update`](Self::update).
    pub fn unscale(&mut self, optimizer: &dyn Optimizer) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        if self.stages.contains_key(&optimizer.id()) {
            let message = format!("unscale() was already called for this {} since the last update()", optimizer.name());
            return Err(Error::argument(OP, message));
        }
        let vars = optimizer.vars();
        let found_inf = !grad_norm(&vars, NormType::Inf)?.is_finite();
        for var in &vars {
            var.scale_grad(1.0 / self.scale)?;
        }
        self.stages.insert(optimizer.id(), Stage { found_inf, stepped: false });
        Ok(())
    }

    /// Unscales the gradients if that was not done, then calls [`step_all`](Optimizer::step_all), unless a gradient is
    /// infinite or NaN. Returns whether the step was taken.
    ///
    /// # Errors
    /// [`Error::Argument`] if a step was taken since the last [`update`](Self::update); those of the optimizer.
    pub fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        if !self.config.enabled {
            optimizer.step_all()?;
            return Ok(true);
        }
        if !self.stages.contains_key(&optimizer.id()) {
            self.unscale(optimizer)?;
        }
        let Some(stage) = self.stages.get_mut(&optimizer.id()) else { return Ok(false) };
        if stage.stepped {
            let message = format!("step() was already called for this {} since the last update()", optimizer.name());
            return Err(Error::argument(OP, message));
        }
        stage.stepped = true;
        if !stage.found_inf {
            optimizer.step_all()?;
        }
        Ok(!stage.found_inf)
    }

    /// Ends the iteration: the scale falls if a gradient was infinite or NaN, and grows after enough good steps in a row.
    ///
    /// # Errors
    /// [`Error::Argument`] if no optimizer was unscaled or stepped since the last call.
    pub fn update(&mut self) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        if self.stages.is_empty() {
            return Err(Error::argument(OP, "update() needs a step() before it, found none since the last update()"));
        }
        let found_inf = self.stages.drain().any(|(_, stage)| stage.found_inf);
        if found_inf {
            self.scale *= self.config.backoff_factor;
            self.growth_tracker = 0;
            return Ok(());
        }
        self.growth_tracker += 1;
        if self.growth_tracker == self.config.growth_interval {
            let grown = self.scale * self.config.growth_factor;
            // A scale that f32 cannot hold would make every loss infinite.
            if grown <= f64::from(f32::MAX) {
                self.scale = grown;
            }
            self.growth_tracker = 0;
        }
        Ok(())
    }

    /// Goes on with the scale and the tracker of a saved run.
    ///
    /// # Errors
    /// [`Error::Argument`] if the scale is not a number above 0.
    pub fn restore(&mut self, scale: f64, growth_tracker: u64) -> Result<()> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::argument(OP, format!("found scale {scale}, expected a number above 0")));
        }
        (self.scale, self.growth_tracker) = (scale, growth_tracker);
        Ok(())
    }
}
