//! The objective of diffusion models such as SDXL, which predict the noise or the velocity of noised data.
//!
//! Noised data is √ᾱ · data + √(1 - ᾱ) · noise, where ᾱ is the timestep's entry of [`NoiseSchedule::alphas_cumprod`].

use trainable_candle_core::rng::{Purpose, State, Stream};
use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::levels::{NoiseLevels, SigmaDistribution};
use super::loss::{Delta, LossFunction, Weights, per_example, weighted_loss};
use super::pyramid::Pyramid;
use super::schedule::{NoiseSchedule, PredictionType};
use super::{check_numbers, normal_rows};

const OP: &str = "diffusion_objective";

/// How δ of the Huber losses, the absolute error above which they are linear, depends on the timestep t of the
/// schedule's T timesteps (Khrapov et al. 2024, arXiv:2403.16728). `delta` is [`DiffusionConfig::huber_delta`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HuberSchedule {
    /// δ is `delta` at every timestep.
    #[default]
    Constant,
    /// `delta`^(t / T): 1 at t = 0 (data), about `delta` at the last timestep (noise).
    Exponential,
    /// (1 - `delta`) / (1 + √((1 - ᾱ) / ᾱ))² + `delta`, with ᾱ of timestep t: about 1 at data, about `delta` at noise.
    Snr,
}

impl std::str::FromStr for HuberSchedule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "constant" => Ok(Self::Constant),
            "exponential" => Ok(Self::Exponential),
            "snr" => Ok(Self::Snr),
            other => Err(Error::argument(
                OP,
                format!("unknown huber_schedule \"{other}\"; expected \"constant\", \"exponential\" or \"snr\""),
            )),
        }
    }
}

/// The settings of a [`DiffusionObjective`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiffusionConfig {
    /// The distribution of timesteps. A level u of the distribution, from 0 to 1, gives the timestep
    /// ⌊`min_timestep` + u · (`max_timestep` - `min_timestep`)⌋, but at most `max_timestep` - 1.
    pub timesteps: SigmaDistribution,
    /// Shifts timesteps as [`NoiseLevels::new`] does: towards noise if it is above 1, towards data if it is below 1.
    pub shift: f64,
    /// The first timestep that may be drawn.
    pub min_timestep: usize,
    /// The timestep after the last one that may be drawn; `None` allows all timesteps of the schedule.
    pub max_timestep: Option<usize>,
    /// γ of min-SNR weights (Hang et al. 2023, arXiv:2303.09556). The weight is min(SNR, γ) / SNR if the model predicts
    /// noise, and min(SNR, γ) / (SNR + 1) if it predicts velocities. SNR is the signal-to-noise ratio of the timestep.
    /// The paper uses γ = 5. `None` means a weight of 1 for all timesteps.
    pub min_snr_gamma: Option<f64>,
    /// Standard deviation of additional noise that has one value for each channel of each example, so that whole images
    /// can become dark or bright (Guttenberg 2023, "Diffusion with offset noise"). 0 adds none; up to about 0.1 is
    /// usual.
    pub noise_offset: f64,
    /// The largest number of levels of multiresolution noise. The first level is normal noise of the size of the
    /// latents. Each further level has a lower resolution and is enlarged to that size. All levels are added to the
    /// noise of the latents, and the sum is divided by its standard deviation over the example. Like offset noise, the
    /// levels let whole images become dark or bright. 0 adds none; 6 to 10 are usual.
    pub multires_noise_iterations: usize,
    /// The weight of each level after the first, divided by the weight of the level before it: above 0 and below 1.
    pub multires_noise_discount: f64,
    /// The loss of one element.
    pub loss: LossFunction,
    /// The `delta` from which [`HuberSchedule`] computes δ of the Huber losses: above 0, and at most 1 unless the
    /// schedule is constant.
    pub huber_delta: f64,
    /// How δ of the Huber losses depends on the timestep.
    pub huber_schedule: HuberSchedule,
}

impl Default for DiffusionConfig {
    fn default() -> Self {
        Self {
            timesteps: SigmaDistribution::Uniform,
            shift: 1.0,
            min_timestep: 0,
            max_timestep: None,
            min_snr_gamma: None,
            noise_offset: 0.0,
            multires_noise_iterations: 0,
            multires_noise_discount: 0.3,
            loss: LossFunction::Mse,
            huber_delta: 0.1,
            huber_schedule: HuberSchedule::Constant,
        }
    }
}

