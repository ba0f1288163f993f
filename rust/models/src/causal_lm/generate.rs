//! Generation of texts. A text ends at a stop token, or when `max_new_tokens` tokens were added to it.

use trainable_candle_core::interrupt::Interrupt;
use trainable_candle_core::rng::{Purpose, uniform_samples};
use trainable_candle_core::{DType, Device, Error, Result};

use super::OP;
use super::cache::KvCache;
use super::{CausalLM, Sampling};

/// Options of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The largest number of tokens that are added to each text.
    pub max_new_tokens: usize,
    /// How the next token is chosen from the scores of all tokens.
    pub sampling: Sampling,
    /// The ids of stop tokens. A stop token ends a text and is not added to it.
    pub stops: Vec<u32>,
    /// The seed of the random numbers. The random number for a token depends only on the seed, the index of the text
    /// and the index of the token in its text.
    pub seed: u64,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 128, sampling: Sampling::default(), stops: Vec::new(), seed: 0 }
    }
}

/// The generation of several texts. Each step adds at most one token to each text.
pub struct Generation {
    options: GenerateOptions,
    cache: KvCache,
    /// The tokens of each text that are not in `cache` yet: the prompt, or the last chosen token. Empty for texts that
    /// have ended.
    unread: Vec<Vec<u32>>,
    /// The number of tokens added to each text, without the prompt.
    added: Vec<usize>,
    interrupt: Interrupt,
}

impl Generation {
    /// A generation that continues each of `prompts`.
    ///
    /// # Errors
    /// [`Error::Argument`] if a prompt is empty or an option of `options.sampling` is out of range.
    pub fn new(prompts: Vec<Vec<u32>>, options: GenerateOptions) -> Result<Self> {
        options.sampling.check()?;
        if let Some(text) = prompts.iter().position(Vec::is_empty) {
            return Err(Error::argument(OP, format!("prompt {text} is empty; give at least one token")));
        }
        let count = prompts.len();
        let mut generation = Self {
            options,
            cache: KvCache::new(count),
            unread: prompts,
            added: vec![0; count],
            interrupt: Interrupt::new(),
        };
        if generation.options.max_new_tokens == 0 {
            // All texts have ended.
            generation.unread.iter_mut().for_each(Vec::clear);
        }
        Ok(generation)
    }

    /// Whether all texts have ended.
    pub fn is_done(&self) -> bool {
        self.unread.iter().all(Vec::is_empty)
    }

    /// Choose the next token of each text that has not ended. The result has an element for each text: the token, or
    /// `None` for a text that ended before or ends now at a stop token.
    ///
    /// # Errors
    /// As [`CausalLM::extend`] and [`Interrupt::step`]; [`Error::NonFinite`] if a score is NaN.
    pub fn step(&mut self, model: &CausalLM) -> Result<Vec<Option<u32>>> {
        let mut chosen = vec![None; self.unread.len()];
        if self.is_done() {
            return Ok(chosen);
        }
        // Checks from time to time whether the user has interrupted; the argument says how much work a step is.
        self.interrupt.step(self.unread.len().saturating_mul(model.config().vocab_size))?;
        let new: Vec<&[u32]> = self.unread.iter().map(Vec::as_slice).collect();
        // Shape (texts that have not ended, vocab).
        let scores = model.extend(&mut self.cache, &new)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        let vocab = scores.dims()[1];
        let mut scores = scores.reshape(scores.elem_count())?.to_vec::<f32>()?;
        let growing = (0..chosen.len()).filter(|&text| !new[text].is_empty()).collect::<Vec<_>>();
        for (text, scores) in growing.into_iter().zip(scores.chunks_exact_mut(vocab)) {
            let text_tokens = self.cache.tokens(text);
            // The indices of the text and of the token, in one number.
            let index = (text as u64) << 32 | text_tokens.len() as u64;
            let draw = f64::from(uniform_samples(self.options.seed, Purpose::Token, &[index], 1)[0]);
            let token = self.options.sampling.choose(scores, text_tokens, draw)?;
            let unread = &mut self.unread[text];
            unread.clear();
            let is_stop = self.options.stops.contains(&token);
            if !is_stop {
                chosen[text] = Some(token);
                self.added[text] += 1;
            }
            if is_stop || self.added[text] == self.options.max_new_tokens {
                self.cache.release(text);
            } else {
                unread.push(token);
            }
        }
        Ok(chosen)
    }

    /// End the text with the index `text`; later steps add no token to it.
    ///
    /// # Errors
    /// [`Error::Argument`] if `text` is not less than the number of texts.
    pub fn end(&mut self, text: usize) -> Result<()> {
        let count = self.unread.len();
        let Some(unread) = self.unread.get_mut(text) else {
            return Err(Error::argument(
                OP,
                format!("there is no text {text}; expected an index below {count}, the number of texts"),
            ));
        };
        unread.clear();
        self.cache.release(text);
        Ok(())
    }
}

impl CausalLM {
    /// Generate tokens after each of `prompts` until all texts have ended. The result has the generated tokens of each
    /// text, without the prompt and without the stop token.
    ///
    /// # Errors
    /// As [`Generation::new`] and [`Generation::step`].
    pub fn generate(&self, prompts: Vec<Vec<u32>>, options: GenerateOptions) -> Result<Vec<Vec<u32>>> {
        let mut generated = vec![Vec::new(); prompts.len()];
        let mut generation = Generation::new(prompts, options)?;
        while !generation.is_done() {
            for (tokens, token) in generated.iter_mut().zip(generation.step(self)?) {
                // The token is `None` if the text has ended.
                tokens.extend(token);
            }
        }
        Ok(generated)
    }
}
