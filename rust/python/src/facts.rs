//! Python functions that read what checkpoints contain, without their weights, and that list the names that options
//! accept.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::IntoPyObjectExt;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{type_hint_identifier, type_hint_subscript};
use serde_json::{Map, Value};
use trainable_candle_core::ops::fake_quantize::Grid;
use trainable_candle_io::WeightFile;
use trainable_candle_io::adapter_file::AdapterFormat;
use trainable_candle_models::pipelines::{PIPELINES, Pipeline};
use trainable_candle_models::saved::SampleSize;
use trainable_candle_models::{self as models, facts};
use trainable_candle_nn::adapter::KINDS as ADAPTERS;
use trainable_candle_nn::optim::KINDS as OPTIMIZERS;
use trainable_candle_nn::{Checkpointing, StreamOptions, StreamedBytes};

use crate::arguments::{FilePath, Integer};
use crate::call::detached;
use crate::dtype::{DType, DTypeArg};
use crate::error::Result;
use crate::lora_config::LoraConfig;

/// The contents of a checkpoint, according to its headers and configurations.
///
/// ```python
/// facts = tc.inspect("sdxl")
/// assert (facts.model, facts.prediction_type) == ("sdxl", "epsilon")
/// assert sorted(facts.parts) == ["text_encoder", "text_encoder_2", "unet", "vae"]
/// ```
#[pyclass(frozen, get_all, module = "trainable_candle")]
pub struct CheckpointFacts {
    /// The name of the models' family, as on the command line; None for a model that belongs to no family.
    model: Option<&'static str>,
    /// The models, by the names of their folders in a pipeline. A model without a pipeline has an empty name.
    parts: BTreeMap<String, Py<PartFacts>>,
    /// Side in pixels of the square images that the denoiser was trained on; None if it is unknown, or if there is no
    /// denoiser.
    resolution: Option<usize>,
    /// Pixels per latent along one side of an image; None if there is no autoencoder.
    factor: Option<usize>,
    /// What the denoiser predicts: "epsilon" or "v_prediction"; None if the files do not state it.
    prediction_type: Option<String>,
    /// Whether the files state that the last timestep is pure noise.
    zero_snr: bool,
}

/// One model of a checkpoint.
///
/// ```python
/// unet = tc.inspect("sdxl").parts["unet"]
/// assert unet.class_name == "SDXLUNet"
/// assert unet.weight_bytes("bf16") == 2 * unet.elements
/// ```
#[pyclass(frozen, module = "trainable_candle")]
pub struct PartFacts(facts::PartFacts);

