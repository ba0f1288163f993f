//! `DigitsTransformer` in Python: the image generator of the demo with handwritten digits.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models::digits::DigitsConfig;
use trainable_candle_models::{self as models, Loaded};

use super::{Model, class};
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, detached};
use crate::device;
use crate::error::Result;
use crate::tensor::Tensor;

/// The demo's image generator: a flow-matching diffusion transformer over images of handwritten digits.
///
/// The constructor makes a fresh model whose parameters are trainable; `from_pretrained` loads a frozen one.
///
/// ```python
/// digits = tc.models.DigitsTransformer(num_layers=1)
/// velocity = digits(tc.randn(2, 1, 8, 8), tc.tensor([1000.0, 500.0]), tc.tensor([3, 7]))
/// assert velocity.shape == (2, 1, 8, 8)
/// ```
///
/// Args:
///     sample_size: height and width of an image in pixels, a multiple of `patch_size`.
///     patch_size: height and width in pixels of a patch; each patch becomes one token.
///     num_layers: number of transformer blocks.
///     num_attention_heads: number of attention heads of each block.
///     attention_head_dim: width of each head; the width of the tokens is the number of heads times this width.
///     mlp_ratio: width of the feed-forward network's hidden layer, as a multiple of the width of the tokens.
///     num_classes: number of classes of images.
///     device: the device of the parameters.
///
/// Raises:
///     ConfigError: if a number is 0 or above 65536, or `sample_size` is not a multiple of `patch_size`.
///     ArgumentError: if a number is negative.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the parameters do not fit.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct DigitsTransformer(Arc<models::DigitsTransformer>);

class!(DigitsTransformer);

const OP: &str = "DigitsTransformer";

#[pymethods]
impl DigitsTransformer {
    #[new]
    #[pyo3(signature = (*, sample_size=Integer::of(8), patch_size=Integer::of(2), num_layers=Integer::of(3),
        num_attention_heads=Integer::of(3), attention_head_dim=Integer::of(32), mlp_ratio=Integer::of(3),
        num_classes=Integer::of(10), device="cpu"))]
    #[allow(clippy::too_many_arguments)] // each is a parameter in Python
    fn new(
        sample_size: Integer,
        patch_size: Integer,
        num_layers: Integer,
        num_attention_heads: Integer,
        attention_head_dim: Integer,
        mlp_ratio: Integer,
        num_classes: Integer,
        device: &str,
    ) -> Result<PyClassInitializer<Self>> {
        let config = DigitsConfig {
            sample_size: sample_size.count(OP, "sample_size")?,
            patch_size: patch_size.count(OP, "patch_size")?,
            num_layers: num_layers.count(OP, "num_layers")?,
            num_attention_heads: num_attention_heads.count(OP, "num_attention_heads")?,
            attention_head_dim: attention_head_dim.count(OP, "attention_head_dim")?,
            mlp_ratio: mlp_ratio.count(OP, "mlp_ratio")?,
            num_classes: num_classes.count(OP, "num_classes")?,
            // The other fields: one colour channel, and the default width of the timestep's embedding.
            ..DigitsConfig::default()
        };
        let device = device::parse(device)?;
        let model = Arc::new(catch_panics(|| models::DigitsTransformer::fresh(config, &device))?);
        Ok(PyClassInitializer::from(Model::new(Loaded::new(model.clone()))).add_subclass(Self(model)))
    }

    /// Predict the velocity of flow matching (noise minus image) for noisy images.
    ///
    /// Args:
    ///     sample: noisy images, (B, 1, sample_size, sample_size). The values of images without noise are -1 to 1.
    ///     timestep: the time of each image from 0 (clean image) to 1000 (pure noise), (B,).
    ///     class_labels: the class of each image, (B,), i64 or u32.
    ///
    /// Returns:
    ///     A tensor of the shape of `sample`, in the dtype of the weights.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    ///     IndexOutOfRangeError: if a label is not a class.
    ///     DTypeError: if the labels are neither i64 nor u32.
    fn __call__(
        &self,
        py: Python<'_>,
        sample: Argument<PyRef<'_, Tensor>>,
        timestep: Argument<PyRef<'_, Tensor>>,
        class_labels: Argument<PyRef<'_, Tensor>>,
    ) -> Result<Tensor> {
        let (sample, timestep) = (sample.get(OP, "sample")?, timestep.get(OP, "timestep")?);
        let class_labels = class_labels.get(OP, "class_labels")?;
        let (sample, timestep, labels) = (&sample.0, &timestep.0, &class_labels.0);
        detached(py, || self.0.forward(sample, timestep, labels)).map(Tensor)
    }
}
