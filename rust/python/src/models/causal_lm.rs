//! The Python class `CausalLM`: language models. Most methods compute in `detached`, without the GIL.

use std::sync::{Arc, PoisonError};

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_models::causal_lm::PackedTexts;
use trainable_candle_models::{self as models, Architecture, Loaded};

use super::generation::{Generation, GenerationArguments, KVCache, token_ids};
use super::{Model, class};
use crate::argument::Argument;
use crate::arguments::{FilePath, Integer};
use crate::call::detached;
use crate::device;
use crate::error::Result;
use crate::tensor::Tensor;

const OP: &str = "CausalLM";

/// A language model of the family Llama 2 or 3, Mistral, SmolLM2, Qwen2, Qwen2.5 or Qwen3. It computes the results of
/// transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`. `from_pretrained`
/// loads a model. With `layers=` it loads only the first layers, for use as a text encoder. It loads Qwen2.5-VL as a
/// text encoder, too. A text encoder has no language-model head, so it computes hidden states, but no scores.
///
/// The constructor makes a fresh model with the sizes in a `config.json`. The model's parameters are trainable and f32.
///
/// In shapes, V is the size of the vocabulary, and D is the number of features of a hidden state. A batch has B texts
/// of S tokens each, padding included. Some methods take M texts as one packed row of N tokens instead. It consists of
/// three tensors: `input_ids` has the tokens, one text after the other. `positions` has each token's position in its
/// text, from 0. `cu_seqlens` has M + 1 ascending bounds, from 0 to at most N: text i has the tokens from bound i up
/// to, but not including, bound i + 1. Tokens of a text do not attend to other texts. The tokens from the last bound on
/// are padding.
///
/// ```python
/// lm = tc.models.CausalLM.from_pretrained("llama")
/// tokens = [257, *b"upper: clavo", 256, 258]  # the token "user", the bytes of the text, the tokens "end", "assistant"
/// (answer,) = lm.generate([tokens], max_new_tokens=8)
/// ```
///
/// Args:
///     config: the path of the `config.json`.
///     device: the device of the parameters.
///
/// Raises:
///     MissingFileError, ConfigError: if the configuration is missing or belongs to another model.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the parameters do not fit.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct CausalLM(Arc<models::CausalLM>);

// Defines `CausalLM::CLASS`, the entry of this class in the table of models.
class!(CausalLM);

#[pymethods]
impl CausalLM {
    #[new]
    #[pyo3(signature = (config, device="cpu"))]
    fn new(py: Python<'_>, config: FilePath, device: &str) -> Result<PyClassInitializer<Self>> {
        let path = config.named(OP, "config")?;
        let device = device::parse(device)?;
        let model = detached(py, || {
            let config = models::CausalLM::config_at(Some(&path))?;
            models::CausalLM::fresh(config, &device)
        })?;
        let model = Arc::new(model);
        Ok(PyClassInitializer::from(Model::new(Loaded::new(model.clone()))).add_subclass(Self(model)))
    }

    /// Compute, for each token of `input_ids`, the scores (logits) of the token that follows it: (B, S, V) in the dtype
    /// of the weights.
    ///
    /// Args:
    ///     input_ids: token ids, (B, S), i64 or u32.
    ///     attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding, where the scores are 0.
    ///         Default: no padding.
    ///
    /// Raises:
    ///     ShapeError: if an input has another shape.
    ///     IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
    ///     DTypeError: if an input has another dtype than i64 or u32.
    ///     ArgumentError: if the model is a text encoder.
    #[pyo3(signature = (input_ids, attention_mask=None))]
    fn __call__(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        attention_mask: Option<Argument<PyRef<'_, Tensor>>>,
    ) -> Result<Tensor> {
        let input_ids = input_ids.get(OP, "input_ids")?;
        let mask = attention_mask.map(|mask| mask.get(OP, "attention_mask")).transpose()?;
        let (ids, mask) = (&input_ids.0, mask.as_ref().map(|mask| &mask.0));
        detached(py, || self.0.forward(ids, mask)).map(Tensor)
    }