/// A noised batch: the model's input, and the target of the model's prediction.
#[derive(Clone, Debug)]
pub struct NoisedLatents {
    /// √ᾱ · latents + √(1 - ᾱ) · noise, in the shape and dtype of the latents.
    pub sample: Tensor,
    /// The timestep of each example: (B,), i64, or the dtype of the timesteps given to
    /// [`DiffusionObjective::noise_at`].
    pub timesteps: Tensor,
    /// The target of the model's prediction, in the shape of the latents, f32.
    pub target: Tensor,
}

/// Adds noise to latents and computes the loss of a model's prediction. The tables with one number for each timestep
/// are on the device of the latents, so that a training step copies nothing to the host.
#[derive(Clone, Debug)]
pub struct DiffusionObjective {
    config: DiffusionConfig,
    prediction_type: PredictionType,
    levels: NoiseLevels,
    /// The timesteps that may be drawn.
    range: std::ops::Range<usize>,
    /// √ᾱ of each timestep.
    signal_shares: Tensor,
    /// √(1 - ᾱ) of each timestep.
    noise_shares: Tensor,
    /// The min-SNR weight of each timestep; `None` if all weights are 1.
    weight: Option<Tensor>,
    /// δ of each timestep; `None` if it is the same for all timesteps.
    delta: Option<Tensor>,
}

impl DiffusionObjective {
    /// The objective of a model trained under `schedule`, for tensors on `device`.
    ///
    /// # Errors
    /// [`Error::Argument`] if a setting is outside its range. The same error if the model predicts noise and a timestep
    /// of pure noise may be drawn, because the model could learn nothing from this timestep.
    pub fn new(schedule: &NoiseSchedule, config: DiffusionConfig, device: &Device) -> Result<Self> {
        let levels = NoiseLevels::new(OP, config.timesteps, config.shift)?;
        let total = schedule.num_train_timesteps();
        let range = config.min_timestep..config.max_timestep.unwrap_or(total);
        check(&config, &range, schedule)?;
        let table = |values: Vec<f64>| -> Result<Tensor> {
            let values: Vec<f32> = values.into_iter().map(|v| v as f32).collect();
            Tensor::from_vec(values, total, &Device::Cpu)?.to_device(device)
        };
        let alphas = schedule.alphas_cumprod();
        let prediction_type = schedule.prediction_type();
        let weight = config.min_snr_gamma.map(|gamma| min_snr_weights(schedule, gamma));
        let delta = match config.huber_schedule {
            HuberSchedule::Constant => None,
            HuberSchedule::Exponential => {
                Some((0..total).map(|t| config.huber_delta.powf(t as f64 / total as f64)).collect())
            }
            HuberSchedule::Snr => {
                // sigma is √((1 - ᾱ) / ᾱ).
                let at_sigma = |sigma: f64| (1.0 - config.huber_delta) / (1.0 + sigma).powi(2) + config.huber_delta;
                Some(schedule.sigmas().into_iter().map(at_sigma).collect())
            }
        };
        Ok(Self {
            config,
            prediction_type,
            levels,
            range,
            signal_shares: table(alphas.iter().map(|a| a.sqrt()).collect())?,
            noise_shares: table(alphas.iter().map(|a| (1.0 - a).sqrt()).collect())?,
            weight: weight.map(table).transpose()?,
            delta: delta.map(table).transpose()?,
        })
    }

    /// The settings.
    pub const fn config(&self) -> &DiffusionConfig {
        &self.config
    }

    /// Draw `count` timesteps from the library's generator: (count,), i64.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the timesteps do not fit in memory.
    pub fn draw_timesteps(&self, count: usize) -> Result<Tensor> {
        self.timesteps_at(&self.levels.draw(count, self.signal_shares.device())?)
    }

    /// The timesteps (B,), i64, of `levels (B,)`, which are from 0 to 1; see [`DiffusionConfig::timesteps`].
    fn timesteps_at(&self, levels: &Tensor) -> Result<Tensor> {
        let (first, last) = (self.range.start as f64, (self.range.end - 1) as f64);
        levels.affine(self.range.len() as f64, first)?.clamp(Some(first), Some(last))?.to_dtype(DType::I64)
    }

