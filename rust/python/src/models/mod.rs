//! Models: what all have in common, and one class for each.

mod clip;
mod digits;
mod request;
mod sdxl;
mod vae;

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tc::checkpoint::Policy;
use trainable_candle_core as tc;
use trainable_candle_io as io;
use trainable_candle_models::{self as models, registry};
use trainable_candle_nn::adapter::AdapterSet as Set;

use crate::adapter_set::{AdapterSet, Attached, LoraConfig};
use crate::arguments::FilePath;
use crate::call::detached;
use crate::dtype::{DType, DTypeArg};
use crate::error::Result;
use crate::given::Given;
use crate::tensor::Tensor;
use crate::types::{NamedTensors, NamedVars};
use crate::var::Var;

pub use clip::{CLIPTextModel, TextFeatures};
pub use digits::DigitsTransformer;
use request::{Call, Request};
pub use sdxl::SDXLUNet;
pub use vae::AutoencoderKL;

/// A model: its tensors by name, its adapters, its checkpointing. Each kind is a subclass that can be called.
#[pyclass(frozen, subclass, module = "trainable_candle.models")]
pub struct Model {
    model: Arc<dyn models::Model>,
    adapter: Attached,
}

impl Model {
    /// The part of a model's object that all have in common.
    pub fn new(model: Arc<dyn models::Model>) -> Self {
        Self { model, adapter: Attached::default() }
    }
}

/// How the class of a kind of model is made: `class!(Class)` for a tuple struct around an `Arc` of `models::Class`.
macro_rules! class {
    ($class:ident) => {
        impl $class {
            fn initializer(model: trainable_candle_models::$class) -> pyo3::PyClassInitializer<Self> {
                let model = std::sync::Arc::new(model);
                pyo3::PyClassInitializer::from(super::Model::new(model.clone())).add_subclass(Self(model))
            }

            /// The object of a loaded model.
            pub fn object(py: Python<'_>, model: trainable_candle_models::$class) -> PyResult<Py<Self>> {
                Py::new(py, Self::initializer(model))
            }
        }
    };
}
pub(crate) use class;

#[pymethods]
impl Model {
    /// The dtype of the weights, in which the model computes.
    #[getter]
    fn dtype(&self) -> DType {
        DType::new(self.model.dtype())
    }

    /// Every parameter by name, adapters left out; a merged one is part of its layer's weight.
    fn named_tensors<'py>(&self, py: Python<'py>) -> Result<NamedTensors<'py>> {
        let dict = PyDict::new(py);
        for (name, tensor) in self.model.named_tensors() {
            dict.set_item(name, Bound::new(py, Tensor(tensor.detach()))?)?;
        }
        Ok(NamedTensors(dict))
    }

    /// The trainable parameters of the model itself by name: none if it was loaded, all if it is fresh.
    fn named_parameters<'py>(&self, py: Python<'py>) -> Result<NamedVars<'py>> {
        let dict = PyDict::new(py);
        for (name, var) in self.model.named_vars() {
            dict.set_item(name, Var::object(py, var)?)?;
        }
        Ok(NamedVars(dict))
    }

    /// Put trainable adapters on the layers that `config` targets; the model itself stays as it is.
    ///
    /// Raises:
    ///     ConfigError: if no layer matches, or the model has an adapter already.
    fn add_adapter(&self, py: Python<'_>, config: &LoraConfig) -> Result<Py<AdapterSet>> {
        let config = config.inner();
        self.adapter.attach(py, "add_adapter", &self.model, || Set::attach(config, &self.model.named_layers()))
    }

    /// Put the adapters of a file on the model, their effect multiplied by `scale`: of a file in any of the formats of
    /// `AdapterSet.save`, by whatever tool. Its adapters for other parts of a pipeline are left out.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if there is no such file, or it is not an adapter for this model.
    ///     ConfigError: if the model has an adapter already.
    #[pyo3(signature = (path, scale=Given::of(1.0)))]
    fn load_adapter(&self, py: Python<'_>, path: FilePath, scale: Given<f64>) -> Result<Py<AdapterSet>> {
        const OP: &str = "load_adapter";
        let (path, scale) = (path.get(OP)?, scale.get(OP, "scale")?);
        self.adapter.attach(py, OP, &self.model, || {
            let (names, layers) = (self.model.adapter_names(), self.model.named_layers());
            io::attach_adapter(&path, scale, io::PartLayers { names: &names, layers: &layers })
        })
    }

    /// Let the adapted layers compute with one merged weight each, at the speed of the base. Training has no effect
    /// until `unmerge_adapter`.
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
        self.adapter.get("unmerge_adapter")?.set_enabled(true);
        Ok(())
    }

    /// Remove the adapters, merged or not; the model then computes exactly the base's results.
    fn remove_adapter(&self) -> Result<()> {
        self.adapter.remove()
    }

    /// Keep little between forward and backward, and recompute the rest.
    ///
    /// Args:
    ///     policy: "full" keeps the inputs of blocks, "selective" also the results of matrix products and attention.
    ///
    /// Raises:
    ///     ArgumentError: if the policy is unknown.
    #[pyo3(signature = (policy="full"))]
    fn enable_gradient_checkpointing(&self, policy: &str) -> Result<()> {
        self.model.set_checkpointing(policy.parse()?);
        Ok(())
    }

    /// Keep everything between forward and backward.
    fn disable_gradient_checkpointing(&self) {
        self.model.set_checkpointing(Policy::None);
    }

    /// Write `config.json` and the weights to a folder as diffusers and transformers read them, adapters left out; a merged
    /// one is part of its layer's weight.
    ///
    /// Raises:
    ///     FileError: if a file cannot be written.
    fn save_pretrained(&self, py: Python<'_>, folder: FilePath) -> Result<()> {
        let folder = folder.get("save_pretrained")?;
        detached(py, || models::save_pretrained(self.model.as_ref(), &folder))
    }

    fn __repr__(&self) -> String {
        let elements: usize = self.model.named_tensors().iter().map(|(_, tensor)| tensor.elem_count()).sum();
        format!("{}({elements} parameters, {})", self.model.class_name(), self.model.dtype().as_str())
    }
}

