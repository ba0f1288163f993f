//! The Python classes of models: the base class, and one class for each kind of model.

mod causal_lm;
mod chroma;
mod clip;
mod digits;
mod flux;
mod flux2;
mod generation;
mod qwen_image;
mod qwen_vae;
mod request;
mod sd3;
mod sdxl;
mod t5;
mod vae;
mod z_image;

use std::collections::BTreeMap;
use std::convert::Infallible;

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::type_hint_identifier;
use pyo3::types::{PyDict, PyType};
use tc::checkpoint::Policy;
use trainable_candle_core as tc;
use trainable_candle_io as io;
use trainable_candle_models::registry::ModelKind;
use trainable_candle_models::{self as models, Loaded};
use trainable_candle_nn::{StreamOptions, adapter};

use crate::adapter_set::{AdapterSet, Attached};
use crate::argument::Argument;
use crate::arguments::{FilePath, Integer};
use crate::call::detached; // runs a closure without the GIL
use crate::device;
use crate::dtype::{DType, DTypeArg};
use crate::error::Result;
use crate::lora_config::LoraConfig;
use crate::named::{NamedTensors, NamedVars};
use crate::tensor::Tensor;
use crate::training_adapter::TrainingAdapter;
use crate::var::Var;

pub use causal_lm::CausalLM;
pub use chroma::ChromaTransformer;
pub use clip::{CLIPTextModel, TextFeatures};
pub use digits::DigitsTransformer;
pub use flux::FluxTransformer;
pub use flux2::Flux2Transformer;
pub use generation::{Generation, KVCache};
pub use qwen_image::QwenImageTransformer;
pub use qwen_vae::AutoencoderKLQwenImage;
pub use request::set_resolver;
use request::{Options, Request};
pub use sd3::SD3Transformer;
pub use sdxl::SDXLUNet;
pub use t5::T5Encoder;
pub use vae::AutoencoderKL;
pub use z_image::ZImageTransformer;

/// The base class of models, with the methods for named tensors, adapters, gradient checkpointing and files. Each kind
/// of model is a subclass. Calling a model runs its forward pass, but an autoencoder has the methods `encode` and
/// `decode` instead. `from_pretrained` loads a model.
///
/// ```python
/// unet = tc.models.Model.from_pretrained("sdxl")  # the denoising model of the pipeline
/// unet.enable_gradient_checkpointing()
/// adapter = unet.load_adapter("adapter.safetensors", scale=0.8)
/// unet.merge_adapter()
/// unet.save_pretrained("merged")
/// ```
#[pyclass(frozen, subclass, module = "trainable_candle.models")]
pub struct Model {
    model: Loaded,
    adapter: Attached, // the adapters on the model's layers, if there are any
}

impl Model {
    /// The part of a model's Python object that belongs to the base class.
    pub fn new(model: Loaded) -> Self {
        Self { model, adapter: Attached::default() }
    }

    /// The Python object of a model, in the class of the model's kind.
    fn object(py: Python<'_>, model: Loaded) -> Result<Py<Self>> {
        let kind = model.kind().name;
        let Some(class) = CLASSES.iter().find(|class| class.kind.name == kind) else {
            return Err(tc::Error::Config(format!("load: \"{kind}\" has no Python class")).into());
        };
        Ok((class.wrap)(py, model)?)
    }
}

