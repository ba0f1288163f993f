//! The noise schedule of diffusion models (Ho et al. 2020, arXiv:2006.11239) under diffusers' names.
//!
//! β is the variance of the noise that a timestep adds. ᾱ of a timestep is the product of 1 - β over all timesteps up
//! to and including it.
//!
//! Follows <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/schedulers/scheduling_ddpm.py#L101>.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use trainable_candle_core::{Error, Result};

const OP: &str = "noise_schedule";
const FILE: &str = "scheduler_config.json";

/// How the variances β of the noise added at each timestep grow from `beta_start` to `beta_end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BetaSchedule {
    /// The variances grow linearly.
    Linear,
    /// The square roots of the variances grow linearly (latent diffusion, Stable Diffusion, SDXL).
    ScaledLinear,
    /// The variances grow so that √ᾱ follows a cosine (Nichol & Dhariwal 2021, arXiv:2102.09672); `beta_start` and
    /// `beta_end` are ignored.
    #[serde(rename = "squaredcos_cap_v2")]
    SquaredCosine,
}

/// The quantity that the model predicts from x = √ᾱ · data + √(1 - ᾱ) · noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PredictionType {
    /// The noise.
    Epsilon,
    /// The velocity √ᾱ · noise - √(1 - ᾱ) · data (Salimans & Ho 2022, arXiv:2202.00512).
    VPrediction,
}

/// How a sampler picks its timesteps (Lin et al. 2023, arXiv:2305.08891, table 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimestepSpacing {
    /// Evenly spaced from the last timestep to the first.
    Linspace,
    /// The multiples 0, d, 2d, ... of d = ⌊number of timesteps / number of steps⌋, plus `steps_offset`. For
    /// DPM-Solver++ the divisor is the number of steps + 1. The multiples usually end before the last timestep.
    Leading,
    /// Counted down from the last timestep at a distance of (number of timesteps / number of steps), then rounded.
    Trailing,
}

/// Implement the conversions between an enum and the names of its values in configuration files. `$what` is the name of
/// the setting for errors.
macro_rules! names {
    ($type:ty, $what:literal, $($name:literal => $value:ident),+) => {
        impl std::str::FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                match text {
                    $($name => Ok(Self::$value),)+
                    other => Err(Error::argument(
                        OP,
                        format!("unknown {} \"{other}\"; expected one of {}", $what, [$($name),+].join(", ")),
                    )),
                }
            }
        }

        impl $type {
            /// The name in a configuration file.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)+
                }
            }
        }
    };
}

names!(BetaSchedule, "beta_schedule", "linear" => Linear, "scaled_linear" => ScaledLinear, "squaredcos_cap_v2" => SquaredCosine);
names!(PredictionType, "prediction_type", "epsilon" => Epsilon, "v_prediction" => VPrediction);
names!(TimestepSpacing, "timestep_spacing", "linspace" => Linspace, "leading" => Leading, "trailing" => Trailing);

/// The entries of diffusers' `scheduler_config.json` that tell how a model was trained and which timesteps samplers
/// pick. The defaults are SDXL's. Other entries are ignored.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct NoiseScheduleConfig {
    /// How β grows.
    pub beta_schedule: BetaSchedule,
    /// β of the first timestep, in (0, 1).
    pub beta_start: f64,
    /// β of the last timestep, in (0, 1).
    pub beta_end: f64,
    /// β of every timestep. If it is given, the three fields above and `num_train_timesteps` are ignored.
    pub trained_betas: Option<Vec<f64>>,
    /// The number of timesteps, at least 2.
    pub num_train_timesteps: usize,
    /// What the model predicts.
    pub prediction_type: PredictionType,
    /// Rescale the schedule so that the last timestep is pure noise (arXiv:2305.08891, algorithm 1).
    pub rescale_betas_zero_snr: bool,
    /// How samplers pick timesteps.
    pub timestep_spacing: TimestepSpacing,
    /// Added to each timestep that [`TimestepSpacing::Leading`] picks.
    pub steps_offset: usize,
}

impl Default for NoiseScheduleConfig {
    fn default() -> Self {
        Self {
            beta_schedule: BetaSchedule::ScaledLinear,
            beta_start: 0.00085,
            beta_end: 0.012,
            trained_betas: None,
            num_train_timesteps: 1000,
            prediction_type: PredictionType::Epsilon,
            rescale_betas_zero_snr: false,
            timestep_spacing: TimestepSpacing::Leading,
            steps_offset: 1,
        }
    }
}

