//! Modulation by scales, shifts and gates that are computed from a condition (adaLN-zero, arXiv:2212.09748, section
//! 3.2).

use trainable_candle_core::ops::gated_add;
use trainable_candle_core::ops::norm::modulated_layer_norm;
use trainable_candle_core::{Result, Tensor};

/// Added to the variance in every layer norm and to the mean square in every RMS norm of the blocks.
pub const EPS: f64 = 1e-6;

/// Layer norm of `x (B, S, D)`, times 1 + `scale`, plus `shift`. Scale and shift are (B, D).
///
/// # Errors
/// [`Error::Shape`](trainable_candle_core::Error::Shape) if the shapes do not fit each other.
pub fn modulated(x: &Tensor, [shift, scale]: [&Tensor; 2]) -> Result<Tensor> {
    modulated_layer_norm(x, scale, shift, EPS)
}

/// `x + gate · y` for `x` and `y` (B, S, D) and `gate (B, D)`.
///
/// # Errors
/// [`Error::Shape`](trainable_candle_core::Error::Shape) if the shapes do not fit each other.
pub fn gated_add(x: &Tensor, y: &Tensor, gate: &Tensor) -> Result<Tensor> {
    gated_add::gated_add(x, y, &gate.unsqueeze(1)?)
}
