//! T5's encoder.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;

use super::{Model, class};
use crate::argument::Argument;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::Tensor;

/// T5's encoder, a text encoder of Stable Diffusion 3, Flux and Chroma, with the results of transformers'
/// `T5EncoderModel`. With weights in f16, activations that would exceed the range of f16 are scaled or kept in f32.
/// `from_pretrained` loads an encoder.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct T5Encoder(Arc<models::T5Encoder>);

class!(T5Encoder);

#[pymethods]
impl T5Encoder {
    /// Compute the hidden states of the tokens after the last block and the final norm: (B, L, D), in the dtype of the
    /// weights. D is the number of features of a token.
    ///
    /// Args:
    ///     input_ids: the ids of L tokens for each of B texts, (B, L), i64 or u32; L is at least 1.
    ///     attention_mask: (B, L), i64 or u32: 1 for tokens that other tokens attend to, 0 for the rest. Default: 1 for
    ///         all tokens, padding included, as in diffusers' pipelines.
    ///
    /// Raises:
    ///     ShapeError: if an input has another shape.
    ///     IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
    ///     DTypeError: if an input has another dtype than i64 or u32.
    #[pyo3(signature = (input_ids, attention_mask=None))]
    fn __call__(
        &self,
        py: Python<'_>,
        input_ids: Argument<PyRef<'_, Tensor>>,
        attention_mask: Option<Argument<PyRef<'_, Tensor>>>,
    ) -> Result<Tensor> {
        let input_ids = input_ids.get("T5Encoder", "input_ids")?;
        let mask = attention_mask.map(|mask| mask.get("T5Encoder", "attention_mask")).transpose()?;
        let (ids, mask) = (&input_ids.0, mask.as_ref().map(|mask| &mask.0));
        detached(py, || self.0.forward(ids, mask)).map(Tensor)
    }
}
