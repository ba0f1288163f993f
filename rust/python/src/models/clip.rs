//! CLIP's text encoders.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_core::DType;
use trainable_candle_models as models;
use trainable_candle_models::clip;

use super::request::{Call, Request};
use super::{Model, class};
use crate::arguments::{FilePath, Integer};
use crate::call::{detached, quick};
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::given::Given;
use crate::tensor::Tensor;

/// A text encoder that computes what transformers' `CLIPTextModel` or `CLIPTextModelWithProjection` computes. Names begin with
/// "text_model.", as in the published files. Made by `from_pretrained`.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct CLIPTextModel(Arc<models::CLIPTextModel>);

class!(CLIPTextModel);

#[pymethods]
impl CLIPTextModel {
    /// The frozen model at `path`.
    ///
    /// Args:
    ///     path: a text encoder, its folder or a weight file beside its `config.json`; a pipeline's folder; an original checkpoint in one
    ///         file; or a name on the Hugging Face hub, "organisation/name".
    ///     dtype: convert the weights; as they are stored without it.
    ///     device: where to load it.
    ///     subfolder: the model's folder in a pipeline, also for a checkpoint: "text_encoder" (which is meant
    ///         without it) or "text_encoder_2".
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
            Call::from_pretrained(&models::CLIPTextModel::COMPONENT),
            path,
            dtype,
            device,
            subfolder,
            config,
        )?;
        Ok(Self::object(py, request.load(py, &models::CLIPTextModel::COMPONENT, models::CLIPTextModel::load)?)?)
    }

    /// A frozen model of random weights, for measuring how fast and large it is.
    ///
    /// Args:
    ///     config: a `config.json`; CLIP's large model without it.
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
        let model = detached(py, || models::CLIPTextModel::from_config(config.as_deref(), dtype, &device))?;
        Ok(Self::object(py, model)?)
    }

    /// What the encoder makes of texts.
    ///
    /// Args:
    ///     input_ids: token ids, (B, S), i64 or u32, S up to 77.
    ///
    /// Raises:
    ///     ShapeError: if a text is too long.
    ///     IndexOutOfRangeError: if an id is not a token.
    fn __call__(&self, py: Python<'_>, input_ids: Given<PyRef<'_, Tensor>>) -> Result<TextFeatures> {
        let input_ids = input_ids.get("CLIPTextModel", "input_ids")?;
        let ids = &input_ids.0;
        detached(py, || self.0.forward(ids)).map(TextFeatures)
    }
}

/// What a text encoder makes of texts.
#[pyclass(frozen, module = "trainable_candle.models")]
pub struct TextFeatures(clip::TextFeatures);

#[pymethods]
impl TextFeatures {
    /// The last layer's states after the final norm, (B, S, D).
    #[getter]
    fn last_hidden_state(&self) -> Tensor {
        Tensor(self.0.last_hidden_state.clone())
    }

    /// The states that enter the last layer, (B, S, D): what SDXL reads.
    #[getter]
    fn penultimate(&self) -> Result<Tensor> {
        self.skipped(Integer::of(0))
    }

    /// The state of each text's end after the final norm, projected if the model projects: (B, D) or (B, P).
    #[getter]
    fn pooled(&self) -> Tensor {
        Tensor(self.0.pooled.clone())
    }

    /// The states after each layer, those of the embedding first; the final norm is not applied.
    #[getter]
    fn hidden_states(&self) -> Vec<Tensor> {
        self.0.hidden_states.iter().cloned().map(Tensor).collect()
    }

    /// The states `clip_skip` layers before the penultimate ones, as diffusers' SDXL pipelines count.
    ///
    /// Raises:
    ///     ArgumentError: if the model has not so many layers.
    fn skipped(&self, clip_skip: Integer) -> Result<Tensor> {
        let clip_skip = clip_skip.count("skipped", "clip_skip")?;
        quick(|| self.0.skipped(clip_skip).cloned()).map(Tensor)
    }
}