#[pymethods]
impl PartFacts {
    /// The name of the model's class in `trainable_candle.models`.
    #[getter]
    fn class_name(&self) -> &'static str {
        self.0.kind.name
    }

    /// The model's configuration, as its `config.json` has it.
    #[getter]
    fn config(&self) -> Json {
        Json(Value::Object(self.0.config()))
    }

    /// Check that a file format can hold adapters of the kind `adapter` on `layers`. For a model that belongs to no
    /// family, every format can.
    ///
    /// Args:
    ///     format: "diffusers", "kohya", "comfyui" or "peft".
    ///     adapter: the kind of the adapters, such as "lora".
    ///     layers: the names of the layers that get an adapter.
    ///
    /// Raises:
    ///     ArgumentError: if the format is unknown, or cannot hold these adapters. In the second case, the message
    ///         names a format that can.
    ///     ConfigError: if there is no such kind.
    fn check_format(&self, format: &str, adapter: &str, layers: Vec<String>) -> Result<()> {
        let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
        Ok(self.0.check_format(Some(format.parse()?), adapter, &layers)?)
    }

    /// The floating-point dtype of most of the model's elements in its file; None if its elements have no such dtype.
    #[getter]
    fn dtype(&self) -> Option<DType> {
        self.0.dtype.map(DType::new)
    }

    /// The path that was given to `inspect` and holds the model: one of `others`, or else `path`.
    #[getter]
    fn path(&self) -> PathBuf {
        self.0.path.clone()
    }

    /// The shapes of the model's parameters by name, as in files.
    #[getter]
    fn tensors(&self) -> BTreeMap<String, Vec<usize>> {
        self.0.tensors()
    }

    /// The shapes of the weights of the layers that can have adapters, by the layers' names: (out, in), or (out, in,
    /// height, width) for a convolution.
    #[getter]
    fn layers(&self) -> BTreeMap<String, Vec<usize>> {
        self.0.layers()
    }

    /// The number of elements of all parameters of the model.
    #[getter]
    fn elements(&self) -> usize {
        self.0.tensors().values().map(|dims| dims.iter().product::<usize>()).sum()
    }

    /// Return how many bytes the model's weights take on a device. With streaming, this includes the device memory to
    /// which streamed weights are copied, but not the weights in host memory.
    ///
    /// Args:
    ///     dtype: the dtype of the weights that are not quantized.
    ///     quantize: the format of the linear layers that may be quantized, as in `from_pretrained`.
    ///     stream_blocks: as in `from_pretrained`.
    ///     stream_modulation: as in `from_pretrained`.
    ///
    /// Raises:
    ///     ArgumentError: if the format is unknown, if a format is given and the model has no layers that may be
    ///         quantized, if the model has fewer blocks than `stream_blocks`, or if it has no separate layers for
    ///         `stream_modulation`.
    #[pyo3(signature = (dtype, quantize=None, *, stream_blocks=Integer::of(0), stream_modulation=false))]
    fn weight_bytes(
        &self,
        dtype: DTypeArg,
        quantize: Option<&str>,
        stream_blocks: Integer,
        stream_modulation: bool,
    ) -> Result<usize> {
        let (on_device, _) = self.bytes("weight_bytes", dtype, quantize, (stream_blocks, stream_modulation))?;
        Ok(on_device)
    }

    /// Return how many bytes the streamed weights take in host memory, as a pair: those of the blocks, and those of the
    /// layers that compute the blocks' modulation. The arguments and the errors are those of `weight_bytes`.
    #[pyo3(signature = (dtype, quantize=None, *, stream_blocks=Integer::of(0), stream_modulation=false))]
    fn streamed_bytes(
        &self,
        dtype: DTypeArg,
        quantize: Option<&str>,
        stream_blocks: Integer,
        stream_modulation: bool,
    ) -> Result<(usize, usize)> {
        let (_, streamed) = self.bytes("streamed_bytes", dtype, quantize, (stream_blocks, stream_modulation))?;
        Ok((streamed.blocks, streamed.modulation))
    }

    /// The format in which the file stores every layer that may be quantized: "int8", "fp8" or "nf4". None if these
    /// layers have different formats, or another one. With this format as `quantize`, `from_pretrained` keeps the
    /// file's codes.
    #[getter]
    fn stored_format(&self) -> Option<&'static str> {
        self.0.stored_format().map(trainable_candle_core::quantized::Format::name)
    }

    /// Whether the model has layers that may be quantized, and its file is not a GGUF file with quantized layers. The
    /// quantized layers of a GGUF file stay so without `quantize`, which would round their values a second time.
    #[getter]
    fn can_be_quantized(&self) -> bool {
        self.0.can_be_quantized()
    }

    /// The number of blocks that `stream_blocks` can keep in host memory.
    #[getter]
    fn blocks(&self) -> usize {
        let (blocks, _has_modulation) = self.0.streamable();
        blocks
    }

    /// Whether the model has separate layers, which compute the blocks' modulation, whose weights `stream_modulation`
    /// can keep in host memory.
    #[getter]
    fn has_modulation(&self) -> bool {
        let (_blocks, has_modulation) = self.0.streamable();
        has_modulation
    }

    /// Return the number of floating-point operations of a forward pass over one sample, without adapters, as a pair:
    /// those of the layers, and those of attention.
    ///
    /// Args:
    ///     height: the height of the input, which is latents or an image; 0 for a model that takes text only.
    ///     width: the width of the input.
    ///     tokens: the number of tokens of the text; 0 for a model that takes no text.
    #[pyo3(signature = (*, height=Integer::of(0), width=Integer::of(0), tokens=Integer::of(0)))]
    fn forward_flops(
        &self,
        py: Python<'_>,
        height: Integer,
        width: Integer,
        tokens: Integer,
    ) -> Result<(usize, usize)> {
        let size = sample_size("forward_flops", [height, width, tokens])?;
        let flops = detached(py, || Ok(self.0.forward_flops(size)))?;
        Ok((flops.layers, flops.attention))
    }

    /// The number of blocks that can have a checkpointing policy, as `blocks` of `enable_gradient_checkpointing` counts
    /// them.
    #[getter]
    fn blocks_to_checkpoint(&self) -> usize {
        self.0.blocks_to_checkpoint()
    }

    /// Return approximately how many values are saved for the backward pass of one sample, at the peak.
    ///
    /// Args:
    ///     config: the configuration of the adapters.
    ///     policy: "none", "full", "selective" or "offload" checkpointing.
    ///     blocks: the number of blocks that get the policy, as in `enable_gradient_checkpointing`.
    ///     height: the height of the input, which is latents or an image; 0 for a model that takes text only.
    ///     width: the width of the input.
    ///     tokens: the number of tokens of the text; 0 for a model that takes no text.
    ///
    /// Returns:
    ///     The number of values on the device, and the number in host memory, which is 0 unless `policy` is "offload".
    ///
    /// Raises:
    ///     ArgumentError: as for `enable_gradient_checkpointing`.
    ///     ConfigError: if `config` has a wrong pattern or kind of adapter.
    #[allow(clippy::too_many_arguments)] // each is an argument in Python
    #[pyo3(signature = (config, policy, *, blocks=None, height=Integer::of(0), width=Integer::of(0), tokens=Integer::of(0)))]
    fn saved_values(
        &self,
        py: Python<'_>,
        config: &LoraConfig,
        policy: &str,
        blocks: Option<Integer>,
        height: Integer,
        width: Integer,
        tokens: Integer,
    ) -> Result<(usize, usize)> {
        let size = sample_size("saved_values", [height, width, tokens])?;
        let (checkpointing, config) = (self.checkpointing("saved_values", policy, blocks)?, config.inner());
        let [device, host] = detached(py, || self.0.saved_values(&config, checkpointing, size))?;
        Ok((device, host))
    }

    /// Return which share of the floating-point operations of the blocks' forward pass the backward pass repeats, from
    /// 0 to 1.
    ///
    /// Args:
    ///     policy: "none", "full", "selective" or "offload" checkpointing. "selective" repeats only operations that are
    ///         not counted (norms, activations, sums).
    ///     blocks: the number of blocks that get the policy, as in `enable_gradient_checkpointing`.
    ///     height: the height of the input, which is latents or an image; 0 for a model that takes text only.
    ///     width: the width of the input.
    ///     tokens: the number of tokens of the text; 0 for a model that takes no text.
    ///
    /// Raises:
    ///     ArgumentError: as for `enable_gradient_checkpointing`.
    #[pyo3(signature = (policy, *, blocks=None, height=Integer::of(0), width=Integer::of(0), tokens=Integer::of(0)))]
    fn recomputed_share(
        &self,
        py: Python<'_>,
        policy: &str,
        blocks: Option<Integer>,
        height: Integer,
        width: Integer,
        tokens: Integer,
    ) -> Result<f64> {
        let size = sample_size("recomputed_share", [height, width, tokens])?;
        let checkpointing = self.checkpointing("recomputed_share", policy, blocks)?;
        detached(py, || Ok(self.0.recomputed(checkpointing, size)))
    }

    /// Return the number of values in the largest gradient of activations that the backward pass computes for one
    /// sample. It is the gradient of the results of layers that share an input, and exists in addition to the saved
    /// values.
    ///
    /// Args:
    ///     config: the configuration of the adapters.
    ///     height: the height of the input, which is latents or an image; 0 for a model that takes text only.
    ///     width: the width of the input.
    ///     tokens: the number of tokens of the text; 0 for a model that takes no text.
    ///
    /// Raises:
    ///     ConfigError: if `config` has a wrong pattern or kind of adapter.
    #[pyo3(signature = (config, *, height=Integer::of(0), width=Integer::of(0), tokens=Integer::of(0)))]
    fn widest_gradient(
        &self,
        py: Python<'_>,
        config: &LoraConfig,
        height: Integer,
        width: Integer,
        tokens: Integer,
    ) -> Result<usize> {
        let size = sample_size("widest_gradient", [height, width, tokens])?;
        let config = config.inner();
        detached(py, || self.0.widest_gradient(&config, size))
    }
}

