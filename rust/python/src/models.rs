//! Models: what all have in common, and one class for each.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tc::checkpoint::Policy;
use trainable_candle_core as tc;
use trainable_candle_io as io;
use trainable_candle_models::digits::DigitsConfig;
use trainable_candle_models::{self as models, Pretrained, registry};
use trainable_candle_nn::adapter::AdapterSet as Set;

use crate::adapter_set::{AdapterSet, Attached, LoraConfig};
use crate::arguments::{FilePath, Integer};
use crate::call::{detached, quick};
use crate::device;
use crate::dtype::{DType, DTypeArg};
use crate::error::Result;
use crate::tensor::Tensor;
use crate::types::{NamedTensors, NamedVars};
use crate::var::Var;

/// A model: its tensors by name, its adapters, its checkpointing. Each kind is a subclass that can be called.
#[pyclass(frozen, subclass, module = "trainable_candle.models")]
pub struct Model {
    model: Arc<dyn models::Model>,
    adapter: Attached,
}

impl Model {
    fn new(model: Arc<dyn models::Model>) -> Self {
        Self { model, adapter: Attached::default() }
    }
}

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
    ///     ConfigError: if no layer matches, or one has an adapter already.
    fn add_adapter(&self, py: Python<'_>, config: &LoraConfig) -> Result<Py<AdapterSet>> {
        let config = config.inner();
        self.adapter.attach(py, || Set::attach(config, &self.model.named_layers()))
    }

    /// Put the adapters of a file on the model, their effect multiplied by `scale`.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if there is no such file, or it is no adapter for this model.
    ///     ConfigError: if a layer has an adapter already.
    #[pyo3(signature = (path, scale=1.0))]
    fn load_adapter(&self, py: Python<'_>, path: FilePath, scale: f64) -> Result<Py<AdapterSet>> {
        let path = path.get("load_adapter")?;
        self.adapter.attach(py, || io::attach_adapter(&path, scale, &self.model.named_layers()))
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

    /// Take the adapters off, merged or not; the model computes exactly what it did before them.
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

    /// Write `config.json` and `model.safetensors` to a folder, adapters left out.
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

/// Load the model at `path`, frozen, whatever kind its `config.json` says it is.
///
/// Args:
///     path: a folder with `config.json` and safetensors weights, or a weight file beside its `config.json`.
///     dtype: convert the weights; as they are stored without it.
///     device: where to load it.
///
/// Raises:
///     MissingFileError, WeightsFormatError: if files are missing or damaged.
///     ConfigError: if the configuration is of no known model or does not fit the weights.
#[pyfunction]
#[pyo3(signature = (path, dtype=None, device="cpu"))]
pub fn load_model(py: Python<'_>, path: FilePath, dtype: Option<DTypeArg>, device: &str) -> Result<Py<Model>> {
    let found = path.get("load")?;
    let kind = quick(|| registry::kind_of(&Pretrained::find(&found)?))?;
    match kind.class_name {
        models::DigitsTransformer::CLASS_NAME => {
            let model = DigitsTransformer::from_pretrained(py, path, dtype, device)?;
            Ok(model.into_bound(py).into_super().unbind())
        }
        other => Err(tc::Error::Config(format!("load: \"{other}\" has no Python class")).into()),
    }
}

/// The demo's image generator: a flow-matching diffusion transformer over pictures of handwritten digits.
///
/// The constructor makes a fresh model whose parameters are trainable; `from_pretrained` loads a frozen one.
///
/// Args:
///     sample_size: height and width of a picture in pixels.
///     patch_size: height and width of the square that becomes one token.
///     num_layers: number of blocks.
///     num_attention_heads: heads of each attention.
///     attention_head_dim: width of each head.
///     mlp_ratio: width of the feed-forward layers' middle, as a multiple of the model's width.
///     num_classes: number of classes.
///     device: where its parameters are.
///
/// Raises:
///     ConfigError: if the sizes do not fit together.
#[pyclass(frozen, extends = Model, module = "trainable_candle.models")]
pub struct DigitsTransformer(Arc<models::DigitsTransformer>);

impl DigitsTransformer {
    fn initializer(model: models::DigitsTransformer) -> PyClassInitializer<Self> {
        let model = Arc::new(model);
        PyClassInitializer::from(Model::new(model.clone())).add_subclass(Self(model))
    }
}

#[pymethods]
impl DigitsTransformer {
    #[new]
    #[pyo3(signature = (*, sample_size=Integer::of(8), patch_size=Integer::of(2), num_layers=Integer::of(3), num_attention_heads=Integer::of(3), attention_head_dim=Integer::of(32),
        mlp_ratio=Integer::of(3), num_classes=Integer::of(10), device="cpu"))]
    #[allow(clippy::too_many_arguments)] // one for each size
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
        const OP: &str = models::DigitsTransformer::CLASS_NAME;
        let config = DigitsConfig {
            sample_size: sample_size.count(OP, "sample_size")?,
            patch_size: patch_size.count(OP, "patch_size")?,
            num_layers: num_layers.count(OP, "num_layers")?,
            num_attention_heads: num_attention_heads.count(OP, "num_attention_heads")?,
            attention_head_dim: attention_head_dim.count(OP, "attention_head_dim")?,
            mlp_ratio: mlp_ratio.count(OP, "mlp_ratio")?,
            num_classes: num_classes.count(OP, "num_classes")?,
            ..DigitsConfig::default()
        };
        let device = device::parse(device)?;
        Ok(Self::initializer(quick(|| models::DigitsTransformer::fresh(config, &device))?))
    }

    /// The frozen model at `path`: a folder with `config.json` and safetensors weights, or a weight file beside its
    /// `config.json`.
    ///
    /// Args:
    ///     path: the folder or the file.
    ///     dtype: convert the weights; as they are stored without it.
    ///     device: where to load it.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if files are missing or damaged.
    ///     ConfigError: if the configuration is another model's or does not fit the weights.
    #[staticmethod]
    #[pyo3(signature = (path, dtype=None, device="cpu"))]
    fn from_pretrained(py: Python<'_>, path: FilePath, dtype: Option<DTypeArg>, device: &str) -> Result<Py<Self>> {
        let (path, device) = (path.get("from_pretrained")?, device::parse(device)?);
        let load = || models::DigitsTransformer::from_pretrained(&path, dtype.map(|dtype| dtype.0), &device);
        Ok(Py::new(py, Self::initializer(detached(py, load)?))?)
    }

    /// The velocity `noise - picture` of flow matching.
    ///
    /// Args:
    ///     sample: pictures under noise, (B, 1, H, W), values about -1 to 1.
    ///     timestep: noise levels from 0 (picture) to 1000 (noise), (B,).
    ///     class_labels: the class of each, (B,), i64 or u32.
    ///
    /// Returns:
    ///     A tensor of the shape of `sample`.
    ///
    /// Raises:
    ///     ShapeError: if the inputs do not fit the model or one another.
    ///     IndexOutOfRangeError: if a label is no class.
    fn __call__(&self, py: Python<'_>, sample: &Tensor, timestep: &Tensor, class_labels: &Tensor) -> Result<Tensor> {
        detached(py, || self.0.forward(&sample.0, &timestep.0, &class_labels.0)).map(Tensor)
    }
}
