//! Computes the scores of the next token of growing texts. If a cached text grows by one token, the forward pass has
//! only that token and uses the cached keys and values. Other texts share one forward pass over all their tokens, in
//! which the texts are packed one after another.

use trainable_candle_core::ops::attention::{scaled_dot_product_attention, varlen_attention};
use trainable_candle_core::{Device, Error, Result, Tensor, tape::no_grad};

use super::OP;
use super::cache::{KvCache, LayerCache, Text};
use super::model::CausalLM;

impl CausalLM {
    /// Add the tokens `new[i]` to text i of `cache`, and compute the scores of the next token of each text that got
    /// tokens. The result has the shape (texts that got tokens, vocab), with the texts in the order of `cache`.
    ///
    /// If the cache has the keys and values for all tokens of a text, and the text gets one token, the forward pass has
    /// only this token. Any other text that gets tokens needs a forward pass over all its tokens. So does a text whose
    /// new length changes the rotary angles (with dynamic scaling or `LongRoPE`). In all cases the scores equal those
    /// of a forward pass over the whole text. A text's scores do not depend on the other texts.
    ///
    /// # Errors
    /// [`Error::Argument`] if `new` does not have one list for each text of `cache`, no text gets a token, or the model
    /// has no language-model head; [`Error::Index`] if an id is not less than the vocabulary's size. After these errors
    /// the cache is unchanged.
    pub fn extend(&self, cache: &mut KvCache, new: &[&[u32]]) -> Result<Tensor> {
        let _no_grad = no_grad();
        self.check(cache, new)?;
        let rope = &self.config().rope;
        // The texts that get tokens, each with its row in the result.
        let mut growing: Vec<(usize, &mut Text)> = Vec::new();
        for (text, tokens) in cache.texts.iter_mut().zip(new).filter(|(_, tokens)| !tokens.is_empty()) {
            text.tokens.extend_from_slice(tokens);
            // Identifies the rotary frequencies, which may depend on the length of the text.
            let stage = rope.stage(text.tokens.len());
            // The keys and values are of use only if they are those of all tokens except one, with these frequencies.
            // `processed` is also 0 after an error, which may leave the keys and values of some layers.
            if text.stage != stage || text.processed == 0 || text.processed + 1 != text.tokens.len() {
                text.forget();
            }
            text.stage = stage;
            growing.push((growing.len(), text));
        }
        let count = growing.len();
        let (uncached, cached): (Vec<_>, Vec<_>) = growing.into_iter().partition(|(_, text)| text.processed == 0);
        // The rows of the result, in the order in which `decode` computes them.
        let mut rows = Vec::with_capacity(count);
        let mut states = Vec::new();
        for mut group in [uncached, cached] {
            // The texts of one call of `decode` share tables of rotary angles. So each text gets a call of its own if
            // the angles depend on the length of the text. `chunks_mut` rejects the size 0, also for an empty group.
            let texts_per_call = if rope.follows_length() { 1 } else { group.len().max(1) };
            for texts in group.chunks_mut(texts_per_call) {
                rows.extend(texts.iter().map(|&(row, _)| row));
                let mut texts: Vec<&mut Text> = texts.iter_mut().map(|(_, text)| &mut **text).collect();
                states.push(self.decode(&mut texts)?);
            }
        }
        let states = Tensor::cat(&states.iter().collect::<Vec<_>>(), 0)?;
        if rows.is_sorted() {
            return self.logits(&states);
        }
        // For each row of the result, the index of its hidden state in `states`.
        let mut sources = vec![0i64; count];
        for (source, row) in rows.into_iter().enumerate() {
            sources[row] = source as i64;
        }
        self.logits(&states.index_select(&Tensor::from_vec(sources, count, states.device())?, 0)?)
    }

    /// Check the arguments of [`extend`](Self::extend).
    fn check(&self, cache: &KvCache, new: &[&[u32]]) -> Result<()> {
        self.head()?;
        if cache.len() != new.len() {
            let (texts, lists) = (cache.len(), new.len());
            return Err(Error::argument(
                OP,
                format!("found {lists} lists of tokens for {texts} texts, expected one list for each text"),
            ));
        }
        if new.iter().all(|tokens| tokens.is_empty()) {
            return Err(Error::argument(OP, "no text gets a token; give at least one token"));
        }
        let vocab = self.config().vocab_size;
        let wrong_id = new.iter().flat_map(|tokens| tokens.iter()).find(|&&id| id as usize >= vocab);
        wrong_id.map_or(Ok(()), |id| {
            Err(Error::index(
                OP,
                format!("the id {id} is not a token; expected an id below {vocab}, the size of the vocabulary"),
            ))
        })
    }

