//! The decoder: from token ids to hidden states, or to the scores of the next token.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::ops::index::embedding;
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::loss::{IGNORE_INDEX, linear_cross_entropy, linear_log_probs};
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Weight};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Init, Module, Quantizable, RmsNorm, Source, Visitor, Weights};

use super::keys::weight_of;
use super::layers::DecoderLayer;
use super::{CausalLMConfig, OP, PackedTexts, gguf, keys};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Key, Layout, Naming, Pretrained};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// The file in a model's folder with settings for generation.
const GENERATION_CONFIG: &str = "generation_config.json";

/// A language model that computes the same as transformers' class for its family (`LlamaForCausalLM` for Llama). The
/// tokens of all texts are concatenated to one sequence: M texts with N tokens in total. `positions (N)` (i64 or u32)
/// are the tokens' positions for the rotary embedding. `cu_seqlens (M + 1)` (i64 or u32) are the bounds of the texts:
/// text i has the tokens `cu_seqlens[i]` to `cu_seqlens[i + 1] - 1` of the sequence. D is the hidden size, and vocab is
/// the number of tokens of the vocabulary.
pub struct CausalLM {
    config: CausalLMConfig,
    /// The embedding's matrix, (vocab, D).
    embedding: Weight,
    layers: Blocks<DecoderLayer>,
    /// `None` if the model has fewer layers than the files.
    top: Option<Top>,
}

/// The final norm and the language-model head, after the last layer.
struct Top {
    norm: RmsNorm,
    /// The head's matrix (vocab, D). `None` if the head uses the embedding's matrix, or if the model is a text encoder
    /// without a head.
    head: Option<Weight>,
}

impl CausalLM {
    /// A model with the parameters `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the parameters belong to another model.
    pub fn new(config: CausalLMConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let (vocab, dim) = (config.vocab_size, config.hidden_size);
        // The standard deviation is transformers' `initializer_range`.
        let init = Init::Normal(0.02);
        let embedding = weights.matrix(keys::EMBEDDING, (vocab, dim), init)?;
        let layer = |index: usize| {
            let mut weights = weights.pp(&format!("{}.{index}", keys::LAYERS));
            DecoderLayer::new(&config, config.windows[index], &mut weights)
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
        // `is_part`: the model has only the first layers of the files.
        let top = if config.is_part() {
            None
        } else {
            let norm = weights.rms_norm(keys::NORM, dim, config.rms_norm_eps)?;
            let head = config.has_own_head().then(|| weights.matrix(keys::HEAD, (vocab, dim), init));
            Some(Top { norm, head: head.transpose()? })
        };
        Ok(Self { config, embedding, layers, top })
    }

    /// A model with trainable parameters. Their initial values are drawn from the library's generator.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the parameters do not fit on the device.
    pub fn fresh(config: CausalLMConfig, device: &Device) -> Result<Self> {
        Self::new(config, &mut Source::fresh(device).root())
    }

    /// The configuration.
    pub const fn config(&self) -> &CausalLMConfig {
        &self.config
    }

    /// The final norm and the head, or an error if the model has none.
    fn top(&self) -> Result<&Top> {
        self.top.as_ref().ok_or_else(|| {
            let layers = self.config.num_hidden_layers;
            Error::argument(
                OP,
                format!(
                    "there is no final norm and no head: the model was loaded with layers={layers}, so it cannot \
                     compute scores or be saved; load all layers"
                ),
            )
        })
    }

    /// The matrix of the language-model head, (vocab, D). It may be the matrix of the embedding.
    ///
    /// # Errors
    /// [`Error::Argument`] if only a part of the layers was loaded, or if the model is Qwen2.5-VL, which has no head.
    pub fn head(&self) -> Result<&Weight> {
        if self.config.is_vl() {
            let text = "Qwen2.5-VL is loaded as a text encoder, without its head, so it cannot compute scores";
            return Err(Error::argument(OP, text));
        }
        Ok(self.top()?.head.as_ref().unwrap_or(&self.embedding))
    }

    /// The hidden states after the final norm, (N, D), for `input_ids (N)` (i64 or u32). The language-model head
    /// computes the scores from these states.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input has another shape. [`Error::Index`] if an id is not less than the vocabulary's
    /// size, or a bound in `cu_seqlens` is out of order or range. [`Error::DType`] if `input_ids` or `cu_seqlens` is
    /// neither i64 nor u32. [`Error::Argument`] if only a part of the layers was loaded.
    pub fn hidden(&self, input_ids: &Tensor, positions: &Tensor, cu_seqlens: &Tensor) -> Result<Tensor> {
        let top = self.top()?;
        let (x, [cos, sin]) = self.start(input_ids, positions)?;
        // The layers take `conditions`: cos, sin and cu_seqlens.
        let x = self.layers.run(&x, &[&cos, &sin, cu_seqlens], |layer, x, conditions| {
            layer.forward(x, [&conditions[0], &conditions[1], &conditions[2]])
        })?;
        top.norm.forward(&x)
    }

    /// Applies the final norm to `x (..., D)`, a result of the last layer.
    pub(super) fn last_norm(&self, x: &Tensor) -> Result<Tensor> {
        self.top()?.norm.forward(x)
    }

    /// The matrix of the embedding, (vocab, D).
    pub(super) const fn embedding(&self) -> &Weight {
        &self.embedding
    }

    /// The layers, in the order of the forward pass.
    pub(super) const fn layers(&self) -> &Blocks<DecoderLayer> {
        &self.layers
    }

    /// The scores of every token of the vocabulary, (..., vocab), for hidden states `hidden (..., D)` from
    /// [`hidden`](Self::hidden).
    ///
    /// # Errors
    /// As [`head`](Self::head); [`Error::Shape`] if the last dimension of `hidden` is not D, [`Error::DType`] if
    /// `hidden` does not have the dtype of the weights.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(hidden, self.head()?, None)
    }