    /// Add noise to `latents (B, C, ...)`, each example at its own timestep. Noise and timesteps come from the
    /// library's generator.
    ///
    /// # Errors
    /// [`Error::Shape`] if the latents have fewer than two dimensions, or do not have four for multiresolution noise.
    /// [`Error::DType`] if they are not floating point, [`Error::Device`] if they are on another device than the
    /// objective.
    pub fn noise(&self, latents: &Tensor) -> Result<NoisedLatents> {
        let dims = self.check_latents(latents)?;
        let timesteps = self.draw_timesteps(dims[0])?;
        let noise = Tensor::randn(0.0, 1.0, dims, DType::F32, latents.device())?;
        let offset = |dims: &[usize]| Tensor::randn(0.0, 1.0, dims, DType::F32, latents.device());
        let noise = self.with_offset(noise, offset)?;
        let noise = self.with_multires(noise, |pyramid, _example, dims| pyramid.draw(dims))?;
        self.noise_at(latents, &noise, &timesteps)
    }

    /// As [`noise`](Self::noise), but the noise and the timestep of example i depend only on `seed` and its sample
    /// number `samples[i]`; a training run numbers its samples from 0. So noise and timestep are the same in every call
    /// and in any batch. The library's generator does not advance.
    ///
    /// # Errors
    /// As [`noise`](Self::noise); [`Error::Shape`] if `samples` does not have one number for each example.
    pub fn noise_for(&self, latents: &Tensor, samples: &[u64], seed: u64) -> Result<NoisedLatents> {
        let dims = self.check_latents(latents)?;
        check_numbers(OP, dims, samples.len())?;
        let device = latents.device();
        let timesteps = self.timesteps_at(&self.levels.draw_for(samples, Purpose::Level, seed, device)?)?;
        let noise = normal_rows(dims, samples, Purpose::Noise, seed, device)?;
        let offset = |dims: &[usize]| normal_rows(dims, samples, Purpose::Offset, seed, device);
        let multires = |pyramid: Pyramid, example: usize, dims| {
            // While `_stream` lives, this thread draws from the random stream of the example.
            let _stream = Stream::enter(State::of(seed, Purpose::Pyramid, samples[example]));
            pyramid.draw(dims)
        };
        let noise = self.with_multires(self.with_offset(noise, offset)?, multires)?;
        self.noise_at(latents, &noise, &timesteps)
    }

    /// Add `noise_offset` · a standard normal value to each channel of each example of `noise (B, C, ...)`.
    /// `draw(shape)` returns the standard normal values.
    fn with_offset(&self, noise: Tensor, draw: impl FnOnce(&[usize]) -> Result<Tensor>) -> Result<Tensor> {
        if self.config.noise_offset == 0.0 {
            return Ok(noise);
        }
        let mut dims = vec![1; noise.rank()];
        dims[..2].copy_from_slice(&noise.dims()[..2]);
        noise.add(&draw(&dims)?.mul_scalar(self.config.noise_offset)?)
    }

    /// Add multiresolution noise to `noise (B, C, H, W)`, and divide the sum by its standard deviation over each
    /// example. `draw(pyramid, b, [C, H, W])` returns the multiresolution noise of example b.
    fn with_multires(&self, noise: Tensor, draw: impl Fn(Pyramid, usize, [usize; 3]) -> Vec<f32>) -> Result<Tensor> {
        if self.config.multires_noise_iterations == 0 {
            return Ok(noise);
        }
        let &[batch, channels, height, width] = noise.dims() else {
            let found = noise.dims();
            return Err(Error::shape(
                OP,
                format!("the latents have shape {found:?}, expected (B, C, H, W) for multires_noise_iterations"),
            ));
        };
        let pyramid = Pyramid {
            iterations: self.config.multires_noise_iterations,
            discount: self.config.multires_noise_discount,
        };
        let multires = (0..batch).flat_map(|example| draw(pyramid, example, [channels, height, width])).collect();
        let multires = Tensor::from_vec::<f32>(multires, noise.dims(), &Device::Cpu)?.to_device(noise.device())?;
        let sum = noise.add(&multires)?;
        let (keepdim, correction) = (true, 1.0);
        sum.div(&sum.var(&[1, 2, 3], keepdim, correction)?.sqrt()?)
    }