    /// Compute the mean cross entropy of predicting each label from the tokens before it: a scalar in f32. The matrix
    /// of the scores of all tokens never exists in memory.
    ///
    /// Args:
    ///     input_ids: token ids, (B, S), i64 or u32.
    ///     labels: (B, S), i64: a copy of `input_ids`, with -100 at the tokens to ignore. The label in column s is
    ///         predicted from the tokens up to column s - 1, so labels in the first column and labels that directly
    ///         follow padding are ignored too. The mean is over the labels that are not ignored; if there are none, it
    ///         is 0.
    ///     attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding. Default: no padding.
    ///
    /// Raises:
    ///     ShapeError, DTypeError: if an input does not fit.
    ///     IndexOutOfRangeError: if an id or a label is not a token, or the mask has other values than 0 and 1.
    ///     ArgumentError: if the model is a text encoder.
    #[pyo3(signature = (input_ids, labels, attention_mask=None))]
    fn loss(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        labels: Argument<PyRef<'_, Tensor>>,
        attention_mask: Option<Argument<PyRef<'_, Tensor>>>,
    ) -> Result<Tensor> {
        let (input_ids, labels) = (input_ids.get("loss", "input_ids")?, labels.get("loss", "labels")?);
        let mask = attention_mask.map(|mask| mask.get("loss", "attention_mask")).transpose()?;
        let (ids, labels, mask) = (&input_ids.0, &labels.0, mask.as_ref().map(|mask| &mask.0));
        detached(py, || self.0.loss(ids, labels, mask)).map(Tensor)
    }

    /// Compute the weighted sum of the cross entropies of a packed row's targets: a scalar in f32. The matrix of the
    /// scores of all tokens never exists in memory.
    ///
    /// Args:
    ///     input_ids: token ids, (N,), i64 or u32.
    ///     targets: the target of each token, (N,), i64: the id of the next token in the same text, or -100 to leave
    ///         the token out of the sum.
    ///     positions: the position of each token in its text, (N,), i64 or u32.
    ///     cu_seqlens: the bounds of the texts, (M + 1,), i64 or u32.
    ///     weights: the factor of each token's cross entropy, (N,), f32; default: 1 for all tokens.
    ///
    /// Raises:
    ///     ShapeError, DTypeError: if an input does not fit.
    ///     IndexOutOfRangeError: if an id or a target is not a token, or a bound is out of order or range.
    ///     ArgumentError: if the model is a text encoder.
    ///     NoBackwardError: if `weights` needs a gradient.
    #[pyo3(signature = (input_ids, targets, positions, cu_seqlens, weights=None))]
    fn packed_loss(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        targets: Argument<PyRef<'_, Tensor>>,
        positions: Argument<PyRef<'_, Tensor>>,
        cu_seqlens: Argument<PyRef<'_, Tensor>>,
        weights: Option<Argument<PyRef<'_, Tensor>>>,
    ) -> Result<Tensor> {
        let [ids, positions, bounds] = packed_row([input_ids, positions, cu_seqlens])?;
        let targets = targets.get("packed_loss", "targets")?;
        let weights = weights.map(|weights| weights.get("packed_loss", "weights")).transpose()?;
        let (targets, weights) = (&targets.0, weights.as_ref().map(|weights| &weights.0));
        detached(py, || self.0.packed_loss(&self.0.hidden(&ids, &positions, &bounds)?, targets, weights)).map(Tensor)
    }

    /// Compute the logarithm of the probability of each target of a packed row: (N,) in f32, 0 where the target is
    /// -100. Neither the forward nor the backward pass holds the matrix of the scores of all tokens in memory.
    ///
    /// Args:
    ///     input_ids, targets, positions, cu_seqlens: as for `packed_loss`.
    ///
    /// Raises:
    ///     The errors of `packed_loss` about these arguments and the model.
    fn log_probs(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        targets: Argument<PyRef<'_, Tensor>>,
        positions: Argument<PyRef<'_, Tensor>>,
        cu_seqlens: Argument<PyRef<'_, Tensor>>,
    ) -> Result<Tensor> {
        let [ids, positions, bounds] = packed_row([input_ids, positions, cu_seqlens])?;
        let targets = targets.get("log_probs", "targets")?;
        let targets = &targets.0;
        detached(py, || self.0.log_probs(&self.0.hidden(&ids, &positions, &bounds)?, targets)).map(Tensor)
    }

