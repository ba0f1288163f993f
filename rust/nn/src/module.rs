//! [`Module`]: iteration over the named layers and tensors of a model.

use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::{Result, Tensor, Var, Weight, WeightRef};

use crate::base::Base;
use crate::blocks::{BlockState, Blocks, Checkpointing};
use crate::conv::weight_to_file;
use crate::slot::AdapterSlot;
use crate::{Conv2d, Linear};

/// A layer that adapters can attach to.
#[derive(Clone, Copy)]
pub enum Layer<'a> {
    /// y = x Wᵀ + b.
    Linear(&'a Linear<Tensor>),
    /// A convolution of channels-last images.
    Conv(&'a Conv2d<Tensor>),
}

impl<'a> Layer<'a> {
    /// Return the layer's own parameters and its operation, for adapters.
    pub fn base(self) -> Base<'a> {
        match self {
            Self::Linear(linear) => linear.base(),
            Self::Conv(conv) => conv.base(),
        }
    }

    /// Whether the layer is a convolution.
    pub const fn is_conv(self) -> bool {
        matches!(self, Self::Conv(_))
    }

    pub(crate) const fn slot(self) -> &'a AdapterSlot {
        match self {
            Self::Linear(linear) => linear.slot(),
            Self::Conv(conv) => conv.slot(),
        }
    }

    /// Return the weight that the layer computes with, in the layout of files: for a convolution, (out, in / groups,
    /// kernel height, kernel width). Fails only if a convolution's weight does not have four dimensions.
    fn file_weight(self) -> Result<Weight> {
        match self {
            Self::Linear(linear) => Ok(linear.effective_weight()),
            Self::Conv(conv) => match conv.effective_weight() {
                Weight::Plain(weight) => Ok(weight_to_file(&weight)?.into()),
                // Not reached: weights of convolutions are plain.
                other => Ok(other),
            },
        }
    }
}

/// A model or a component of a model, with named layers and tensors. [`visit`](Self::visit) lists them; adapters,
/// checkpointing, streaming and the other methods of this trait use this list.
pub trait Module {
    /// Pass every [`Part`] of the module to `visitor`.
    ///
    /// # Errors
    /// Those of the visitor.
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()>;

    /// List every layer that adapters can attach to, with its name (`blocks.0.attn.to_q`).
    fn named_layers(&self) -> Vec<(String, Layer<'_>)> {
        let mut layers = Vec::new();
        // `visit` returns no errors but those of the closure, and this closure returns none. The same holds for each
        // `let _` below.
        let _ = self.visit(&mut Visitor::new(&mut |part| {
            if let Part::Layer(name, layer) = part {
                layers.push((name, layer));
            }
            Ok(())
        }));
        layers
    }

    /// List every parameter with its name (`blocks.0.attn.to_q.weight`), in the layout of files. Quantized weights are
    /// dequantized, and the values of streamed weights are gathered; a weight for which this fails is left out.
    /// Parameters of adapters are not in the list, but while an adapter is merged, the weight of its layer is the
    /// merged weight.
    fn named_tensors(&self) -> Vec<(String, Tensor)> {
        let named_values = |(name, weight): (String, Weight)| match weight {
            Weight::Plain(tensor) => Some((name, tensor)),
            other => {
                let values = WeightRef::from(&other).values(other.dtype()).ok()?;
                Some((name, values))
            }
        };
        self.named_weights().into_iter().filter_map(named_values).collect()
    }

    /// Return the tensor with this name in [`named_tensors`](Self::named_tensors); None if there is no parameter of
    /// this name.
    ///
    /// # Errors
    /// As [`WeightRef::values`].
    fn named_tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let mut found: Option<Weight> = None;
        self.visit(&mut Visitor::new(&mut |part| {
            let weight = match part {
                Part::Layer(layer_name, layer) => match name.strip_prefix(&*layer_name) {
                    Some(".weight") => Some(layer.file_weight()?),
                    Some(".bias") => layer.base().bias.map(|bias| bias.clone().into()),
                    _ => None,
                },
                Part::Tensor(own_name, tensor) if own_name == name => Some(tensor.clone().into()),
                Part::Matrix(own_name, weight) if own_name == name => Some(weight.clone()),
                Part::Tensor(..) | Part::Matrix(..) | Part::Blocks { .. } => None,
            };
            found = found.take().or(weight);
            Ok(())
        }))?;
        found.map(|weight| WeightRef::from(&weight).values(weight.dtype())).transpose()
    }

    /// As [`named_tensors`](Self::named_tensors), but quantized weights stay quantized and streamed weights stay
    /// streamed.
    fn named_weights(&self) -> Vec<(String, Weight)> {
        let mut weights = Vec::new();
        // The closure returns no error: convolutions have weights of four dimensions, so `file_weight` does not fail.
        let _ = self.visit(&mut Visitor::new(&mut |part| {
            match part {
                Part::Layer(name, layer) => {
                    weights.push((format!("{name}.weight"), layer.file_weight()?));
                    weights.extend(layer.base().bias.map(|b| (format!("{name}.bias"), b.clone().into())));
                }
                Part::Tensor(name, tensor) => weights.push((name, tensor.clone().into())),
                Part::Matrix(name, weight) => weights.push((name, weight.clone())),
                Part::Blocks { .. } => {}
            }
            Ok(())
        }));
        weights
    }

    /// List every trainable parameter of the module itself with its name; parameters of adapters are not in the list. A
    /// loaded model has no trainable parameters. The weights of convolutions are channels-last, as in memory.
    fn named_vars(&self) -> Vec<(String, Var)> {
        let mut vars = Vec::new();
        let _ = self.visit(&mut Visitor::new(&mut |part| {
            match part {
                Part::Layer(name, layer) => {
                    let base = layer.base();
                    vars.extend(base.weight.tensor().and_then(Var::of).map(|var| (format!("{name}.weight"), var)));
                    vars.extend(base.bias.and_then(Var::of).map(|var| (format!("{name}.bias"), var)));
                }
                Part::Tensor(name, tensor) => vars.extend(Var::of(tensor).map(|var| (name, var))),
                Part::Matrix(name, weight) => vars.extend(weight.tensor().and_then(Var::of).map(|var| (name, var))),
                Part::Blocks { .. } => {}
            }
            Ok(())
        }));
        vars
    }

    /// Set the checkpointing policy of all [`Blocks`] for later forward passes. The policy says which results the
    /// blocks keep from the forward pass to the backward pass. By default, blocks keep all results.
    fn set_checkpointing(&self, policy: Policy) {
        let _ = self.visit(&mut Visitor::new(&mut |part| {
            if let Part::Blocks { state, .. } = part {
                state.set(policy.into());
            }
            Ok(())
        }));
    }

    /// Set the checkpointing policy of the first `count` blocks, in the order of [`visit`](Self::visit), for later
    /// forward passes. The other blocks get [`Policy::Selective`].
    ///
    /// # Errors
    /// As [`Checkpointing::of_first`].
    fn checkpoint_first(&self, count: usize, policy: Policy) -> Result<()> {
        let checkpointing = Checkpointing::of_first(count, policy, self.blocks_to_checkpoint())?;
        let mut start = 0;
        self.visit(&mut Visitor::new(&mut |part| {
            if let Part::Blocks { state, count: len, .. } = part {
                // `after` leaves out the first `start` blocks, those of earlier parts, and numbers the others from 0.
                state.set(checkpointing.after(start));
                start += len;
            }
            Ok(())
        }))
    }

    /// Count all blocks; each of them can have a checkpointing policy.
    fn blocks_to_checkpoint(&self) -> usize {
        let mut total = 0;
        let _ = self.visit(&mut Visitor::new(&mut |part| {
            if let Part::Blocks { count, .. } = part {
                total += count;
            }
            Ok(())
        }));
        total
    }
}

