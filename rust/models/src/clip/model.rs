//! CLIP's text encoder. It computes a hidden state for each token of a text, and a pooled state for the whole text.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::ops::index::embedding;
use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Init, LayerNorm, Linear, Module, Quantizable, Visitor, Weights};

use super::layers::EncoderLayer;
use super::{CLIPTextConfig, keys};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Key, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// A text encoder that computes the same as transformers' `CLIPTextModel` or `CLIPTextModelWithProjection`. The names
/// of its parameters, except the projection's, begin with `text_model.`, as in the published files.
pub struct CLIPTextModel {
    config: CLIPTextConfig,
    token_embedding: Tensor,
    position_embedding: Tensor,
    layers: Blocks<EncoderLayer>,
    final_layer_norm: LayerNorm,
    text_projection: Option<Linear<Tensor>>,
}

/// An `eos_token_id` that older configurations have although no end token has this id. If a configuration has this
/// value, the end token of a text is the token whose id is the largest in the text.
const LEGACY_END: u32 = 2;

/// The text encoder's results for B texts of S tokens. D is the hidden size.
#[derive(Clone)]
pub struct TextFeatures {
    /// The hidden states after the embedding and after each layer, before the final norm: one more tensor than there
    /// are layers, (B, S, D) each.
    pub hidden_states: Vec<Tensor>,
    /// The hidden states after the last layer and the final norm, (B, S, D).
    pub last_hidden_state: Tensor,
    /// The pooled states. Without a projection, these are the end tokens' states in `last_hidden_state`, (B, D). A
    /// projection maps these states to P = `projection_dim` features, (B, P).
    pub pooled: Tensor,
}

impl TextFeatures {
    /// The hidden states that the last layer reads. SDXL's denoiser reads these states too.
    ///
    /// # Errors
    /// As [`skipped`](Self::skipped).
    pub fn penultimate(&self) -> Result<&Tensor> {
        self.skipped(0)
    }

    /// The hidden states `clip_skip` layers before [`penultimate`](Self::penultimate). diffusers' SDXL pipelines count
    /// in the same way.
    ///
    /// # Errors
    /// [`Error::Argument`] if `clip_skip` is not less than the number of layers.
    pub fn skipped(&self, clip_skip: usize) -> Result<&Tensor> {
        let count = self.hidden_states.len();
        let index = count.checked_sub(clip_skip.saturating_add(2));
        index.and_then(|index| self.hidden_states.get(index)).ok_or_else(|| {
            let most = count.saturating_sub(2);
            Error::argument("CLIPTextModel", format!("clip_skip is {clip_skip}, expected 0 to {most} for this model"))
        })
    }
}

