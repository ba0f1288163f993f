//! The Python class of the transformer of FLUX.2.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;
use trainable_candle_models::flux2::Flux2Conditions;

use super::{Model, class};
use crate::argument::Argument;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::{Operand, Tensor};

/// The transformer of FLUX.2, with the results and the parameter names of diffusers' `Flux2Transformer2DModel`.
/// `from_pretrained` loads one.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct Flux2Transformer(Arc<models::Flux2Transformer>);

class!(Flux2Transformer);

#[pymethods]
impl Flux2Transformer {
    /// Predict the velocity (noise minus latents) for noisy latents.
    ///
    /// Args:
    ///     hidden_states: noisy latents of B samples as S tokens each, (B, S, in_channels). The features of a token are
    ///         the values of a square of 2 x 2 latents in the order (channel, row, column).
    ///     encoder_hidden_states: the text encoder's results for the L text tokens, (B, L, joint_attention_dim).
    ///     timestep: the time from 0 (clean latents) to 1 (pure noise): (B,), (1,), or a number.
    ///     img_ids: positions of the image tokens, (S, 4): 0, row, column, 0.
    ///     txt_ids: positions of the text tokens, (L, 4): 0, 0, 0, the token's index in the text.
    ///     guidance: the guidance scale, (B,), (1,), or a number. Only a guidance-distilled model (FLUX.2-dev) takes
    ///         this argument.
    ///
    /// Returns:
    ///     A tensor of the shape of `hidden_states`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    ///     DTypeError: if `hidden_states` is not floating point, or `img_ids` and `txt_ids` have different dtypes.
    ///     ArgumentError: if a model that takes `guidance` gets none, or if one that does not take `guidance` gets it.
    #[pyo3(signature = (hidden_states, encoder_hidden_states, timestep, img_ids, txt_ids, guidance=None))]
    #[allow(clippy::too_many_arguments)] // each is a parameter in Python
    fn __call__(
        &self,
        py: Python<'_>,
        hidden_states: Argument<PyRef<'_, Tensor>>,
        encoder_hidden_states: Argument<PyRef<'_, Tensor>>,
        timestep: Operand<'_>,
        img_ids: Argument<PyRef<'_, Tensor>>,
        txt_ids: Argument<PyRef<'_, Tensor>>,
        guidance: Option<Operand<'_>>,
    ) -> Result<Tensor> {
        const OP: &str = "Flux2Transformer";
        let hidden_states = hidden_states.get(OP, "hidden_states")?;
        let encoder_hidden_states = encoder_hidden_states.get(OP, "encoder_hidden_states")?;
        let (img_ids, txt_ids) = (img_ids.get(OP, "img_ids")?, txt_ids.get(OP, "txt_ids")?);
        let (x, text) = (&hidden_states.0, &encoder_hidden_states.0);
        let (img_ids, txt_ids) = (&img_ids.0, &txt_ids.0);
        let forward = |timestep: &_, guidance: Option<&_>| {
            self.0.forward(x, Flux2Conditions { encoder_hidden_states: text, timestep, img_ids, txt_ids, guidance })
        };
        // `detached` releases the GIL. `in_f32` turns a number into an f32 tensor; a tensor stays as it is.
        detached(py, || {
            timestep.in_f32(x.device(), |timestep| match guidance {
                Some(guidance) => guidance.in_f32(x.device(), |guidance| forward(timestep, Some(guidance))),
                None => forward(timestep, None),
            })
        })
        .map(Tensor)
    }
}
