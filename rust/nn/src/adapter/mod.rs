//! Adapters: small trainable changes to frozen layers.
//!
//! A kind of adapter is one file with an [`AdapterKind`] and one line in [`KINDS`]. The code of models does not depend
//! on adapters: [`AdapterSet::attach`] finds the layers by name, and [`AdapterSet::set_enabled`] with false removes the
//! adapters again.

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
mod values;

pub use beside::TrainingAdapter;
pub(crate) use beside::{Beside, Product};
pub use config::{LoraConfig, scale};
pub use dora::Dora;
pub use kind::{AdapterKind, Build, Parameters, SavedByAdapter, Start, StartValues};
pub use layer::{AdaptedLinear, DoRALinear, DoraLayer, LayerKind, LoRALinear, LoraLayer};
pub use layout::Layout;
pub use lora::{LoRABackwardOps, Lora};
pub use oft::{OftSide, oft_block_size};
pub use quantization_aware::QuantizationAware;
pub use set::{AdaptedLayer, AdapterSet};
use trainable_candle_core::capture::HostState;
use trainable_candle_core::ops::linear_group::LowRank;
use trainable_candle_core::{DType, Result, Tensor, no_grad};
pub use values::LayerValues;

use crate::base::Base;

/// An adapter of one layer.
pub trait Adapter: Send + Sync {
    /// Compute the layer's result with the adapter. `base` is the frozen layer.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`], `DType` or `Device` if the input does not fit.
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor>;

    /// Return the low-rank product that the adapter adds to the layer's result for an input of `dtype`. None if the
    /// adapter changes the result in another way, as LoRA does while its dropout is active.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    fn as_low_rank(&self, _dtype: DType) -> Result<Option<LowRank>> {
        Ok(None)
    }

    /// Compute the weight with which a layer without an adapter would give the same results (without dropout), in the
    /// layout of the base's weight. If the weight depends on the adapter's parameters, it is f32 or f64, and gradients
    /// flow through it to the parameters.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor>;

    /// Compute [`adapted_weight`](Self::adapted_weight) in the dtype of the base, without recording on the tape.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    fn merged_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        let _constant = no_grad();
        Ok(self.adapted_weight(base)?.to_dtype(base.weight.dtype())?.detach())
    }

    /// Return the constant weight with which this adapter computes in place of the layer's own weight. None if the
    /// adapter changes the result in another way, or computes its weight from parameters.
    fn replaces_weight(&self) -> Option<Tensor> {
        None
    }

    /// Return the factor in front of the adapter's change: for LoRA, in front of the low-rank product. 0 if the adapter
    /// has no such factor.
    fn scale(&self) -> f64;

    /// Set whether the adapter is in training mode, in which dropout is active.
    fn set_training(&self, training: bool);
}

/// Make the state of one adapter that says whether the adapter is in training mode; it starts as true. CUDA graphs
/// depend on this state.
fn training() -> HostState<bool> {
    HostState::new("whether adapters are in training", true)
}

/// Sizes and settings of one adapter, after `rank_pattern` and `alpha_pattern` have been applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterSettings {
    /// Rank r of the low-rank product. OFT ignores it.
    pub rank: usize,
    /// Factor in front of the adapter's change: alpha / r, or alpha / √r for rsLoRA.
    pub scale: f64,
    /// Probability of dropping an element of the adapter's input while training.
    pub dropout: f64,
    /// DoRA: true for one magnitude for each output, as in peft; false for one for each input.
    pub wd_on_output: bool,
    /// LoKr: whether the smaller factor may be low-rank, too.
    pub decompose_both: bool,
    /// LoKr: a size F, which determines the size of the smaller factor. For a layer with n outputs, the factor has
    /// min(F, n / F) rows if F divides n; otherwise the number of rows is the largest divisor of n that is at most F and
    /// at most √n. `None` means the largest divisor up to √n. The number of columns follows in the same way from the
    /// layer's inputs.
    pub decompose_factor: Option<usize>,
    /// OFT: the size of blocks. If it does not divide the number of features, OFT uses the nearest divisor
    /// ([`oft_block_size`]).
    pub oft_block_size: usize,
    /// OFT: the side that is rotated.
    pub oft_side: OftSide,
    /// OFT of inputs: the number of terms, from 2 to 64, of peft's series in place of the Cayley transform. `None`
    /// means the Cayley transform itself.
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
