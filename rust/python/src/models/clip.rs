//! The Python classes of CLIP's text encoder and of its results.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;
use trainable_candle_models::clip;

use super::{Model, class};
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, detached};
use crate::error::Result;
use crate::tensor::Tensor;

/// CLIP's text encoder. It computes the results of transformers' `CLIPTextModel` or `CLIPTextModelWithProjection`. The
/// names of its parameters, except the projection's, begin with "text_model.", as in the published files.
/// `from_pretrained` loads an encoder.
///
/// ```python
/// encoder = tc.models.CLIPTextModel.from_pretrained("sdxl", subfolder="text_encoder")
/// features = encoder(tc.tensor([[1, 2, 3]]))
/// assert features.penultimate.shape[:2] == (1, 3)
/// ```
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct CLIPTextModel(Arc<models::CLIPTextModel>);

// Defines `CLIPTextModel::CLASS`, the entry of this class in the table of models.
class!(CLIPTextModel);

#[pymethods]
impl CLIPTextModel {
    /// Compute the features of B texts of S tokens each.
    ///
    /// Args:
    ///     input_ids: token ids, (B, S), i64 or u32. S is at most the model's number of positions, 77 in the published
    ///         models.
    ///
    /// Raises:
    ///     ShapeError: if the ids have another shape, or the texts have no token or too many.
    ///     IndexOutOfRangeError: if an id is not a token.
    ///     DTypeError: if the ids are neither i64 nor u32.
    fn __call__(&self, py: Python<'_>, input_ids: Argument<PyRef<'_, Tensor>>) -> Result<TextFeatures> {
        let input_ids = input_ids.get("CLIPTextModel", "input_ids")?;
        let ids = &input_ids.0;
        // `detached` releases the GIL; gradients are not affected.
        detached(py, || self.0.forward(ids)).map(TextFeatures)
    }
}

/// The features that CLIP's text encoder computes for B texts of S tokens each. D is the encoder's hidden size.
///
/// ```python
/// encoder = tc.models.CLIPTextModel.from_pretrained("sdxl", subfolder="text_encoder")
/// features = encoder(tc.tensor([[1, 2, 3]]))
/// assert features.last_hidden_state.shape[:2] == features.skipped(1).shape[:2]
/// ```
#[pyclass(frozen, module = "trainable_candle.models")]
pub struct TextFeatures(clip::TextFeatures);

#[pymethods]
impl TextFeatures {
    /// The hidden states after the last layer and the final norm, (B, S, D).
    #[getter]
    fn last_hidden_state(&self) -> Tensor {
        Tensor(self.0.last_hidden_state.clone())
    }

    /// The hidden states before the last layer, (B, S, D), which SDXL uses.
    #[getter]
    fn penultimate(&self) -> Result<Tensor> {
        self.skipped(Integer::of(0))
    }

    /// The pooled states, (B, D): for each text, the state of its end token in `last_hidden_state`. If the model has a
    /// projection, these states are projected to P features, (B, P).
    #[getter]
    fn pooled(&self) -> Tensor {
        Tensor(self.0.pooled.clone())
    }

    /// The hidden states after the embedding and after each layer, before the final norm, (B, S, D) each.
    #[getter]
    fn hidden_states(&self) -> Vec<Tensor> {
        self.0.hidden_states.iter().cloned().map(Tensor).collect()
    }

    /// Return the hidden states `clip_skip` layers before `penultimate`, (B, S, D). diffusers' SDXL pipelines count
    /// `clip_skip` in the same way.
    ///
    /// Raises:
    ///     ArgumentError: if `clip_skip` is negative or not less than the model's number of layers.
    fn skipped(&self, clip_skip: Integer) -> Result<Tensor> {
        let clip_skip = clip_skip.count("skipped", "clip_skip")?;
        catch_panics(|| self.0.skipped(clip_skip).cloned()).map(Tensor)
    }
}
