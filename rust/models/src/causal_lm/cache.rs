//! The cache for generation: the tokens of several texts, and the attention keys and values of these tokens in every
//! layer.

use trainable_candle_core::{DType, Device, Raw, Result, Tensor, compute};

/// The texts that [`CausalLM::extend`](super::CausalLM::extend) continues. For each text, the cache has all tokens and,
/// for each layer, the keys and values of those processed tokens to which later tokens attend.
#[derive(Default)]
pub struct KvCache {
    pub(super) texts: Vec<Text>,
}

impl KvCache {
    /// A cache of `count` texts without tokens.
    pub fn new(count: usize) -> Self {
        Self { texts: (0..count).map(|_| Text::default()).collect() }
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

    /// Free the memory of the keys and values of the text with the index `text`. The text keeps its tokens, so it can
    /// still be continued ([`Text::forget`]).
    pub(super) fn release(&mut self, text: usize) {
        self.texts[text].forget();
    }
}

/// The cache of one text.
#[derive(Default)]
pub(super) struct Text {
    pub tokens: Vec<u32>,
    /// The model has processed the first `processed` tokens. Their keys and values are in `layers`, except those that a
    /// layer with a window has dropped.
    pub processed: usize,
    /// The [`Rope::stage`](super::Rope::stage) of the frequencies by which the keys in `layers` were rotated. Some
    /// models have other frequencies for longer texts; when the stage changes, all keys must be computed again.
    pub stage: usize,
    /// The keys and values of every layer. Empty before the first forward pass and after [`forget`](Self::forget).
    pub layers: Vec<LayerCache>,
}

impl Text {
    /// Drop the keys and values of the layers. The next forward pass then processes all tokens again.
    pub fn forget(&mut self) {
        self.processed = 0;
        self.layers.clear();
    }
}

/// The keys and values of one layer for one text, in two buffers of shape (key heads, capacity in tokens, width of a
/// head). When the buffers are full, [`append`](Self::append) makes new ones. If the layer has a window, the new
/// buffers lack the tokens to which no later query attends, so their size does not grow with the length of the text.
pub(super) struct LayerCache {
    keys: Raw,
    values: Raw,
    /// The number of tokens whose keys and values are in the buffers. They are the text's latest processed tokens.
    filled: usize,
    /// The number of tokens to which a query attends, its own included. `None` if a query attends to all tokens up to
    /// its own.
    window: Option<usize>,
}

/// New buffers have room for at least this many tokens in addition to those for which they are made.
const ROOM: usize = 64;

impl LayerCache {
    /// Empty buffers in `dtype` on `device` for `heads` key heads of `width` features, with room for `tokens` +
    /// [`ROOM`] tokens.
    pub fn new(
        tokens: usize,
        [heads, width]: [usize; 2],
        window: Option<usize>,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        let [keys, values] = buffers(heads, tokens + ROOM, width, dtype, device)?;
        Ok(Self { keys, values, filled: 0, window })
    }

    /// Add the keys and values of the text's next tokens. `keys` and `values` have the shape (tokens, key heads, width
    /// of a head).
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

    /// Copy the keys and values to which later queries attend into new buffers, before `count` tokens are added. The
    /// new buffers have a capacity of 2 · (copied tokens + `count`) + [`ROOM`] tokens.
    fn make_room(&mut self, count: usize) -> Result<()> {
        let &[heads, _, width] = self.keys.dims() else { unreachable!("buffers have three dimensions") };
        // The window of the next query includes the query's own key, which is not in the buffers yet. So the query
        // attends to at most `window - 1` of the tokens in the buffers.
        let copied = self.window.map_or(self.filled, |window| self.filled.min(window - 1));
        let capacity = 2 * (copied + count) + ROOM;
        let [keys, values] = buffers(heads, capacity, width, self.keys.dtype(), self.keys.device())?;
        for (old, new) in [(&self.keys, &keys), (&self.values, &values)] {
            if copied > 0 {
                compute::copy_into(&new.narrow(1, 0, copied)?, &old.narrow(1, self.filled - copied, copied)?)?;
            }
        }
        (self.keys, self.values, self.filled) = (keys, values, copied);
        Ok(())
    }

    /// The keys and the values to which the query of the last added token attends, each (key heads, tokens, width of a
    /// head).
    pub fn attended(&self) -> Result<[Tensor; 2]> {
        let count = self.window.map_or(self.filled, |window| self.filled.min(window));
        let part =
            |buffer: &Raw| -> Result<Tensor> { Ok(Tensor::from_raw(&buffer.narrow(1, self.filled - count, count)?)) };
        Ok([part(&self.keys)?, part(&self.values)?])
    }
}

/// A buffer for keys and a buffer for values, each (heads, capacity, width), filled with zeros.
fn buffers(heads: usize, capacity: usize, width: usize, dtype: DType, device: &Device) -> Result<[Raw; 2]> {
    let buffer = || Tensor::zeros((heads, capacity, width), dtype, device).map(|tensor| tensor.raw().clone());
    Ok([buffer()?, buffer()?])
}
