//! Estimates from a model's layers alone how many values the tape keeps of a forward pass. Each block counts its own
//! values in a function beside its forward pass.
//!
//! A frozen layer keeps nothing. An adapter keeps what its kind says ([`Kept`]), such as its input and the result of
//! its first factor. A norm, a product or an activation keeps what its backward pass reads, if a gradient passes
//! through it. A forward pass over zeros that take no memory would give the same count, but would take seconds for
//! SDXL.

use std::collections::HashMap;

use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::adapter::{Kept, LoraConfig};
use trainable_candle_nn::{Blocks, Checkpointing, Conv2d, Kept as KeptOfBlocks, Layer, Linear, Part, Visitor};

use crate::registry::Model;

/// The sizes of the sample for which a forward pass is estimated.
#[derive(Clone, Copy, Debug)]
pub struct SampleSize {
    /// Height of the latents or the image that the model reads.
    pub height: usize,
    /// Width of the latents or the image.
    pub width: usize,
    /// Number of text tokens.
    pub tokens: usize,
}

/// Counts the values that the tape keeps for one sample. Blocks add their values in the order of the forward pass. The
/// tape keeps nothing before the first adapter, because no gradient is computed there.
pub struct Saved {
    /// What the adapter of each layer keeps, by the layer's [`key`].
    adapted: HashMap<*const (), Kept>,
    checkpointing: Checkpointing,
    /// The index of the first block of each [`Blocks`] among all blocks of the model.
    starts: HashMap<*const KeptOfBlocks, usize>,
    /// The policy of the current block.
    policy: Policy,
    /// Whether each layer with an adapter rounds its input (`LoraConfig::qat_activations`).
    rounds: bool,
    /// Whether a layer with an adapter was counted already. Gradients then pass through all layers that follow.
    reached: bool,
    /// Values that the tape holds when the forward pass ends.
    held: usize,
    /// The largest number of recomputed values that the backward pass holds at a time, in the latest blocks with the
    /// same policy.
    again: usize,
    /// The largest number of values that the backward pass holds while it is in earlier blocks. By then, it has freed
    /// the values of the blocks that follow.
    earlier: usize,
    /// The current block.
    block: Block,
    /// Values of the latest blocks that full checkpointing recomputes together.
    together: usize,
    /// Whether the input of the first block in `together` is counted already.
    is_entered: bool,
    /// Values in the memory of the host: inputs of offloaded checkpoints.
    offloaded: usize,
    /// The largest number of values in the result of layers that share an input, among layers whose result has a
    /// gradient.
    widest: usize,
    flops: Flops,
    /// Operations of the blocks that are recomputed, and of all blocks.
    recomputed: [usize; 2],
}

/// Floating-point operations of a forward pass, without those of adapters, norms and activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// Operations of linear layers and convolutions.
    pub layers: usize,
    /// Operations of attention.
    pub attention: usize,
}

/// Numbers of values of one block.
#[derive(Default)]
struct Block {
    /// Values that the tape keeps. Under full checkpointing, it keeps them only from the recomputation of
    /// the block to the block's backward pass.
    kept: usize,
    /// Values that the backward pass recomputes.
    again: usize,
}

impl Flops {
    const fn sum(self) -> usize {
        self.layers + self.attention
    }
}

impl Saved {
    /// The approximate number of values that the tape holds at its peak, for one sample of `size`: on the device, and
    /// in the memory of the host.
    ///
    /// # Errors
    /// As [`LoraConfig::select`].
    pub fn values(
        model: &dyn Model,
        config: &LoraConfig,
        checkpointing: Checkpointing,
        size: SampleSize,
    ) -> Result<[usize; 2]> {
        let saved = Self::of(model, Self::adapted(model, config)?, (checkpointing, config.qat_activations), size);
        Ok([saved.earlier.max(saved.held + saved.again), saved.offloaded])
    }

    /// The share of the blocks' operations in a forward pass that the backward pass repeats.
    pub fn recomputed(model: &dyn Model, checkpointing: Checkpointing, size: SampleSize) -> f64 {
        let [recomputed, all] = Self::of(model, HashMap::new(), (checkpointing, false), size).recomputed;
        recomputed as f64 / all.max(1) as f64
    }

    /// The number of values in the largest gradient that the backward pass computes, for one sample of `size`: the
    /// gradient of the result of layers that share an input. It exists in addition to the values that the tape holds.
    ///
    /// # Errors
    /// As [`LoraConfig::select`].
    pub fn widest_gradient(model: &dyn Model, config: &LoraConfig, size: SampleSize) -> Result<usize> {
        Ok(Self::of(model, Self::adapted(model, config)?, (Policy::None.into(), false), size).widest)
    }

