//! [`Architecture`]: what the files of a model say, and how it is built of them.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::quantized::Format;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::WeightFiles;
use trainable_candle_nn::{Quantizable, Quantization, Source, StreamOptions, Streaming, Weights};

use super::{Choice, Layout, Original, Pretrained, read_json};
use crate::registry::{Model, ModelKind};

/// A model's `config.json`. The default is the published model's.
pub trait Configuration: Clone + Default + 'static {
    /// The configuration in a `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field that is missing, wrong or not supported.
    fn from_json(map: &Map<String, Value>) -> Result<Self>;

    /// The `config.json` that diffusers or transformers reads.
    fn to_json(&self) -> Map<String, Value>;
}

/// A model that is built of a configuration and weights.
pub trait Architecture: Model + Sized {
    /// Its `config.json`.
    type Config: Configuration;

    /// Its entry among the kinds of models.
    const KIND: &'static ModelKind;

    /// The linear layers that may be quantized; none unless it says so.
    const QUANTIZABLE: Quantizable = Quantizable::NOTHING;

    /// A model over `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong or the weights are another model's.
    fn build(config: Self::Config, weights: &mut Weights<'_>) -> Result<Self>;

    /// The configuration of the model in an original checkpoint, from the shapes of its tensors. What leaves no trace in them is the
    /// published model's, or comes from the first of the `known` configurations whose sizes are these.
    ///
    /// # Errors
    /// [`Error::Config`] if a size cannot be determined.
    fn deduce(files: &WeightFiles, original: Original, known: Vec<Self::Config>) -> Result<Self::Config>;

    /// The names of its parameters in a folder, or in an original checkpoint: in `files`, if such a checkpoint is there already.
    fn names(config: &Self::Config, original: Option<Original>, files: Option<&WeightFiles>) -> Box<dyn Layout>;

    /// Whether half precision is not enough, as the configuration says.
    fn force_upcast(_config: &Self::Config) -> bool {
        false
    }

    /// The configuration in `files`; no weight is read.
    ///
    /// # Errors
    /// As [`Pretrained::config`].
    fn read_config(files: &Pretrained) -> Result<Self::Config> {
        files.config(Self::deduce)
    }

    /// The frozen model of `files`, its weights converted to `dtype` if one is given; to f32 if half precision is not enough for it.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong or does not fit the weights; as [`Pretrained::build`].
    fn load(files: &Pretrained, dtype: Option<DType>, device: &Device) -> Result<Self> {
        if files.layers().is_some() {
            let text = format!("layers= is for language models; {} is loaded whole", Self::KIND.noun);
            return Err(Error::argument("from_pretrained", text));
        }
        let config = Self::read_config(files)?;
        let upcasts = files.upcasts(dtype, Self::force_upcast(&config));
        let dtype = if upcasts { Some(DType::F32) } else { dtype };
        let layout = |weights: &WeightFiles| Self::names(&config, files.original(), Some(weights));
        let quantization = Self::quantization("from_pretrained", files.quantize())?;
        let streaming = Self::streaming(&config, files.stream(), device)?;
        files.build(layout, dtype, (device, quantization, streaming), |weights| Self::build(config.clone(), weights))
    }

    /// How its blocks are streamed from the memory of the host, if anything is.
    ///
    /// # Errors
    /// As [`Streaming::new`].
    fn streaming(config: &Self::Config, options: StreamOptions, device: &Device) -> Result<Option<Arc<Streaming>>> {
        if options.is_none() {
            return Ok(None);
        }
        let shapes = Self::build(config.clone(), &mut Source::shapes(DType::F16).root())?;
        Streaming::new(&shapes, Self::QUANTIZABLE, options, device).map(|streaming| Some(Arc::new(streaming)))
    }

    /// Its layers in a format, or as files have them.
    ///
    /// # Errors
    /// [`Error::Argument`] if a format is given and none of them may be quantized.
    fn quantization(op: &'static str, format: Option<Format>) -> Result<Quantization> {
        if format.is_some() {
            Self::KIND.check_quantizable(op)?;
        }
        Ok(Quantization { format, layers: Self::QUANTIZABLE })
    }

    /// The frozen model at `path`: its folder, a weight file beside its `config.json`, a pipeline's folder, or an original checkpoint.
    ///
    /// # Errors
    /// As [`Pretrained::find`] and [`load`](Self::load).
    fn from_pretrained(path: &Path, dtype: Option<DType>, device: &Device) -> Result<Self> {
        Self::load(&Pretrained::find(path, Self::KIND, &Choice::default())?, dtype, device)
    }

    /// A frozen model of random weights, drawn from the library's generator, of the sizes in a `config.json`, or of the published
    /// model without one, to measure its speed and memory; quantized if a format is given, with blocks streamed from the memory of the host.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Config`] if it is of another model, [`Error::DType`] if `dtype` is not
    /// floating-point, [`Error::OutOfMemory`] if the model does not fit, [`Error::Argument`] if it cannot be quantized.
    fn from_config(
        config: Option<&Path>,
        dtype: DType,
        device: &Device,
        (quantize, stream): (Option<Format>, StreamOptions),
    ) -> Result<Self> {
        if !is_float(dtype) {
            let message = format!("a model computes in floating point, found {}", dtype.as_str());
            return Err(Error::dtype("from_config", message));
        }
        let quantization = Self::quantization("from_config", quantize)?;
        let config = Self::config_at(config)?;
        let streaming = Self::streaming(&config, stream, device)?;
        let mut source = Source::random(dtype, device).quantized(Some(quantization)).streamed(streaming.clone());
        let model = Self::build(config, &mut source.root())?;
        if let Some(streaming) = streaming {
            streaming.start(&model)?;
        }
        Ok(model)
    }

    /// The configuration in a `config.json`, or the published model's.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Config`] if it is of another model.
    fn config_at(config: Option<&Path>) -> Result<Self::Config> {
        config.map_or_else(|| Ok(Self::Config::default()), |path| Self::Config::from_json(&read_json(path)?))
    }
}
