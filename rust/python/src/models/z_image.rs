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
    /// The negative velocity (latents minus noise) that the model predicts for noisy latents.
    ///
    /// Args:
    ///     hidden_states: noisy latents, (B, in_channels, h, w), shifted and scaled by the autoencoder's factors; h and
    ///         w are even.
    ///     encoder_hidden_states: the text's tokens, (B, L, cap_feat_dim).
    ///     timestep: the time, (B,), (1,), or a number: 0 is noise and 1 is clean, the reverse of other flow models.
    ///     lengths: the number of tokens of each text before its padding, (B,). The model does not read later tokens. By
    ///         default, texts have no padding.
    ///     rows_are_full: whether every text fills its row: its length equals L, if both are rounded up to a multiple of
    ///         32. Then attention needs no mask, which saves time. The model does not check this argument.
    ///
    /// Returns:
    ///     A tensor of the shape of `hidden_states`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
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
