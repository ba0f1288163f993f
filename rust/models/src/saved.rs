//! How many values the tape keeps of a forward pass, computed from the layers alone: each block declares its share beside its forward.
//!
//! A frozen layer keeps nothing. An adapter keeps what its kind says ([`Kept`]): its input and the product between its factors. A norm, a product or an activation
//! keeps what its backward reads, if a gradient passes through it. Running the forward on weights without memory would count the
//! same, but takes seconds for SDXL, because it reads every weight.

use std::collections::HashMap;

use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::adapter::{Kept, LoraConfig};
use trainable_candle_nn::{Conv2d, Layer, Linear};

use crate::registry::Model;

/// The sizes of one sample that a forward pass is estimated for.
#[derive(Clone, Copy, Debug)]
pub struct SampleSize {
    /// Height of the latents or the image that the model sees.
    pub height: usize,
    /// Its width.
    pub width: usize,
    /// Tokens of the text.
    pub tokens: usize,
}

/// Values that the tape keeps for one sample, as blocks add them in the order of the forward pass. Nothing is kept before the first
/// adapter, as no gradient goes there.
pub struct Saved {
    /// What the adapters of layers keep.
    adapted: HashMap<*const (), Kept>,
    policy: Policy,
    /// Whether a gradient reaches the following layers.
    reached: bool,
    /// Values that are kept until the forward pass ends.
    held: usize,
    /// The most values that the backward pass recomputes at a time.
    again: usize,
    /// The current block.
    block: Block,
    /// Values of the blocks that full checkpointing recomputes together.
    together: usize,
    /// Whether the input of those blocks is counted.
    is_entered: bool,
    flops: Flops,
}

/// Floating-point operations of a forward pass. What adapters, norms and activations add is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// Operations of linear layers and convolutions.
    pub layers: usize,
    /// Operations of attention.
    pub attention: usize,
}

/// What one block keeps.
#[derive(Default)]
struct Block {
    kept: usize,
    again: usize,
}

impl Saved {
    /// About how many values the tape holds at its fullest, for one sample of `size`.
    ///
    /// # Errors
    /// As [`LoraConfig::select`].
    pub fn values(model: &dyn Model, config: &LoraConfig, policy: Policy, size: SampleSize) -> Result<usize> {
        let layers = model.named_layers();
        let selected = config.select(layers.iter().map(|(name, layer)| (name.as_str(), layer.is_conv())))?;
        let kind = config.kind()?;
        let mut adapted = HashMap::new();
        for (name, layer) in layers.iter().filter(|(name, _)| selected.contains_key(name)) {
            adapted.insert(key(*layer), (kind.kept)(&layer.base(), &config.settings(name)?));
        }
        let saved = Self::of(model, adapted, policy, size);
        Ok(saved.held + saved.again)
    }

    /// The operations of a forward pass over one sample of `size`.
    pub fn forward_flops(model: &dyn Model, size: SampleSize) -> Flops {
        Self::of(model, HashMap::new(), Policy::None, size).flops
    }

    /// The sum of what all blocks of a model add.
    fn of(model: &dyn Model, adapted: HashMap<*const (), Kept>, policy: Policy, size: SampleSize) -> Self {
        let mut saved = Self {
            adapted,
            policy,
            reached: false,
            held: 0,
            again: 0,
            block: Block::default(),
            together: 0,
            is_entered: false,
            flops: Flops::default(),
        };
        model.saved(size, &mut saved);
        saved
    }

    /// Attention of `queries` tokens to `keys` others, over heads whose widths add up to `width`.
    pub const fn attention(&mut self, queries: usize, keys: usize, width: usize) {
        self.flops.attention += 4 * queries * keys * width;
    }

    /// Count a product with `weight` at `positions` places; it keeps nothing.
    pub fn product(&mut self, weight: &[usize], positions: usize) {
        self.flops.layers += 2 * weight.iter().product::<usize>() * positions;
    }

    /// A part outside checkpoints.
    pub fn outside(&mut self, add: impl FnOnce(&mut Self)) {
        add(self);
        let Block { kept, again } = std::mem::take(&mut self.block);
        self.held += kept;
        self.again = self.again.max(again);
    }

