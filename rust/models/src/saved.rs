//! Estimates how many values the tape keeps of a forward pass, from a model's layers alone. Each block counts its own
//! values in a function next to its forward pass.
//!
//! The tape keeps nothing for a frozen layer. For an adapter, it keeps what the adapter's kind says
//! ([`SavedByAdapter`]), such as the input of the layer and the result of the first factor. For a norm, an attention,
//! an elementwise product or an activation, it keeps what the backward pass reads, if a gradient passes through the
//! operation. A forward pass over zeros that take no memory would give the same count, but would take seconds for SDXL.

use std::collections::HashMap;

use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::adapter::{LoraConfig, SavedByAdapter};
use trainable_candle_nn::{BlockState, Blocks, Checkpointing, Conv2d, Layer, Linear, Part, Visitor};

use crate::registry::Model;

/// The sizes of one sample, whose forward pass is estimated.
#[derive(Clone, Copy, Debug)]
pub struct SampleSize {
    /// Height of the latents or the image that the model reads.
    pub height: usize,
    /// Width of the latents or the image that the model reads.
    pub width: usize,
    /// Number of text tokens.
    pub tokens: usize,
}

/// Counts the values that the tape keeps for one sample. Blocks add their values in the order of the forward pass. The
/// tape keeps nothing before the first adapter, because no gradient is computed there.
pub struct Saved {
    /// What the tape keeps for the adapter of each layer, by the layer's [`key`].
    adapted: HashMap<*const (), SavedByAdapter>,
    checkpointing: Checkpointing,
    /// For each [`Blocks`] of the model: the index of its first block among all blocks of the model.
    first_indices: HashMap<*const BlockState, usize>,
    /// The policy of the current block.
    policy: Policy,
    /// Whether each layer with an adapter rounds its input (`LoraConfig::qat_activations`).
    rounds: bool,
    /// Whether a layer with an adapter was counted already. Gradients then pass through this layer and all that follow.
    reached: bool,
    /// Values that the tape holds on the device when the forward pass ends.
    held: usize,
    /// The largest number of recomputed values that the backward pass holds at a time, among the blocks since the
    /// latest change of the policy.
    most_recomputed: usize,
    /// The largest number of values that the backward pass holds while it is in blocks before the latest change of the
    /// policy. The backward pass runs from the last block to the first, so by then it has freed the values of the
    /// blocks after the change.
    earlier_peak: usize,
    /// The numbers of the current block.
    block: Block,
    /// Values of the latest blocks that full checkpointing recomputes together.
    together: usize,
    /// Whether the input of the first block in `together` is counted already.
    is_input_counted: bool,
    /// Values in host memory: inputs of offloaded checkpoints.
    offloaded: usize,
    /// The number of values in the largest gradient of the results of layers that share an input.
    widest: usize,
    flops: Flops,
    /// Operations of the blocks that full checkpointing recomputes, and of all blocks.
    block_operations: [usize; 2],
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
    /// Values that the tape keeps. Under full checkpointing, it keeps them only from the recomputation of the block to
    /// the block's backward pass.
    kept: usize,
    /// Values that the tape does not keep and the backward pass recomputes, if the block is not recomputed as a whole.
    recomputed: usize,
}

impl Flops {
    const fn sum(self) -> usize {
        self.layers + self.attention
    }
}

impl Saved {
    /// The approximate numbers of values that the tape holds at its peak, for one sample of `size`: on the device, and
    /// in host memory.
    ///
    /// # Errors
    /// As [`LoraConfig::select`] and [`LoraConfig::kind`].
    pub fn values(
        model: &dyn Model,
        config: &LoraConfig,
        checkpointing: Checkpointing,
        size: SampleSize,
    ) -> Result<[usize; 2]> {
        let adapted = Self::kept_by_adapters(model, config)?;
        let saved = Self::of(model, adapted, (checkpointing, config.qat_activations), size);
        Ok([saved.earlier_peak.max(saved.held + saved.most_recomputed), saved.offloaded])
    }