    /// Add given `noise (B, C, ...)` to `latents (B, C, ...)`, at given `timesteps (B,)`, i64 or u32.
    ///
    /// # Errors
    /// As [`noise`](Self::noise); [`Error::Shape`] if the three shapes do not fit together, [`Error::Index`] if the
    /// schedule does not have one of the timesteps, [`Error::DType`] if the timesteps are neither i64 nor u32.
    pub fn noise_at(&self, latents: &Tensor, noise: &Tensor, timesteps: &Tensor) -> Result<NoisedLatents> {
        let dims = self.check_latents(latents)?;
        if noise.dims() != dims || timesteps.dims() != [dims[0]] {
            return Err(Error::shape(
                OP,
                format!(
                    "latents {dims:?}, noise {:?} and timesteps {:?} do not fit together; expected (B, C, ...), the same shape, and (B,)",
                    noise.dims(),
                    timesteps.dims()
                ),
            ));
        }
        let (clean, noise) = (latents.to_dtype(DType::F32)?, noise.to_dtype(DType::F32)?);
        let at = |table: &Tensor| table.index_select(timesteps, 0)?.reshape(per_example(latents));
        let (signal_share, noise_share) = (at(&self.signal_shares)?, at(&self.noise_shares)?);
        let sample = clean.mul(&signal_share)?.add(&noise.mul(&noise_share)?)?;
        let target = match self.prediction_type {
            PredictionType::Epsilon => noise,
            PredictionType::VPrediction => noise.mul(&signal_share)?.sub(&clean.mul(&noise_share)?)?,
        };
        Ok(NoisedLatents { sample: sample.to_dtype(latents.dtype())?, timesteps: timesteps.clone(), target })
    }

    /// Add noise for a validation loss that can be compared over a run. Example number `examples[i]` has the same noise
    /// and timestep in every call and in any batch. The library's generator does not advance. Multiples of the golden
    /// ratio choose the timesteps, so that examples with consecutive numbers are spread evenly over the range of
    /// timesteps.
    ///
    /// # Errors
    /// As [`noise`](Self::noise); [`Error::Shape`] if `examples` does not have one number for each example.
    pub fn validation_noise(&self, latents: &Tensor, examples: &[u32], seed: u64) -> Result<NoisedLatents> {
        /// The golden ratio minus 1; its multiples are counted modulo 1.
        const GOLDEN: f64 = 0.618_033_988_749_894_8;
        let dims = self.check_latents(latents)?;
        check_numbers(OP, dims, examples.len())?;
        let timestep = |&example: &u32| {
            let level = (0.5 + f64::from(example) * GOLDEN).fract();
            (self.range.start + (level * self.range.len() as f64) as usize) as i64
        };
        let timesteps = Tensor::from_vec(examples.iter().map(timestep).collect(), examples.len(), &Device::Cpu)?;
        let examples: Vec<u64> = examples.iter().copied().map(u64::from).collect();
        let noise = normal_rows(dims, &examples, Purpose::ValidationNoise, seed, latents.device())?;
        self.noise_at(latents, &noise, &timesteps.to_device(latents.device())?)
    }

    /// The loss of `prediction` for the result of [`noise`](Self::noise): one element in f32, with a gradient for the
    /// prediction.
    ///
    /// An example's loss is the mean of the losses of its elements, times its min-SNR weight, times its entry in
    /// `weights (B,)` (for example the weight of the prior loss for regularisation images). The result is the mean over
    /// the examples of the batch.
    ///
    /// `mask (B, 1, ...)` has the spatial size of the latents and a weight, at least 0, for each spatial position. An
    /// example's mask is divided by its mean, so that the area of the mask does not change the weight of the example.
    /// An example whose mask is 0 everywhere has loss 0.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Device`] if an argument does not fit `noised`.
    pub fn loss(
        &self,
        prediction: &Tensor,
        noised: &NoisedLatents,
        mask: Option<&Tensor>,
        weights: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dims = noised.target.dims();
        if prediction.dims() != dims {
            return Err(Error::shape(
                OP,
                format!("the prediction has shape {:?}, expected that of the latents, {dims:?}", prediction.dims()),
            ));
        }
        let mask = mask.map(|mask| fitting("mask", mask, &mask_dims(dims))).transpose()?;
        let weights = weights.map(|weights| fitting("weights", weights, &dims[..1])).transpose()?;
        let at = |table: &Tensor| table.index_select(&noised.timesteps, 0);
        let snr_weights = self.weight.as_ref().map(at).transpose()?;
        let examples = match (snr_weights, weights) {
            (Some(snr_weights), Some(weights)) => Some(snr_weights.mul(&weights)?),
            (snr_weights, weights) => snr_weights.or(weights),
        };
        let delta = match self.config.loss {
            LossFunction::Huber | LossFunction::SmoothL1 => self.delta.as_ref().map(at).transpose()?,
            LossFunction::Mse | LossFunction::L1 => None,
        };
        let delta = delta.as_ref().map_or(Delta::Constant(self.config.huber_delta), Delta::PerExample);
        let weights = Weights { examples: examples.as_ref(), positions: mask.as_ref() };
        weighted_loss(self.config.loss, delta, prediction, &noised.target, weights)
    }

