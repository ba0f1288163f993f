//! Runs all double-stream blocks, or all single-stream blocks, of a model one after another.

use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::Blocks;

use super::{DoubleBlock, Rope, SingleBlock};

/// The inputs of attention besides the tokens: angles and mask.
#[derive(Clone, Copy, Default)]
pub struct AttentionInputs<'a> {
    /// The rotary embedding's angles of the text tokens, then of the image tokens. None if queries and keys are not
    /// rotated.
    pub angles: Option<&'a Rope>,
    /// u8, (B, 1, 1, L + S) for L text tokens and S image tokens: 1 for keys that attention reads. None if attention
    /// reads all keys.
    pub mask: Option<&'a Tensor>,
}

impl AttentionInputs<'_> {
    /// Cosines and sines of the angles, then the mask, as far as they exist. As inputs of a block they are kept by the
    /// block's checkpoint.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &Tensor> {
        self.angles.into_iter().flat_map(|Rope { cos, sin }| [cos, sin]).chain(self.mask)
    }

    /// Rebuild a [`AttentionInputs`] from the tensors that [`AttentionInputs::inputs`] returned, and call `run` with it. `rotates` says
    /// whether these tensors begin with cosines and sines.
    pub(crate) fn of<R>(rotates: bool, inputs: &[Tensor], run: impl FnOnce(AttentionInputs<'_>) -> R) -> R {
        let (angles, mask) = inputs.split_at(if rotates { 2 } else { 0 });
        let angles = if let [cos, sin] = angles { Some(Rope { cos: cos.clone(), sin: sin.clone() }) } else { None };
        run(AttentionInputs { angles: angles.as_ref(), mask: mask.first() })
    }
}

/// Returns the image `(B, S, D)` and the text `(B, L, D)` after all blocks, for B samples and tokens of width D.
/// `modulation(i, block)` computes the modulations of image and text for block i.
///
/// # Errors
/// As [`DoubleBlock::forward`] and `modulation`.
pub fn run_double(
    blocks: &Blocks<DoubleBlock>,
    [mut image, mut text]: [Tensor; 2],
    attention_inputs: AttentionInputs<'_>,
    modulation: impl Fn(usize, &DoubleBlock) -> Result<[Tensor; 2]>,
) -> Result<[Tensor; 2]> {
    let rotates = attention_inputs.angles.is_some();
    for i in 0..blocks.len() {
        let modulations = blocks.aside(i, |block| modulation(i, block))?;
        let inputs: Vec<&Tensor> =
            [&image, &text].into_iter().chain(&modulations).chain(attention_inputs.inputs()).collect();
        let mut results = blocks.run_several(i, &inputs, move |block, inputs| {
            let [image, text, to_image, to_text, of_sight @ ..] = inputs else { unreachable!("four inputs at least") };
            let run = |attention_inputs: AttentionInputs<'_>| {
                block.forward([image, text], [to_image, to_text], attention_inputs)
            };
            Ok(AttentionInputs::of(rotates, of_sight, run)?.into())
        })?;
        // The last result is removed first, so that the index of the other one stays valid.
        (text, image) = (results.remove(1), results.remove(0));
    }
    Ok([image, text])
}

/// Returns the tokens `x (B, L + S, D)` after all blocks: L text tokens, then S image tokens. `modulation(i, block)`
/// computes the modulation for block i.
///
/// # Errors
/// As [`SingleBlock::forward`] and `modulation`.
pub fn run_single(
    blocks: &Blocks<SingleBlock>,
    mut x: Tensor,
    attention_inputs: AttentionInputs<'_>,
    modulation: impl Fn(usize, &SingleBlock) -> Result<Tensor>,
) -> Result<Tensor> {
    let rotates = attention_inputs.angles.is_some();
    for i in 0..blocks.len() {
        let [block_modulation] = blocks.aside(i, |block| Ok([modulation(i, block)?]))?;
        let inputs: Vec<&Tensor> = [&x, &block_modulation].into_iter().chain(attention_inputs.inputs()).collect();
        x = blocks.run_one(i, &inputs, move |block, inputs| {
            let [x, modulation, of_sight @ ..] = inputs else { unreachable!("two inputs at least") };
            AttentionInputs::of(rotates, of_sight, |attention_inputs| block.forward(x, modulation, attention_inputs))
        })?;
    }
    Ok(x)
}
