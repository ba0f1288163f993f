//! Python bindings of training objectives, the noise schedule of diffusion models, and samplers.

mod diffusion;
mod flow;
mod sampler;
mod schedule;

pub use diffusion::{DiffusionObjective, NoisedLatents};
pub use flow::FlowMatching;
pub use sampler::{Sampler, classifier_free_guidance};
pub use schedule::NoiseSchedule;