    /// For each token of `input_ids (B, S)`, the scores of the token that follows it: (B, S, vocab). Where
    /// `attention_mask (B, S)` is 0, the scores are zeros.
    ///
    /// # Errors
    /// As [`PackedTexts::new`], [`hidden`](Self::hidden) and [`head`](Self::head).
    pub fn forward(&self, input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Tensor> {
        let texts = PackedTexts::new(input_ids, attention_mask)?;
        let hidden = self.hidden(&texts.input_ids, &texts.positions, &texts.cu_seqlens)?;
        texts.unpack(&self.logits(&hidden)?)
    }

    /// The mean cross entropy of the labels (B, S), i64 or u32. The label in column s is predicted from the tokens up
    /// to column s - 1. Three sorts of labels do not count: [`IGNORE_INDEX`], labels in the first column, and labels
    /// that directly follow padding. If no label counts, the loss is 0.
    ///
    /// # Errors
    /// As [`PackedTexts::new`], [`PackedTexts::targets`], [`hidden`](Self::hidden) and
    /// [`packed_loss`](Self::packed_loss).
    pub fn loss(&self, input_ids: &Tensor, labels: &Tensor, attention_mask: Option<&Tensor>) -> Result<Tensor> {
        let texts = PackedTexts::new(input_ids, attention_mask)?;
        let (targets, counted) = texts.targets(labels, IGNORE_INDEX)?;
        let hidden = self.hidden(&texts.input_ids, &texts.positions, &texts.cu_seqlens)?;
        self.packed_loss(&hidden, &targets, None)?.mul_scalar(1.0 / counted.max(1) as f64)
    }

    /// The sum, in f32, of `weights[i]` · cross entropy of `targets[i]`, given the hidden states `hidden (N, D)`. A
    /// target is the id of the token to predict, or [`IGNORE_INDEX`]. Without `weights`, all weights are 1. The sum is
    /// computed in parts, so that the matrix of all scores (N, vocab) never exists in memory.
    ///
    /// # Errors
    /// As [`linear_cross_entropy`] and [`head`](Self::head).
    pub fn packed_loss(&self, hidden: &Tensor, targets: &Tensor, weights: Option<&Tensor>) -> Result<Tensor> {
        linear_cross_entropy(hidden, self.head()?, targets, weights)
    }

    /// The logarithms of the probabilities of `targets (N)`, given the hidden states `hidden (N, D)`. The result (N) is
    /// in f32, and 0 where the target is [`IGNORE_INDEX`].
    ///
    /// # Errors
    /// As [`linear_log_probs`] and [`head`](Self::head).
    pub fn log_probs(&self, hidden: &Tensor, targets: &Tensor) -> Result<Tensor> {
        linear_log_probs(hidden, self.head()?, targets)
    }

    /// For each number n in `after`, the hidden states (N, D) after the first n layers, before the final norm. For n =
    /// 0 these are the embedded tokens. Only as many layers as the largest n are computed.
    ///
    /// # Errors
    /// [`Error::Argument`] if a number in `after` exceeds the model's number of layers; for wrong inputs, as
    /// [`hidden`](Self::hidden).
    pub fn states(
        &self,
        input_ids: &Tensor,
        positions: &Tensor,
        cu_seqlens: &Tensor,
        after: &[usize],
    ) -> Result<Vec<Tensor>> {
        self.states_by(input_ids, positions, after, |index, x, [cos, sin]| {
            self.layers.run_one(index, &[x, cos, sin, cu_seqlens], |layer, inputs| {
                let [x, cos, sin, cu_seqlens] = inputs else { unreachable!("four inputs") };
                layer.forward(x, [cos, sin, cu_seqlens])
            })
        })
    }

    /// As [`states`](Self::states), for one text. The first `text_tokens` tokens of `input_ids (N)` are the text, and
    /// the other tokens are padding. Padding tokens attend to the tokens of the text, but not to padding tokens, as in
    /// transformers with an attention mask.
    ///
    /// # Errors
    /// [`Error::Argument`] if `text_tokens` is 0 or larger than N; otherwise as [`states`](Self::states).
    pub fn padded_states(&self, input_ids: &Tensor, text_tokens: usize, after: &[usize]) -> Result<Vec<Tensor>> {
        let (tokens, device) = (input_ids.elem_count(), input_ids.device());
        if text_tokens == 0 || text_tokens > tokens {
            return Err(Error::argument(
                OP,
                format!("text_tokens is {text_tokens}, expected 1 to {tokens}, the number of tokens"),
            ));
        }
        let positions = Tensor::from_vec((0..tokens as i64).collect(), tokens, device)?;
        // `cu_seqlens` of the text alone; the tokens after its last bound are padding.
        let bounds = Tensor::from_vec(vec![0, text_tokens as i64], 2, device)?;
        self.states_by(input_ids, &positions, after, |index, x, [cos, sin]| {
            self.layers.run_one(index, &[x, cos, sin, &bounds], move |layer, inputs| {
                let [x, cos, sin, bounds] = inputs else { unreachable!("four inputs") };
                if text_tokens == tokens {
                    return layer.forward(x, [cos, sin, bounds]);
                }
                layer.forward_padded(x, text_tokens, [cos, sin, bounds])
            })
        })
    }

    /// The hidden states after each number of layers in `after`. `run(i, x, [cos, sin])` computes layer i from the
    /// layer's input `x` and the cosines and sines of the positions' rotary angles.
    fn states_by(
        &self,
        input_ids: &Tensor,
        positions: &Tensor,
        after: &[usize],
        run: impl Fn(usize, &Tensor, [&Tensor; 2]) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let count = self.layers.len();
        if let Some(too_many) = after.iter().find(|&&number| number > count) {
            return Err(Error::argument(
                OP,
                format!("hidden states after {too_many} layers were requested, expected 0 to {count} layers"),
            ));
        }
        let computed = after.iter().copied().max().unwrap_or(0);
        let (x, [cos, sin]) = self.start(input_ids, positions)?;
        let mut states = vec![x];
        for index in 0..computed {
            states.push(run(index, &states[index], [&cos, &sin])?);
        }
        Ok(after.iter().map(|&number| states[number].clone()).collect())
    }

    /// The embedded tokens (N, D), and the cosines and sines of the rotary angles of their positions.
    pub(super) fn start(&self, input_ids: &Tensor, positions: &Tensor) -> Result<(Tensor, [Tensor; 2])> {
        if input_ids.rank() != 1 {
            let text = format!(
                "input_ids has shape {:?}, expected (N), the tokens of all texts in sequence",
                input_ids.dims()
            );
            return Err(Error::shape(OP, text));
        }
        if positions.dims() != input_ids.dims() {
            let (found, expected) = (positions.dims(), input_ids.dims());
            let text = format!("positions have shape {found:?}, expected {expected:?}, the shape of input_ids");
            return Err(Error::shape(OP, text));
        }
        let tables = self.config.rope.tables(positions, self.embedding.device())?;
        Ok((embedding(&self.embedding, input_ids)?, tables))
    }
}

impl Module for CausalLM {
    /// The head is visited as a parameter, not as a layer, so that adapters skip the head, as peft's `all-linear` does.
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.matrix(&weight_of(keys::EMBEDDING), &self.embedding)?;
        visitor.blocks(keys::LAYERS, &self.layers)?;
        let Some(top) = &self.top else { return Ok(()) };
        visitor.module(keys::NORM, &top.norm)?;
        top.head.iter().try_for_each(|head| visitor.matrix(&weight_of(keys::HEAD), head))
    }
}

