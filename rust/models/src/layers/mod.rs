//! Layers that several models share, under diffusers' names.

mod attention;
mod timestep;

pub use attention::Attention;
pub use timestep::{TimestepEmbedding, sinusoidal_embedding};