/// The noise level of each timestep.
#[derive(Clone, Debug, PartialEq)]
pub struct NoiseSchedule {
    config: NoiseScheduleConfig,
    alphas_cumprod: Vec<f64>,
}

impl NoiseSchedule {
    /// Compute the schedule of a configuration.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are fewer than 2 timesteps or a β is not in (0, 1).
    pub fn new(config: NoiseScheduleConfig) -> Result<Self> {
        let mut alphas_cumprod: Vec<f64> = betas(&config)?
            .into_iter()
            .scan(1.0, |product, beta| {
                *product *= 1.0 - beta;
                Some(*product)
            })
            .collect();
        if config.rescale_betas_zero_snr {
            rescale_to_zero_snr(&mut alphas_cumprod);
        }
        Ok(Self { config, alphas_cumprod })
    }

    /// SDXL's schedule.
    ///
    /// # Errors
    /// None; the default configuration is valid.
    pub fn sdxl() -> Result<Self> {
        Self::new(NoiseScheduleConfig::default())
    }

    /// The schedule in a `scheduler_config.json`: `path` is the file, the folder that holds it, or the folder of a
    /// model that holds it as `scheduler/scheduler_config.json`. Missing entries have SDXL's values.
    ///
    /// # Errors
    /// [`Error::Io`] if there is no such file, [`Error::Config`] naming the line that does not parse,
    /// [`Error::Argument`] as for [`new`](Self::new).
    pub fn from_pretrained(path: &Path) -> Result<Self> {
        let candidates: [PathBuf; 2] = [path.join(FILE), path.join("scheduler").join(FILE)];
        let file = candidates
            .into_iter()
            .find(|file| file.is_file())
            .unwrap_or_else(|| if path.is_dir() { path.join("scheduler").join(FILE) } else { path.to_path_buf() });
        let text = std::fs::read_to_string(&file).map_err(|e| Error::io(&file, e))?;
        let config = serde_json::from_str(&text).map_err(|e| Error::Config(format!("{}: {e}", file.display())))?;
        Self::new(config)
    }

    /// The configuration.
    pub const fn config(&self) -> &NoiseScheduleConfig {
        &self.config
    }

    /// ᾱ of each timestep. The values fall from about 1. If the data have variance 1, ᾱ is the data's share of the
    /// variance of x = √ᾱ · data + √(1 - ᾱ) · noise.
    pub fn alphas_cumprod(&self) -> &[f64] {
        &self.alphas_cumprod
    }

    /// The number of timesteps.
    pub fn num_train_timesteps(&self) -> usize {
        self.alphas_cumprod.len()
    }

    /// What the model predicts.
    pub const fn prediction_type(&self) -> PredictionType {
        self.config.prediction_type
    }

    /// ᾱ / (1 - ᾱ) of each timestep, the signal-to-noise ratio.
    pub fn snr(&self) -> Vec<f64> {
        self.alphas_cumprod.iter().map(|a| a / (1.0 - a)).collect()
    }

    /// √((1 - ᾱ) / ᾱ) of each timestep, the noise-to-data ratio (Karras et al. 2022, arXiv:2206.00364). At a timestep
    /// of pure noise, ᾱ counts as 2⁻²⁴, so that samplers start from a finite ratio.
    pub fn sigmas(&self) -> Vec<f64> {
        /// 2⁻²⁴, the number that diffusers uses: the smallest positive f16 number.
        const MIN_ALPHA: f64 = 1.0 / 16_777_216.0;
        self.alphas_cumprod.iter().map(|a| a.max(MIN_ALPHA)).map(|a| ((1.0 - a) / a).sqrt()).collect()
    }
}

/// β of each timestep.
fn betas(config: &NoiseScheduleConfig) -> Result<Vec<f64>> {
    let NoiseScheduleConfig { beta_start, beta_end, num_train_timesteps: total, .. } = *config;
    if let Some(betas) = &config.trained_betas {
        return checked(betas.clone());
    }
    if config.beta_schedule != BetaSchedule::SquaredCosine {
        // Checks both before their square roots are taken, so that an error shows the value of the configuration.
        checked(vec![beta_start, beta_end])?;
    }
    // `max` avoids a division by 0; `checked` rejects fewer than 2 timesteps.
    let between = |start: f64, end: f64, i: usize| start + (end - start) * i as f64 / (total.max(2) - 1) as f64;
    checked(match config.beta_schedule {
        BetaSchedule::Linear => (0..total).map(|i| between(beta_start, beta_end, i)).collect(),
        BetaSchedule::ScaledLinear => {
            (0..total).map(|i| between(beta_start.sqrt(), beta_end.sqrt(), i).powi(2)).collect()
        }
        BetaSchedule::SquaredCosine => {
            // ᾱ after i timesteps, up to a constant factor. The constants 0.008 and 0.999 are those of the paper.
            let alpha = |i: usize| {
                let t = i as f64 / total as f64;
                ((t + 0.008) / 1.008 * std::f64::consts::FRAC_PI_2).cos().powi(2)
            };
            (0..total).map(|i| (1.0 - alpha(i + 1) / alpha(i)).min(0.999)).collect()
        }
    })
}