/// Load the model at `path`, frozen, whatever kind its files say it is.
///
/// Args:
///     path: a model's folder; a weight file beside its `config.json`; a pipeline's folder or an original checkpoint, of which the
///         model that is fine-tuned is meant unless `subfolder` names another; or a name on the Hugging Face hub,
///         "organisation/name".
///     dtype: convert the weights; as they are stored without it.
///     device: where to load it.
///     subfolder: the model's folder in a pipeline ("unet", "vae", "text_encoder", "text_encoder_2"), also for a checkpoint.
///     config: a `config.json`, or a pipeline's folder that has one, in place of the one that belongs to the weights.
///
/// Raises:
///     MissingFileError, WeightsFormatError: if files are missing or damaged.
///     ConfigError: if the configuration is of no known model or does not fit the weights.
#[pyfunction]
#[pyo3(signature = (path, dtype=None, device="cpu", *, subfolder=None, config=None))]
pub fn load_model(
    py: Python<'_>,
    path: FilePath,
    dtype: Option<DTypeArg>,
    device: &str,
    subfolder: Option<String>,
    config: Option<FilePath>,
) -> Result<Py<Model>> {
    let request = Request::new(
        py,
        Call { op: "load", component: &registry::KINDS[0].component },
        path,
        dtype,
        device,
        subfolder,
        config,
    )?;
    let (kind, files) = detached(py, || registry::find(&request.path, &request.choice))?;
    let Request { dtype, device, .. } = &request;
    Ok(match kind.name {
        "SDXLUNet" => {
            let model = detached(py, || models::SDXLUNet::load(&files, *dtype, device))?;
            SDXLUNet::object(py, model)?.into_bound(py).into_super().unbind()
        }
        "AutoencoderKL" => {
            let model = detached(py, || models::AutoencoderKL::load(&files, *dtype, device, None))?;
            AutoencoderKL::object(py, model)?.into_bound(py).into_super().unbind()
        }
        "CLIPTextModel" => {
            let model = detached(py, || models::CLIPTextModel::load(&files, *dtype, device))?;
            CLIPTextModel::object(py, model)?.into_bound(py).into_super().unbind()
        }
        "DigitsTransformer" => {
            let model = detached(py, || models::DigitsTransformer::load(&files, *dtype, device))?;
            DigitsTransformer::object(py, model)?.into_bound(py).into_super().unbind()
        }
        other => return Err(tc::Error::Config(format!("load: \"{other}\" has no Python class")).into()),
    })
}

/// Write models to one file under the names of the original checkpoints, as ComfyUI and others read them.
///
/// Args:
///     path: the file.
///     models: each model by the folder that it would have in a pipeline: "unet", "vae", "text_encoder", "text_encoder_2".
///         Adapters are left out; a merged one is part of its layer's weight.
///     base: a checkpoint from which all else is taken, as it is.
///     dtype: convert the weights of the models.
///
/// Raises:
///     ArgumentError: if a model has no such place.
///     FileError, MissingFileError: if a file cannot be written or read.
#[pyfunction]
#[pyo3(signature = (path, models, base=None, dtype=None))]
pub fn save_checkpoint(
    py: Python<'_>,
    path: FilePath,
    models: BTreeMap<String, PyRef<'_, Model>>,
    base: Option<FilePath>,
    dtype: Option<DTypeArg>,
) -> Result<()> {
    const OP: &str = "save_checkpoint";
    let path = path.get(OP)?;
    let base = base.map(|base| base.get(OP)).transpose()?;
    let models: Vec<(String, Arc<dyn models::Model>)> =
        models.into_iter().map(|(place, model)| (place, model.model.clone())).collect();
    let dtype = dtype.map(|dtype| dtype.0);
    detached(py, || {
        let models: Vec<(&str, &dyn models::Model)> =
            models.iter().map(|(place, model)| (place.as_str(), model.as_ref())).collect();
        models::save_checkpoint(&path, &models, base.as_deref(), dtype)
    })
}
