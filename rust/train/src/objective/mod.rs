//! What a model is trained to predict, and from what.

mod flow;

pub(crate) use flow::shift_sigma;
pub use flow::{FlowMatching, Noised, SigmaDistribution, noised};
