//! The Python class `NoiseSchedule`: the noise schedule of diffusion models.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_train::objective::{self, NoiseScheduleConfig};

use crate::argument::Argument;
use crate::arguments::{FilePath, Integer};
use crate::call::catch_panics;
use crate::error::Result;

/// The noise level of each timestep in a diffusion model's training. The arguments have diffusers' names, and their
/// defaults are SDXL's values.
///
/// ```python
/// schedule = tc.train.NoiseSchedule(prediction_type="v_prediction", rescale_betas_zero_snr=True)
/// assert (schedule.num_train_timesteps, schedule.alphas_cumprod[-1]) == (1000, 0.0)
/// ```
///
/// Args:
///     beta_schedule: how beta, the variance of the noise that a timestep adds, grows with the timestep: "linear",
///         "scaled_linear" (the square root of beta grows linearly) or "squaredcos_cap_v2" (arXiv:2102.09672; it
///         ignores `beta_start` and `beta_end`).
///     beta_start: beta of the first timestep, in (0, 1).
///     beta_end: beta of the last timestep, in (0, 1).
///     num_train_timesteps: the number of timesteps, at least 2.
///     prediction_type: what the model predicts: "epsilon" (the noise) or "v_prediction" (the velocity,
///         sqrt(a) * noise - sqrt(1 - a) * data, where a is the timestep's entry of `alphas_cumprod`;
///         arXiv:2202.00512).
///     rescale_betas_zero_snr: whether all betas are rescaled so that the last timestep is pure noise
///         (arXiv:2305.08891).
///     timestep_spacing: how samplers pick timesteps: "leading", "trailing" or "linspace" (arXiv:2305.08891, table 2).
///     steps_offset: the number that samplers add to each timestep of the "leading" spacing.
///
/// Raises:
///     ArgumentError: if `beta_schedule`, `prediction_type` or `timestep_spacing` is unknown, or if a number is out of
///         range.
#[pyclass(frozen, module = "trainable_candle.train")]
pub struct NoiseSchedule(pub Arc<objective::NoiseSchedule>);

#[pymethods]
impl NoiseSchedule {
    #[new]
    #[pyo3(signature = (beta_schedule="scaled_linear", beta_start=Argument::of(0.00085), beta_end=Argument::of(0.012), num_train_timesteps=Integer::of(1000),
        prediction_type="epsilon", rescale_betas_zero_snr=false, timestep_spacing="leading", steps_offset=Integer::of(1)))]
    #[allow(clippy::too_many_arguments)] // each is a field of the configuration
    fn new(
        beta_schedule: &str,
        beta_start: Argument<f64>,
        beta_end: Argument<f64>,
        num_train_timesteps: Integer,
        prediction_type: &str,
        rescale_betas_zero_snr: bool,
        timestep_spacing: &str,
        steps_offset: Integer,
    ) -> Result<Self> {
        const OP: &str = "NoiseSchedule";
        let config = NoiseScheduleConfig {
            beta_schedule: beta_schedule.parse()?,
            beta_start: beta_start.get(OP, "beta_start")?,
            beta_end: beta_end.get(OP, "beta_end")?,
            trained_betas: None, // only read from files: a list of all betas in place of the three settings above
            num_train_timesteps: num_train_timesteps.count(OP, "num_train_timesteps")?,
            prediction_type: prediction_type.parse()?,
            rescale_betas_zero_snr,
            timestep_spacing: timestep_spacing.parse()?,
            steps_offset: steps_offset.count(OP, "steps_offset")?,
        };
        Ok(Self(Arc::new(catch_panics(|| objective::NoiseSchedule::new(config))?)))
    }

    /// Read a noise schedule from diffusers' configuration. Missing entries have SDXL's values.
    ///
    /// Args:
    ///     path: the path of a `scheduler_config.json`, of its folder, or of a pipeline's folder that has the file in
    ///         its folder `scheduler`.
    ///
    /// Raises:
    ///     MissingFileError: if there is no `scheduler_config.json` at the path.
    ///     ConfigError: if the file is not JSON, or an entry has the wrong type or an unknown name.
    ///     ArgumentError: if a number is out of range.
    #[staticmethod]
    fn from_pretrained(path: FilePath) -> Result<Self> {
        let path = path.get("NoiseSchedule")?;
        Ok(Self(Arc::new(catch_panics(|| objective::NoiseSchedule::from_pretrained(&path))?)))
    }

    /// The number of timesteps.
    #[getter]
    fn num_train_timesteps(&self) -> usize {
        self.0.num_train_timesteps()
    }

    /// What the model predicts: "epsilon" or "v_prediction".
    #[getter]
    fn prediction_type(&self) -> &'static str {
        self.0.prediction_type().name()
    }

    /// Whether all betas were rescaled so that the last timestep is pure noise.
    #[getter]
    fn rescale_betas_zero_snr(&self) -> bool {
        self.0.config().rescale_betas_zero_snr
    }

    /// How samplers pick timesteps: "leading", "trailing" or "linspace".
    #[getter]
    fn timestep_spacing(&self) -> &'static str {
        self.0.config().timestep_spacing.name()
    }

    /// The number a of each timestep, where the noised data is sqrt(a) * data + sqrt(1 - a) * noise. If the data has
    /// variance 1, a is the data's share of the variance of the noised data.
    #[getter]
    fn alphas_cumprod(&self) -> Vec<f64> {
        self.0.alphas_cumprod().to_vec()
    }

    /// The noise-to-data ratio of each timestep: sqrt((1 - a) / a), where a is the timestep's entry of
    /// `alphas_cumprod`, but at least 2**-24, so that the ratio is finite.
    #[getter]
    fn sigmas(&self) -> Vec<f64> {
        self.0.sigmas()
    }

    fn __repr__(&self) -> String {
        let config = self.0.config();
        format!(
            "NoiseSchedule(beta_schedule=\"{}\", num_train_timesteps={}, prediction_type=\"{}\", rescale_betas_zero_snr={}, timestep_spacing=\"{}\")",
            config.beta_schedule.name(),
            self.0.num_train_timesteps(),
            config.prediction_type.name(),
            if config.rescale_betas_zero_snr { "True" } else { "False" },
            config.timestep_spacing.name()
        )
    }
}
