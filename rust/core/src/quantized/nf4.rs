//! NF4, a format with codes of four bits for quantized weights, as bitsandbytes stores it. Each block of 64 elements in
//! row-major order has a scale; a block may contain the end of one row and the beginning of the next. The scales of the
//! blocks may themselves be quantized (nested scales).
//!
//! Dettmers et al. 2023, "QLoRA", arXiv:2305.14314. Codes, their rounding and order follow
//! <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/backends/default/ops.py>
//! and `quantize_4bit` with `compress_statistics` of `functional.py` there.

use std::sync::LazyLock;

use super::{Scales, create_dynamic_map};
use crate::cpu::pool::par_chunks_mut;
use crate::raw::{Raw, from_vec};

/// Number of elements that share a scale.
pub(super) const BLOCK: usize = 64;
/// The number of block scales that share one scale when they are quantized themselves.
pub(super) const NESTED: usize = 256;

/// The values of the sixteen codes: quantiles of the normal distribution, scaled to [-1, 1].
pub(super) const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Returns [`VALUES`], the values of the sixteen codes, to other crates.
pub const fn values() -> [f32; 16] {
    VALUES
}

/// The values, in increasing order, that the 8-bit codes of block scales represent. They have both signs, because the
/// mean of the scales is subtracted before they are quantized.
pub(super) static SCALES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let signed = true;
    create_dynamic_map(signed)
});

/// Number of blocks that a thread takes at a time.
const GRAIN: usize = 256;

/// The codes of `values`, two per byte with the first in the high bits, and the scales of the blocks, quantized if
/// `nested`. `None` if a value is non-finite.
pub(super) fn quantize(values: &[f32], nested: bool) -> Option<(Raw, Scales)> {
    let blocks = values.len().div_ceil(BLOCK);
    // The scale of a block is its largest magnitude.
    let mut largest = vec![0f32; blocks];
    par_chunks_mut(&mut largest, GRAIN, |piece, largest| {
        for (block, largest) in values[piece * GRAIN * BLOCK..].chunks(BLOCK).zip(largest) {
            // `max` would ignore NaN.
            *largest = block.iter().fold(0f32, |m, x| if x.is_finite() { m.max(x.abs()) } else { f32::INFINITY });
        }
    });
    if largest.iter().any(|m| m.is_infinite()) {
        return None;
    }
    let mut codes = vec![0u8; values.len().div_ceil(2)];
    par_chunks_mut(&mut codes, GRAIN * BLOCK / 2, |piece, codes| {
        let largest = &largest[piece * GRAIN..];
        for ((block, codes), largest) in
            values[piece * GRAIN * BLOCK..].chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2)).zip(largest)
        {
            encode(block, *largest, codes);
        }
    });
    let count = codes.len();
    let scales = if nested { quantized_scales(&largest) } else { Scales::Nf4(from_vec(largest, blocks)) };
    Some((from_vec(codes, count), scales))
}

/// Writes the codes of a block whose largest magnitude is `largest`.
fn encode(block: &[f32], largest: f32, codes: &mut [u8]) {
    // Keeps the reciprocal finite for a block of zeros.
    let largest = largest.max(1e-38);
    // As in bitsandbytes, the values of an incomplete last block are divided by the scale of the block; the values of
    // other blocks are multiplied by the rounded reciprocal of the scale.
    let reciprocal = 1.0 / largest;
    let scaled = |x: f32| if block.len() < BLOCK { x / largest } else { x * reciprocal };
    for (pair, byte) in block.chunks(2).zip(codes) {
        let second = pair.get(1).copied().map_or(0.0, scaled);
        *byte = nearest(scaled(pair[0])) << 4 | nearest(second);
    }
}

/// The code of the value nearest to `x`; the lower one in case of a tie.
fn nearest(x: f32) -> u8 {
    // The code is the number of midpoints below x; comparisons without branches vectorise.
    VALUES.windows(2).map(|pair| u8::from(x > (pair[0] + pair[1]) / 2.0)).sum()
}

/// Quantizes the scales of the blocks, which are the blocks' largest magnitudes: subtracts their mean, the offset, and
/// divides each group of [`NESTED`] differences by the group's largest magnitude.
fn quantized_scales(largest: &[f32]) -> Scales {
    let sum: f64 = largest.iter().map(|&m| f64::from(m)).sum();
    let offset = (sum / largest.len().max(1) as f64) as f32;
    let (mut codes, mut scales) = (Vec::with_capacity(largest.len()), Vec::new());
    for group in largest.chunks(NESTED) {
        let scale = group.iter().fold(0f32, |m, x| m.max((x - offset).abs()));
        let reciprocal = 1.0 / scale;
        codes.extend(group.iter().map(|x| nearest_scale(if scale > 0.0 { (x - offset) * reciprocal } else { 0.0 })));
        scales.push(scale);
    }
    let (blocks, groups) = (codes.len(), scales.len());
    Scales::Nested { codes: from_vec(codes, blocks), scales: from_vec(scales, groups), offset }
}

/// The code whose value in [`SCALES`] is nearest to `x`; the lower one in case of a tie.
fn nearest_scale(x: f32) -> u8 {
    let above = SCALES.partition_point(|&value| value < x).min(SCALES.len() - 1);
    let below = above.saturating_sub(1);
    if x - SCALES[below] <= SCALES[above] - x { below as u8 } else { above as u8 }
}