    /// The operations that the backward pass repeats, as a share of the operations of all blocks in a forward pass.
    pub fn recomputed(model: &dyn Model, checkpointing: Checkpointing, size: SampleSize) -> f64 {
        // Adapters and the rounding of their inputs do not change this number.
        let (adapted, rounds) = (HashMap::new(), false);
        let [recomputed, all] = Self::of(model, adapted, (checkpointing, rounds), size).block_operations;
        recomputed as f64 / all.max(1) as f64
    }

    /// The number of values in the largest gradient that the backward pass computes, for one sample of `size`: the
    /// gradient of the results of layers that share an input. This gradient is in memory in addition to the values that
    /// the tape holds.
    ///
    /// # Errors
    /// As [`LoraConfig::select`] and [`LoraConfig::kind`].
    pub fn widest_gradient(model: &dyn Model, config: &LoraConfig, size: SampleSize) -> Result<usize> {
        // Checkpointing and the rounding of inputs do not change this number.
        let (adapted, rounds) = (Self::kept_by_adapters(model, config)?, false);
        Ok(Self::of(model, adapted, (Policy::None.into(), rounds), size).widest)
    }

    /// What the tape keeps for the adapters that `config` selects, by the layer's [`key`].
    fn kept_by_adapters(model: &dyn Model, config: &LoraConfig) -> Result<HashMap<*const (), SavedByAdapter>> {
        let layers = model.named_layers();
        let selected = config.select(layers.iter().map(|(name, layer)| (name.as_str(), layer.is_conv())))?;
        let kind = config.kind()?;
        let adapted = layers.iter().filter(|(name, _)| selected.contains_key(name));
        adapted
            .map(|(name, layer)| {
                let settings = config.settings(name, layer.is_conv())?;
                Ok((key(*layer), (kind.saved)(&layer.base(), &settings)))
            })
            .collect()
    }

    /// The operations of a forward pass over one sample of `size`.
    pub fn forward_flops(model: &dyn Model, size: SampleSize) -> Flops {
        // Adapters, checkpointing and the rounding of inputs do not change this number.
        let (adapted, rounds) = (HashMap::new(), false);
        Self::of(model, adapted, (Policy::None.into(), rounds), size).flops
    }

    /// Counts all layers of a model for one sample of `size`. `adapted` and `rounds` are the fields of the same names.
    fn of(
        model: &dyn Model,
        adapted: HashMap<*const (), SavedByAdapter>,
        (checkpointing, rounds): (Checkpointing, bool),
        size: SampleSize,
    ) -> Self {
        let (mut first_indices, mut blocks_so_far) = (HashMap::new(), 0);
        // The closure never returns an error, so the visit returns none.
        let _ = model.visit(&mut Visitor::new(&mut |part| {
            if let Part::Blocks { state, count, .. } = part {
                first_indices.insert(std::ptr::from_ref(state), blocks_so_far);
                blocks_so_far += count;
            }
            Ok(())
        }));
        let mut saved = Self {
            adapted,
            checkpointing,
            first_indices,
            policy: checkpointing.policy(0),
            rounds,
            reached: false,
            held: 0,
            most_recomputed: 0,
            earlier_peak: 0,
            block: Block::default(),
            together: 0,
            is_input_counted: false,
            offloaded: 0,
            widest: 0,
            flops: Flops::default(),
            block_operations: [0; 2],
        };
        model.saved(size, &mut saved);
        saved
    }

    /// Count the operations of attention from `queries` tokens to `keys` tokens, with heads whose widths add up to
    /// `width`.
    pub const fn attention(&mut self, queries: usize, keys: usize, width: usize) {
        // Two products, the scores and the sums of values. Each multiplies and adds.
        self.flops.attention += 4 * queries * keys * width;
    }

    /// Count the operations of a product with a weight of the shape `dims` at `positions` tokens or pixels. The values
    /// that the tape keeps are not counted here.
    pub fn product(&mut self, dims: &[usize], positions: usize) {
        self.flops.layers += 2 * dims.iter().product::<usize>() * positions;
    }

