//! Layers that several models share. Their parameters have diffusers' names.

mod attention;
// Blocks in which image tokens and text tokens attend to each other.
pub mod joint;
mod resnet;
// The embedding of the timestep.
pub(crate) mod timestep;
mod transformer;

pub(crate) use attention::attend;
pub use attention::{Attention, AttentionSizes};
pub use resnet::{Downsample, ResnetBlock, ResnetSizes, Upsample};
pub(crate) use resnet::{conv1x1, conv3x3};
pub use timestep::{Sinusoids, TimestepEmbedding};
pub use transformer::{SpatialTransformer, TransformerSizes};