    fn check_latents<'a>(&self, latents: &'a Tensor) -> Result<&'a [usize]> {
        let dims = latents.dims();
        if dims.len() < 2 {
            return Err(Error::shape(OP, format!("the latents have shape {dims:?}, expected (B, C, ...)")));
        }
        if !trainable_candle_core::raw::is_float(latents.dtype()) {
            let found = latents.dtype().as_str();
            return Err(Error::dtype(
                OP,
                format!("the latents are {found}, expected floating point; convert them with to()"),
            ));
        }
        if !latents.device().same_device(self.signal_shares.device()) {
            return Err(Error::device(
                OP,
                "the latents are on another device than the objective; make the objective on the device of the latents",
            ));
        }
        Ok(dims)
    }
}

/// Check the settings. `range` has the timesteps that may be drawn.
fn check(config: &DiffusionConfig, range: &std::ops::Range<usize>, schedule: &NoiseSchedule) -> Result<()> {
    let total = schedule.num_train_timesteps();
    if range.is_empty() || range.end > total {
        return Err(Error::argument(
            OP,
            format!(
                "found timesteps from {} up to but not including {}, expected a non-empty range within 0 to {total}",
                range.start, range.end
            ),
        ));
    }
    let positive = |name: &str, value: f64| {
        if value > 0.0 && value.is_finite() {
            return Ok(());
        }
        Err(Error::argument(OP, format!("{name} is {value}, expected a number above 0")))
    };
    config.min_snr_gamma.map_or(Ok(()), |gamma| positive("min_snr_gamma", gamma))?;
    positive("huber_delta", config.huber_delta)?;
    if config.huber_schedule != HuberSchedule::Constant && config.huber_delta > 1.0 {
        let found = config.huber_delta;
        return Err(Error::argument(
            OP,
            format!("huber_delta is {found}, expected at most 1 unless huber_schedule is \"constant\""),
        ));
    }
    if !(config.noise_offset >= 0.0 && config.noise_offset.is_finite()) {
        let found = config.noise_offset;
        return Err(Error::argument(OP, format!("noise_offset is {found}, expected 0 or more")));
    }
    if !(config.multires_noise_discount > 0.0 && config.multires_noise_discount < 1.0) {
        let found = config.multires_noise_discount;
        return Err(Error::argument(OP, format!("multires_noise_discount is {found}, expected above 0 and below 1")));
    }
    let last_teaches_nothing =
        schedule.prediction_type() == PredictionType::Epsilon && schedule.alphas_cumprod().contains(&0.0);
    if last_teaches_nothing && range.end == total {
        return Err(Error::argument(
            OP,
            "the schedule ends in pure noise (rescale_betas_zero_snr), where predicting noise teaches nothing; set \
             prediction_type to \"v_prediction\", or max_timestep below the last timestep",
        ));
    }
    Ok(())
}

/// The min-SNR-γ weight of each timestep, for the prediction type of the schedule.
fn min_snr_weights(schedule: &NoiseSchedule, gamma: f64) -> Vec<f64> {
    let weight = |snr: f64| match schedule.prediction_type() {
        // This is min(SNR, γ) / SNR, in a form that is defined for SNR = 0 too.
        PredictionType::Epsilon => (gamma / snr).min(1.0),
        PredictionType::VPrediction => snr.min(gamma) / (snr + 1.0),
    };
    schedule.snr().into_iter().map(weight).collect()
}

/// The shape (B, 1, ...) of a mask for latents of shape `dims`, (B, C, ...).
fn mask_dims(dims: &[usize]) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[1] = 1;
    dims
}

/// The argument `found` in f32, after a check that its shape is `dims`. `name` is the argument's name for errors.
fn fitting(name: &str, found: &Tensor, dims: &[usize]) -> Result<Tensor> {
    if found.dims() != dims {
        return Err(Error::shape(OP, format!("{name} has shape {:?}, expected {dims:?}", found.dims())));
    }
    found.to_dtype(DType::F32)
}

#[cfg(test)]
mod tests;
