//! Runs all double-stream blocks, or all single-stream blocks, of a model one after another. A double-stream block has
//! separate weights for image tokens and text tokens; a single-stream block has one set of weights for both.

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
    /// Cosines and sines of the angles, then the mask, without those that are None. Callers pass these tensors to a
    /// block as inputs, so that the block's checkpoint keeps them.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.angles.into_iter().flat_map(|Rope { cos, sin }| [cos, sin]).chain(self.mask)
    }

    /// Rebuild the [`AttentionInputs`] whose [`tensors`](Self::tensors) are `tensors`, and call `run` with them.
    /// `has_angles` says whether `tensors` begins with cosines and sines.
    pub(crate) fn with_tensors<R>(
        has_angles: bool,
        tensors: &[Tensor],
        run: impl FnOnce(AttentionInputs<'_>) -> R,
    ) -> R {
        let (angles, mask) = tensors.split_at(if has_angles { 2 } else { 0 });
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
    let has_angles = attention_inputs.angles.is_some();
    for i in 0..blocks.len() {
        // `aside` computes the modulations outside of the block's checkpoint, because they are small to keep, and a
        // recomputation would read the large weights of their layers again.
        let modulations = blocks.aside(i, |block| modulation(i, block))?;
        let inputs: Vec<&Tensor> =
            [&image, &text].into_iter().chain(&modulations).chain(attention_inputs.tensors()).collect();
        let mut results = blocks.run_several(i, &inputs, move |block, inputs| {
            let [image, text, image_modulation, text_modulation, angles_and_mask @ ..] = inputs else {
                unreachable!("four inputs at least")
            };
            let run = |attention_inputs: AttentionInputs<'_>| {
                block.forward([image, text], [image_modulation, text_modulation], attention_inputs)
            };
            Ok(AttentionInputs::with_tensors(has_angles, angles_and_mask, run)?.into())
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
    let has_angles = attention_inputs.angles.is_some();
    for i in 0..blocks.len() {
        // Outside of the block's checkpoint, as in `run_double`.
        let [block_modulation] = blocks.aside(i, |block| Ok([modulation(i, block)?]))?;
        let inputs: Vec<&Tensor> = [&x, &block_modulation].into_iter().chain(attention_inputs.tensors()).collect();
        x = blocks.run_one(i, &inputs, move |block, inputs| {
            let [x, modulation, angles_and_mask @ ..] = inputs else { unreachable!("two inputs at least") };
            let run = |attention_inputs: AttentionInputs<'_>| block.forward(x, modulation, attention_inputs);
            AttentionInputs::with_tensors(has_angles, angles_and_mask, run)
        })?;
    }
    Ok(x)
}
