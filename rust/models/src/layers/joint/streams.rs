//! Runs a model's blocks one after another: double-stream blocks, and single-stream blocks.

use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::Blocks;

use super::{DoubleBlock, Rope, SingleBlock};

/// The inputs of attention besides the tokens: angles and mask.
#[derive(Clone, Copy, Default)]
pub struct Sight<'a> {
    /// The rotary embedding's angles of the text tokens, then of the image tokens.
    pub angles: Option<&'a Rope>,
    /// u8, (B, 1, 1, L + S) for L text tokens and S image tokens: 1 for keys that attention reads. None if attention
    /// reads all keys.
    pub mask: Option<&'a Tensor>,
}

impl Sight<'_> {
    /// Angles and mask as inputs of a block, so that the block's checkpoint keeps them.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &Tensor> {
        self.angles.into_iter().flat_map(|Rope { cos, sin }| [cos, sin]).chain(self.mask)
    }

    /// Rebuild a [`Sight`] from the tensors that its method [`inputs`](Self::inputs) returned, and call `run` with the
    /// [`Sight`]. `rotates` says whether `inputs` begins with cosines and sines.
    pub(crate) fn of<R>(rotates: bool, inputs: &[Tensor], run: impl FnOnce(Sight<'_>) -> R) -> R {
        let (angles, mask) = inputs.split_at(if rotates { 2 } else { 0 });
        let angles = if let [cos, sin] = angles { Some(Rope { cos: cos.clone(), sin: sin.clone() }) } else { None };
        run(Sight { angles: angles.as_ref(), mask: mask.first() })
    }
}

/// The image (B, S, D) and the text (B, L, D) after all blocks. `modulation(i, block)` computes the modulation of image
/// and text in block i.
///
/// # Errors
/// [`trainable_candle_core::Error::Shape`] if an input does not fit.
pub fn run_double(
    blocks: &Blocks<DoubleBlock>,
    [mut image, mut text]: [Tensor; 2],
    sight: Sight<'_>,
    modulation: impl Fn(usize, &DoubleBlock) -> Result<[Tensor; 2]>,
) -> Result<[Tensor; 2]> {
    let rotates = sight.angles.is_some();
    for i in 0..blocks.len() {
        let [of_image, of_text] = blocks.aside(i, |block| modulation(i, block))?;
        let inputs: Vec<&Tensor> = [&image, &text, &of_image, &of_text].into_iter().chain(sight.inputs()).collect();
        let mut results = blocks.run_several(i, &inputs, move |block, inputs| {
            let [image, text, of_image, of_text, others @ ..] = inputs else { unreachable!("four inputs at least") };
            let run = |sight: Sight<'_>| block.forward([image, text], [of_image, of_text], sight);
            Ok(Sight::of(rotates, others, run)?.into())
        })?;
        (text, image) = (results.remove(1), results.remove(0));
    }
    Ok([image, text])
}

/// The tokens (B, S, D) after all blocks. `modulation(i, block)` computes the modulation in block i.
///
/// # Errors
/// [`trainable_candle_core::Error::Shape`] if an input does not fit.
pub fn run_single(
    blocks: &Blocks<SingleBlock>,
    mut x: Tensor,
    sight: Sight<'_>,
    modulation: impl Fn(usize, &SingleBlock) -> Result<Tensor>,
) -> Result<Tensor> {
    let rotates = sight.angles.is_some();
    for i in 0..blocks.len() {
        let [of_tokens] = blocks.aside(i, |block| Ok([modulation(i, block)?]))?;
        let inputs: Vec<&Tensor> = [&x, &of_tokens].into_iter().chain(sight.inputs()).collect();
        x = blocks.run_one(i, &inputs, move |block, inputs| {
            let [x, of_tokens, others @ ..] = inputs else { unreachable!("two inputs at least") };
            Sight::of(rotates, others, |sight| block.forward(x, of_tokens, sight))
        })?;
    }
    Ok(x)
}