impl PartFacts {
    /// The checkpointing that the arguments `policy` and `blocks` of the function `op` describe.
    fn checkpointing(&self, op: &'static str, policy: &str, blocks: Option<Integer>) -> Result<Checkpointing> {
        let blocks = blocks.map(|blocks| blocks.count(op, "blocks")).transpose()?;
        Ok(self.0.checkpointing(policy.parse()?, blocks)?)
    }

    /// The bytes of the weights on the device, and of the streamed weights in host memory. `blocks` and `modulation`
    /// are the arguments `stream_blocks` and `stream_modulation` of the function `op`.
    fn bytes(
        &self,
        op: &'static str,
        dtype: DTypeArg,
        quantize: Option<&str>,
        (blocks, modulation): (Integer, bool),
    ) -> Result<(usize, StreamedBytes)> {
        let stream = StreamOptions { blocks: blocks.count(op, "stream_blocks")?, modulation };
        Ok(self.0.weight_bytes(dtype.0, quantize.map(str::parse).transpose()?, stream)?)
    }
}

/// The size of a sample, from the arguments `height`, `width` and `tokens` of the function `op`.
fn sample_size(op: &'static str, [height, width, tokens]: [Integer; 3]) -> Result<SampleSize> {
    Ok(SampleSize {
        height: height.count(op, "height")?,
        width: width.count(op, "width")?,
        tokens: tokens.count(op, "tokens")?,
    })
}