    /// Compute the hidden states, after the final norm, of the last token of each text: (texts, hidden size). Adds the
    /// keys and values of the new tokens to the cache. Before the call, the cache has keys and values either for no
    /// token of any of the texts, or for all tokens except the last of each text.
    fn decode(&self, texts: &mut [&mut Text]) -> Result<Tensor> {
        let device = self.device();
        let vector = |values: Vec<i64>| {
            let count = values.len();
            Tensor::from_vec(values, count, device)
        };
        // The number of new tokens of each text, and the end of these tokens in the packed sequence.
        let counts: Vec<usize> = texts.iter().map(|text| text.tokens.len() - text.processed).collect();
        let mut packed = 0;
        let mut ends = Vec::with_capacity(counts.len());
        for &count in &counts {
            packed += count;
            ends.push(packed);
        }
        let are_uncached = texts.iter().all(|text| text.processed == 0);
        let ids = texts.iter().flat_map(|text| &text.tokens[text.processed..]).map(|&id| i64::from(id));
        let positions = texts.iter().flat_map(|text| text.processed..text.tokens.len()).map(|position| position as i64);
        let bounds = vector(std::iter::once(0).chain(ends.iter().copied()).map(|bound| bound as i64).collect())?;
        let (mut x, [cos, sin]) = self.start(&vector(ids.collect())?, &vector(positions.collect())?)?;
        for text in texts.iter_mut() {
            // `processed` is 0 until all layers are done. After an error, the next call therefore computes the whole
            // text again.
            text.processed = 0;
        }
        let config = self.config();
        let kv_heads = config.num_key_value_heads;
        // The number of query heads that share a key head.
        let heads_per_key_head = config.num_attention_heads / kv_heads;
        for (index, layer) in self.layers().iter().enumerate() {
            let window = config.windows[index];
            // Of all packed tokens: (tokens, heads, width of a head).
            let [q, k, v] = layer.project(&x, [&cos, &sin])?;
            let width = q.dims()[2];
            // The result of attention for each text; stays empty if the texts are uncached.
            let mut parts = Vec::new();
            for (text, (end, &count)) in texts.iter_mut().zip(ends.iter().zip(&counts)) {
                if text.layers.len() == index {
                    text.layers.push(LayerCache::new(count, [kv_heads, width], window, (k.dtype(), device))?);
                }
                let layer_cache = &mut text.layers[index];
                layer_cache.append(&k.narrow(0, end - count, count)?, &v.narrow(0, end - count, count)?)?;
                if !are_uncached {
                    // The new token's queries of the heads that share a key head attend to the same keys. So they are
                    // the query rows of one attention for each key head. It has no mask and is not causal, because all
                    // keys are of the new token or of earlier ones; its scale is the default.
                    let [keys, values] = layer_cache.attended()?;
                    let queries = q.narrow(0, end - 1, 1)?.reshape((kv_heads, heads_per_key_head, width))?;
                    let part = scaled_dot_product_attention(&queries, &keys, &values, None, false, None)?;
                    parts.push(part.reshape((1, kv_heads * heads_per_key_head, width))?);
                }
            }
            // The result of attention for all tokens of the pass: (tokens, query heads, width).
            let mixed = match are_uncached {
                true => varlen_attention(&q, &k, &v, &bounds, window, /* scale: */ None)?,
                false => Tensor::cat(&parts.iter().collect::<Vec<_>>(), 0)?,
            };
            x = layer.finish(&x, &mixed)?;
        }
        for text in texts.iter_mut() {
            text.processed = text.tokens.len();
        }
        let last_rows = vector(ends.iter().map(|end| *end as i64 - 1).collect())?;
        self.last_norm(&x.index_select(&last_rows, 0)?)
    }

    fn device(&self) -> &Device {
        self.embedding().device()
    }
}
