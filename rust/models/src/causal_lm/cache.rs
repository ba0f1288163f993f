//! The cache for generation: the tokens of texts, and the keys and values of every layer.

use trainable_candle_core::{DType, Device, Raw, Result, Tensor, compute};

/// Texts that [`CausalLM::extend`](super::CausalLM::extend) continues: their tokens and, for each layer, the keys and
/// values of the tokens that the model has read.
#[derive(Default)]
pub struct KvCache {
    pub(super) texts: Vec<Text>,
}

impl KvCache {
    /// A cache of this many texts without tokens.
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

    /// The tokens of a text.
    ///
    /// # Panics
    /// If there is no such text.
    pub fn tokens(&self, text: usize) -> &[u32] {
        &self.texts[text].tokens
    }

    /// Drop the keys and values of a text that has ended.
    pub(super) fn release(&mut self, text: usize) {
        self.texts[text].forget();
    }
}

/// The cache of one text.
#[derive(Default)]
pub(super) struct Text {
    pub tokens: Vec<u32>,
    /// The number of tokens whose keys are in the cache.
    pub known: usize,
    /// The [`Rope::stage`](super::Rope::stage) of the frequencies by which these keys are rotated.
    pub stage: usize,
    pub layers: Vec<Kept>,
}

impl Text {
    /// Drop the keys and values of the layers.
    pub fn forget(&mut self) {
        self.known = 0;
        self.layers.clear();
    }
}

/// Keys and values of a layer, each (key heads, capacity, width of a head), of which the first `filled` tokens are
/// valid. When the buffers of a layer with a window are full, they drop the tokens that no later query attends to. So
/// their memory does not grow with the text.
pub(super) struct Kept {
    keys: Raw,
    values: Raw,
    filled: usize,
    window: Option<usize>,
}

/// New buffers have room for at least this many tokens more than they receive.
const ROOM: usize = 64;

impl Kept {
    /// Empty buffers in `dtype` with room for `tokens` tokens and some more.
    pub fn new(
        tokens: usize,
        [heads, width]: [usize; 2],
        window: Option<usize>,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        let [keys, values] = buffers(heads, tokens + ROOM, width, dtype, device)?;
        Ok(Self { keys, values, filled: 0, window })
    }

    /// Add the next tokens' `keys` and `values`, (tokens, key heads, width).
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

    /// Move the keys and values that later queries attend to into new buffers. Their capacity is twice the sum of the
    /// moved tokens and `count`, plus [`ROOM`].
    fn make_room(&mut self, count: usize) -> Result<()> {
        let &[heads, _, width] = self.keys.dims() else { unreachable!("buffers have three dimensions") };
        // The window of the next query includes its own key, which is not stored yet.
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

    /// The keys and values that the query of the last token attends to, each (key heads, tokens, width).
    pub fn seen(&self) -> Result<[Tensor; 2]> {
        let count = self.window.map_or(self.filled, |window| self.filled.min(window));
        let part =
            |buffer: &Raw| -> Result<Tensor> { Ok(Tensor::from_raw(&buffer.narrow(1, self.filled - count, count)?)) };
        Ok([part(&self.keys)?, part(&self.values)?])
    }
}

fn buffers(heads: usize, capacity: usize, width: usize, dtype: DType, device: &Device) -> Result<[Raw; 2]> {
    let buffer = || Tensor::zeros((heads, capacity, width), dtype, device).map(|tensor| tensor.raw().clone());
    Ok([buffer()?, buffer()?])
}
