//! Adapters: small trainable changes to frozen layers.
//!
//! An adapter kind is one file with an [`AdapterKind`] and one line in [`KINDS`]. The code of models does not depend on
//! adapters: a set of adapters is attached to layers by their names ([`AdapterSet::attach`]), and can be removed again.

mod beside;
mod config;
mod delta;
mod dora;
mod kind;
mod layer;
mod layout;
mod loha;
mod lokr;
mod lora;
mod merged;
mod oft;
mod quantization_aware;
mod set;

pub use beside::TrainingAdapter;
pub(crate) use beside::{Beside, Product};
pub use config::{LoraConfig, scale};
pub use dora::Dora;
pub use kind::{AdapterKind, Build, Kept, Parameters, Start, StartValues};
pub use layer::{AdaptedLinear, DoRALinear, DoraLayer, LayerKind, LoRALinear, LoraLayer};
pub use layout::Layout;
pub use lora::{LoRABackwardOps, Lora};
pub use oft::{OftSide, oft_block_size};
pub use quantization_aware::QuantizationAware;
pub use set::{AdaptedLayer, AdapterSet, LayerValues};
use trainable_candle_core::capture::HostState;
use trainable_candle_core::ops::linear_group::LowRank;
use trainable_candle_core::{DType, Result, Tensor, no_grad};

use crate::base::Base;

/// An adapter of one layer.
pub trait Adapter: Send + Sync {
    /// The layer's result with the adapter, over the frozen `base`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`], `DType` or `Device` if the input does not fit.
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor>;

    /// The low-rank product that the adapter adds to a linear layer's result for an input of `dtype`; None if the adapter
    /// changes the result in another way, as LoRA does while its dropout is active.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    fn as_low_rank(&self, _dtype: DType) -> Result<Option<LowRank>> {
        Ok(None)
    }

    /// The weight with which a layer without an adapter would compute the same, in f32 or f64 and in the base's layout.
    /// Gradients flow through it to the adapter's parameters.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor>;

    /// [`adapted_weight`](Self::adapted_weight) in the dtype of the base, without recording on the tape.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    fn merged_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        let _constant = no_grad();
        Ok(self.adapted_weight(base)?.to_dtype(base.weight.dtype())?.detach())
    }

    /// The weight with which this adapter computes in place of the layer's own weight; None if the adapter
    /// changes the result in another way.
    fn replaces_weight(&self) -> Option<Tensor> {
        None
    }

    /// The factor in front of the low-rank product.
    fn scale(&self) -> f64;

    /// Set whether the adapter is in training mode, in which dropout is active.
    fn set_training(&self, training: bool);
}

/// Whether an adapter is in training mode. CUDA graphs depend on this value.
fn training() -> HostState<bool> {
    HostState::new("whether adapters are in training", true)
}

/// Sizes and settings of one adapter, after `rank_pattern` and `alpha_pattern` have been applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterSettings {
    /// Rank r of the low-rank product.
    pub rank: usize,
    /// Factor in front of the low-rank product: alpha / r, or alpha / √r for rsLoRA.
    pub scale: f64,
    /// Probability of dropping an element of the adapter's input while training.
    pub dropout: f64,
    /// DoRA: whether there is one magnitude for each output, as in peft, or one for each input.
    pub wd_on_output: bool,
    /// LoKr: whether the smaller factor may be low-rank, too.
    pub decompose_both: bool,
    /// LoKr: the size of the smaller factor, for outputs and for inputs. If the size does not divide the layer's number of
    /// outputs (or inputs), the largest divisor up to this size and up to the square root of that number is used. `None`
    /// means the largest divisor up to the square root.
    pub decompose_factor: Option<usize>,
    /// OFT: the size of blocks. If it does not divide the number of features, the nearest divisor is used.
    pub oft_block_size: usize,
    /// OFT: the side that is rotated.
    pub oft_side: OftSide,
    /// OFT of inputs: the number of terms of peft's series in place of the Cayley transform, at least 2. `None` means the
    /// Cayley transform itself.
    pub cayley_neumann_terms: Option<usize>,
}

impl Default for AdapterSettings {
    fn default() -> Self {
        Self {
            rank: 8,
            scale: 1.0,
            dropout: 0.0,
            wd_on_output: true,
            decompose_both: false,
            decompose_factor: None,
            oft_block_size: 32,
            oft_side: OftSide::Input,
            cayley_neumann_terms: None,
        }
    }
}

/// Every kind of adapter.
pub static KINDS: &[&AdapterKind] = &[&lora::KIND, &dora::KIND, &loha::KIND, &lokr::KIND, &oft::KIND];
