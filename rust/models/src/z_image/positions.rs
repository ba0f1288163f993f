//! The positions of Z-Image's tokens, and masks of its text tokens. Both are computed on the device, so that a
//! recorded forward pass copies nothing from the host.
//!
//! A position has three coordinates, the axes: time, row and column. All tokens of an image have the same time; the
//! tokens of a text have different times, and row and column 0. Padding of an image is at 0 on every axis.
//!
//! In shapes, B is the batch, L the number of a text's tokens with its padding, and S the number of all tokens: those
//! of the image with its padding, then those of the text.

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::{ZImageConfig, ZImageTransformer};
use crate::layers::joint::{Rope, RopeAxes};

/// Padding makes the number of an image's tokens, and the number of a text's tokens, a multiple of this.
pub(super) const MULTIPLE: usize = 32;

/// Computes the positions of an image's tokens, followed by those of a text's tokens, and masks.
pub(super) struct Positions {
    axes: RopeAxes,
    /// The number of positions along each axis.
    axes_lens: Vec<usize>,
    /// The numbers 0, 1, 2, …, N - 1: (N) in f64.
    numbers: Tensor,
    /// For each of these numbers, the start of its block of 32, the largest multiple of 32 that does not exceed it:
    /// (1, N) in f32.
    starts: Tensor,
}

/// The numbers of tokens of an image and a text.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// Rows of image tokens.
    pub height: usize,
    /// Columns of image tokens.
    pub width: usize,
    /// Tokens of the text with its padding.
    pub text: usize,
}

impl Extent {
    /// Tokens of the image.
    pub const fn area(self) -> usize {
        self.height * self.width
    }

    /// Tokens of the image with its padding.
    pub const fn padded_area(self) -> usize {
        self.area().next_multiple_of(MULTIPLE)
    }
}

impl Positions {
    pub fn new(config: &ZImageConfig, device: &Device) -> Result<Self> {
        let count = config.axes_lens.iter().copied().max().unwrap_or(0).next_multiple_of(MULTIPLE);
        let numbers: Vec<f64> = (0..count).map(|i| i as f64).collect();
        let starts: Vec<f32> = (0..count).map(|i| (i - i % MULTIPLE) as f32).collect();
        Ok(Self {
            axes: RopeAxes::new(&config.axes_dims, config.rope_theta, device)?,
            axes_lens: config.axes_lens.clone(),
            numbers: Tensor::from_vec(numbers, count, &Device::Cpu)?.to_device(device)?,
            starts: Tensor::from_vec(starts, (1, count), &Device::Cpu)?.to_device(device)?,
        })
    }

    /// Checks that there are positions for all tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if an axis has too few positions.
    pub fn check(&self, extent: Extent) -> Result<()> {
        // Along the first axis, padding of the image is at 0, the text begins at 1, and the image follows the text.
        let needed = [extent.text + 2, extent.height, extent.width];
        if needed.iter().zip(&self.axes_lens).all(|(needed, available)| needed <= available) {
            return Ok(());
        }
        let Extent { height, width, text } = extent;
        Err(Error::shape(
            ZImageTransformer::CLASS_NAME,
            format!(
                "{height} x {width} image tokens and {text} text tokens with padding need {needed:?} positions along \
                 the axes, but the model has {:?} (axes_lens)",
                self.axes_lens
            ),
        ))
    }

    /// The angles of all tokens. `shown (B, L)` is the mask of [`shown`](Self::shown); without it, all text tokens are
    /// shown. Along the first axis, the position of the image follows the position of the last shown text token.
    pub fn angles(&self, extent: Extent, shown: Option<&Tensor>) -> Result<Rope> {
        let Some(shown) = shown else {
            // The number text + 1, after the times 1 to text of the text's tokens.
            let image_time = self.numbers.narrow(0, extent.text + 1, 1)?;
            return self.axes.at(&self.ids(extent, &image_time)?);
        };
        let image_times = shown.to_dtype(DType::F64)?.sum(&[1], false)?.add_scalar(1.0)?;
        let sample = |i| self.axes.at(&self.ids(extent, &image_times.narrow(0, i, 1)?)?);
        Rope::stack(&(0..shown.dims()[0]).map(sample).collect::<Result<Vec<_>>>()?)
    }

    /// Positions of all tokens, (S, 3): the image, its padding, the text. `image_time (1)` is the position of the image
    /// along the first axis.
    fn ids(&self, extent: Extent, image_time: &Tensor) -> Result<Tensor> {
        let Extent { height, width, text } = extent;
        let area = extent.area();
        let grid = |numbers: Tensor| numbers.broadcast_as((height, width))?.reshape((area, 1));
        let rows = grid(self.numbers.narrow(0, 0, height)?.unsqueeze(1)?)?;
        let columns = grid(self.numbers.narrow(0, 0, width)?.unsqueeze(0)?)?;
        let image = Tensor::cat(&[&grid(image_time.unsqueeze(0)?)?, &rows, &columns], 1)?;
        let zeros = |tokens: usize, axes: usize| self.numbers.narrow(0, 0, 1)?.broadcast_as((tokens, axes));
        let text_times = self.numbers.narrow(0, 1, text)?.unsqueeze(1)?;
        let caption = Tensor::cat(&[&text_times, &zeros(text, 2)?], 1)?;
        Tensor::cat(&[&image, &zeros(extent.padded_area() - area, 3)?, &caption], 0)
    }

    /// A mask (B, L, 1), u8: 1 for a text's own tokens and 0 for its padding. The texts have `lengths (B)` tokens
    /// without their padding, and L = `text` tokens with it.
    pub fn own_tokens(&self, lengths: &Tensor, text: usize) -> Result<Tensor> {
        let numbers = self.numbers.narrow(0, 0, text)?.to_dtype(DType::F32)?.unsqueeze(0)?;
        numbers.lt(&column(lengths)?)?.unsqueeze(2)
    }

    /// A mask (B, L), u8: 1 for a text's own tokens and for its padding up to a multiple of 32, 0 for further padding.
    /// `lengths` and `text` are as in [`own_tokens`](Self::own_tokens).
    pub fn shown(&self, lengths: &Tensor, text: usize) -> Result<Tensor> {
        // The 32 tokens of a block are shown if the block begins before the text's end.
        self.starts.narrow(1, 0, text)?.lt(&column(lengths)?)
    }

    /// A mask of keys, (B, 1, 1, S), u8: 1 for all keys of the image, and for the text's keys that are `shown`.
    pub fn mask(&self, extent: Extent, shown: &Tensor) -> Result<Tensor> {
        let batch = shown.dims()[0];
        // The first token of every text is shown, so its 1 is repeated for the image.
        let image = shown.narrow(1, 0, 1)?.broadcast_as((batch, extent.padded_area()))?;
        Tensor::cat(&[&image, shown], 1)?.unsqueeze(1)?.unsqueeze(1)
    }
}

/// Converts lengths (B) to a column (B, 1) in f32.
fn column(lengths: &Tensor) -> Result<Tensor> {
    lengths.detach().to_dtype(DType::F32)?.unsqueeze(1)
}