/// A named part of a module, as a [`Visitor`] passes it to its function. Names begin with the names of the enclosing
/// modules.
pub enum Part<'a> {
    /// A layer and its name.
    Layer(String, Layer<'a>),
    /// A parameter that belongs to no layer, and its name.
    Tensor(String, &'a Tensor),
    /// A parameter that belongs to no layer and may be quantized, and its name.
    Matrix(String, &'a Weight),
    /// Repeated blocks. The layers and parameters of the blocks follow as parts of their own.
    Blocks {
        /// The common prefix of the blocks' names: `blocks` for `blocks.0`, `blocks.1` and so on.
        name: String,
        /// The blocks' checkpointing policies and streamed weights.
        state: &'a BlockState,
        /// The number of blocks.
        count: usize,
    },
}

/// Passes the parts of modules to a function, under their full names.
pub struct Visitor<'a, 'f> {
    /// The full name of the current module; empty for the outermost module.
    path: String,
    /// The function.
    see: &'f mut dyn FnMut(Part<'a>) -> Result<()>,
}

impl<'a, 'f> Visitor<'a, 'f> {
    /// Make a visitor that calls `see` with every part.
    pub fn new(see: &'f mut dyn FnMut(Part<'a>) -> Result<()>) -> Self {
        Self { path: String::new(), see }
    }

    fn full_name(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }

    /// Visit the parts of `module` under `name`.
    ///
    /// # Errors
    /// Those of `see`.
    pub fn module(&mut self, name: &str, module: &'a dyn Module) -> Result<()> {
        let inner_path = self.full_name(name);
        let outer_path = std::mem::replace(&mut self.path, inner_path);
        let result = module.visit(self);
        self.path = outer_path;
        result
    }

    /// Visit the parts of all blocks under `<name>.0`, `<name>.1` and so on.
    ///
    /// # Errors
    /// Those of `see`.
    pub fn blocks<B: Module>(&mut self, name: &str, blocks: &'a Blocks<B>) -> Result<()> {
        blocks.visit(name, self)
    }

    /// Visit repeated blocks themselves, without their layers and parameters.
    pub(crate) fn block_state(&mut self, name: &str, state: &'a BlockState, count: usize) -> Result<()> {
        let name = self.full_name(name);
        (self.see)(Part::Blocks { name, state, count })
    }

    /// Visit a linear layer.
    ///
    /// # Errors
    /// Those of `see`.
    pub fn linear(&mut self, name: &str, linear: &'a Linear<Tensor>) -> Result<()> {
        let name = self.full_name(name);
        (self.see)(Part::Layer(name, Layer::Linear(linear)))
    }

    /// Visit a convolution.
    ///
    /// # Errors
    /// Those of `see`.
    pub fn conv(&mut self, name: &str, conv: &'a Conv2d<Tensor>) -> Result<()> {
        let name = self.full_name(name);
        (self.see)(Part::Layer(name, Layer::Conv(conv)))
    }

    /// Visit a parameter that belongs to no layer.
    ///
    /// # Errors
    /// Those of `see`.
    pub fn tensor(&mut self, name: &str, tensor: &'a Tensor) -> Result<()> {
        let name = self.full_name(name);
        (self.see)(Part::Tensor(name, tensor))
    }

    /// Visit a parameter that belongs to no layer and may be quantized.
    ///
    /// # Errors
    /// Those of `see`.
    pub fn matrix(&mut self, name: &str, weight: &'a Weight) -> Result<()> {
        let name = self.full_name(name);
        (self.see)(Part::Matrix(name, weight))
    }
}
