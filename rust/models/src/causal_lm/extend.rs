//! Computes the scores of the next token of growing texts. New texts get one forward pass over all their tokens, packed
//! one after another. If a text grows by one token, the forward pass has only that token and uses the cached keys and
//! values.

use trainable_candle_core::ops::attention::{scaled_dot_product_attention, varlen_attention};
use trainable_candle_core::{Device, Error, Result, Tensor, tape::no_grad};

use super::OP;
use super::cache::{Kept, KvCache, Text};
use super::model::CausalLM;

impl CausalLM {
    /// Add the tokens `new[i]` to text i of `cache`, and compute the scores of the next token of each text that got
    /// tokens. The result has the shape (texts that got tokens, vocab), with the texts in the order of `cache`.
    ///
    /// If the cache has the keys and values of all tokens of a text, and the text gets one token, the forward pass has
    /// only this token. Any other text that gets tokens needs a forward pass over all its tokens. In both cases the
    /// scores equal those of a forward pass over the whole text. If the rotary angles depend on the length of the text
    /// (dynamic scaling, `LongRoPE`), every change of the angles needs a forward pass over the whole text. A text's
    /// scores do not depend on the other texts.
    ///
    /// # Errors
    /// [`Error::Argument`] if `new` has another number of texts than `cache`, no text gets a token, or the model has no
    /// language-model head; [`Error::Index`] with an id that is not less than the vocabulary's size.
    pub fn extend(&self, cache: &mut KvCache, new: &[&[u32]]) -> Result<Tensor> {
        let _no_grad = no_grad();
        self.check(cache, new)?;
        let rope = &self.config().rope;
        let mut growing: Vec<(usize, &mut Text)> = Vec::new();
        for (text, tokens) in cache.texts.iter_mut().zip(new).filter(|(_, tokens)| !tokens.is_empty()) {
            text.tokens.extend_from_slice(tokens);
            let stage = rope.stage(text.tokens.len());
            if text.stage != stage || text.known == 0 || text.known + 1 != text.tokens.len() {
                text.forget();
            }
            text.stage = stage;
            growing.push((growing.len(), text));
        }
        let count = growing.len();
        let (whole, steps): (Vec<_>, Vec<_>) = growing.into_iter().partition(|(_, text)| text.known == 0);
        let (mut order, mut states) = (Vec::with_capacity(count), Vec::new());
        for mut group in [whole, steps] {
            // The texts of one call of `decode` share tables of rotary angles. So each text gets a call of its own if
            // the angles depend on the length of the text.
            let together = if rope.follows_length() { 1 } else { group.len().max(1) };
            for texts in group.chunks_mut(together) {
                order.extend(texts.iter().map(|&(place, _)| place));
                let mut texts: Vec<&mut Text> = texts.iter_mut().map(|(_, text)| &mut **text).collect();
                states.push(self.decode(&mut texts)?);
            }
        }
        let states = Tensor::cat(&states.iter().collect::<Vec<_>>(), 0)?;
        if order.is_sorted() {
            return self.logits(&states);
        }
        let mut places = vec![0i64; count];
        for (row, place) in order.into_iter().enumerate() {
            places[place] = row as i64;
        }
        self.logits(&states.index_select(&Tensor::from_vec(places, count, states.device())?, 0)?)
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
            return Err(Error::argument(OP, "no text gets a token; give at least one"));
        }
        let vocab = self.config().vocab_size;
        let wrong = new.iter().flat_map(|tokens| tokens.iter()).find(|&&id| id as usize >= vocab);
        wrong.map_or(Ok(()), |id| {
            Err(Error::index(
                OP,
                format!("the id {id} is not a token; expected an id below {vocab}, the size of the vocabulary"),
            ))
        })
    }

    /// The hidden states of the last token of each text after the last norm, (texts, hidden size). Adds the keys and
    /// values of the new tokens to the cache. The cache has keys and values either for no token of the texts, or for
    /// all tokens of each text except the last.
    fn decode(&self, texts: &mut [&mut Text]) -> Result<Tensor> {
        let device = self.device();
        let row = |values: Vec<i64>| {
            let count = values.len();
            Tensor::from_vec(values, count, device)
        };
        let news: Vec<usize> = texts.iter().map(|text| text.tokens.len() - text.known).collect();
        let whole = texts.iter().all(|text| text.known == 0);
        let ends: Vec<usize> = news.iter().scan(0, |end, new| Some((*end += new, *end).1)).collect();
        let ids = texts.iter().flat_map(|text| &text.tokens[text.known..]).map(|&id| i64::from(id));
        let positions = texts.iter().flat_map(|text| text.known..text.tokens.len()).map(|place| place as i64);
        let bounds = row(std::iter::once(0).chain(ends.iter().copied()).map(|end| end as i64).collect())?;
        let (mut x, [cos, sin]) = self.start(&row(ids.collect())?, &row(positions.collect())?)?;
        for text in texts.iter_mut() {
            // `known` is 0 until all layers are done. After an error, the next call therefore computes the whole text
            // again.
            text.known = 0;
        }
        let config = self.config();
        let (heads, groups) = (config.num_key_value_heads, config.num_attention_heads / config.num_key_value_heads);
        for (index, layer) in self.layers().iter().enumerate() {
            let window = config.windows[index];
            let [q, k, v] = layer.project(&x, [&cos, &sin])?;
            let width = q.dims()[2];
            let mut mixed = Vec::new();
            for (text, (end, new)) in texts.iter_mut().zip(ends.iter().zip(&news)) {
                if text.layers.len() == index {
                    text.layers.push(Kept::new(*new, [heads, width], window, (k.dtype(), device))?);
                }
                let kept = &mut text.layers[index];
                kept.append(&k.narrow(0, end - new, *new)?, &v.narrow(0, end - new, *new)?)?;
                if !whole {
                    // The query heads of a group share one key head. Their queries of the new token attend to the same
                    // keys, so they are computed as the query rows of one attention per key head.
                    let [keys, values] = kept.seen()?;
                    let queries = q.narrow(0, end - 1, 1)?.reshape((heads, groups, width))?;
                    let seen = scaled_dot_product_attention(&queries, &keys, &values, None, false, None)?;
                    mixed.push(seen.reshape((1, heads * groups, width))?);
                }
            }
            let mixed = match whole {
                true => varlen_attention(&q, &k, &v, &bounds, window, None)?,
                false => Tensor::cat(&mixed.iter().collect::<Vec<_>>(), 0)?,
            };
            x = layer.finish(&x, &mixed)?;
        }
        for text in texts.iter_mut() {
            text.known = text.tokens.len();
        }
        let last = row(ends.iter().map(|end| *end as i64 - 1).collect())?;
        self.last_norm(&x.index_select(&last, 0)?)
    }

    fn device(&self) -> &Device {
        self.embedding().device()
    }
}
