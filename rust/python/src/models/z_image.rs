//! The transformer of Z-Image.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;
use trainable_candle_models::z_image::ZImageConditions;

use super::{Model, class};
use crate::argument::Argument;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::{Operand, Tensor};

/// The transformer of Z-Image, with the results and the parameter names of diffusers' `ZImageTransformer2DModel`.
/// `from_pretrained` loads one.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct ZImageTransformer(Arc<models::ZImageTransformer>);

class!(ZImageTransformer);

#[pymethods]
impl ZImageTransformer {
    /// Predict the velocity from noise to clean latents (latents minus noise) for noisy latents.
    ///
    /// Args:
    ///     hidden_states: noisy latents of B samples, (B, in_channels, h, w), shifted and scaled by the autoencoder's
    ///         `shift_factor` and `scaling_factor`; h and w must be even.
    ///     encoder_hidden_states: the text encoder's results for the L text tokens, (B, L, cap_feat_dim).
    ///     timestep: the time, (B,), (1,), or a number, from 0 (pure noise) to 1 (clean latents). Other flow models
    ///         count the time in the opposite direction, and predict noise minus latents.
    ///     lengths: the number of tokens of each text without its padding, (B,), at least 1. The model replaces the
    ///         padding tokens after them by its own. Default: no text has padding.
    ///     rows_are_full: True asserts that the length of every text, rounded up to a multiple of 32, equals L rounded
    ///         up to a multiple of 32. Then attention needs no mask, which saves time. The model does not check this.
    ///
    /// Returns:
    ///     A tensor of the shape of `hidden_states`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    ///     DTypeError: if `hidden_states` is not floating point.
    #[pyo3(signature = (hidden_states, encoder_hidden_states, timestep, lengths=None, *, rows_are_full=false))]
    fn __call__(
        &self,
        py: Python<'_>,
        hidden_states: Argument<PyRef<'_, Tensor>>,
        encoder_hidden_states: Argument<PyRef<'_, Tensor>>,
        timestep: Operand<'_>,
        lengths: Option<Argument<PyRef<'_, Tensor>>>,
        rows_are_full: bool,
    ) -> Result<Tensor> {
        const OP: &str = "ZImageTransformer";
        let hidden_states = hidden_states.get(OP, "hidden_states")?;
        let encoder_hidden_states = encoder_hidden_states.get(OP, "encoder_hidden_states")?;
        let lengths = lengths.map(|lengths| lengths.get(OP, "lengths")).transpose()?;
        let (x, text, lengths) = (&hidden_states.0, &encoder_hidden_states.0, lengths.as_ref().map(|given| &given.0));
        let forward = |timestep: &_| {
            self.0.forward(x, ZImageConditions { encoder_hidden_states: text, timestep, lengths, rows_are_full })
        };
        detached(py, || timestep.in_f32(x.device(), forward)).map(Tensor)
    }
}