/// The Python class of a kind of model.
pub struct Class {
    kind: &'static ModelKind,
    /// Whether a Python type is this class.
    is: fn(&Bound<'_, PyType>) -> bool,
    /// Makes the Python object of a model of this kind.
    wrap: fn(Python<'_>, Loaded) -> PyResult<Py<Model>>,
}

/// The class of each kind of model.
static CLASSES: &[Class] = &[
    SDXLUNet::CLASS,
    SD3Transformer::CLASS,
    FluxTransformer::CLASS,
    Flux2Transformer::CLASS,
    ChromaTransformer::CLASS,
    ZImageTransformer::CLASS,
    QwenImageTransformer::CLASS,
    AutoencoderKL::CLASS,
    AutoencoderKLQwenImage::CLASS,
    CLIPTextModel::CLASS,
    T5Encoder::CLASS,
    DigitsTransformer::CLASS,
    CausalLM::CLASS,
];

impl Class {
    /// The kind of model whose Python class is `class`; `None` for the base class.
    fn kind(class: &Bound<'_, PyType>) -> Option<&'static ModelKind> {
        CLASSES.iter().find(|known| (known.is)(class)).map(|known| known.kind)
    }
}

/// `class!(Name)` defines `Name::CLASS`, the entry of a kind of model in `CLASSES`. `Name` must be a tuple struct
/// around an `Arc<models::Name>`.
macro_rules! class {
    ($class:ident) => {
        impl $class {
            /// The entry of this class in `CLASSES`.
            pub const CLASS: super::Class = super::Class {
                kind: <trainable_candle_models::$class as trainable_candle_models::Architecture>::KIND,
                is: |class| class.is(class.py().get_type::<Self>()),
                wrap: |py, model| {
                    let any: std::sync::Arc<dyn std::any::Any + Send + Sync> = model.model().clone();
                    let Ok(typed) = any.downcast::<trainable_candle_models::$class>() else {
                        unreachable!("a model is of its kind's type")
                    };
                    let object = pyo3::PyClassInitializer::from(super::Model::new(model)).add_subclass(Self(typed));
                    Ok(Py::new(py, object)?.into_bound(py).into_super().unbind())
                },
            };
        }
    };
}
pub(crate) use class;

#[pymethods]
impl Model {
    /// Load the model at `path` with frozen weights. A subclass's `from_pretrained` returns an object of the subclass;
    /// `Model.from_pretrained`, also called `load`, returns an object of the subclass that fits the files.
    ///
    /// ```python
    /// unet = tc.models.load("sdxl", dtype="bf16")
    /// assert isinstance(unet, tc.models.SDXLUNet)
    /// ```
    ///
    /// Args:
    ///     path: a model's folder, a weight file beside its `config.json`, a pipeline's folder, an original checkpoint
    ///         in one file, or a name on the Hugging Face hub, "organisation/name". From a pipeline or an original
    ///         checkpoint, `Model.from_pretrained` loads the denoising model (the UNet or transformer).
    ///     dtype: the dtype to which the weights are converted; default: the dtype of most weights in the files.
    ///     device: the device of the weights.
    ///     subfolder: the name of the model's folder in a pipeline ("unet", "vae", "text_encoder", "text_encoder_2"),
    ///         which also selects the model of an original checkpoint. Default: the first folder that fits the class.
    ///     config: the path of a `config.json`, or of a pipeline's folder that has one, to use instead of the
    ///         configuration beside the weights.
    ///     force_upcast: whether the weights become f32 even if half precision is requested or stored. By default the
    ///         model's configuration decides. The configuration of SDXL's autoencoder requests f32, because the
    ///         autoencoder's activations exceed the range of f16.
    ///     layers: the number of layers of a language model to load, from the first on, to read their `hidden_states`;
    ///         default: all.
    ///     quantize: "int8", "fp8", "nf4", "q8_0" or "q4_0": the format to which the linear layers of blocks are
    ///         quantized while they are read, as by the function `quantize`. The other weights have `dtype`.
    ///     stream_blocks: the number of transformer blocks that keep the weights of linear layers in pinned host
    ///         memory. The weights of such a block are copied to the device before the block runs, on a separate CUDA
    ///         stream. The device holds the copied weights of two such blocks at a time.
    ///     stream_modulation: whether the weights of the layers that compute the modulation of all blocks are in pinned
    ///         host memory too. For Flux these weights take 6 GiB, and each step reads them once.
    ///
    /// Raises:
    ///     MissingFileError, FileError, WeightsFormatError: if files are missing, cannot be read, or are damaged.
    ///     ConfigError: if the configuration belongs to another model, is not supported, or does not fit the weights.
    ///     ArgumentError: if `layers` is given for a model that is not a language model or is not from 1 to its number
    ///         of layers, if `quantize` is unknown or given for a kind of model without layers to quantize, if the
    ///         model has fewer blocks than `stream_blocks`, or if it has no separate layers for `stream_modulation`.
    ///     DTypeError: if the dtype is unknown or not floating point.
    ///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
    ///     OutOfMemoryError: if the model does not fit, or if the system cannot allocate the pinned memory.
    #[classmethod]
    #[pyo3(signature = (path, dtype=None, device="cpu", *, subfolder=None, config=None, force_upcast=None, layers=None, quantize=None, stream_blocks=Integer::of(0), stream_modulation=false))]
    #[allow(clippy::too_many_arguments)] // each is a parameter in Python
    fn from_pretrained(
        cls: &Bound<'_, PyType>,
        py: Python<'_>,
        path: FilePath,
        dtype: Option<DTypeArg>,
        device: &str,
        subfolder: Option<String>,
        config: Option<FilePath>,
        force_upcast: Option<bool>,
        layers: Option<Integer>,
        quantize: Option<&str>,
        stream_blocks: Integer,
        stream_modulation: bool,
    ) -> Result<Own> {
        let layers = layers.map(|layers| layers.count("from_pretrained", "layers")).transpose()?;
        let quantize = quantize.map(str::parse).transpose()?;
        let blocks = stream_blocks.count("from_pretrained", "stream_blocks")?;
        let stream = StreamOptions { blocks, modulation: stream_modulation };
        let options = Options { subfolder, config, force_upcast, layers, quantize, stream };
        let request = Request::new(py, "from_pretrained", Class::kind(cls), (path, options), dtype, device)?;
        Ok(Own(Self::object(py, request.load(py)?)?))
    }

    /// Make a model with frozen random weights, to measure the model's speed and memory.
    ///
    /// Args:
    ///     config: the path of a `config.json`; default: the configuration of the published model of this class.
    ///     dtype: the dtype of the weights; default: f32.
    ///     device: the device of the weights.
    ///     quantize, stream_blocks, stream_modulation: as in `from_pretrained`.
    ///
    /// Raises:
    ///     ArgumentError: if called on the base class `Model`, if `quantize` is unknown or the kind has no layers to
    ///         quantize, if the model has fewer blocks than `stream_blocks`, or if it has no separate layers for
    ///         `stream_modulation`.
    ///     MissingFileError, FileError, ConfigError: if the configuration is missing, cannot be read, or belongs to
    ///         another model.
    ///     DTypeError: if the dtype is unknown or not floating point.
    ///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
    ///     OutOfMemoryError: if the model does not fit, or if the system cannot allocate the pinned memory.
    #[classmethod]
    #[pyo3(signature = (config=None, dtype=None, device="cpu", *, quantize=None, stream_blocks=Integer::of(0), stream_modulation=false))]
    #[allow(clippy::too_many_arguments)] // each is a parameter in Python
    fn from_config(
        cls: &Bound<'_, PyType>,
        py: Python<'_>,
        config: Option<FilePath>,
        dtype: Option<DTypeArg>,
        device: &str,
        quantize: Option<&str>,
        stream_blocks: Integer,
        stream_modulation: bool,
    ) -> Result<Own> {
        const OP: &str = "from_config";
        let Some(kind) = Class::kind(cls) else {
            let message = "Model is the base class; call from_config on the class of a model, such as SDXLUNet";
            return Err(tc::Error::argument(OP, message).into());
        };
        let config = config.map(|config| config.named(OP, "config")).transpose()?;
        let (dtype, device) = (dtype.map_or(tc::DType::F32, |dtype| dtype.0), device::parse(device)?);
        let quantize = quantize.map(str::parse).transpose()?;
        let blocks = stream_blocks.count(OP, "stream_blocks")?;
        let stream = StreamOptions { blocks, modulation: stream_modulation };
        let model = detached(py, || (kind.random)(config.as_deref(), dtype, &device, (quantize, stream)))?;
        Ok(Own(Self::object(py, Loaded::new(model))?))
    }

    /// The dtype of the weights, in which the model computes.
    #[getter]
    fn dtype(&self) -> DType {
        DType::new(self.model.dtype())
    }

    /// Return every parameter by name, quantized weights dequantized. Parameters of adapters are not included, but if
    /// an adapter is merged, the weight of its layer is the merged weight.
    fn named_tensors<'py>(&self, py: Python<'py>) -> Result<NamedTensors<'py>> {
        let dict = PyDict::new(py);
        for (name, tensor) in self.model.named_tensors() {
            dict.set_item(name, Bound::new(py, Tensor(tensor.detach()))?)?;
        }
        Ok(NamedTensors(dict))
    }

    /// Return the tensor `named_tensors()[name]`. Unlike `named_tensors`, this method dequantizes only this tensor.
    ///
    /// Raises:
    ///     ArgumentError: if the model has no parameter of this name.
    fn get_tensor(&self, name: &str) -> Result<Tensor> {
        let missing = || {
            let message = format!("the model has no parameter {name:?}; named_tensors() lists the parameters");
            tc::Error::argument("get_tensor", message)
        };
        Ok(Tensor(self.model.named_tensor(name)?.ok_or_else(missing)?.detach()))
    }

    /// Return the model's trainable parameters by name, without the parameters of adapters. A model from
    /// `from_pretrained` has none. In a model from the constructor, all parameters are trainable.
    fn named_parameters<'py>(&self, py: Python<'py>) -> Result<NamedVars<'py>> {
        let dict = PyDict::new(py);
        for (name, var) in self.model.named_vars() {
            dict.set_item(name, Var::object(py, var)?)?;
        }
        Ok(NamedVars(dict))
    }

    /// Put trainable adapters on the layers that `config` targets. The model's own weights do not change.
    ///
    /// Raises:
    ///     ConfigError: if the configuration matches no layer or does not suit a layer, or if the model has an adapter
    ///         already.
    ///     OutOfMemoryError: if the adapters' parameters do not fit.
    fn add_adapter(&self, py: Python<'_>, config: &LoraConfig) -> Result<Py<AdapterSet>> {
        let mut config = config.inner();
        self.adapter.attach(py, "add_adapter", &self.model, || {
            // By default, OFT rotates the side of layers that the programs for the model's adapter files expect.
            config.oft_side.get_or_insert(self.model.adapter_names().default_format().oft_side());
            adapter::AdapterSet::attach(config, &self.model.named_layers())
        })
    }

    /// Put the adapters of a file on the model and multiply the adapters' scales by `scale`. The file may have any of
    /// the formats of `AdapterSet.save`, and any tool may have written it. The file's adapters for other models of a
    /// pipeline are ignored.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if there is no such file, or it has no adapter for this model.
    ///     ConfigError, ShapeError: if the model has an adapter already, or the file's adapters do not fit its layers.
    ///     ArgumentError: if `scale` is 0 or not finite.
    #[pyo3(signature = (path, scale=Argument::of(1.0)))]
    fn load_adapter(&self, py: Python<'_>, path: FilePath, scale: Argument<f64>) -> Result<Py<AdapterSet>> {
        const OP: &str = "load_adapter";
        let (path, scale) = (path.get(OP)?, scale.get(OP, "scale")?);
        self.adapter.attach(py, OP, &self.model, || {
            let (names, layers) = (self.model.adapter_names(), self.model.named_layers());
            io::attach_adapter(&path, scale, io::PartLayers { names: &names, layers: &layers })
        })
    }

    /// Put the frozen LoRA of a file on the model, in addition to the adapter that is trained, and multiply the frozen
    /// LoRA's scale by `scale`. Such LoRAs ("training adapters") are published for the training of distilled models.
    /// Saved files and merged weights do not include the frozen LoRA.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if there is no such file, or it has no adapter for this model.
    ///     ConfigError, ShapeError: if the file is not a LoRA of linear layers, if it does not fit the layers, or if a
    ///         layer already has a training adapter.
    ///     ArgumentError: if `scale` is not finite.
    #[pyo3(signature = (path, scale=Argument::of(1.0)))]
    fn add_training_adapter(&self, py: Python<'_>, path: FilePath, scale: Argument<f64>) -> Result<TrainingAdapter> {
        const OP: &str = "add_training_adapter";
        let (path, scale) = (path.get(OP)?, scale.get(OP, "scale")?);
        let adapter = detached(py, || {
            let (names, layers) = (self.model.adapter_names(), self.model.named_layers());
            io::adapter_file::attach_training_adapter(&path, scale, io::PartLayers { names: &names, layers: &layers })
        })?;
        Ok(TrainingAdapter::new(adapter, self.model.clone()))
    }

    /// Make each adapted layer compute with one merged weight, as fast as an unquantized layer without an adapter.
    /// Later changes of the adapters' parameters have no effect until `unmerge_adapter`.
    ///
    /// Raises:
    ///     ArgumentError: if the model has no adapter.
    fn merge_adapter(&self, py: Python<'_>) -> Result<()> {
        let set = self.adapter.get("merge_adapter")?;
        detached(py, || set.merge())
    }

    /// Undo `merge_adapter`, exactly.
    ///
    /// Raises:
    ///     ArgumentError: if the model has no adapter.
    fn unmerge_adapter(&self) -> Result<()> {
        // Enabling puts the adapters back in place of the merged weights.
        self.adapter.get("unmerge_adapter")?.set_enabled(true);
        Ok(())
    }

    /// Remove the adapters, merged or not. The model then computes exactly the results of its frozen weights.
    fn remove_adapter(&self) -> Result<()> {
        self.adapter.remove()
    }

    /// Keep only some activations between the forward and the backward pass, and recompute the other activations in the
    /// backward pass.
    ///
    /// Args:
    ///     policy: "full" keeps the inputs of blocks; "selective" also keeps the results of matrix products and
    ///         attention; "offload" keeps the inputs of blocks in the memory of the host; "none" keeps everything.
    ///     blocks: the number of blocks, from the model's first block on, that get the policy "full" or "offload"; the
    ///         later blocks get "selective". Default: all blocks get the policy.
    ///
    /// Raises:
    ///     ArgumentError: if the policy is unknown, if `blocks` is negative or exceeds the model's number of blocks, or
    ///         if `blocks` is given with the policy "selective" or "none".
    #[pyo3(signature = (policy="full", *, blocks=None))]
    fn enable_gradient_checkpointing(&self, policy: &str, blocks: Option<Integer>) -> Result<()> {
        let policy: Policy = policy.parse()?;
        match blocks {
            Some(blocks) => {
                let count = blocks.count("enable_gradient_checkpointing", "blocks")?;
                self.model.checkpoint_first(count, policy)?;
            }
            None => self.model.set_checkpointing(policy),
        }
        Ok(())
    }

    /// Keep all activations that the backward pass needs, and recompute none.
    fn disable_gradient_checkpointing(&self) {
        self.model.set_checkpointing(Policy::None);
    }

    /// Write `config.json` and the weights to a folder that diffusers and transformers can load. Adapters are not
    /// written, but if an adapter is merged, the weight of its layer is the merged weight.
    ///
    /// Args:
    ///     folder: the folder, which is created if missing.
    ///     quantize: "nf4" quantizes all linear layers that may be quantized: it writes them as bitsandbytes does, in
    ///         four bits with scales in f32. `config.json` names the linear layers that are not quantized. If diffusers
    ///         cannot tell such a name apart from the name of a quantized layer, both layers are quantized: this
    ///         happens to the last layer of Flux.
    ///
    /// Raises:
    ///     FileError: if a file cannot be written.
    ///     ArgumentError: if only a part of the model's layers was loaded, if the format is not "nf4", or if the model
    ///         has no layers that may be quantized.
    ///     DTypeError: if a layer to quantize is f64.
    #[pyo3(signature = (folder, quantize=None))]
    fn save_pretrained(&self, py: Python<'_>, folder: FilePath, quantize: Option<&str>) -> Result<()> {
        let folder = folder.get("save_pretrained")?;
        let format = quantize.map(str::parse).transpose()?;
        detached(py, || models::save_pretrained(&*self.model, &folder, format))
    }

    fn __repr__(&self) -> String {
        let elements: usize =
            self.model.named_weights().iter().map(|(_, weight)| weight.dims().iter().product::<usize>()).sum();
        format!("{}({elements} parameters, {})", self.model.class_name(), self.model.dtype().as_str())
    }
}