/// Determine the contents of a checkpoint from its headers and configurations, without reading weights.
///
/// ```python
/// assert tc.inspect("sdxl").resolution == 128  # the built-in model
/// ```
///
/// Args:
///     path: a pipeline's folder, an original checkpoint in one file, or the folder or file of a single model.
///     model: the family, such as "sdxl". With a family, `path` and `others` together must have all models of the
///         family.
///     others: folders and files of single text encoders and autoencoders, which replace those at `path`.
///
/// Raises:
///     MissingFileError: if nothing is at `path` or at one of `others`.
///     WeightsFormatError: if a file is damaged, if a model of the family is missing, or if `path` is of another
///         family.
///     ConfigError: if a configuration is wrong, or there is no such family.
#[pyfunction]
#[pyo3(signature = (path, model=None, others=Vec::new()))]
pub fn inspect(py: Python<'_>, path: FilePath, model: Option<&str>, others: Vec<FilePath>) -> Result<CheckpointFacts> {
    const OP: &str = "inspect";
    let path = path.get(OP)?;
    let others = others.into_iter().map(|other| other.named(OP, "others")).collect::<Result<Vec<_>>>()?;
    let facts = detached(py, || facts::inspect(&path, model.map(Pipeline::find).transpose()?, &others))?;
    let (resolution, factor) = (facts.resolution(), facts.factor());
    let models::Facts { pipeline, parts, prediction_type, zero_snr } = facts;
    let parts = parts.into_iter().map(|(name, part)| Ok((name, Py::new(py, PartFacts(part))?)));
    Ok(CheckpointFacts {
        model: pipeline.map(|pipeline| pipeline.name),
        parts: parts.collect::<PyResult<_>>()?,
        resolution,
        factor,
        prediction_type,
        zero_snr,
    })
}