/// Whether a file uses the names of llama.cpp.
fn is_llama_cpp(original: CheckpointNaming) -> bool {
    original.naming == Naming::LlamaCpp
}

/// The names of the model's parameters in a file of the naming `original`, or in transformers' folder if it is `None`.
fn layout(config: &CausalLMConfig, original: Option<CheckpointNaming>) -> Box<dyn Layout> {
    if original.is_some_and(is_llama_cpp) { gguf::layout(config) } else { keys::layout(config, original) }
}

impl Architecture for CausalLM {
    type Config = CausalLMConfig;

    const KIND: &'static ModelKind = &super::KIND;

    const QUANTIZABLE: Quantizable = Quantizable {
        blocks: &["model.layers."],
        // The embedding and the head, which are dequantized some rows at a time.
        rows: &[keys::EMBEDDING, keys::HEAD],
        ..Quantizable::NOTHING
    };

    fn build(config: CausalLMConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<CausalLMConfig>) -> Result<CausalLMConfig> {
        match files.gguf().filter(|_| is_llama_cpp(original)) {
            Some(file) => gguf::config(file),
            None => keys::deduce(files, original, known),
        }
    }

    fn parameter_layout(
        config: &CausalLMConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        layout(config, original)
    }

    fn load(files: &Pretrained, dtype: Option<DType>, device: &Device) -> Result<Self> {
        let mut config = Self::read_config(files)?;
        if let Some(settings) = files.beside_config(GENERATION_CONFIG)? {
            config.add_eos_tokens(&settings);
        }
        let config = match files.layers() {
            Some(count) => config.first_layers(count)?,
            None => config,
        };
        let names = |_: &WeightFiles| layout(&config, files.original());
        let quantization = Self::quantization("from_pretrained", files.quantize())?;
        files.build(
            names,
            dtype,
            (device, quantization, Self::streaming(&config, files.stream(), device)?),
            |weights| Self::new(config.clone(), weights),
        )
    }
}

impl Model for CausalLM {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn class_name(&self) -> &'static str {
        self.config.class_name()
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.embedding.dtype()
    }

    fn saved(&self, size: SampleSize, saved: &mut Saved) {
        saved.each(&self.layers, |layer, saved| layer.saved(size.tokens, saved));
        // Counts the operations of the scores, the product of the hidden states with the head's matrix, which has the
        // embedding's shape. The tape keeps no scores, because the loss computes them in parts.
        saved.product(self.embedding.dims(), size.tokens);
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    fn require_whole(&self) -> Result<()> {
        self.top()?;
        Ok(())
    }

    /// Other tools use transformers' names of the layers. This library uses the same names.
    fn original_names(&self) -> OriginalNames {
        Arc::new(|layer| Some(Key::plain(layer)))
    }
}