    /// Count all `blocks` in their order, each under its policy. `add` counts one block.
    pub fn each<B>(&mut self, blocks: &Blocks<B>, mut add: impl FnMut(&B, &mut Self)) {
        (0..blocks.len()).for_each(|index| self.one(blocks, index, &mut add));
    }

    /// Count block `index` of `blocks`, if there is one, under its policy. `add` counts the block.
    pub fn one<B>(&mut self, blocks: &Blocks<B>, index: usize, add: impl FnOnce(&B, &mut Self)) {
        let Some(block) = blocks.iter().nth(index) else { return };
        // The policy of a block depends on its index among all blocks of the model. `first_indices` has every
        // `Blocks` of the model, because the model's `visit` shows them all.
        let first = self.first_indices.get(&std::ptr::from_ref(blocks.state())).copied().unwrap_or(0);
        let policy = self.checkpointing.policy(first + index);
        if policy != self.policy {
            self.earlier_peak = self.earlier_peak.max(self.held + std::mem::take(&mut self.most_recomputed));
            self.policy = policy;
        }
        let operations_before = self.flops.sum();
        add(block, self);
        let operations = self.flops.sum() - operations_before;
        let repeated = if policy.recomputes_all() { operations } else { 0 };
        self.block_operations = [self.block_operations[0] + repeated, self.block_operations[1] + operations];
    }

    /// Count layers outside of checkpoints. `add` counts them.
    pub fn outside(&mut self, add: impl FnOnce(&mut Self)) {
        add(self);
        let Block { kept, recomputed } = std::mem::take(&mut self.block);
        self.held += kept;
        self.most_recomputed = self.most_recomputed.max(recomputed);
    }

    /// Count a block under one checkpoint. `own_inputs` is the number of input values that only this block needs. If
    /// `joins_previous`, full checkpointing recomputes the block together with the previous block, except if it
    /// offloads inputs. `add` counts the block.
    pub fn block(&mut self, own_inputs: usize, joins_previous: bool, add: impl FnOnce(&mut Self)) {
        // A block that is not recomputed as a whole counts as layers outside of checkpoints do.
        if !self.policy.recomputes_all() {
            return self.outside(add);
        }
        let offloads = self.policy == Policy::Offloaded;
        let joins_previous = joins_previous && !offloads;
        let was_reached = self.reached;
        add(self);
        let Block { kept, .. } = std::mem::take(&mut self.block);
        self.together = kept + if joins_previous { self.together } else { 0 };
        self.is_input_counted &= joins_previous;
        // If no gradient passes through the block, its checkpoint keeps no input.
        if (was_reached || kept > 0) && !self.is_input_counted {
            if offloads && was_reached {
                // The device holds the inputs of two blocks: while the backward pass recomputes this block, the input
                // of the previous block is copied to the device.
                self.offloaded += own_inputs;
                self.together += 2 * own_inputs;
            } else {
                // The input stays on the device. Under `Offloaded`, this is an input that no gradient reaches: a
                // constant, which no checkpoint offloads.
                self.held += own_inputs;
            }
            self.is_input_counted = true;
        }
        self.most_recomputed = self.most_recomputed.max(self.together);
    }

    /// Count values that the backward pass of an operation reads. The tape keeps them if a gradient reaches the
    /// operation.
    pub fn keep(&mut self, values: usize) {
        if self.reached {
            self.block.kept += values;
        }
    }

    /// As [`keep`](Self::keep), for results of a norm, an activation or another cheap operation, which selective
    /// checkpointing recomputes.
    pub fn keep_cheap(&mut self, values: usize) {
        if self.reached && self.policy == Policy::Selective {
            self.block.recomputed += values;
        } else {
            self.keep(values);
        }
    }