    /// What the adapters that `config` selects keep, by the layer's [`key`].
    fn adapted(model: &dyn Model, config: &LoraConfig) -> Result<HashMap<*const (), Kept>> {
        let layers = model.named_layers();
        let selected = config.select(layers.iter().map(|(name, layer)| (name.as_str(), layer.is_conv())))?;
        let kind = config.kind()?;
        let adapted = layers.iter().filter(|(name, _)| selected.contains_key(name));
        adapted
            .map(|(name, layer)| {
                let settings = config.settings(name, layer.is_conv())?;
                Ok((key(*layer), (kind.kept)(&layer.base(), &settings)))
            })
            .collect()
    }

    /// The operations of a forward pass over one sample of `size`.
    pub fn forward_flops(model: &dyn Model, size: SampleSize) -> Flops {
        Self::of(model, HashMap::new(), (Policy::None.into(), false), size).flops
    }

    /// The sum over all blocks of a model. `rounds` says whether layers with adapters round their inputs.
    fn of(
        model: &dyn Model,
        adapted: HashMap<*const (), Kept>,
        (checkpointing, rounds): (Checkpointing, bool),
        size: SampleSize,
    ) -> Self {
        let (mut starts, mut all) = (HashMap::new(), 0);
        // The closure returns no error.
        let _ = model.visit(&mut Visitor::new(&mut |part| {
            if let Part::Blocks { kept, count, .. } = part {
                starts.insert(std::ptr::from_ref(kept), all);
                all += count;
            }
            Ok(())
        }));
        let mut saved = Self {
            adapted,
            checkpointing,
            starts,
            policy: checkpointing.policy(0),
            rounds,
            reached: false,
            held: 0,
            again: 0,
            earlier: 0,
            block: Block::default(),
            together: 0,
            is_entered: false,
            offloaded: 0,
            widest: 0,
            flops: Flops::default(),
            recomputed: [0; 2],
        };
        model.saved(size, &mut saved);
        saved
    }

    /// Count an attention of `queries` tokens to `keys` tokens, over heads whose widths add up to `width`.
    pub const fn attention(&mut self, queries: usize, keys: usize, width: usize) {
        self.flops.attention += 4 * queries * keys * width;
    }

    /// Count the operations of a product with `weight` at `positions` tokens or pixels. The tape keeps nothing of the
    /// product.
    pub fn product(&mut self, weight: &[usize], positions: usize) {
        self.flops.layers += 2 * weight.iter().product::<usize>() * positions;
    }

    /// Count all `blocks` in their order, each under its policy. `add` counts one block.
    pub fn each<B>(&mut self, blocks: &Blocks<B>, mut add: impl FnMut(&B, &mut Self)) {
        (0..blocks.len()).for_each(|index| self.one(blocks, index, &mut add));
    }

    /// Count block `index` of `blocks` under its policy; `add` counts it.
    pub fn one<B>(&mut self, blocks: &Blocks<B>, index: usize, add: impl FnOnce(&B, &mut Self)) {
        let Some(block) = blocks.iter().nth(index) else { return };
        let start = self.starts.get(&std::ptr::from_ref(blocks.kept())).copied().unwrap_or(0);
        let policy = self.checkpointing.policy(start + index);
        if policy != self.policy {
            self.earlier = self.earlier.max(self.held + std::mem::take(&mut self.again));
            self.policy = policy;
        }
        let before = self.flops.sum();
        add(block, self);
        let operations = self.flops.sum() - before;
        let again = if policy.recomputes_all() { operations } else { 0 };
        self.recomputed = [self.recomputed[0] + again, self.recomputed[1] + operations];
    }

    /// Count a part of the model outside of checkpoints.
    pub fn outside(&mut self, add: impl FnOnce(&mut Self)) {
        add(self);
        let Block { kept, again } = std::mem::take(&mut self.block);
        self.held += kept;
        self.again = self.again.max(again);
    }

    /// Count a block under one checkpoint. `enters` is the number of input values that only this block needs. With
    /// `goes_on`, full checkpointing recomputes the block together with the previous block.
    pub fn block(&mut self, enters: usize, goes_on: bool, add: impl FnOnce(&mut Self)) {
        if !self.policy.recomputes_all() {
            return self.outside(add);
        }
        let offloads = self.policy == Policy::Offloaded;
        let goes_on = goes_on && !offloads;
        let was_reached = self.reached;
        add(self);
        let Block { kept, .. } = std::mem::take(&mut self.block);
        self.together = kept + if goes_on { self.together } else { 0 };
        self.is_entered &= goes_on;
        if (was_reached || kept > 0) && !self.is_entered {
            if offloads && was_reached {
                // The device holds the inputs of two blocks: while the backward pass recomputes this block, the input
                // of the previous block is copied to the device.
                self.offloaded += enters;
                self.together += 2 * enters;
            } else {
                self.held += enters;
            }
            self.is_entered = true;
        }
        self.again = self.again.max(self.together);
    }