/// Write models to one file, with the tensor names of the original checkpoint. ComfyUI and other tools read such files.
///
/// ```python
/// unet = tc.models.SDXLUNet.from_pretrained("sdxl")
/// tc.models.save_checkpoint("checkpoint.safetensors", {"unet": unet}, dtype="f16")
/// ```
///
/// Args:
///     path: the file.
///     models: the models, by the names of their folders in a pipeline, such as "unet", "transformer", "vae" or
///         "text_encoder". Adapters are not written, but if an adapter is merged, the weight of its layer is the merged
///         weight.
///     base: the path of an original checkpoint. Its tensors that belong to none of `models` are copied unchanged.
///     dtype: the floating point dtype to which the weights of `models` are converted. Default: each keeps its dtype.
///     quantize: for each model to quantize, the format "fp8" or "int8", by the name of the model's folder. The linear
///         layers of the model are written as ComfyUI stores them: "fp8" as e4m3 numbers with one scale per weight,
///         "int8" as integers with one scale per row of the weight.
///
/// Raises:
///     ArgumentError: if a model does not fit the name of its folder, if only a part of a model's layers was loaded, if
///         `quantize` names a model that is not in `models` or has no layers that may be quantized, or if a format is
///         neither "fp8" nor "int8".
///     DTypeError: if `dtype` is not floating point.
///     FileError, MissingFileError: if a file cannot be written or read.
///     WeightsFormatError: if `base` is damaged or has tensors of an unsupported dtype.
#[pyfunction]
#[pyo3(signature = (path, models, base=None, dtype=None, quantize=Argument::of(None)))]
pub fn save_checkpoint(
    py: Python<'_>,
    path: FilePath,
    models: BTreeMap<String, PyRef<'_, Model>>,
    base: Option<FilePath>,
    dtype: Option<DTypeArg>,
    quantize: Argument<Option<BTreeMap<String, String>>>,
) -> Result<()> {
    const OP: &str = "save_checkpoint";
    let formats = quantize.get(OP, "quantize")?.unwrap_or_default();
    let formats = formats.into_iter().map(|(name, format)| Ok((name, format.parse()?))).collect::<tc::Result<_>>()?;
    let path = path.get(OP)?;
    let base = base.map(|base| base.get(OP)).transpose()?;
    let models: Vec<(String, Loaded)> = models.into_iter().map(|(name, model)| (name, model.model.clone())).collect();
    let options = models::WriteOptions { dtype: dtype.map(|dtype| dtype.0), formats };
    detached(py, || {
        let models: Vec<(&str, &dyn models::Model)> =
            models.iter().map(|(name, model)| (name.as_str(), &**model)).collect();
        models::save_checkpoint(&path, &models, base.as_deref(), &options)
    })
}

/// The result of a class method: an object of the class on which the method was called, or of a subclass.
pub struct Own(pub Py<Model>);

impl<'py> IntoPyObject<'py> for Own {
    type Target = Model;
    type Output = Bound<'py, Model>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing_extensions", "Self");

    fn into_pyobject(self, py: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0.into_bound(py))
    }
}
