//! T5's encoder, which computes one state per token from token ids.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::ops::index::embedding;
use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Init, Module, Quantizable, Visitor, Weights};

use super::layers::{EncoderBlock, Norm, stream_dtype};
use super::{T5Config, keys, relative};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Key, Layout};
use crate::registry::{Model, ModelKind};

/// The name of the token embedding.
const EMBEDDING: &str = "shared.weight";
/// The name of the table of biases. All blocks use the first block's table.
const BIASES: &str = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";
/// Added to the scores of masked keys. It is far below any score, and far above the lowest f32. Rounding makes each sum
/// equal to it, so if all keys are masked, they get equal weights, as in transformers.
const MASKED: f32 = -1e30;

/// An encoder with the results of transformers' `T5EncoderModel`. Its results in f16 are finite, although values
/// within its blocks exceed the range of f16; `layers.rs` says how.
pub struct T5Encoder {
    config: T5Config,
    embedding: Tensor,
    /// The bias of each bucket for each head, (buckets, heads).
    biases: Tensor,
    blocks: Blocks<EncoderBlock>,
    final_norm: Norm,
}

impl T5Encoder {
    /// The class in the model's `config.json`.
    pub const CLASS_NAME: &'static str = "T5EncoderModel";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong or the weights belong to another model.
    pub fn new(config: T5Config, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let table = (config.relative_attention_num_buckets, config.num_heads);
        Ok(Self {
            embedding: weights.get(EMBEDDING, (config.vocab_size, config.d_model), Init::Normal(1.0))?,
            biases: weights.get(BIASES, table, Init::Normal((config.d_model as f64).sqrt().recip()))?,
            blocks: (0..config.num_layers)
                .map(|i| EncoderBlock::new(&config, &mut weights.pp(&format!("encoder.block.{i}"))))
                .collect::<Result<_>>()?,
            final_norm: Norm::new("encoder.final_layer_norm", &config, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &T5Config {
        &self.config
    }

    /// The last block's states after the final norm for `input_ids (B, L)` (i64 or u32), L at least 1: (B, L,
    /// `d_model`) in the dtype of the weights. Each token attends to all tokens or, with `attention_mask (B, L)` (i64
    /// or u32), to those where the mask is 1. The mask has the values 0 and 1.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input has another shape, [`Error::Index`] if an id is not in the vocabulary or a value of
    /// the mask is neither 0 nor 1, [`Error::DType`] if an input does not have integers.
    pub fn forward(&self, input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Tensor> {
        let length = match *input_ids.dims() {
            [_, length] if length > 0 => length,
            ref dims => {
                let text = format!("input_ids has shape {dims:?}, expected (B, L) with L 1 or more");
                return Err(Error::shape(Self::CLASS_NAME, text));
            }
        };
        // (1, heads, L, L); with a mask (B, heads, L, L).
        let bias = relative::bias(&self.config, &self.biases, length)?;
        let bias = match attention_mask {
            Some(mask) => bias.add(&mask_bias(mask, input_ids)?)?,
            None => bias,
        };
        // Values between the blocks are in f32 even if the weights are in f16.
        let x = embedding(&self.embedding, input_ids)?.to_dtype(stream_dtype(self.embedding.dtype()))?;
        let x = self.blocks.run(&x, &[&bias], |block, x, conditions| block.forward(x, &conditions[0]))?;
        self.final_norm.forward(&x)
    }
}

/// The biases that a mask (B, L) adds to the scores of all heads and queries: (B, 1, 1, L) in f32.
fn mask_bias(mask: &Tensor, input_ids: &Tensor) -> Result<Tensor> {
    if mask.dims() != input_ids.dims() {
        return Err(Error::shape(
            T5Encoder::CLASS_NAME,
            format!("attention_mask has shape {:?}, expected {:?} like input_ids", mask.dims(), input_ids.dims()),
        ));
    }
    // The lookup rejects a mask of other numbers than 0 and 1.
    let table = Tensor::from_vec(vec![MASKED, 0.0], (2, 1), mask.device())?;
    embedding(&table, mask)?.reshape((mask.dims()[0], 1, 1, mask.dims()[1]))
}

impl Module for T5Encoder {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.tensor(EMBEDDING, &self.embedding)?;
        visitor.tensor(BIASES, &self.biases)?;
        visitor.blocks("encoder.block", &self.blocks)?;
        visitor.module("encoder.final_layer_norm", &self.final_norm)
    }
}

impl Architecture for T5Encoder {
    type Config = T5Config;

    const KIND: &'static ModelKind = &super::KIND;

    // All linear layers of the blocks, and nothing else.
    const QUANTIZABLE: Quantizable = Quantizable { blocks: &["encoder.block."], ..Quantizable::NOTHING };

    fn build(config: T5Config, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<T5Config>) -> Result<T5Config> {
        keys::deduce(files, original, known)
    }

    // Without `original`, the layout of the model's own folder.
    fn parameter_layout(
        _config: &T5Config,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original)
    }
}

impl Model for T5Encoder {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.embedding.dtype()
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    /// Other tools use transformers' names of the layers, which are also this library's.
    fn original_names(&self) -> OriginalNames {
        Arc::new(|layer| Some(Key::plain(layer)))
    }
}
