//! SDXL's UNet.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_core::DType;
use trainable_candle_models as models;
use trainable_candle_models::sdxl::UNetConditions;

use super::request::{Call, Request};
use super::{Model, class};
use crate::arguments::FilePath;
use crate::call::detached;
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::given::Given;
use crate::tensor::{Operand, Tensor};

/// SDXL's UNet, computing what diffusers' `UNet2DConditionModel` computes, under its names. Made by `from_pretrained`.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct SDXLUNet(Arc<models::SDXLUNet>);

class!(SDXLUNet);

#[pymethods]
impl SDXLUNet {
    /// The frozen model at `path`.
    ///
    /// Args:
    ///     path: a UNet, its folder or a weight file beside its `config.json`; a pipeline's folder; an original checkpoint in one
    ///         file; or a name on the Hugging Face hub, "organisation/name".
    ///     dtype: convert the weights; as they are stored without it.
    ///     device: where to load it.
    ///     subfolder: the model's folder in a pipeline, also for a checkpoint.
    ///     config: a `config.json`, or a pipeline's folder that has one, in place of the one that belongs to the weights.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if files are missing or damaged.
    ///     ConfigError: if the configuration is another model's, is not supported, or does not fit the weights.
    #[staticmethod]
    #[pyo3(signature = (path, dtype=None, device="cpu", *, subfolder=None, config=None))]
    fn from_pretrained(
        py: Python<'_>,
        path: FilePath,
        dtype: Option<DTypeArg>,
        device: &str,
        subfolder: Option<String>,
        config: Option<FilePath>,
    ) -> Result<Py<Self>> {
        let request = Request::new(
            py,
            Call::from_pretrained(&models::SDXLUNet::COMPONENT),
            path,
            dtype,
            device,
            subfolder,
            config,
        )?;
        Ok(Self::object(py, request.load(py, &models::SDXLUNet::COMPONENT, models::SDXLUNet::load)?)?)
    }

    /// A frozen model of random weights, for measuring how fast and large it is.
    ///
    /// Args:
    ///     config: a `config.json`; SDXL's base model without it.
    ///     dtype: of the weights, f32 without it.
    ///     device: where they are.
    ///
    /// Raises:
    ///     MissingFileError, ConfigError: if the configuration is missing or another model's.
    ///     OutOfMemoryError: if the model does not fit.
    #[staticmethod]
    #[pyo3(signature = (config=None, dtype=None, device="cpu"))]
    fn from_config(
        py: Python<'_>,
        config: Option<FilePath>,
        dtype: Option<DTypeArg>,
        device: &str,
    ) -> Result<Py<Self>> {
        let config = config.map(|config| config.get("from_config")).transpose()?;
        let (dtype, device) = (dtype.map_or(DType::F32, |dtype| dtype.0), device::parse(device)?);
        let model = detached(py, || models::SDXLUNet::from_config(config.as_deref(), dtype, &device))?;
        Ok(Self::object(py, model)?)
    }

    /// The prediction for noisy latents: the noise, or the velocity if the model was trained for it.
    ///
    /// Args:
    ///     sample: latents under noise, (B, 4, h, w), scaled as the autoencoder says.
    ///     timestep: from 0 (clean) to 999 (noise): (B,), (1,), or a number.
    ///     encoder_hidden_states: the text's tokens, (B, L, cross_attention_dim).
    ///     text_embeds: the pooled text, (B, P).
    ///     time_ids: original height and width, top and left of the crop, target height and width, (B, 6).
    ///
    /// Returns:
    ///     A tensor of the shape of `sample`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    #[pyo3(signature = (sample, timestep, encoder_hidden_states, *, text_embeds, time_ids))]
    fn __call__(
        &self,
        py: Python<'_>,
        sample: Given<PyRef<'_, Tensor>>,
        timestep: Operand<'_>,
        encoder_hidden_states: Given<PyRef<'_, Tensor>>,
        text_embeds: Given<PyRef<'_, Tensor>>,
        time_ids: Given<PyRef<'_, Tensor>>,
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
        detached(py, || timestep.in_f32(sample.device(), |time| self.0.forward(sample, time, conditions))).map(Tensor)
    }
}