    /// Count values that the backward pass of an operation reads. They are kept if a gradient reaches the operation.
    pub fn keep(&mut self, values: usize) {
        if self.reached {
            self.block.kept += values;
        }
    }

    /// As [`keep`](Self::keep), for results of a norm, an activation or another cheap operation, which selective
    /// checkpointing recomputes.
    pub fn keep_cheap(&mut self, values: usize) {
        if self.reached && self.policy == Policy::Selective {
            self.block.again += values;
        } else {
            self.keep(values);
        }
    }

    /// Count results of a matrix product. Selective checkpointing always keeps them; otherwise the tape keeps them only
    /// if the backward pass reads them.
    pub fn keep_product(&mut self, values: usize, is_read: bool) {
        if is_read || self.policy == Policy::Selective {
            self.keep(values);
        }
    }

    /// Whether a gradient reaches the operations that are counted now: a layer with an adapter was counted before.
    pub const fn is_reached(&self) -> bool {
        self.reached
    }

    /// Whether a layer has an adapter.
    pub fn adapts(&self, layer: &Linear<Tensor>) -> bool {
        self.adapted.contains_key(&key(Layer::Linear(layer)))
    }

    /// Count a linear layer that is applied to `positions` tokens or pixels. `inputs` is the number of input values of
    /// all tokens or pixels together.
    pub fn linear(&mut self, layer: &Linear<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Linear(layer)], (inputs, positions), false);
    }

    /// As [`linear`](Self::linear), for a layer whose input comes from a norm or an activation, which selective
    /// checkpointing recomputes.
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

    /// Count layers that share an input. Without checkpointing, the backward pass computes the input again
    /// ([`Tensor::remade`]), unless an adapter needs the input, or a rounded copy of the input, on the tape. Under
    /// checkpointing, the layers count as in [`cheap_linear`](Self::cheap_linear).
    pub fn remade_layers(&mut self, layers: &[Layer<'_>], (inputs, positions): (usize, usize)) {
        if self.policy == Policy::None && !self.rounds && !self.kept(layers).any(|kept| kept.remade) {
            self.layers(layers, (0, positions), false);
            self.block.again = self.block.again.max(inputs);
        } else {
            self.layers(layers, (inputs, positions), true);
        }
    }

    /// What the adapters of some layers keep.
    fn kept(&self, layers: &[Layer<'_>]) -> impl Iterator<Item = Kept> {
        layers.iter().filter_map(|layer| self.adapted.get(&key(*layer)).copied())
    }

    /// Count layers that share their input. If the input is `cheap`, selective checkpointing recomputes it.
    pub fn layers(&mut self, layers: &[Layer<'_>], (inputs, positions): (usize, usize), cheap: bool) {
        layers.iter().for_each(|layer| self.product(layer.base().weight.dims(), positions));
        let kept: Vec<Kept> = self.kept(layers).collect();
        self.reached |= !kept.is_empty();
        if self.reached {
            let outputs = layers.iter().map(|layer| layer.base().weight.dims()[0]).sum::<usize>();
            self.widest = self.widest.max(outputs * positions);
        }
        if kept.is_empty() {
            return;
        }
        let selective = usize::from(self.policy == Policy::Selective);
        self.block.kept += positions * kept.iter().map(|kept| kept.values + selective * kept.products).sum::<usize>();
        let recomputed = cheap && self.policy == Policy::Selective;
        if self.rounds {
            // Each layer keeps its own rounded copy of the input. Selective checkpointing recomputes the copy from the
            // input. Otherwise the tape keeps the input only if another operation, such as attention, keeps it.
            let adapted = layers.iter().filter(|layer| self.adapted.contains_key(&key(**layer)));
            let rounded = adapted.map(|layer| positions * layer.base().weight.dims()[1]).sum::<usize>();
            if self.policy == Policy::Selective {
                self.block.again += rounded;
            } else {
                self.block.kept += rounded;
                if cheap {
                    return;
                }
            }
        } else if !kept.iter().any(|kept| kept.input) {
            return;
        }
        if recomputed {
            self.block.again += inputs;
        } else {
            self.block.kept += inputs;
        }
    }
}

/// The address of a layer, which identifies it.
const fn key(layer: Layer<'_>) -> *const () {
    match layer {
        Layer::Linear(linear) => std::ptr::from_ref(linear).cast(),
        Layer::Conv(conv) => std::ptr::from_ref(conv).cast(),
    }
}
