//! The steps that all autoencoders have around their encoder and decoder: checks, conversion to channels-last tensors
//! and back, and tiles.

use trainable_candle_core::compute::with_bf16_pairs;
use trainable_candle_core::{DType, Error, Result, Tensor};

use super::tiling::Tiling;

/// The lowest and the highest logarithm of the variance, as in diffusers. Other values are clamped to this range.
const LOGVAR_RANGE: (f64, f64) = (-30.0, 20.0);

/// The properties of an autoencoder on which the steps around its encoder and decoder depend.
pub struct Coding {
    /// The model's name in errors.
    pub op: &'static str,
    /// Pixels per latent along one side of an image.
    pub downscale: usize,
    /// The dtype of the weights.
    pub dtype: DType,
}

impl Coding {
    /// The distribution of the latents of `image (B, image_channels, H, W)`: mean and logarithm of the variance, (B,
    /// `latent_channels`, h, w) each. `run` computes the moments (B, h, w, 2 · `latent_channels`) of channels-last
    /// images: the means, then the logarithms. With `tile_size`, an image with more than `tile_size` pixels along a
    /// side is encoded in tiles. `tile_size` is rounded down to whole latents.
    ///
    /// # Errors
    /// [`Error::Shape`] if the image does not have four dimensions and `image_channels` channels, or a side is shorter
    /// than one latent; [`Error::Argument`] if `tile_size` is less than four latents; the errors of `run`.
    pub fn encode(
        &self,
        image: &Tensor,
        [image_channels, latent_channels]: [usize; 2],
        tile_size: Option<usize>,
        run: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let least_side = self.downscale;
        let x = self.to_channels_last("image", image, image_channels, least_side)?;
        // In f32 on a GPU, tensor cores compute the products, with each f32 split into two bf16 numbers.
        let encode = |x: &Tensor| with_bf16_pairs(|| run(x));
        let moments = match self.tiling(tile_size)? {
            Some((pixels, latents)) if x.dims()[1].max(x.dims()[2]) > pixels => {
                // The sides of a tile of the input and of its result, here pixels and latents.
                Tiling::new(pixels, latents).run(&x, encode)?
            }
            _ => encode(&x)?,
        };
        let moments = moments.permute(&[0, 3, 1, 2])?;
        let mean = moments.narrow(1, 0, latent_channels)?.contiguous()?;
        let logvar = moments.narrow(1, latent_channels, latent_channels)?.contiguous()?;
        Ok((mean, logvar.clamp(Some(LOGVAR_RANGE.0), Some(LOGVAR_RANGE.1))?))
    }

    /// The image of `latent (B, channels, h, w)`; `run` decodes channels-last latents. With `tile_size`, an image with
    /// more than `tile_size` pixels along a side is decoded in tiles. `tile_size` is rounded down to whole latents.
    ///
    /// # Errors
    /// [`Error::Shape`] if the latent does not have four dimensions and `channels` channels, or a side is 0;
    /// [`Error::Argument`] if `tile_size` is less than four latents; the errors of `run`.
    pub fn decode(
        &self,
        latent: &Tensor,
        channels: usize,
        tile_size: Option<usize>,
        run: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let least_side = 1;
        let z = self.to_channels_last("latent", latent, channels, least_side)?;
        // With the products of f32 on tensor cores, as in `encode`.
        let decode = |z: &Tensor| with_bf16_pairs(|| run(z));
        let image = match self.tiling(tile_size)? {
            Some((pixels, latents)) if z.dims()[1].max(z.dims()[2]) > latents => {
                // The reverse of `encode`: a tile of latents becomes a tile of pixels.
                Tiling::new(latents, pixels).run(&z, decode)?
            }
            _ => decode(&z)?,
        };
        image.permute(&[0, 3, 1, 2])?.contiguous()
    }

    /// The side of a tile in pixels and in latents; None without `tile_size`.
    fn tiling(&self, tile_size: Option<usize>) -> Result<Option<(usize, usize)>> {
        /// The fewest latents along a tile's side. Neighbouring tiles overlap by a quarter of the side: here, one
        /// latent.
        const FEWEST: usize = 4;
        let Some(pixels) = tile_size else { return Ok(None) };
        let latents = pixels / self.downscale;
        if latents < FEWEST {
            let least = FEWEST * self.downscale;
            let message = format!("tile_size is {pixels}, expected at least {least} pixels; 512 is usual");
            return Err(Error::argument(self.op, message));
        }
        Ok(Some((latents * self.downscale, latents)))
    }

    /// Converts `x` to channels-last, (B, C, H, W) → (B, H, W, C), and to the dtype of the weights. H and W must be at
    /// least `least`.
    fn to_channels_last(&self, name: &str, x: &Tensor, channels: usize, least: usize) -> Result<Tensor> {
        match *x.dims() {
            [_, c, height, width] if c == channels && height.min(width) >= least => {
                x.to_dtype(self.dtype)?.permute(&[0, 2, 3, 1])?.contiguous()
            }
            _ => Err(Error::shape(
                self.op,
                format!("{name} has shape {:?}, expected (B, {channels}, H, W), H and W at least {least}", x.dims()),
            )),
        }
    }
}
