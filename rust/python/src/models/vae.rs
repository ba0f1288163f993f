//! The autoencoder of latent diffusion.

use std::sync::Arc;

use pyo3::prelude::*;
use trainable_candle_core::DType;
use trainable_candle_models as models;

use super::request::{Call, Request};
use super::{Model, class};
use crate::arguments::{FilePath, Integer};
use crate::call::detached;
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::given::Given;
use crate::tensor::Tensor;

/// The autoencoder between pictures and latents, computing what diffusers' `AutoencoderKL` computes, under its names. Made by
/// `from_pretrained`.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct AutoencoderKL(Arc<models::AutoencoderKL>);

class!(AutoencoderKL);

#[pymethods]
impl AutoencoderKL {
    /// The frozen model at `path`.
    ///
    /// Args:
    ///     path: an autoencoder, its folder or a weight file beside its `config.json`; a pipeline's folder; an original checkpoint in one
    ///         file; or a name on the Hugging Face hub, "organisation/name".
    ///     dtype: convert the weights. Values in SDXL's autoencoder leave the range of f16: where its configuration says
    ///         `force_upcast`, as SDXL's does, the model is f32 although half precision is asked for or stored.
    ///     device: where to load it.
    ///     subfolder: the model's folder in a pipeline, also for a checkpoint.
    ///     config: a `config.json`, or a pipeline's folder that has one, in place of the one that belongs to the weights.
    ///     force_upcast: overrules the configuration; False gives the weights the dtype that is asked for.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if files are missing or damaged.
    ///     ConfigError: if the configuration is another model's, is not supported, or does not fit the weights.
    #[staticmethod]
    #[pyo3(signature = (path, dtype=None, device="cpu", *, subfolder=None, config=None, force_upcast=None))]
    #[allow(clippy::too_many_arguments)] // each is a name in Python
    fn from_pretrained(
        py: Python<'_>,
        path: FilePath,
        dtype: Option<DTypeArg>,
        device: &str,
        subfolder: Option<String>,
        config: Option<FilePath>,
        force_upcast: Option<bool>,
    ) -> Result<Py<Self>> {
        let request = Request::new(
            py,
            Call::from_pretrained(&models::AutoencoderKL::COMPONENT),
            path,
            dtype,
            device,
            subfolder,
            config,
        )?;
        let load = |files: &_, dtype, device: &_| models::AutoencoderKL::load(files, dtype, device, force_upcast);
        Ok(Self::object(py, request.load(py, &models::AutoencoderKL::COMPONENT, load)?)?)
    }

    /// What latents are, from the configuration alone; no weight is read.
    ///
    /// Args:
    ///     path: as for `from_pretrained`.
    ///     subfolder: likewise.
    ///
    /// Returns:
    ///     `downscale`, `scaling_factor` and `shift_factor` of the model at `path`.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if files are missing or damaged.
    ///     ConfigError: if the configuration is another model's or is not supported.
    #[staticmethod]
    #[pyo3(signature = (path, *, subfolder=None))]
    fn latent_form(py: Python<'_>, path: FilePath, subfolder: Option<String>) -> Result<(usize, f64, f64)> {
        let component = &models::AutoencoderKL::COMPONENT;
        let call = Call { op: "latent_form", component };
        let request = Request::new(py, call, path, None, "cpu", subfolder, None)?;
        let config = request.load(py, component, |files, _, _| models::AutoencoderKL::read_config(files))?;
        Ok((config.downscale(), config.scaling_factor, config.shift_factor.unwrap_or(0.0)))
    }

    /// A frozen model of random weights, for measuring how fast and large it is.
    ///
    /// Args:
    ///     config: a `config.json`; SDXL's autoencoder without it.
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
        let model = detached(py, || models::AutoencoderKL::from_config(config.as_deref(), dtype, &device))?;
        Ok(Self::object(py, model)?)
    }

    /// A diffusion model sees (latent - shift_factor) * scaling_factor.
    #[getter]
    fn scaling_factor(&self) -> f64 {
        self.0.config().scaling_factor
    }

    /// See `scaling_factor`; 0 for SDXL.
    #[getter]
    fn shift_factor(&self) -> f64 {
        self.0.config().shift_factor.unwrap_or(0.0)
    }

    /// Pixels along one side of a picture for each of the latents.
    #[getter]
    fn downscale(&self) -> usize {
        self.0.config().downscale()
    }

    /// The distribution of a picture's latents.
    ///
    /// Args:
    ///     image: pictures, (B, 3, H, W), values -1 to 1.
    ///     tile_size: encode larger pictures in tiles of so many pixels, which overlap by a quarter (512 is usual);
    ///         near seams the result differs a little.
    ///
    /// Returns:
    ///     Mean and logarithm of the variance, (B, 4, H / downscale, W / downscale) each; not scaled.
    ///
    /// Raises:
    ///     ShapeError: if the picture does not fit the model.
    #[pyo3(signature = (image, *, tile_size=None))]
    fn encode(
        &self,
        py: Python<'_>,
        image: Given<PyRef<'_, Tensor>>,
        tile_size: Option<Integer>,
    ) -> Result<(Tensor, Tensor)> {
        let image = image.get("encode", "image")?;
        let image = &image.0;
        let tile_size = tile_size.map(|size| size.count("encode", "tile_size")).transpose()?;
        let (mean, logvar) = detached(py, || self.0.encode(image, tile_size))?;
        Ok((Tensor(mean), Tensor(logvar)))
    }

    /// The pictures of latents.
    ///
    /// Args:
    ///     latent: latents, (B, 4, h, w), not scaled.
    ///     tile_size: decode larger pictures in tiles of so many pixels, which overlap by a quarter, their seams blended (512
    ///         is usual): memory no longer grows with the picture.
    ///
    /// Returns:
    ///     Pictures, (B, 3, h * downscale, w * downscale), values about -1 to 1.
    ///
    /// Raises:
    ///     ShapeError: if the latents do not fit the model.
    #[pyo3(signature = (latent, *, tile_size=None))]
    fn decode(&self, py: Python<'_>, latent: Given<PyRef<'_, Tensor>>, tile_size: Option<Integer>) -> Result<Tensor> {
        let latent = latent.get("decode", "latent")?;
        let latent = &latent.0;
        let tile_size = tile_size.map(|size| size.count("decode", "tile_size")).transpose()?;
        detached(py, || self.0.decode(latent, tile_size)).map(Tensor)
    }
}
