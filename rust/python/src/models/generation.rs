//! The Python classes for generating texts with a language model: `Generation`, and `KVCache`, the attention keys and
//! values of the texts' tokens.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_models as models;
use trainable_candle_models::causal_lm::{self, GenerateOptions, Sampling};

use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, detached};
use crate::error::Result;

/// An iterator that generates several texts. Each iteration chooses the next token of every text that has not ended. It
/// returns a list with one element per text: the new token, or None if the text has ended. The iterator stops when all
/// texts have ended. `CausalLM.stream` makes one.
///
/// ```python
/// lm = tc.models.CausalLM.from_pretrained("llama")
/// for tokens in lm.stream([[257, 104, 105], [257, 97]], max_new_tokens=4):
///     assert len(tokens) == 2
/// ```
#[pyclass(frozen, module = "trainable_candle.models")]
pub struct Generation {
    model: Arc<models::CausalLM>,
    state: Mutex<causal_lm::Generation>,
}

impl Generation {
    pub fn new(model: Arc<models::CausalLM>, state: causal_lm::Generation) -> Self {
        Self { model, state: Mutex::new(state) }
    }
}

#[pymethods]
impl Generation {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<Vec<Option<u32>>>> {
        detached(py, || {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            while !state.is_done() {
                let tokens = state.step(&self.model)?;
                // A step adds no token if all remaining texts end at a stop token. The iterator then stops without an
                // item for this step.
                if tokens.iter().any(Option::is_some) {
                    return Ok(Some(tokens));
                }
            }
            Ok(None)
        })
    }

    /// End the text with the index `text`. The other texts continue.
    ///
    /// Raises:
    ///     ArgumentError: if `text` is negative or not less than the number of texts.
    fn end(&self, text: Integer) -> Result<()> {
        let text = text.count("end", "text")?;
        catch_panics(|| self.state.lock().unwrap_or_else(PoisonError::into_inner).end(text))
    }
}

/// The options of `generate` and `stream`, as they were passed.
pub struct GenerationArguments {
    pub max_new_tokens: Integer,
    pub temperature: Argument<f64>,
    pub top_k: Integer,
    pub top_p: Argument<f64>,
    pub min_p: Argument<f64>,
    pub repetition_penalty: Argument<f64>,
    pub stop_token_ids: Option<Vec<Integer>>,
    pub seed: Integer,
}

impl GenerationArguments {
    /// Make a generation that continues `prompts`. A text ends at any of `stop_token_ids`; by default these are the
    /// model's `eos_token_ids`. `op` is the name of the Python function for error messages.
    ///
    /// # Errors
    /// As [`token_ids`] for the ids; `TypeError` or `ArgumentError` if an option has another type or is out of range;
    /// `ArgumentError` if a prompt is empty.
    pub fn start(
        self,
        op: &'static str,
        prompts: Vec<Vec<Integer>>,
        model: &models::CausalLM,
    ) -> Result<causal_lm::Generation> {
        let options = GenerateOptions {
            max_new_tokens: self.max_new_tokens.count(op, "max_new_tokens")?,
            sampling: Sampling {
                temperature: self.temperature.get(op, "temperature")?,
                top_k: self.top_k.count(op, "top_k")?,
                top_p: self.top_p.get(op, "top_p")?,
                min_p: self.min_p.get(op, "min_p")?,
                repetition_penalty: self.repetition_penalty.get(op, "repetition_penalty")?,
            },
            stops: match self.stop_token_ids {
                Some(ids) => token_ids(op, "stop_token_ids", ids)?,
                None => model.config().eos_token_ids.clone(),
            },
            seed: self.seed.count(op, "seed")? as u64,
        };
        let prompts = prompts.into_iter().map(|ids| token_ids(op, "prompts", ids)).collect::<Result<_>>()?;
        catch_panics(|| causal_lm::Generation::new(prompts, options))
    }
}

/// Convert the token ids that the function `op` got as the argument `name`.
///
/// # Errors
/// `TypeError` if an id is not an integer, `ArgumentError` if it is negative, `IndexOutOfRangeError` if it is 2**32 or
/// more, which no vocabulary contains.
pub fn token_ids(op: &'static str, name: &str, ids: Vec<Integer>) -> Result<Vec<u32>> {
    let token = |id: Integer| {
        let id = id.count(op, name)?;
        let too_large = |_| tc::Error::index(op, format!("the id {id} is not a token; expected an id below 2**32"));
        Ok(u32::try_from(id).map_err(too_large)?)
    };
    ids.into_iter().map(token).collect()
}

/// The texts that `CausalLM.extend` continues, with the attention keys and values of the texts' tokens.
///
/// ```python
/// lm = tc.models.CausalLM.from_pretrained("llama")
/// cache = tc.models.KVCache(1)
/// scores = lm.extend(cache, [[257, 104]])
/// scores = lm.extend(cache, [[105]])  # computes only this token
/// assert cache.tokens(0) == [257, 104, 105]
/// ```
///
/// Args:
///     texts: the number of texts, at least 0.
///
/// Raises:
///     ArgumentError: if `texts` is negative.
#[pyclass(frozen, module = "trainable_candle.models")]
pub struct KVCache(pub Mutex<causal_lm::KvCache>);

#[pymethods]
impl KVCache {
    #[new]
    fn new(texts: Integer) -> Result<Self> {
        Ok(Self(Mutex::new(causal_lm::KvCache::new(texts.count("KVCache", "texts")?))))
    }

    /// Return the token ids of the text with the index `text`.
    ///
    /// Raises:
    ///     ArgumentError: if `text` is negative or not less than the number of texts.
    fn tokens(&self, text: Integer) -> Result<Vec<u32>> {
        let text = text.count("tokens", "text")?;
        let cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if text >= cache.len() {
            let count = cache.len();
            let message = format!("there is no text {text}; expected an index below {count}, the number of texts");
            return Err(tc::Error::argument("tokens", message).into());
        }
        Ok(cache.tokens(text).to_vec())
    }

    fn __len__(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