/// `betas`, after a check that there are at least 2 and that each is in (0, 1).
fn checked(betas: Vec<f64>) -> Result<Vec<f64>> {
    if betas.len() < 2 {
        return Err(Error::argument(OP, format!("found {} timesteps, expected at least 2", betas.len())));
    }
    match betas.iter().find(|&&beta| !(beta > 0.0 && beta < 1.0)) {
        Some(beta) => Err(Error::argument(OP, format!("found a beta of {beta}, expected numbers between 0 and 1"))),
        None => Ok(betas),
    }
}

/// Subtract one number from √ᾱ of all timesteps so that √ᾱ of the last timestep is 0. Then multiply √ᾱ of all timesteps
/// by one factor so that √ᾱ of the first timestep has its old value.
fn rescale_to_zero_snr(alphas_cumprod: &mut [f64]) {
    let (Some(first), Some(last)) = (alphas_cumprod.first(), alphas_cumprod.last()) else { return };
    let (first, last) = (first.sqrt(), last.sqrt());
    for alpha in alphas_cumprod {
        *alpha = ((alpha.sqrt() - last) * first / (first - last)).powi(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_schedules_are_rejected() {
        let message = |config: NoiseScheduleConfig| NoiseSchedule::new(config).unwrap_err().to_string();
        let default = NoiseScheduleConfig::default;
        assert!(message(NoiseScheduleConfig { num_train_timesteps: 1, ..default() }).contains("at least 2"));
        assert!(message(NoiseScheduleConfig { beta_start: -0.1, ..default() }).contains("-0.1"));
        assert!(message(NoiseScheduleConfig { trained_betas: Some(vec![0.1, f64::NAN]), ..default() }).contains("NaN"));
        assert!("cosine".parse::<BetaSchedule>().unwrap_err().to_string().contains("squaredcos_cap_v2"));
    }

    #[test]
    fn zero_snr_ends_in_pure_noise() {
        let config = NoiseScheduleConfig { rescale_betas_zero_snr: true, ..NoiseScheduleConfig::default() };
        let (zero, plain) = (NoiseSchedule::new(config).unwrap(), NoiseSchedule::sdxl().unwrap());
        assert_eq!(zero.snr()[999], 0.0);
        assert!((zero.alphas_cumprod()[0] - plain.alphas_cumprod()[0]).abs() < 1e-12);
        assert!(zero.sigmas()[999].is_finite());
    }

    #[test]
    fn configurations_are_found_and_read() {
        let folder = std::env::temp_dir().join(format!("noise schedule {}", std::process::id()));
        std::fs::create_dir_all(folder.join("scheduler")).unwrap();
        let file = folder.join("scheduler").join(FILE);
        let text = r#"{"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "clip_sample": false, "trained_betas": null,
            "rescale_betas_zero_snr": true, "timestep_spacing": "trailing", "steps_offset": 0}"#;
        std::fs::write(&file, text).unwrap();
        for path in [&folder, &folder.join("scheduler"), &file] {
            let schedule = NoiseSchedule::from_pretrained(path).unwrap();
            assert_eq!(schedule.prediction_type(), PredictionType::VPrediction);
            assert_eq!(schedule.config().timestep_spacing, TimestepSpacing::Trailing);
            assert_eq!(schedule.num_train_timesteps(), 1000);
        }
        // diffusers also has the type `sample`, which is not supported.
        std::fs::write(&file, r#"{"prediction_type": "sample"}"#).unwrap();
        let message = NoiseSchedule::from_pretrained(&folder).unwrap_err().to_string();
        assert!(message.contains("v_prediction") && message.contains(FILE), "{message}");
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(NoiseSchedule::from_pretrained(&folder), Err(Error::Io { .. })));
    }
}
