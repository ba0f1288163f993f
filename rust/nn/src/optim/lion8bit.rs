//! Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`.

use trainable_candle_core::cpu::dispatch;

use super::lion::Coefficients;
use super::quant::{BLOCK_SIZE, Codebook, Codes, padded};

/// Hyper-parameters of [`Lion8bit`]; names, meaning and defaults are those of bitsandbytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Lion8bitConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Weight of the momentum in the update, and its decay rate; each in [0, 1).
    pub betas: (f64, f64),
    /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// Parameters with fewer elements keep their momentum in f32.
    pub min_8bit_size: usize,
}

impl Default for Lion8bitConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0, min_8bit_size: 4096 }
    }
}

/// One step with an 8-bit momentum. An element whose gradient is not finite loses its momentum and stays as it is (where
/// bitsandbytes would write the block's largest value to its momentum).
pub(crate) fn update_blockwise(at: Coefficients<f32>, param: &mut [f32], grad: &[f32], state1: Codes<'_>) {
    dispatch(
        #[inline(always)]
        || update_blocks(at, param, grad, state1),
    );
}

#[inline(always)]
fn update_blocks(at: Coefficients<f32>, param: &mut [f32], grad: &[f32], state1: Codes<'_>) {
    let (params, param_rest) = param.as_chunks_mut();
    let (grads, grad_rest) = grad.as_chunks();
    let (codes, codes_rest) = state1.codes.as_chunks_mut();
    let full = params.len();
    for block in 0..full {
        update_block(at, &mut params[block], &grads[block], &mut codes[block], &mut state1.absmax[block]);
    }
    if !param_rest.is_empty() {
        let (mut param, grad, mut codes) = (padded(param_rest, 0.0), padded(grad_rest, 0.0), padded(codes_rest, 128));
        update_block(at, &mut param, &grad, &mut codes, &mut state1.absmax[full]);
        let len = param_rest.len();
        param_rest.copy_from_slice(&param[..len]);
        codes_rest.copy_from_slice(&codes[..len]);
    }
}

#[inline(always)]
fn update_block(
    at: Coefficients<f32>,
    param: &mut [f32; BLOCK_SIZE],
    grad: &[f32; BLOCK_SIZE],
    codes: &mut [u8; BLOCK_SIZE],
    absmax: &mut f32,
) {
    let codebook = Codebook::sign_preserving();
    let mut m = [0f32; BLOCK_SIZE];
    let mut max = 0;
    for i in 0..BLOCK_SIZE {
        let (updated, momentum) = at.advance(param[i], grad[i], codebook.decode(codes[i]) * *absmax);
        let finite = grad[i].is_finite();
        param[i] = if finite { updated } else { param[i] };
        m[i] = if finite { momentum } else { 0.0 };
        // Magnitudes compare as their bits do, and integers have a maximum that vectorises.
        max = max.max(m[i].abs().to_bits());
    }
    *absmax = f32::from_bits(max);
    *codes = codebook.encode_block(&m, 1.0 / *absmax);
}
