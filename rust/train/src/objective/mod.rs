//! What a model is trained to predict, and from what.

mod diffusion;
mod flow;
mod levels;
mod loss;
mod schedule;

pub use diffusion::{DiffusionConfig, DiffusionObjective, HuberSchedule, NoisedLatents};
pub use flow::{FlowMatching, Noised, noised};
pub(crate) use levels::shift_sigma;
pub use levels::{NoiseLevels, SigmaDistribution};
pub use loss::LossFunction;
pub use schedule::{BetaSchedule, NoiseSchedule, NoiseScheduleConfig, PredictionType, TimestepSpacing};