    /// Compute the hidden states of a packed row after the final norm, (N, D). The language-model head computes the
    /// scores from these states (see `logits`).
    ///
    /// Args:
    ///     input_ids: token ids, (N,), i64 or u32.
    ///     positions: the position of each token in its text, (N,), i64 or u32.
    ///     cu_seqlens: the bounds of the texts, (M + 1,), i64 or u32.
    ///
    /// Raises:
    ///     ShapeError, DTypeError: if an input does not fit.
    ///     IndexOutOfRangeError: if an id is not a token, or a bound is out of order or range.
    ///     ArgumentError: if only a part of the layers was loaded.
    fn hidden(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        positions: Argument<PyRef<'_, Tensor>>,
        cu_seqlens: Argument<PyRef<'_, Tensor>>,
    ) -> Result<Tensor> {
        let [ids, positions, bounds] = packed_row([input_ids, positions, cu_seqlens])?;
        detached(py, || self.0.hidden(&ids, &positions, &bounds)).map(Tensor)
    }

    /// Compute the scores (logits) of the next token, (..., V), from the hidden states (..., D) that `hidden` computed.
    ///
    /// Raises:
    ///     ShapeError, DTypeError: if the last dimension of the states is not D, or their dtype is not that of the
    ///         weights.
    ///     ArgumentError: if the model is a text encoder.
    fn logits(&self, py: Python<'_>, hidden: Argument<PyRef<'_, Tensor>>) -> Result<Tensor> {
        let hidden = hidden.get(OP, "hidden")?;
        let hidden = &hidden.0;
        detached(py, || self.0.logits(hidden)).map(Tensor)
    }

    /// Compute the hidden states with the numbers `layers`. As in transformers, states 0 are the embedded tokens, and
    /// states n are the results of the first n layers. Unlike in transformers, the final norm is not applied to the
    /// last layer's states. Layers whose states are not needed are not computed.
    ///
    /// Args:
    ///     input_ids: token ids, (B, S), i64 or u32.
    ///     attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding, where the states are 0.
    ///         Default: no padding.
    ///     layers: the numbers of the states to return, from 0 to the number of layers that were loaded; default: the
    ///         last layer's.
    ///
    /// Returns:
    ///     (B, S, D) for each of `layers`.
    ///
    /// Raises:
    ///     ShapeError, DTypeError: if an input does not fit.
    ///     IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
    ///     ArgumentError: if a number in `layers` is negative or exceeds the number of layers that were loaded.
    #[pyo3(signature = (input_ids, attention_mask=None, *, layers=None))]
    fn hidden_states(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        attention_mask: Option<Argument<PyRef<'_, Tensor>>>,
        layers: Option<Vec<Integer>>,
    ) -> Result<Vec<Tensor>> {
        const OP: &str = "hidden_states";
        let input_ids = input_ids.get(OP, "input_ids")?;
        let mask = attention_mask.map(|mask| mask.get(OP, "attention_mask")).transpose()?;
        let layers = match layers {
            Some(layers) => layers.into_iter().map(|layer| layer.count(OP, "layers")).collect::<Result<Vec<_>>>()?,
            None => vec![self.0.config().num_hidden_layers],
        };
        let (ids, mask) = (&input_ids.0, mask.as_ref().map(|mask| &mask.0));
        let states = detached(py, || {
            let texts = PackedTexts::new(ids, mask)?;
            let states = self.0.states(&texts.input_ids, &texts.positions, &texts.cu_seqlens, &layers)?;
            states.iter().map(|states| texts.unpack(states)).collect::<tc::Result<Vec<_>>>()
        })?;
        Ok(states.into_iter().map(Tensor).collect())
    }

