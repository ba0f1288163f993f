//! The autoencoder of latent diffusion.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_models as models;

use super::{Model, class};
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::Tensor;

/// The autoencoder of latent diffusion, which converts images to latents and back. It has the results and the parameter
/// names of diffusers' `AutoencoderKL`. `from_pretrained` loads one.
///
/// ```python
/// vae = tc.models.AutoencoderKL.from_pretrained("sdxl", subfolder="vae")
/// mean, logvar = vae.encode(tc.zeros(1, 3, 64, 64))
/// images = vae.decode(mean)
/// assert images.shape == (1, 3, 64, 64)
/// ```
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct AutoencoderKL(Arc<models::AutoencoderKL>);

class!(AutoencoderKL);

#[pymethods]
impl AutoencoderKL {
    /// The factor of the latents: a diffusion model's input is (latent - shift_factor) * scaling_factor.
    #[getter]
    fn scaling_factor(&self) -> f64 {
        self.0.config().scaling_factor
    }

    /// The shift of the latents (see `scaling_factor`); 0 for SDXL.
    #[getter]
    fn shift_factor(&self) -> f64 {
        self.0.config().shift_factor.unwrap_or(0.0)
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
    ///     The mean and the logarithm of the variance of the latents before shift and scaling, (B, C, H / downscale,
    ///     W / downscale) each, sizes rounded down. C is the model's number of latent channels, 4 for SDXL.
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
    ///     latent: latents, (B, C, h, w), before shift and scaling, as `encode` returns them. C is the model's number
    ///         of latent channels.
    ///     tile_size: the side of a tile in pixels, rounded down to a multiple of `downscale`; 512 is usual. Images
    ///         with a longer side are decoded in square tiles, which overlap by a quarter of their side and are blended
    ///         at their seams. The memory of the activations then does not grow with the image. Default: no tiles.
    ///
    /// Returns:
    ///     Images, (B, 3, h * downscale, w * downscale), values about -1 to 1.
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