    /// Count results of a matrix product. Under selective checkpointing the tape always keeps them, otherwise only if
    /// the backward pass reads them (`is_read`). Nothing is kept if no gradient reaches the product.
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
        self.layers(&[Layer::Linear(layer)], (inputs, positions), /* cheap */ false);
    }

    /// As [`linear`](Self::linear), for a layer whose input comes from a norm or an activation, which selective
    /// checkpointing recomputes.
    pub fn cheap_linear(&mut self, layer: &Linear<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Linear(layer)], (inputs, positions), /* cheap */ true);
    }

    /// As [`linear`](Self::linear), for a convolution.
    pub fn conv(&mut self, layer: &Conv2d<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Conv(layer)], (inputs, positions), /* cheap */ false);
    }

    /// As [`cheap_linear`](Self::cheap_linear), for a convolution.
    pub fn cheap_conv(&mut self, layer: &Conv2d<Tensor>, (inputs, positions): (usize, usize)) {
        self.layers(&[Layer::Conv(layer)], (inputs, positions), /* cheap */ true);
    }

    /// Count layers that share an input that is marked with [`Tensor::recomputed`]. Without checkpointing, the backward
    /// pass recomputes the input. Under checkpointing, or if an adapter needs the input or a rounded copy of it on the
    /// tape, the layers count as in [`cheap_linear`](Self::cheap_linear).
    pub fn layers_of_recomputed_input(&mut self, layers: &[Layer<'_>], (inputs, positions): (usize, usize)) {
        if self.policy == Policy::None && !self.rounds && !self.kept(layers).any(|kept| kept.even_if_recomputable) {
            // The tape keeps no value of the input.
            self.layers(layers, (0, positions), /* cheap */ false);
            // The backward pass frees one recomputed input before it recomputes the next.
            self.block.recomputed = self.block.recomputed.max(inputs);
        } else {
            self.layers(layers, (inputs, positions), /* cheap */ true);
        }
    }

    /// What the tape keeps for the adapters of those `layers` that have one.
    fn kept(&self, layers: &[Layer<'_>]) -> impl Iterator<Item = SavedByAdapter> {
        layers.iter().filter_map(|layer| self.adapted.get(&key(*layer)).copied())
    }

    /// Count layers that share an input of `inputs` values, and are applied to `positions` tokens or pixels. If the
    /// input is `cheap`, selective checkpointing recomputes it.
    pub fn layers(&mut self, layers: &[Layer<'_>], (inputs, positions): (usize, usize), cheap: bool) {
        layers.iter().for_each(|layer| self.product(layer.base().weight.dims(), positions));
        let kept: Vec<SavedByAdapter> = self.kept(layers).collect();
        self.reached |= !kept.is_empty();
        if self.reached {
            let outputs = layers.iter().map(|layer| layer.base().weight.dims()[0]).sum::<usize>();
            self.widest = self.widest.max(outputs * positions);
        }
        if kept.is_empty() {
            return;
        }
        let is_selective = self.policy == Policy::Selective;
        // `products` are results of matrix products, which the tape keeps under selective checkpointing only.
        let per_position = |kept: &SavedByAdapter| kept.values + if is_selective { kept.products } else { 0 };
        self.block.kept += positions * kept.iter().map(per_position).sum::<usize>();
        if self.rounds {
            // Each layer with an adapter, always a linear layer, reads its own rounded copy of the input. Selective
            // checkpointing recomputes the copies from the input. Otherwise the tape keeps the copies. It then also
            // keeps an input that is not cheap, because the operation that computed it, such as attention, keeps it.
            let adapted = layers.iter().filter(|layer| self.adapted.contains_key(&key(**layer)));
            let rounded = adapted.map(|layer| positions * layer.base().weight.dims()[1]).sum::<usize>();
            if is_selective {
                self.block.recomputed += rounded;
            } else {
                self.block.kept += rounded;
                if cheap {
                    return;
                }
            }
        } else if !kept.iter().any(|kept| kept.input) {
            return;
        }
        if cheap && is_selective {
            self.block.recomputed += inputs;
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
