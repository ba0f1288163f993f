//! SDXL's UNet.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;
use trainable_candle_models::sdxl::UNetConditions;

use super::{Model, class};
use crate::argument::Argument;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::{Operand, Tensor};

/// SDXL's UNet, with the results and the parameter names of diffusers' `UNet2DConditionModel`. `from_pretrained` loads
/// one.
///
/// ```python
/// # The tiny SDXL in the package: 128 text features instead of 2048, 64 pooled ones instead of 1280.
/// unet = tc.models.SDXLUNet.from_pretrained("sdxl", "f32")
/// text, pooled = tc.randn(1, 77, 128), tc.randn(1, 64)
/// sizes = tc.tensor([[128, 128, 0, 0, 128, 128]])  # an image of 128 x 128 pixels, not cropped
/// noise = unet(tc.randn(1, 4, 16, 16), 500, text, text_embeds=pooled, time_ids=sizes)
/// assert noise.shape == (1, 4, 16, 16)
/// ```
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct SDXLUNet(Arc<models::SDXLUNet>);

class!(SDXLUNet);

#[pymethods]
impl SDXLUNet {
    /// Predict the noise in noisy latents, or their velocity if the model was trained to predict the velocity.
    ///
    /// Args:
    ///     sample: noisy latents of B images, (B, 4, h, w), scaled by the autoencoder's `scaling_factor`.
    ///     timestep: the diffusion timestep from 0 (least noise) to 999 (most noise): (B,), (1,), or a number.
    ///     encoder_hidden_states: the text encoders' results for the L text tokens, (B, L, cross_attention_dim).
    ///     text_embeds: the pooled text embedding of P features, (B, P).
    ///     time_ids: the sizes and the crop of each image in pixels, (B, 6): original height and width, top and left of
    ///         the crop, target height and width.
    ///
    /// Returns:
    ///     A tensor of the shape of `sample`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    ///     DTypeError: if `sample` is not floating point.
    ///     ArgumentError: if a timestep in host memory is not finite.
    #[pyo3(signature = (sample, timestep, encoder_hidden_states, *, text_embeds, time_ids))]
    fn __call__(
        &self,
        py: Python<'_>,
        sample: Argument<PyRef<'_, Tensor>>,
        timestep: Operand<'_>,
        encoder_hidden_states: Argument<PyRef<'_, Tensor>>,
        text_embeds: Argument<PyRef<'_, Tensor>>,
        time_ids: Argument<PyRef<'_, Tensor>>,
    ) -> Result<Tensor> {
        const OP: &str = "SDXLUNet";
        let sample = sample.get(OP, "sample")?;
        let encoder_hidden_states = encoder_hidden_states.get(OP, "encoder_hidden_states")?;
        let (text_embeds, time_ids) = (text_embeds.get(OP, "text_embeds")?, time_ids.get(OP, "time_ids")?);
        let conditions = UNetConditions {
            encoder_hidden_states: &encoder_hidden_states.0,
            text_embeds: &text_embeds.0,
            time_ids: &time_ids.0,
        };
        let sample = &sample.0;
        // `detached` releases Python's global interpreter lock; it has nothing to do with gradients.
        detached(py, || timestep.in_f32(sample.device(), |time| self.0.forward(sample, time, conditions))).map(Tensor)
    }
}
