//! The blocks of a multimodal diffusion transformer (Esser et al. 2024, arXiv:2403.03206, section 4). In double-stream
//! blocks, image tokens have other weights than text tokens. In single-stream blocks, both have the same weights. In
//! blocks of both kinds, every token attends to all image and text tokens. The layers have diffusers' names. Follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/attention.py#L580>
//! and
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/transformers/transformer_flux.py>.

mod attention;
mod block;
mod conditions;
mod feed_forward;
mod inputs;
mod lengths;
mod modulation;
mod output;
mod rope;
mod single;
mod streams;

pub use attention::{JointAttention, SelfAttention};
pub(crate) use attention::{Stream, mix};
pub use block::{DoubleBlock, DoubleBlockKind, DoubleBlockNames};
pub use conditions::{ConditionSizes, TimeTextEmbedding};
pub use feed_forward::{FeedForward, FeedForwardKind};
pub use inputs::{TokenInputs, TokenSizes};
pub use lengths::TextLengths;
pub use modulation::{EPS, gated_add, modulated};
pub use output::ModulatedOutput;
pub use rope::{Rope, RopeAxes};
pub use single::SingleBlock;
pub use streams::{AttentionInputs, run_double, run_single};

/// The sizes of a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockSizes {
    /// Number of attention heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether queries and keys are normalised. Those of a [`SingleBlock`] always are.
    pub qk_norm: bool,
    /// Whether linear layers have biases. Those of a [`SingleBlock`] always have.
    pub bias: bool,
    /// Added to the mean square in the RMS norms of queries and keys.
    pub eps: f64,
}

impl BlockSizes {
    /// Width of the tokens.
    pub const fn dim(self) -> usize {
        self.heads * self.head_dim
    }
}
