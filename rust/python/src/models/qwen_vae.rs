//! The autoencoder of Qwen-Image.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;

use super::{Model, class};
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::Tensor;

/// Qwen-Image's autoencoder between images and latents. It has the parameter names of diffusers'
/// `AutoencoderKLQwenImage` and computes the results of that class for videos of one frame. The layers of the published
/// model that change the number of frames are neither loaded nor saved. `from_pretrained` loads an autoencoder.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct AutoencoderKLQwenImage(Arc<models::AutoencoderKLQwenImage>);

class!(AutoencoderKLQwenImage);

#[pymethods]
impl AutoencoderKLQwenImage {
    /// The mean of each latent channel. The diffusion transformer's input is (latent - latents_mean) / latents_std.
    #[getter]
    fn latents_mean(&self) -> Vec<f64> {
        self.0.config().latents_mean.clone()
    }

    /// The standard deviation of each latent channel.
    #[getter]
    fn latents_std(&self) -> Vec<f64> {
        self.0.config().latents_std.clone()
    }

    /// The number of pixels per latent along each side of an image.
    #[getter]
    fn downscale(&self) -> usize {
        self.0.config().downscale()
    }

    /// Encode images: return the distribution of their latents.
    ///
    /// Args:
    ///     image: images, (B, 3, H, W), values -1 to 1.
    ///     tile_size: the side of a tile in pixels, rounded down to a multiple of `downscale`; 512 is usual. Images
    ///         with a longer side are encoded in square tiles, which overlap by a quarter of their side. Near the
    ///         tiles' seams, the result differs a little from that of the whole image. Default: no tiles.
    ///
    /// Returns:
    ///     The mean and the logarithm of the variance of the latents before normalisation with `latents_mean` and
    ///     `latents_std`, (B, 16, H / downscale, W / downscale) each, sizes rounded down.
    ///
    /// Raises:
    ///     ShapeError: if the image does not fit the model, or a side is shorter than `downscale`.
    ///     ArgumentError: if `tile_size` is below 4 * downscale.
    #[pyo3(signature = (image, *, tile_size=None))]
    fn encode(
        &self,
        py: Python<'_>,
        image: Argument<PyRef<'_, Tensor>>,
        tile_size: Option<Integer>,
    ) -> Result<(Tensor, Tensor)> {
        let image = image.get("encode", "image")?;
        let image = &image.0;
        let tile_size = tile_size.map(|size| size.count("encode", "tile_size")).transpose()?;
        let (mean, logvar) = detached(py, || self.0.encode(image, tile_size))?;
        Ok((Tensor(mean), Tensor(logvar)))
    }

    /// Decode latents to images.
    ///
    /// Args:
    ///     latent: latents, (B, 16, h, w), before normalisation, as `encode` returns them.
    ///     tile_size: the side of a tile in pixels, rounded down to a multiple of `downscale`; 512 is usual. Images
    ///         with a longer side are decoded in square tiles, which overlap by a quarter of their side and are blended
    ///         at their seams. The memory of the activations then does not grow with the image. Default: no tiles.
    ///
    /// Returns:
    ///     Images, (B, 3, h * downscale, w * downscale), values -1 to 1.
    ///
    /// Raises:
    ///     ShapeError: if the latents do not fit the model.
    ///     ArgumentError: if `tile_size` is below 4 * downscale.
    #[pyo3(signature = (latent, *, tile_size=None))]
    fn decode(
        &self,
        py: Python<'_>,
        latent: Argument<PyRef<'_, Tensor>>,
        tile_size: Option<Integer>,
    ) -> Result<Tensor> {
        let latent = latent.get("decode", "latent")?;
        let latent = &latent.0;
        let tile_size = tile_size.map(|size| size.count("decode", "tile_size")).transpose()?;
        detached(py, || self.0.decode(latent, tile_size)).map(Tensor)
    }
}
