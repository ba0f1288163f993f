//! The transformer of SD3 and SD3.5.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;
use trainable_candle_models::sd3::SD3Conditions;

use super::{Model, class};
use crate::argument::Argument;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::{Operand, Tensor};

/// The transformer of SD3 and SD3.5, with the results and the parameter names of diffusers' `SD3Transformer2DModel`.
/// `from_pretrained` loads one.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct SD3Transformer(Arc<models::SD3Transformer>);

class!(SD3Transformer);

#[pymethods]
impl SD3Transformer {
    /// Predict the velocity (noise minus latents) for noisy latents.
    ///
    /// Args:
    ///     hidden_states: noisy latents of B samples, (B, 16, h, w), shifted and scaled by the autoencoder's
    ///         `shift_factor` and `scaling_factor`; h and w must be even.
    ///     encoder_hidden_states: the text encoders' results for the L text tokens, (B, L, joint_attention_dim).
    ///     pooled_projections: the pooled text embedding, (B, pooled_projection_dim).
    ///     timestep: the time from 0 (clean latents) to 1000 (pure noise): (B,), (1,), or a number.
    ///
    /// Returns:
    ///     A tensor of the shape of `hidden_states`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    ///     DTypeError: if `hidden_states` is not floating point.
    #[pyo3(signature = (hidden_states, encoder_hidden_states, pooled_projections, timestep))]
    fn __call__(
        &self,
        py: Python<'_>,
        hidden_states: Argument<PyRef<'_, Tensor>>,
        encoder_hidden_states: Argument<PyRef<'_, Tensor>>,
        pooled_projections: Argument<PyRef<'_, Tensor>>,
        timestep: Operand<'_>,
    ) -> Result<Tensor> {
        const OP: &str = "SD3Transformer";
        let hidden_states = hidden_states.get(OP, "hidden_states")?;
        let encoder_hidden_states = encoder_hidden_states.get(OP, "encoder_hidden_states")?;
        let pooled_projections = pooled_projections.get(OP, "pooled_projections")?;
        let (x, text, pooled) = (&hidden_states.0, &encoder_hidden_states.0, &pooled_projections.0);
        let forward = |timestep: &_| {
            let conditions = SD3Conditions { encoder_hidden_states: text, pooled_projections: pooled, timestep };
            self.0.forward(x, conditions)
        };
        // `detached` releases Python's global interpreter lock; it has nothing to do with gradients. `in_f32` makes a
        // tensor of `timestep` if it is a number.
        detached(py, || timestep.in_f32(x.device(), forward)).map(Tensor)
    }
}
