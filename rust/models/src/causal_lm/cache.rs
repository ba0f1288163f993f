//! The cache for generation: the tokens of several texts, and the attention keys and values of these tokens in every
//! layer.

use trainable_candle_core::{DType, Device, Raw, Result, Tensor, compute};

/// The texts that [`CausalLM::extend`](super::CausalLM::extend) continues. For each text, the cache has all tokens and,
/// for each layer, the keys and values of those tokens that the model has already processed.
#[derive(Default)]
pub struct KvCache {
    pub(super) texts: Vec<Text>,
}

impl KvCache {
    /// A cache of `texts` texts without tokens.
    pub fn new(texts: usize) -> Self {
        Self { texts: (0..texts).map(|_| Text::default()).collect() }
    }

    /// The number of texts.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether there are no texts.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// The tokens of the text with the index `text`.
    ///
    /// # Panics
    /// If `text` is not less than the number of texts.
    pub fn tokens(&self, text: usize) -> &[u32] {
        &self.texts[text].tokens
    }

    /// Drop the keys and values of the text with the index `text`, which will not be continued.
    pub(super) fn release(&mut self, text: usize) {
        self.texts[text].forget();
    }
}

/// The cache of one text.
#[derive(Default)]
pub(super) struct Text {
    pub tokens: Vec<u32>,
    /// The number of tokens, from the first, that the model has processed. Their keys and values are in `layers`,
    /// except those that a layer's window has dropped.
    pub known: usize,
    /// The [`Rope::stage`](super::Rope::stage) of the frequencies that the keys in `layers` are rotated with.
    pub stage: usize,
    /// The keys and values of every layer. Empty before the model has processed a token.
    pub layers: Vec<Kept>,
}

impl Text {
    /// Drop the keys and values of the layers.
    pub fn forget(&mut self) {
        self.known = 0;
        self.layers.clear();
    }
}

/// The keys and values of one layer for one text, in two buffers of shape (key heads, capacity in tokens, width of a
/// head). If a layer with a window has full buffers, the tokens that no later query attends to are dropped. The memory
/// of such a layer is therefore bounded, however long the text is.
pub(super) struct Kept {
    keys: Raw,
    values: Raw,
    /// The number of tokens whose keys and values are in the buffers. They are the text's latest processed tokens.
    filled: usize,
    /// The number of tokens that a query attends to, its own included. `None` if a query attends to all earlier tokens.
    window: Option<usize>,
}

/// The least number of free tokens in new buffers.
const ROOM: usize = 64;

impl Kept {
    /// Empty buffers in `dtype` with room for `tokens` + [`ROOM`] tokens.
    pub fn new(
        tokens: usize,
        [heads, width]: [usize; 2],
        window: Option<usize>,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        let [keys, values] = buffers(heads, tokens + ROOM, width, dtype, device)?;
        Ok(Self { keys, values, filled: 0, window })
    }

    /// Add the keys and values of the next tokens. `keys` and `values` have the shape (tokens, key heads, width of a
    /// head).
    pub fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let count = keys.dims()[0];
        if self.filled + count > self.keys.dims()[1] {
            self.make_room(count)?;
        }
        for (buffer, new) in [(&self.keys, keys), (&self.values, values)] {
            compute::copy_into(&buffer.narrow(1, self.filled, count)?, &new.raw().transpose(0, 1)?)?;
        }
        self.filled += count;
        Ok(())
    }

    /// Copy the keys and values that later queries attend to into new buffers, before `count` tokens are added. The
    /// capacity of the new buffers is 2 · (copied tokens + `count`) + [`ROOM`] tokens.
    fn make_room(&mut self, count: usize) -> Result<()> {
        let &[heads, _, width] = self.keys.dims() else { unreachable!("buffers have three dimensions") };
        // The window of the next query includes the query's own key, which is not in the buffers yet. So the query
        // attends to at most `window - 1` of the tokens in the buffers.
        let seen = self.window.map_or(self.filled, |window| self.filled.min(window - 1));
        let capacity = 2 * (seen + count) + ROOM;
        let [keys, values] = buffers(heads, capacity, width, self.keys.dtype(), self.keys.device())?;
        for (old, new) in [(&self.keys, &keys), (&self.values, &values)] {
            if seen > 0 {
                compute::copy_into(&new.narrow(1, 0, seen)?, &old.narrow(1, self.filled - seen, seen)?)?;
            }
        }
        (self.keys, self.values, self.filled) = (keys, values, seen);
        Ok(())
    }

    /// The keys and the values that the query of the last added token attends to, each (key heads, tokens, width of a
    /// head).
    pub fn seen(&self) -> Result<[Tensor; 2]> {
        let count = self.window.map_or(self.filled, |window| self.filled.min(window));
        let part =
            |buffer: &Raw| -> Result<Tensor> { Ok(Tensor::from_raw(&buffer.narrow(1, self.filled - count, count)?)) };
        Ok([part(&self.keys)?, part(&self.values)?])
    }
}

/// Buffers for keys and for values, each (heads, capacity, width), filled with zeros.
fn buffers(heads: usize, capacity: usize, width: usize, dtype: DType, device: &Device) -> Result<[Raw; 2]> {
    let buffer = || Tensor::zeros((heads, capacity, width), dtype, device).map(|tensor| tensor.raw().clone());
    Ok([buffer()?, buffer()?])
}
