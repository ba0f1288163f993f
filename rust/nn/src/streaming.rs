//! [`Streaming`]: which weights of a model are streamed. Streamed weights are kept in the memory of the host, or split
//! into slices, one on each device of a machine. Before each use, they are copied to the device that computes. They are
//! chosen before the model is built.
//!
//! The weights of a block that are copied together are a [`Unit`]. A [`Ring`] has two slots in the memory of the
//! device, and copies its units to them in turn. A model has up to two rings: one for the weights that blocks use while
//! they run, and one for the weights that compute the modulation of a block before the block runs. A block's unit in a
//! ring is its [`Turn`]. (Modulation: the shifts, scales and gates that a block gets from the timestep.)

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use trainable_candle_core::streaming::{Ring, Sharing, Streamed, Unit};
use trainable_candle_core::{Device, Error, Result, Tensor, Weight};

use crate::quantization::Quantizable;
use crate::{Layer, Module, Part, Visitor};

/// Which weights of a model are streamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// The number of blocks whose linear layers are streamed.
    pub blocks: usize,
    /// Whether the layers that compute the modulation of a block are streamed for all blocks. If false, they are
    /// streamed only for the [`blocks`](Self::blocks) above.
    pub modulation: bool,
}

impl StreamOptions {
    /// Whether there is nothing to stream.
    pub fn is_none(self) -> bool {
        self == Self::default()
    }
}

/// The streamed weights of a model, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamedBytes {
    /// Streamed weights, without those that compute the modulation.
    pub blocks: usize,
    /// Streamed weights that compute the modulation of blocks.
    pub modulation: usize,
    /// The slots of the rings, in the memory of the device.
    pub slots: usize,
}

/// The units of one [`Ring`], one for each streamed block.
#[derive(Default)]
struct Units {
    /// The index of each block's unit, by the block's name, such as `blocks.3`.
    blocks: HashMap<String, usize>,
    units: Vec<Unit>,
}

impl Units {
    fn new(blocks: impl Iterator<Item = String>) -> Self {
        let blocks: HashMap<String, usize> = blocks.enumerate().map(|(unit, name)| (name, unit)).collect();
        Self { units: (0..blocks.len()).map(Unit::new).collect(), blocks }
    }

    /// The streamed blocks among the `count` blocks `name.0`, `name.1`, …: the index of each block and of its unit.
    fn of(&self, name: &str, count: usize) -> Vec<(usize, usize)> {
        let unit = |index: usize| Some((index, *self.blocks.get(&format!("{name}.{index}"))?));
        (0..count).filter_map(unit).collect()
    }
}

/// How a model is streamed: which weights of linear layers in blocks are streamed, and the unit of each of these
/// weights. All other parameters, such as norms and biases, stay on the device. See
/// [`streaming`](trainable_candle_core::streaming).
pub struct Streaming {
    device: Device,
    /// Says which layers are in blocks, and which of them compute the modulation. A linear layer in a block can be
    /// streamed if it can be quantized.
    layers: Quantizable,
    /// The units of the weights that blocks use while they run, without those for the modulation.
    block_units: Units,
    /// The units of the weights that compute the modulation of a block, before the block runs.
    modulation_units: Units,
    /// The processes that load the model together with this process, if there are any.
    sharing: Option<Arc<Sharing>>,
}

impl Streaming {
    /// Chooses the blocks of a model to stream. The streamed blocks are spread evenly over all blocks, so that a unit
    /// is copied while the device computes the blocks before it. `shapes` is the model with shapes but no values.
    /// `layers` says which layers are in blocks, and which of them compute the modulation. If [`Sharing::set`] was
    /// called on this thread, the processes that load the model together share one copy of the weights.
    ///
    /// # Errors
    /// [`Error::Argument`] if fewer blocks can be streamed than `options` asks for, or if the modulation is to be
    /// streamed but the model has no separate layers for it.
    pub fn new(shapes: &dyn Module, layers: Quantizable, options: StreamOptions, device: &Device) -> Result<Self> {
        let (names, count) = (block_names(shapes, &layers), options.blocks);
        let most = names.len();
        if count > most {
            let message =
                format!("found {count} blocks to stream, expected at most {most}, the number that can be streamed");
            return Err(Error::argument("stream_blocks", message));
        }
        if options.modulation && layers.modulation.is_empty() {
            let message =
                "the model has no separate layers for the modulation of blocks; stream whole blocks (stream_blocks)";
            return Err(Error::argument("stream_modulation", message));
        }
        // The quotient index · count / most, rounded down, rises from 0 to `count` in steps of 1, spread evenly. A
        // block is streamed if the quotient rises from its index to the next.
        let is_streamed = |index: usize| (index + 1) * count / most > index * count / most;
        let chosen = |all_blocks: bool| {
            let numbered = names.iter().enumerate();
            numbered.filter(move |(index, _)| all_blocks || is_streamed(*index)).map(|(_, name)| name.clone())
        };
        let modulation_units =
            if layers.modulation.is_empty() { Units::default() } else { Units::new(chosen(options.modulation)) };
        let block_units = Units::new(chosen(/* all_blocks: */ false));
        Ok(Self { device: device.clone(), layers, block_units, modulation_units, sharing: Sharing::current() })
    }

    /// The number of blocks of a model that can be streamed.
    pub fn blocks(model: &dyn Module, layers: &Quantizable) -> usize {
        block_names(model, layers).len()
    }