    /// Generate tokens after each prompt. Returns one list of new tokens for each prompt, without the token that ends
    /// the text.
    ///
    /// Texts do not influence each other and are not padded; their attention keys and values are cached. A drawn token
    /// depends only on the scores, the sampling options, the seed, the index of the text and the token's position in
    /// the text.
    ///
    /// Args:
    ///     prompts: the token ids with which each text begins; every text needs at least one.
    ///     max_new_tokens: the largest number of tokens that are added to each text.
    ///     temperature: a number of at least 0. 0 always chooses the most likely token; otherwise scores are divided by
    ///         the temperature and a token is drawn.
    ///     top_k: draw only from the `top_k` most likely tokens; 0 draws from all.
    ///     top_p: draw only from the smallest set of most likely tokens whose probabilities sum to at least this
    ///         number, above 0 and up to 1.
    ///     min_p: draw only from tokens whose probability is at least `min_p` · the probability of the most likely
    ///         token; 0 to 1.
    ///     repetition_penalty: a number above 0. Numbers above 1 make tokens that are already in the text less likely.
    ///     stop_token_ids: the tokens that end a text; default: `eos_token_ids`.
    ///     seed: the seed of the random draws.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if an id is not a token.
    ///     ArgumentError: if a prompt is empty, if a number is out of range, or if the model is a text encoder.
    ///     NonFiniteError: if one of the model's scores is NaN.
    #[pyo3(signature = (prompts, *, max_new_tokens=Integer::of(128), temperature=Argument::of(0.0), top_k=Integer::of(0),
        top_p=Argument::of(1.0), min_p=Argument::of(0.0), repetition_penalty=Argument::of(1.0), stop_token_ids=None, seed=Integer::of(0)))]
    #[allow(clippy::too_many_arguments)] // each is a parameter in Python
    fn generate(
        &self,
        py: Python<'_>,
        prompts: Vec<Vec<Integer>>,
        max_new_tokens: Integer,
        temperature: Argument<f64>,
        top_k: Integer,
        top_p: Argument<f64>,
        min_p: Argument<f64>,
        repetition_penalty: Argument<f64>,
        stop_token_ids: Option<Vec<Integer>>,
        seed: Integer,
    ) -> Result<Vec<Vec<u32>>> {
        let arguments = GenerationArguments {
            max_new_tokens,
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            stop_token_ids,
            seed,
        };
        let mut added = vec![Vec::new(); prompts.len()];
        let mut generation = arguments.start("generate", prompts, &self.0)?;
        detached(py, || {
            while !generation.is_done() {
                for (tokens, token) in added.iter_mut().zip(generation.step(&self.0)?) {
                    // The token is `None` if the text has ended.
                    tokens.extend(token);
                }
            }
            Ok(added)
        })
    }

    /// Generate tokens as `generate` does, but return an iterator. Each item is a list with one element per text: the
    /// new token, or None if the text has ended.
    ///
    /// Args:
    ///     prompts, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop_token_ids, seed: as for
    ///         `generate`.
    ///
    /// Raises:
    ///     The errors of `generate`. The call itself raises ArgumentError if a prompt is empty or a number is out of
    ///     range, and IndexOutOfRangeError if an id is 2**32 or more; the iterator raises the other errors.
    #[pyo3(signature = (prompts, *, max_new_tokens=Integer::of(128), temperature=Argument::of(0.0), top_k=Integer::of(0),
        top_p=Argument::of(1.0), min_p=Argument::of(0.0), repetition_penalty=Argument::of(1.0), stop_token_ids=None, seed=Integer::of(0)))]
    #[allow(clippy::too_many_arguments)] // each is a parameter in Python
    fn stream(
        &self,
        prompts: Vec<Vec<Integer>>,
        max_new_tokens: Integer,
        temperature: Argument<f64>,
        top_k: Integer,
        top_p: Argument<f64>,
        min_p: Argument<f64>,
        repetition_penalty: Argument<f64>,
        stop_token_ids: Option<Vec<Integer>>,
        seed: Integer,
    ) -> Result<Generation> {
        let arguments = GenerationArguments {
            max_new_tokens,
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            stop_token_ids,
            seed,
        };
        Ok(Generation::new(self.0.clone(), arguments.start("stream", prompts, &self.0)?))
    }

    /// Add tokens to the texts of a cache, and compute the scores of the next token of each text that got tokens. The
    /// result has one row of V scores for each of these texts, in the order of the cache, and no gradient.
    ///
    /// The scores equal those of a forward pass over the whole texts. For a text that grows by one token, the model
    /// usually computes only this token; otherwise it computes all tokens of the text again.
    ///
    /// Args:
    ///     cache: the cache with the texts.
    ///     tokens: the new token ids of each text; an empty list for a text that gets none.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if an id is not a token.
    ///     ArgumentError: if the number of lists in `tokens` is not the number of texts in the cache, if no text gets a
    ///         token, or if the model is a text encoder.
    #[pyo3(signature = (cache, tokens))]
    fn extend(&self, py: Python<'_>, cache: PyRef<'_, KVCache>, tokens: Vec<Vec<Integer>>) -> Result<Tensor> {
        let new_ids = tokens.into_iter().map(|ids| token_ids("extend", "tokens", ids)).collect::<Result<Vec<_>>>()?;
        let cache = &cache.0;
        detached(py, || {
            let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
            self.0.extend(&mut cache, &new_ids.iter().map(Vec::as_slice).collect::<Vec<_>>())
        })
        .map(Tensor)
    }

    /// Compute the hidden states, as in `hidden_states`, of one text and the padding that follows it. Padding tokens
    /// attend to all tokens of the text, but not to padding tokens, as in transformers with an attention mask.
    ///
    /// Args:
    ///     input_ids: token ids, (N,), i64 or u32.
    ///     text_tokens: the number of tokens of the text, 1 to N. The first `text_tokens` tokens of `input_ids` are the
    ///         text; all later tokens are padding.
    ///     layers: the numbers of the states to return, as in `hidden_states`.
    ///
    /// Returns:
    ///     (N, D) for each of `layers`.
    ///
    /// Raises:
    ///     ShapeError, DTypeError: if an input does not fit.
    ///     IndexOutOfRangeError: if an id is not a token.
    ///     ArgumentError: if `text_tokens` is not from 1 to N, or if a number in `layers` is negative or exceeds the
    ///         number of layers that were loaded.
    fn padded_states(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        text_tokens: Integer,
        layers: Vec<Integer>,
    ) -> Result<Vec<Tensor>> {
        const OP: &str = "padded_states";
        let input_ids = input_ids.get(OP, "input_ids")?;
        let text_tokens = text_tokens.count(OP, "text_tokens")?;
        let layers = layers.into_iter().map(|layer| layer.count(OP, "layers")).collect::<Result<Vec<_>>>()?;
        let ids = &input_ids.0;
        let states = detached(py, || self.0.padded_states(ids, text_tokens, &layers))?;
        Ok(states.into_iter().map(Tensor).collect())
    }

    /// The number of rows of the embedding. All token ids are below this number.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.0.config().vocab_size
    }

    /// The largest number of tokens of a text that the model was trained for.
    #[getter]
    fn max_position_embeddings(&self) -> usize {
        self.0.config().max_position_embeddings
    }

    /// The number of layers that were loaded.
    #[getter]
    fn num_hidden_layers(&self) -> usize {
        self.0.config().num_hidden_layers
    }

    /// The tokens that end a text: those of `config.json`, and for a loaded model also those of
    /// `generation_config.json`.
    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.0.config().eos_token_ids.clone()
    }
}

/// The tensors of a packed row, from the arguments `input_ids`, `positions` and `cu_seqlens`. The last are the bounds of
/// the texts.
fn packed_row([ids, positions, bounds]: [Argument<PyRef<'_, Tensor>>; 3]) -> Result<[tc::Tensor; 3]> {
    let tensor = |argument: Argument<PyRef<'_, Tensor>>, name: &str| -> Result<tc::Tensor> {
        Ok(argument.get(OP, name)?.0.clone())
    };
    Ok([tensor(ids, "input_ids")?, tensor(positions, "positions")?, tensor(bounds, "cu_seqlens")?])
}
