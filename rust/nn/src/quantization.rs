//! [`Quantization`]: which linear layers of a model are quantized while it is built.

use trainable_candle_core::quantized::Format;

/// The layers of an architecture that may be quantized. Norms, first and last projections are outside of its blocks and keep their dtype,
/// as convolutions do; so do embeddings that are not among `rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantizable {
    /// What the names of layers in blocks begin with; if empty, nothing is quantized.
    pub blocks: &'static [&'static str],
    /// Parts of the names of layers in blocks that keep their dtype all the same.
    pub kept: &'static [&'static str],
    /// Parts of the names of layers that make a block's modulation, which the model computes outside of the block's run.
    pub modulation: &'static [&'static str],
    /// Matrices outside of blocks whose rows are picked, or which are too large to be dequantized whole: the embedding
    /// and the head of a language model. They take a format that is quantized by rows.
    pub rows: &'static [&'static str],
}

impl Quantizable {
    /// No layer.
    pub const NOTHING: Self = Self { blocks: &[], kept: &[], modulation: &[], rows: &[] };

    /// Whether the layer `name` may be quantized.
    pub fn has(&self, name: &str) -> bool {
        self.blocks.iter().any(|block| name.starts_with(block)) && !self.kept.iter().any(|kept| name.contains(kept))
    }

    /// Whether the layer `name` makes a block's modulation.
    pub fn is_modulation(&self, name: &str) -> bool {
        self.modulation.iter().any(|part| name.contains(part))
    }
}

/// How a model is quantized while it is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// The format of its layers. None: as files have them, some quantized.
    pub format: Option<Format>,
    /// Which layers.
    pub layers: Quantizable,
}

impl Quantization {
    /// None if the matrix `name` is not to be quantized; otherwise its format, where an inner None means that of its
    /// file.
    pub fn of(&self, name: &str) -> Option<Option<Format>> {
        if self.layers.rows.contains(&name) {
            return Some(self.format.map(by_rows));
        }
        self.layers.has(name).then_some(self.format)
    }
}

/// The format of matrices whose rows are picked, if others have `format`.
const fn by_rows(format: Format) -> Format {
    match format {
        Format::Int8 | Format::Fp8 | Format::Nf4 => Format::Int8,
        Format::Ggml(format) => Format::Ggml(format),
    }
}
