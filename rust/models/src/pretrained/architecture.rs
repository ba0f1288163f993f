//! [`Architecture`]: how a model of one class is configured, and built from its files.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::compute::uses_w8a8;
use trainable_candle_core::quantized::Format;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::WeightFiles;
use trainable_candle_nn::{Quantizable, Quantization, Source, StreamOptions, Streaming, Weights};

use super::{CheckpointNaming, Choice, Layout, Pretrained, read_json};
use crate::registry::{Model, ModelKind};

/// A model's `config.json`. The default values are those of the published model.
pub trait Configuration: Clone + Default + 'static {
    /// Reads the configuration from the contents of a `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] if a field is missing, wrong or not supported. The message names the field.
    fn from_json(map: &Map<String, Value>) -> Result<Self>;

    /// The contents of a `config.json` that diffusers or transformers reads.
    fn to_json(&self) -> Map<String, Value>;
}

/// A model that is built from a configuration and weights.
pub trait Architecture: Model + Sized {
    /// The type of the model's `config.json`.
    type Config: Configuration;

    /// The model's entry in the registry of models.
    const KIND: &'static ModelKind;

    /// The linear layers that may be quantized; none by default.
    const QUANTIZABLE: Quantizable = Quantizable::NOTHING;

    /// Builds a model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong or the weights belong to another model.
    fn build(config: Self::Config, weights: &mut Weights<'_>) -> Result<Self>;

    /// Determines the configuration of the model in an original checkpoint (one file with the names of the model's
    /// authors or of llama.cpp, and without a `config.json`) from the shapes of its tensors. `original` says how the
    /// file names its tensors. Fields that shapes do not determine come from the first of the `known` configurations
    /// (one found with the file, then those of published models) with the same sizes. If there is none, they come from
    /// the default configuration.
    ///
    /// # Errors
    /// [`Error::Config`] if a size cannot be determined, or if the sizes belong to a model that is not supported.
    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<Self::Config>) -> Result<Self::Config>;

    /// The layout of the model's parameters: in a folder if `original` is None, or in an original checkpoint. `files`
    /// are the model's files, or None if they do not exist yet.
    fn parameter_layout(
        config: &Self::Config,
        original: Option<CheckpointNaming>,
        files: Option<&WeightFiles>,
    ) -> Box<dyn Layout>;

    /// Whether the configuration says that the model needs f32, because half precision is not enough for it.
    fn force_upcast(_config: &Self::Config) -> bool {
        false
    }

    /// Returns the configuration of `files` without reading weights.
    ///
    /// # Errors
    /// As [`Pretrained::config`].
    fn read_config(files: &Pretrained) -> Result<Self::Config> {
        files.config(Self::deduce)
    }

    /// Loads the frozen model of `files`. If `files` or the configuration says that the model needs f32, and `dtype` is
    /// half precision or None, the weights are converted to f32. Otherwise they are converted to `dtype`, or to the
    /// dtype of most stored weights if `dtype` is None.
    ///
    /// # Errors
    /// [`Error::Argument`] if `files` selects a number of layers, which only language models support; [`Error::Config`]
    /// if the configuration is wrong or does not fit the weights; as [`read_config`](Self::read_config),
    /// [`quantization`](Self::quantization), [`streaming`](Self::streaming) and [`Pretrained::build`].
    fn load(files: &Pretrained, dtype: Option<DType>, device: &Device) -> Result<Self> {
        if files.layers().is_some() {
            let text = format!("layers= is for language models, but this is {}; leave out layers=", Self::KIND.noun);
            return Err(Error::argument("from_pretrained", text));
        }
        let config = Self::read_config(files)?;
        let upcasts = files.upcasts(dtype, Self::force_upcast(&config));
        let dtype = if upcasts { Some(DType::F32) } else { dtype };
        let layout = |weights: &WeightFiles| Self::parameter_layout(&config, files.original(), Some(weights));
        let quantization = Self::quantization("from_pretrained", files.quantize())?;
        let streaming = Self::streaming(&config, files.stream(), device)?;
        files.build(layout, dtype, (device, quantization, streaming), |weights| Self::build(config.clone(), weights))
    }

    /// Plans the streaming of the model's blocks from host memory. None if `options` select no block.
    ///
    /// # Errors
    /// As [`Streaming::new`].
    fn streaming(config: &Self::Config, options: StreamOptions, device: &Device) -> Result<Option<Arc<Streaming>>> {
        if options.is_none() {
            return Ok(None);
        }
        // A model without values. Its dtype does not matter: the plan needs only the names of layers.
        let shapes = Self::build(config.clone(), &mut Source::shapes(DType::F16).root())?;
        Streaming::new(&shapes, Self::QUANTIZABLE, options, device).map(|streaming| Some(Arc::new(streaming)))
    }

    /// Returns the quantization of the model's layers to `format`. If `format` is None, a layer that may be quantized
    /// stays quantized if its file stores it in blocks of ggml; no other layer is quantized. If `format` is int8 or fp8
    /// and linear layers multiply codes ([`uses_w8a8`]), only the layers of
    /// [`Quantizable::multiplied`](trainable_candle_nn::Quantizable::multiplied) are quantized; if this list is empty,
    /// all layers that may be quantized are. `op` is the operation's name in errors.
    ///
    /// # Errors
    /// [`Error::Argument`] if `format` is not None but no layer may be quantized.
    fn quantization(op: &'static str, format: Option<Format>) -> Result<Quantization> {
        if format.is_some() {
            Self::KIND.check_quantizable(op)?;
        }
        Ok(Quantization::new(format, Self::QUANTIZABLE, uses_w8a8()))
    }

    /// Load the frozen model at `path`: the model's folder, a weight file beside the model's `config.json`, a
    /// pipeline's folder, or an original checkpoint.
    ///
    /// # Errors
    /// As [`Pretrained::find`] and [`load`](Self::load).
    fn from_pretrained(path: &Path, dtype: Option<DType>, device: &Device) -> Result<Self> {
        Self::load(&Pretrained::find(path, Self::KIND, &Choice::default())?, dtype, device)
    }

    /// Makes a frozen model of random weights, for measurements of speed and memory. The weights are drawn from the
    /// library's generator. Their sizes come from the `config.json` at the path `config`, or from the published model
    /// if `config` is None. `quantize` is the format to which linear layers are quantized, if any, and `stream` says
    /// which blocks are in host memory.
    ///
    /// # Errors
    /// [`Error::DType`] if `dtype` is not floating-point, [`Error::OutOfMemory`] if the model does not fit on the
    /// device; as [`quantization`](Self::quantization), [`config_at`](Self::config_at) and
    /// [`streaming`](Self::streaming).
    fn from_config(
        config: Option<&Path>,
        dtype: DType,
        device: &Device,
        (quantize, stream): (Option<Format>, StreamOptions),
    ) -> Result<Self> {
        if !is_float(dtype) {
            let message = format!("dtype is {}, expected a floating-point dtype", dtype.as_str());
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

    /// Reads the configuration from the `config.json` at the path `config`. If `config` is None, returns the published
    /// model's configuration.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Config`] if its contents are wrong or not supported.
    fn config_at(config: Option<&Path>) -> Result<Self::Config> {
        config.map_or_else(|| Ok(Self::Config::default()), |path| Self::Config::from_json(&read_json(path)?))
    }
}
