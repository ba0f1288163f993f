//! Training objectives. An objective computes the model's noised input and the target of the model's prediction.

mod diffusion;
mod flow;
mod levels;
mod loss;
mod pyramid;
mod schedule;

use trainable_candle_core::rng::{self, Purpose};
use trainable_candle_core::{Device, Error, Result, Tensor};

pub use diffusion::{DiffusionConfig, DiffusionObjective, HuberSchedule, NoisedLatents};
pub use flow::{FlowMatching, Noised, noised};
pub(crate) use levels::shift_sigma;
pub use levels::{NoiseLevels, SigmaDistribution};
pub use loss::LossFunction;
pub use schedule::{BetaSchedule, NoiseSchedule, NoiseScheduleConfig, PredictionType, TimestepSpacing};

/// Standard normal values of shape `dims` (B, ...) in f32 on `device`. Row `i` comes from the random stream that
/// `seed`, `purpose` and the sample number `samples[i]` select.
fn normal_rows(dims: &[usize], samples: &[u64], purpose: Purpose, seed: u64, device: &Device) -> Result<Tensor> {
    let values = rng::normal_samples(seed, purpose, samples, dims[1..].iter().product());
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_device(device)
}

/// Check that the caller passed one sample number for each example: `count`, the count of these numbers, must equal the
/// batch size `dims[0]`.
fn check_numbers(op: &'static str, dims: &[usize], count: usize) -> Result<()> {
    if count == dims[0] {
        return Ok(());
    }
    Err(Error::shape(
        op,
        format!("found {count} sample numbers for a batch of shape {dims:?}, expected one for each example"),
    ))
}
