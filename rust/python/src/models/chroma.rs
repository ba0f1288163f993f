//! The transformer of Chroma.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;
use trainable_candle_models::chroma::ChromaConditions;

use super::{Model, class};
use crate::argument::Argument;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::{Operand, Tensor};

/// The transformer of Chroma, with the results and the parameter names of diffusers' `ChromaTransformer2DModel`.
/// `from_pretrained` loads one.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct ChromaTransformer(Arc<models::ChromaTransformer>);

// Defines `ChromaTransformer::CLASS`, the entry of this class in the table of models.
class!(ChromaTransformer);

#[pymethods]
impl ChromaTransformer {
    /// Predict the velocity (noise minus latents) for noisy latents.
    ///
    /// Args:
    ///     hidden_states: noisy latents of B samples as S tokens each, (B, S, in_channels). The features of a token are
    ///         the values of a square of 2 x 2 latents in the order (channel, row, column).
    ///     encoder_hidden_states: T5's results for the L text tokens, (B, L, joint_attention_dim).
    ///     timestep: the time from 0 (clean latents) to 1 (pure noise): (B,), (1,), or a number.
    ///     img_ids: positions of the image tokens, (S, 3): 0, row, column.
    ///     txt_ids: positions of the text tokens, (L, 3): zeros.
    ///     lengths: for each sample, the number of text tokens that other tokens attend to, (B,), at least 1: the
    ///         text's own tokens and one padding token. With `lengths`, L is at most 4096. Default: all L tokens; then
    ///         attention needs no mask, which saves time.
    ///
    /// Returns:
    ///     A tensor of the shape of `hidden_states`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    ///     DTypeError: if `hidden_states` is not floating point, or `img_ids` and `txt_ids` have different dtypes.
    #[pyo3(signature = (hidden_states, encoder_hidden_states, timestep, img_ids, txt_ids, lengths=None))]
    #[allow(clippy::too_many_arguments)] // each is a parameter in Python
    fn __call__(
        &self,
        py: Python<'_>,
        hidden_states: Argument<PyRef<'_, Tensor>>,
        encoder_hidden_states: Argument<PyRef<'_, Tensor>>,
        timestep: Operand<'_>,
        img_ids: Argument<PyRef<'_, Tensor>>,
        txt_ids: Argument<PyRef<'_, Tensor>>,
        lengths: Option<Argument<PyRef<'_, Tensor>>>,
    ) -> Result<Tensor> {
        const OP: &str = "ChromaTransformer";
        let hidden_states = hidden_states.get(OP, "hidden_states")?;
        let encoder_hidden_states = encoder_hidden_states.get(OP, "encoder_hidden_states")?;
        let (img_ids, txt_ids) = (img_ids.get(OP, "img_ids")?, txt_ids.get(OP, "txt_ids")?);
        let lengths = lengths.map(|lengths| lengths.get(OP, "lengths")).transpose()?;
        let (x, text, lengths) = (&hidden_states.0, &encoder_hidden_states.0, lengths.as_ref().map(|given| &given.0));
        let (img_ids, txt_ids) = (&img_ids.0, &txt_ids.0);
        let forward = |timestep: &_| {
            self.0.forward(x, ChromaConditions { encoder_hidden_states: text, timestep, img_ids, txt_ids, lengths })
        };
        // Without the GIL; `in_f32` makes a tensor of `timestep` if it is a number.
        detached(py, || timestep.in_f32(x.device(), forward)).map(Tensor)
    }
}