impl CLIPTextModel {
    /// The class name in the `config.json` of a text encoder without a projection.
    pub const CLASS_NAME: &'static str = "CLIPTextModel";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong; as [`Weights::get`].
    pub fn new(config: CLIPTextConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let dim = config.hidden_size;
        let mut inner = weights.pp("text_model");
        let init = Init::Normal(0.02);
        let token_embedding = inner.get("embeddings.token_embedding.weight", (config.vocab_size, dim), init)?;
        Ok(Self {
            token_embedding,
            position_embedding: inner.get(
                "embeddings.position_embedding.weight",
                (config.max_position_embeddings, dim),
                init,
            )?,
            layers: (0..config.num_hidden_layers)
                .map(|i| EncoderLayer::new(&config, &mut inner.pp(&format!("encoder.layers.{i}"))))
                .collect::<Result<_>>()?,
            final_layer_norm: inner.layer_norm("final_layer_norm", dim, config.layer_norm_eps)?,
            text_projection: config
                .projection_dim
                .map(|width| {
                    let has_bias = false;
                    weights.linear("text_projection", dim, width, has_bias)
                })
                .transpose()?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &CLIPTextConfig {
        &self.config
    }

    /// The features of the texts `input_ids (B, S)` (i64 or u32), with S from 1 to `max_position_embeddings`. Each
    /// token attends to itself and to earlier tokens. The results have the dtype of the weights.
    ///
    /// # Errors
    /// [`Error::Shape`] if the ids have another shape or S is out of range, [`Error::Index`] if an id is negative or
    /// not less than the vocabulary's size, [`Error::DType`] if the ids are neither i64 nor u32, [`Error::Device`] if
    /// the ids are on another device.
    pub fn forward(&self, input_ids: &Tensor) -> Result<TextFeatures> {
        let longest = self.config.max_position_embeddings;
        let &[_, length] = input_ids.dims() else {
            return Err(Error::shape(
                Self::CLASS_NAME,
                format!("input_ids has shape {:?}, expected (B, S)", input_ids.dims()),
            ));
        };
        if !(1..=longest).contains(&length) {
            return Err(Error::shape(
                Self::CLASS_NAME,
                format!("input_ids has {length} tokens, expected 1 to {longest}; split longer texts"),
            ));
        }
        let positions = self.position_embedding.narrow(0, 0, length)?;
        let mut x = embedding(&self.token_embedding, input_ids)?.add(&positions)?;
        let mut hidden_states = vec![x.clone()];
        for index in 0..self.layers.len() {
            x = self.layers.run_one(index, &[&x], |layer, inputs| layer.forward(&inputs[0]))?;
            hidden_states.push(x.clone());
        }
        let last_hidden_state = self.final_layer_norm.forward(&x)?;
        let end_states = self.end_states(&last_hidden_state, input_ids)?;
        let pooled = match &self.text_projection {
            Some(projection) => projection.forward(&end_states)?,
            None => end_states,
        };
        Ok(TextFeatures { hidden_states, last_hidden_state, pooled })
    }

    /// The states (B, D) of the texts' end tokens, from the states of all tokens, `states (B, S, D)`. As in
    /// transformers, the first token stands for the end token of a text that has none.
    fn end_states(&self, states: &Tensor, input_ids: &Tensor) -> Result<Tensor> {
        let scores = match self.config.eos_token_id {
            LEGACY_END => input_ids.clone(),
            end_id => input_ids.eq(&Tensor::full(f64::from(end_id), (), input_ids.dtype(), input_ids.device())?)?,
        };
        // A text may have several end tokens, because some tokenizers pad texts with them. The first one counts: of
        // equal scores, argmax returns the index of the first. f32 represents every id exactly.
        let keepdim = true;
        let positions = scores.to_dtype(DType::F32)?.argmax(1, keepdim)?;
        let (batch, dim) = (states.dims()[0], states.dims()[2]);
        let positions = positions.unsqueeze(2)?.broadcast_as((batch, 1, dim))?.contiguous()?;
        states.gather(&positions, 1)?.squeeze(1)
    }
}

impl Module for CLIPTextModel {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.tensor("text_model.embeddings.token_embedding.weight", &self.token_embedding)?;
        visitor.tensor("text_model.embeddings.position_embedding.weight", &self.position_embedding)?;
        visitor.blocks("text_model.encoder.layers", &self.layers)?;
        visitor.module("text_model.final_layer_norm", &self.final_layer_norm)?;
        match &self.text_projection {
            Some(projection) => visitor.linear("text_projection", projection),
            None => Ok(()),
        }
    }
}

impl Architecture for CLIPTextModel {
    type Config = CLIPTextConfig;

    const KIND: &'static ModelKind = &super::KIND;

    // All linear layers of the blocks, and no others.
    const QUANTIZABLE: Quantizable = Quantizable { blocks: &["text_model.encoder.layers."], ..Quantizable::NOTHING };

    fn build(config: CLIPTextConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<CLIPTextConfig>) -> Result<CLIPTextConfig> {
        keys::deduce(files, original, known)
    }

    fn parameter_layout(
        _config: &CLIPTextConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original)
    }
}

impl Model for CLIPTextModel {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn class_name(&self) -> &'static str {
        if self.text_projection.is_some() { super::PROJECTING_CLASS_NAME } else { Self::CLASS_NAME }
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.token_embedding.dtype()
    }

    /// Adds to `saved`, an estimate of memory, what the tape keeps of a forward pass of one sample.
    fn saved(&self, size: SampleSize, saved: &mut Saved) {
        saved.each(&self.layers, |layer, saved| layer.saved(size.tokens, saved));
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    /// Other tools use transformers' names of the layers, which are also the names in this library.
    fn original_names(&self) -> OriginalNames {
        Arc::new(|layer| Some(Key::plain(layer)))
    }
}