/// Return what the header of a GGUF file says about its model, under GGUF's names; None for a file of another format.
///
/// Raises:
///     MissingFileError: if there is no such file.
///     WeightsFormatError: if the file is damaged.
#[pyfunction]
pub fn gguf_facts(py: Python<'_>, path: FilePath) -> Result<Option<Json>> {
    let path = path.get("gguf_facts")?;
    let file = detached(py, || WeightFile::open(&path))?;
    Ok(file.gguf().map(|file| Json(file.facts().clone().into())))
}

/// Return the parts of a family for which an adapter file has adapters, by the names of their folders in a pipeline.
///
/// Args:
///     path: the adapter file, or the folder that peft writes.
///     model: the family, such as "sdxl".
///
/// Raises:
///     MissingFileError: if there is no such file.
///     WeightsFormatError: if the file is damaged.
///     ConfigError: if there is no such family.
#[pyfunction]
pub fn adapted_parts(py: Python<'_>, path: FilePath, model: &str) -> Result<Vec<&'static str>> {
    let path = path.get("adapted_parts")?;
    detached(py, || facts::adapted_parts(&path, Pipeline::find(model)?))
}

/// Return the names of the folders that the parts of a family have in a pipeline.
///
/// Raises:
///     ConfigError: if there is no such family.
#[pyfunction]
pub fn pipeline_parts(model: &str) -> Result<Vec<&'static str>> {
    Ok(Pipeline::find(model)?.parts.iter().map(|part| part.subfolder).collect())
}

/// Return the names that each of the options "adapter", "format", "model", "optimizer" and "qat" accepts. Those of
/// "optimizer" are names of classes in lower case.
#[pyfunction]
pub fn choices() -> BTreeMap<&'static str, Vec<String>> {
    BTreeMap::from([
        ("adapter", ADAPTERS.iter().map(|kind| kind.name.to_owned()).collect()),
        ("format", AdapterFormat::names().map(str::to_owned).collect()),
        ("model", PIPELINES.iter().map(|pipeline| pipeline.name.to_owned()).collect()),
        ("optimizer", OPTIMIZERS.iter().map(|kind| kind.option()).collect()),
        ("qat", Grid::ALL.iter().map(|grid| grid.name().to_owned()).collect()),
    ])
}

/// A JSON object, which Python gets as a dict.
pub struct Json(Value);

impl<'py> IntoPyObject<'py> for Json {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("builtins", "dict"),
        type_hint_identifier!("builtins", "str"),
        type_hint_identifier!("typing", "Any")
    );

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        python_value(py, &self.0)
    }
}

/// Convert a JSON value to a Python object.
fn python_value<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    let to_dict = |map: &Map<String, Value>| {
        let dict = PyDict::new(py);
        map.iter().try_for_each(|(key, value)| dict.set_item(key, python_value(py, value)?))?;
        Ok(dict.into_any())
    };
    match value {
        Value::Null => Ok(py.None().into_bound(py)),
        Value::Bool(value) => value.into_bound_py_any(py),
        // Integers beyond the range of i64 become floats, as numbers with a fraction do.
        Value::Number(number) => match number.as_i64() {
            Some(integer) => integer.into_bound_py_any(py),
            None => number.as_f64().into_bound_py_any(py),
        },
        Value::String(text) => text.into_bound_py_any(py),
        Value::Array(list) => {
            let list = list.iter().map(|value| python_value(py, value)).collect::<PyResult<Vec<_>>>()?;
            Ok(PyList::new(py, list)?.into_any())
        }
        Value::Object(map) => to_dict(map),
    }
}
