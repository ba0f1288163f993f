//! [`Quantization`]: which linear layers of a model are quantized while the model is built.

use trainable_candle_core::quantized::Format;

/// The layers of an architecture that may be quantized. Norms, convolutions, the first and the last projection of a
/// model (outside of its blocks), and embeddings that are not among `rows` keep their dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantizable {
    /// Prefixes of the names of layers in blocks. Of the other layers, only those of `rows` are quantized.
    pub blocks: &'static [&'static str],
    /// Substrings of layer names. A layer in a block keeps its dtype if its name contains one of these substrings.
    pub unquantized: &'static [&'static str],
    /// Substrings of layer names. A layer whose name contains one of these substrings computes a block's modulation
    /// (shifts, scales and gates from the timestep). The model computes the modulation before the block runs, so these
    /// layers are not streamed together with the block.
    pub modulation: &'static [&'static str],
    /// Names of matrices outside of blocks: the embedding of a language model, of which only some rows are dequantized
    /// at a time, and the head, which is too large to be dequantized as a whole. They are quantized to int8 or a ggml
    /// format.
    pub rows: &'static [&'static str],
    /// Substrings of layer names, for models in which all other layers are so small that rounding their inputs takes
    /// more time than the multiplication of 8-bit codes saves. While linear layers multiply codes
    /// ([`set_w8a8`](trainable_candle_core::compute::set_w8a8)), only layers whose names contain one of these
    /// substrings are quantized, and these layers also [keep their codes
    /// transposed](trainable_candle_core::Quantized::with_transposed_codes). An empty list changes nothing.
    pub multiplied: &'static [&'static str],
}

impl Quantizable {
    /// Quantizes no layer. An architecture changes the lists that are not empty for it.
    pub const NOTHING: Self = Self { blocks: &[], unquantized: &[], modulation: &[], rows: &[], multiplied: &[] };

    /// Whether the layer `name` is in a block and may be quantized.
    pub fn has(&self, name: &str) -> bool {
        self.blocks.iter().any(|block| name.starts_with(block))
            && !self.unquantized.iter().any(|part| name.contains(part))
    }

    /// Whether the layer `name` computes a block's modulation.
    pub fn is_modulation(&self, name: &str) -> bool {
        self.modulation.iter().any(|part| name.contains(part))
    }
}

/// How a model is quantized while it is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// The format of the model's `layers`. With None, a layer stays quantized if its file stores it in a format of
    /// ggml; no other layer is quantized.
    pub format: Option<Format>,
    /// The layers that are quantized.
    pub layers: Quantizable,
    /// Whether, of the layers in blocks, only those of [`Quantizable::multiplied`] are quantized, because linear layers
    /// multiply codes.
    is_selective: bool,
}

impl Quantization {
    /// A quantization to `format`. `w8a8` says whether linear layers with 8-bit weights multiply codes.
    pub fn new(format: Option<Format>, layers: Quantizable, w8a8: bool) -> Self {
        let is_selective = w8a8 && !layers.multiplied.is_empty() && matches!(format, Some(Format::Int8 | Format::Fp8));
        Self { format, layers, is_selective }
    }

    /// Whether the quantized layers keep a transposed copy of their codes.
    pub const fn transposes(&self) -> bool {
        self.is_selective
    }

    /// The format of the weight of the layer or matrix `name`; None if the weight is not quantized. `Some(None)` means
    /// that the weight stays quantized if its file stores it in a format of ggml.
    pub fn of(&self, name: &str) -> Option<Option<Format>> {
        if self.layers.rows.contains(&name) {
            return Some(self.format.map(by_rows));
        }
        let is_chosen = !self.is_selective || self.layers.multiplied.iter().any(|part| name.contains(part));
        (is_chosen && self.layers.has(name)).then_some(self.format)
    }
}

/// The format of the matrices in [`Quantizable::rows`] of a model whose layers in blocks have `format`.
const fn by_rows(format: Format) -> Format {
    match format {
        Format::Int8 | Format::Fp8 | Format::Nf4 => Format::Int8,
        Format::Ggml(format) => Format::Ggml(format),
    }
}
