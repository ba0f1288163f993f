//! [`Streaming`]: which weights of a model lie in the memory of the host, decided before it is built.

use std::collections::HashMap;
use std::sync::Arc;

use trainable_candle_core::streaming::{Ring, Streamed, Unit};
use trainable_candle_core::{Device, Error, Result, Tensor, Weight};

use crate::quantization::Quantizable;
use crate::{Module, Part, Visitor};

/// The blocks of a model whose weights of linear layers are copied to the device ahead of their use; see
/// [`streaming`](trainable_candle_core::streaming). All else, such as norms and biases, stays on the device.
pub struct Streaming {
    device: Device,
    layers: Quantizable,
    /// The unit of each block that is streamed, by its name (`blocks.3`).
    blocks: HashMap<String, usize>,
    units: Vec<Unit>,
}

impl Streaming {
    /// Stream `count` blocks of a model, evenly among all of them: what computes between two of them hides copies. `shapes` is the model
    /// without memory, `layers` those of its layers that stand in blocks.
    ///
    /// # Errors
    /// [`Error::Argument`] if the model has fewer blocks.
    pub fn new(shapes: &dyn Module, layers: Quantizable, count: usize, device: &Device) -> Result<Self> {
        let names = blocks(shapes, &layers);
        if count > names.len() {
            let found = names.len();
            let message = format!("found {count} blocks to stream, expected at most {found}: the model has no more");
            return Err(Error::argument("stream_blocks", message));
        }
        let is_streamed = |index: usize| (index + 1) * count / names.len() > index * count / names.len();
        let streamed = names.iter().enumerate().filter(|(index, _)| is_streamed(*index)).map(|(_, name)| name.clone());
        let blocks = streamed.enumerate().map(|(unit, name)| (name, unit)).collect();
        Ok(Self { device: device.clone(), layers, blocks, units: (0..count).map(|_| Unit::default()).collect() })
    }

    /// The unit of the linear layer `layer`, if its weight is streamed.
    pub(crate) fn unit(&self, layer: &str) -> Option<usize> {
        if !self.layers.has(layer) || self.layers.is_modulation(layer) {
            return None;
        }
        let ends = layer.match_indices('.').map(|(end, _)| &layer[..end]);
        ends.filter_map(|block| self.blocks.get(block)).next().copied()
    }

    /// A weight of a unit, which is on the CPU.
    pub(crate) fn weight(&self, unit: usize, weight: Weight) -> Result<Weight> {
        Ok(Weight::Streamed(Streamed::new(weight, &self.device, &self.units[unit])?))
    }

    /// Move the weights of `model`, which is complete, and tell its blocks.
    ///
    /// # Errors
    /// As [`Ring::new`].
    pub fn start(&self, model: &dyn Module) -> Result<()> {
        if self.units.is_empty() {
            return Ok(());
        }
        let ring = Ring::new(&self.device, &self.units)?;
        model.visit(&mut Visitor::new(&mut |part| {
            if let Part::Blocks { name, kept, count } = part {
                let unit = |index: usize| Some((index, *self.blocks.get(&format!("{name}.{index}"))?));
                kept.stream(&ring, (0..count).filter_map(unit).collect());
            }
            Ok(())
        }))
    }
}

/// The names of a model's blocks that have such layers, in the order in which it shows them.
fn blocks(model: &dyn Module, layers: &Quantizable) -> Vec<String> {
    let mut names = Vec::new();
    // The closure returns no error.
    let _ = model.visit(&mut Visitor::new(&mut |part| {
        if let Part::Blocks { name, count, .. } = part
            && layers.blocks.iter().any(|block| format!("{name}.").starts_with(block))
        {
            names.extend((0..count).map(|index| format!("{name}.{index}")));
        }
        Ok(())
    }));
    names
}

/// The number of blocks that can be streamed.
pub fn streamable(model: &dyn Module, layers: &Quantizable) -> usize {
    blocks(model, layers).len()
}

/// A block's place in a ring.
#[derive(Clone)]
pub(crate) struct Turn {
    ring: Arc<Ring>,
    unit: usize,
}

impl Turn {
    pub(crate) const fn new(ring: Arc<Ring>, unit: usize) -> Self {
        Self { ring, unit }
    }

    /// The block runs now.
    pub(crate) fn enter(&self) -> Result<()> {
        self.ring.enter(self.unit)
    }

    /// A result of the block: its backward pass needs the weights again.
    pub(crate) fn reenter(&self, result: Tensor) -> Tensor {
        self.ring.reenter(self.unit, result)
    }
}