    /// Where the weight of the linear layer `layer` is streamed: the units of the weight's ring, and the index of the
    /// weight's unit among them. None if the weight is not streamed.
    fn place(&self, layer: &str) -> Option<(&Units, usize)> {
        if !self.layers.has(layer) {
            return None;
        }
        let units = if self.layers.is_modulation(layer) { &self.modulation_units } else { &self.block_units };
        let prefixes = layer.match_indices('.').map(|(end, _)| &layer[..end]);
        prefixes.filter_map(|prefix| units.blocks.get(prefix)).next().map(|unit| (units, *unit))
    }

    /// The unit of the linear layer `layer`, if its weight is streamed.
    pub(crate) fn unit(&self, layer: &str) -> Option<&Unit> {
        self.place(layer).map(|(units, unit)| &units.units[unit])
    }

    /// Turns a weight on the CPU into a streamed weight of `unit`.
    pub(crate) fn weight(&self, unit: &Unit, weight: Weight) -> Result<Weight> {
        let weight = match &self.sharing {
            Some(sharing) => unit.share(weight, sharing)?,
            None => weight,
        };
        Ok(Weight::Streamed(Streamed::new(weight, &self.device, unit)?))
    }

    /// The sizes of the streamed weights and of the slots. `layers` yields the name of each layer and the bytes of its
    /// weight.
    pub fn bytes<'a>(&self, layers: impl Iterator<Item = (&'a str, usize)>) -> StreamedBytes {
        // For each ring, the bytes of each unit. Ring 0 has the units in `block_units`, ring 1 those in
        // `modulation_units`.
        let mut sizes = [vec![0; self.block_units.units.len()], vec![0; self.modulation_units.units.len()]];
        for (layer, bytes) in layers {
            if let Some((units, unit)) = self.place(layer) {
                let ring = usize::from(std::ptr::eq(units, &raw const self.modulation_units));
                sizes[ring][unit] += bytes;
            }
        }
        // A ring has two slots, one for the units with even indices and one for those with odd indices. A slot is as
        // large as its largest unit.
        let slot = |sizes: &[usize], parity: usize| sizes.iter().skip(parity).step_by(2).max().copied().unwrap_or(0);
        let [blocks, modulation] = [0, 1].map(|ring| sizes[ring].iter().sum());
        StreamedBytes { blocks, modulation, slots: sizes.iter().map(|sizes| slot(sizes, 0) + slot(sizes, 1)).sum() }
    }

    /// Starts to stream the weights of `model`, after the model is built: makes the rings, and tells each streamed
    /// block which unit it has in each ring.
    ///
    /// # Errors
    /// As [`Ring::new`].
    pub fn start(&self, model: &dyn Module) -> Result<()> {
        let ring = |units: &Units| match units.units.as_slice() {
            [] => Ok(None),
            units => Ring::new(&self.device, units, self.sharing.as_deref()).map(Some),
        };
        let (block_ring, modulation_ring) = (ring(&self.block_units)?, ring(&self.modulation_units)?);
        model.visit(&mut Visitor::new(&mut |part| {
            if let Part::Blocks { name, state, count } = part {
                let turns = |ring: &Option<Arc<Ring>>, units: &Units| {
                    ring.as_ref().map_or_else(HashMap::new, |ring| Turn::each(ring, units.of(&name, count)))
                };
                state.stream(turns(&block_ring, &self.block_units), turns(&modulation_ring, &self.modulation_units));
            }
            Ok(())
        }))
    }
}

/// The names of the blocks with at least one linear layer that `layers` includes and that does not compute the
/// modulation. The names are in the order in which the model visits the blocks.
fn block_names(model: &dyn Module, layers: &Quantizable) -> Vec<String> {
    let mut names = Vec::new();
    // All prefixes, up to a dot, of the names of such layers.
    let mut prefixes = HashSet::new();
    // The closure returns no error.
    let _ = model.visit(&mut Visitor::new(&mut |part| {
        match part {
            Part::Blocks { name, count, .. } => names.extend((0..count).map(|index| format!("{name}.{index}"))),
            Part::Layer(name, Layer::Linear(_)) if layers.has(&name) && !layers.is_modulation(&name) => {
                prefixes.extend(name.match_indices('.').map(|(end, _)| name[..end].to_owned()));
            }
            Part::Layer(..) | Part::Tensor(..) | Part::Matrix(..) => {}
        }
        Ok(())
    }));
    names.retain(|name| prefixes.contains(name));
    names
}

/// The unit of one block in a ring; the block calls [`enter`](Self::enter) before it runs.
#[derive(Clone)]
pub(crate) struct Turn {
    ring: Arc<Ring>,
    unit: usize,
}

impl Turn {
    /// The turn of each block in `units`, by the index of the block.
    fn each(ring: &Arc<Ring>, units: Vec<(usize, usize)>) -> HashMap<usize, Self> {
        units.into_iter().map(|(block, unit)| (block, Self { ring: ring.clone(), unit })).collect()
    }

    /// Brings the block's weights to the device, before the block runs.
    pub(crate) fn enter(&self) -> Result<()> {
        self.ring.enter(self.unit)
    }

    /// Marks a result of the block, so that the backward pass brings the block's weights to the device again.
    pub(crate) fn reenter(&self, result: Tensor) -> Tensor {
        self.ring.reenter(self.unit, result)
    }
}