    /// A block under one checkpoint. `enters` counts the values of inputs that only this block needs; with `goes_on`, full
    /// checkpointing recomputes it together with the previous block.
    pub fn block(&mut self, enters: usize, goes_on: bool, add: impl FnOnce(&mut Self)) {
        if self.policy != Policy::Full {
            return self.outside(add);
        }
        let was_reached = self.reached;
        add(self);
        let Block { kept, .. } = std::mem::take(&mut self.block);
        self.together = kept + if goes_on { self.together } else { 0 };
        self.is_entered &= goes_on;
        if (was_reached || kept > 0) && !self.is_entered {
            self.held += enters;
            self.is_entered = true;
        }
        self.again = self.again.max(self.together);
    }

    /// Values that backward reads if a gradient passes through.
    pub fn keep(&mut self, values: usize) {
        if self.reached {
            self.block.kept += values;
        }
    }

    /// As [`keep`](Self::keep) of what a norm, an activation or another cheap operation makes: selective checkpointing
    /// recomputes it.
    pub fn keep_cheap(&mut self, values: usize) {
        if self.reached && self.policy == Policy::Selective {
            self.block.again += values;
        } else {
            self.keep(values);
        }
    }

    /// Results of a matrix product, which selective checkpointing keeps in any case, and the tape only if they are read.
    pub fn keep_product(&mut self, values: usize, is_read: bool) {
        if is_read || self.policy == Policy::Selective {
            self.keep(values);
        }
    }

    /// Whether a layer has an adapter.
    pub fn adapts(&self, layer: &Linear<Tensor>) -> bool {
        self.adapted.contains_key(&key(Layer::Linear(layer)))
    }

    /// A linear layer over `inputs` values at `positions` places.
    pub fn linear(&mut self, layer: &Linear<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Linear(layer)], (inputs, positions), false);
    }

    /// A linear layer whose input comes from a norm or an activation, which selective checkpointing recomputes.
    pub fn cheap_linear(&mut self, layer: &Linear<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Linear(layer)], (inputs, positions), true);
    }

    /// As [`linear`](Self::linear), for a convolution.
    pub fn conv(&mut self, layer: &Conv2d<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Conv(layer)], (inputs, positions), false);
    }

    /// As [`cheap_linear`](Self::cheap_linear), for a convolution.
    pub fn cheap_conv(&mut self, layer: &Conv2d<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Conv(layer)], (inputs, positions), true);
    }

    /// Layers that share an input which their backward computes again ([`Tensor::remade`]); inside of a full checkpoint it is kept.
    pub fn remade_layers(&mut self, layers: &[Layer<'_>], (inputs, positions): (usize, usize)) {
        if self.policy == Policy::None {
            self.layers(layers, (0, positions), false);
            self.block.again = self.block.again.max(inputs);
        } else {
            self.layers(layers, (inputs, positions), true);
        }
    }

    /// Layers that share their input; if it is `cheap`, selective checkpointing recomputes it.
    pub fn layers(&mut self, layers: &[Layer<'_>], (inputs, positions): (usize, usize), cheap: bool) {
        layers.iter().for_each(|layer| self.product(layer.base().weight.dims(), positions));
        let kept: Vec<Kept> = layers.iter().filter_map(|layer| self.adapted.get(&key(*layer)).copied()).collect();
        if kept.is_empty() {
            return;
        }
        self.reached = true;
        self.block.kept += positions * kept.iter().map(|kept| kept.values).sum::<usize>();
        if !kept.iter().any(|kept| kept.input) {
            return;
        }
        if cheap && self.policy == Policy::Selective {
            self.block.again += inputs;
        } else {
            self.block.kept += inputs;
        }
    }
}

/// A layer, identified by its address.
const fn key(layer: Layer<'_>) -> *const () {
    match layer {
        Layer::Linear(linear) => std::ptr::from_ref(linear).cast(),
        Layer::Conv(conv) => std::ptr::from_ref(conv).cast(),
    }
}
