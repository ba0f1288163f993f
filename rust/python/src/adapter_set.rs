//! Python's class for the adapters of a whole model, its functions that write adapter files, and [`Attached`], where a
//! model keeps its adapters.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use trainable_candle_core as tc;
use trainable_candle_io as io;
use trainable_candle_models::Loaded;
use trainable_candle_nn::adapter;

use crate::argument::Argument;
use crate::arguments::FilePath;
use crate::call::{catch_panics, detached};
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::lora_config::LoraConfig;
use crate::named::NamedVars;
use crate::var::Var;

/// The adapters of a model, made by `add_adapter` or `load_adapter`.
///
/// ```python
/// unet = tc.models.load("sdxl")
/// adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules="all-attention"))
/// optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-4)
/// adapter.save("lora.safetensors")
/// ```
#[pyclass(frozen, module = "trainable_candle")]
pub struct AdapterSet {
    set: Arc<adapter::AdapterSet>,
    model: Loaded,
    /// The trainable parameters with peft's names, in the order of the layers.
    vars: Vec<(String, Py<Var>)>,
}

impl AdapterSet {
    /// Make the Python object of the adapters `set` on `model`.
    pub fn object(py: Python<'_>, set: Arc<adapter::AdapterSet>, model: Loaded) -> PyResult<Py<Self>> {
        let vars = set
            .named_vars()
            .into_iter()
            .map(|(name, var)| Ok((name, Var::object(py, var)?)))
            .collect::<PyResult<_>>()?;
        Py::new(py, Self { set, model, vars })
    }

    /// The set of adapters that this object wraps.
    pub const fn inner(&self) -> &Arc<adapter::AdapterSet> {
        &self.set
    }
}

#[pymethods]
impl AdapterSet {
    /// Return the trainable parameters in the order of the layers.
    fn parameters(&self, py: Python<'_>) -> Vec<Py<Var>> {
        self.vars.iter().map(|(_, var)| var.clone_ref(py)).collect()
    }

    /// Return the trainable parameters under peft's names ("transformer_blocks.0.attn.to_q.lora_A.weight").
    fn named_parameters<'py>(&self, py: Python<'py>) -> Result<NamedVars<'py>> {
        let dict = PyDict::new(py);
        for (name, var) in &self.vars {
            dict.set_item(name, var)?;
        }
        Ok(NamedVars(dict))
    }

    /// The configuration of the adapters.
    #[getter]
    fn config(&self) -> LoraConfig {
        LoraConfig(self.set.config().clone())
    }

    /// Enable or disable the adapters. While they are disabled, the model computes exactly the results of its frozen
    /// weights.
    fn set_enabled(&self, enabled: bool) {
        self.set.set_enabled(enabled);
    }

    /// Set whether the adapters are in training mode, in which dropout is active.
    fn set_training(&self, training: bool) {
        self.set.set_training(training);
    }

    /// Write the adapters to a safetensors file. If writing fails, no incomplete file remains.
    ///
    /// Args:
    ///     path: the file. With the format "peft", a path that does not end in ".safetensors" is a folder, which gets
    ///         the files that `PeftModel.from_pretrained` loads.
    ///     format: "kohya", "diffusers", "peft" or "comfyui". Default: the format that most tools load for this model,
    ///         such as "kohya" for SDXL; "peft" for a model that no other tool supports.
    ///     metadata: entries (name: text) for the file's header, in addition to the entries that other tools read.
    ///     dtype: the dtype of the parameters in the file, "f32", "f16" or "bf16". Default: f32.
    ///
    /// Returns:
    ///     The names of layers whose adapter has no effect because one of its matrices is zero everywhere, as before
    ///     training.
    ///
    /// Raises:
    ///     FileError: if the file cannot be written.
    ///     ArgumentError: if the format is unknown or cannot hold these adapters, if the dtype is not floating point,
    ///         or if `path` is a folder and the format is not "peft".
    #[pyo3(signature = (path, format=None, metadata=Argument::of(None), dtype=None))]
    fn save(
        &self,
        py: Python<'_>,
        path: FilePath,
        format: Option<&str>,
        metadata: Argument<Option<BTreeMap<String, String>>>,
        dtype: Option<DTypeArg>,
    ) -> Result<Vec<String>> {
        const OP: &str = "save";
        let path = path.get(OP)?;
        let options = save_options(OP, format, metadata, dtype)?;
        // The names that other tools give to the model and its layers.
        let names = self.model.adapter_names();
        // `zero` lists the layers whose adapter has no effect.
        detached(py, || Ok(io::save_adapters(&path, &[(&names, &self.set)], &options)?.zero))
    }

    /// Set the parameters to those of an adapter file. The file must have the same layers, kinds, ranks and alphas as
    /// these adapters.
    ///
    /// Raises:
    ///     MissingFileError: if there is no such file.
    ///     WeightsFormatError: if the file is damaged, or has no adapter for this model.
    ///     ConfigError, ShapeError: if the file does not fit these adapters. In this case no parameter changes, unless
    ///         only the file's learned scales of `qat` are wrong.
    fn load(&self, py: Python<'_>, path: FilePath) -> Result<()> {
        let path = path.get("load")?;
        detached(py, || {
            let (names, layers) = (self.model.adapter_names(), self.model.named_layers());
            io::load_adapter(&path, &self.set, io::PartLayers { names: &names, layers: &layers })
        })
    }

    fn __repr__(&self) -> String {
        let elements: usize = self.set.vars().iter().map(|var| var.elem_count()).sum();
        format!("AdapterSet({} layers, {elements} parameters)", self.set.len())
    }
}

/// Convert the arguments of the Python function `op`, which writes adapters. Errors name it.
fn save_options(
    op: &'static str,
    format: Option<&str>,
    metadata: Argument<Option<BTreeMap<String, String>>>,
    dtype: Option<DTypeArg>,
) -> Result<io::SaveOptions> {
    Ok(io::SaveOptions {
        format: format.map(str::parse).transpose()?,
        dtype: dtype.map(|dtype| dtype.0),
        metadata: metadata.get(op, "metadata")?.unwrap_or_default(),
    })
}

/// Write the adapters of several models, such as a UNet and its text encoders, to one safetensors file.
///
/// ```python
/// unet = tc.models.load("sdxl")
/// adapter = unet.load_adapter("adapter.safetensors")
/// assert tc.save_adapters("copy.safetensors", [adapter], format="diffusers", dtype="f16") == []
/// ```
///
/// Args:
///     path: the file; with the format "peft", also a folder, as in `AdapterSet.save`.
///     adapters: the adapter set of each model.
///     format: "kohya" (the default for SDXL), "diffusers", "comfyui", or "peft", which holds only one model. Default:
///         as in `AdapterSet.save`, for the first model.
///     metadata: entries (name: text) for the file's header, in addition to the entries that other tools read.
///     dtype: the dtype of the parameters in the file, "f32", "f16" or "bf16". Default: f32.
///
/// Returns:
///     The names of layers whose adapter has no effect, as in `AdapterSet.save`.
///
/// Raises:
///     FileError: if the file cannot be written.
///     ArgumentError: if `adapters` is empty, if the format is unknown or cannot hold these adapters, if two models
///         name a layer alike, if the dtype is not floating point, or if `path` is a folder and the format is not
///         "peft".
#[pyfunction]
#[pyo3(signature = (path, adapters, format=None, metadata=Argument::of(None), dtype=None))]
pub fn save_adapters(
    py: Python<'_>,
    path: FilePath,
    adapters: Vec<Py<AdapterSet>>,
    format: Option<&str>,
    metadata: Argument<Option<BTreeMap<String, String>>>,
    dtype: Option<DTypeArg>,
) -> Result<Vec<String>> {
    let file = prepare(py, "save_adapters", path, &adapters, (format, metadata, dtype))?;
    file.write(py)?;
    Ok(file.idle())
}

/// Copy to the CPU everything that `save_adapters` would write. Another thread can write the copy while training
/// continues.
///
/// ```python
/// unet = tc.models.load("sdxl")
/// adapter = unet.load_adapter("adapter.safetensors")
/// file = tc.prepare_adapters("copy.safetensors", [adapter], dtype="bf16")
/// file.write()  # in another thread, while training continues
/// ```
///
/// Args:
///     path: the file; with the format "peft", also a folder, as in `AdapterSet.save`.
///     adapters: the adapter set of each model.
///     format: "kohya" (the default for SDXL), "diffusers", "comfyui", or "peft", which holds only one model. Default:
///         as in `AdapterSet.save`, for the first model.
///     metadata: entries (name: text) for the file's header, in addition to the entries that other tools read.
///     dtype: the dtype of the parameters in the file, "f32", "f16" or "bf16". Default: f32.
///
/// Raises:
///     ArgumentError: if `adapters` is empty, if the format is unknown or cannot hold these adapters, if two models
///         name a layer alike, if the dtype is not floating point, or if `path` is a folder and the format is not
///         "peft".
#[pyfunction]
#[pyo3(signature = (path, adapters, format=None, metadata=Argument::of(None), dtype=None))]
pub fn prepare_adapters(
    py: Python<'_>,
    path: FilePath,
    adapters: Vec<Py<AdapterSet>>,
    format: Option<&str>,
    metadata: Argument<Option<BTreeMap<String, String>>>,
    dtype: Option<DTypeArg>,
) -> Result<AdapterFile> {
    prepare(py, "prepare_adapters", path, &adapters, (format, metadata, dtype))
}

/// How to write an adapter file: its format, its metadata and the dtype of the parameters.
type FileOptions<'a> = (Option<&'a str>, Argument<Option<BTreeMap<String, String>>>, Option<DTypeArg>);

/// Copy to the CPU what the function `op` writes or prepares.
fn prepare(
    py: Python<'_>,
    op: &'static str,
    path: FilePath,
    adapters: &[Py<AdapterSet>],
    (format, metadata, dtype): FileOptions<'_>,
) -> Result<AdapterFile> {
    let path = path.get(op)?;
    let options = save_options(op, format, metadata, dtype)?;
    let names: Vec<io::PartNames> = adapters.iter().map(|adapter| adapter.get().model.adapter_names()).collect();
    let sets: Vec<Arc<adapter::AdapterSet>> = adapters.iter().map(|adapter| adapter.get().set.clone()).collect();
    detached(py, || {
        let parts: Vec<_> = names.iter().zip(sets.iter().map(Arc::as_ref)).collect();
        Ok(AdapterFile(io::prepare_adapters(&path, &parts, &options)?))
    })
}

/// The contents of an adapter file that is not written yet, made by `prepare_adapters`.
///
/// ```python
/// unet = tc.models.load("sdxl")
/// adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
/// file = tc.prepare_adapters("lora.safetensors", [adapter])
/// assert file.idle  # no adapter is trained yet, so none has an effect
/// file.write()
/// ```
#[pyclass(frozen, module = "trainable_candle")]
pub struct AdapterFile(io::AdapterFile);

#[pymethods]
impl AdapterFile {
    /// Write the file. If writing fails, no incomplete file remains.
    ///
    /// Raises:
    ///     FileError: if the file cannot be written.
    fn write(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.0.write())
    }

    /// The names of layers whose adapter has no effect, as in `AdapterSet.save`.
    #[getter]
    fn idle(&self) -> Vec<String> {
        self.0.saved().zero.clone()
    }

    fn __repr__(&self) -> String {
        format!("AdapterFile({} layers)", self.0.saved().layers)
    }
}

/// Where a model keeps its adapter set: empty until a set is attached.
#[derive(Default)]
pub struct Attached(std::sync::Mutex<Option<Arc<adapter::AdapterSet>>>);

impl Attached {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<adapter::AdapterSet>>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Attach the set that `make` builds, and return its Python object. Errors name the operation `op`.
    pub fn attach(
        &self,
        py: Python<'_>,
        op: &'static str,
        model: &Loaded,
        make: impl FnOnce() -> tc::Result<adapter::AdapterSet> + Send,
    ) -> Result<Py<AdapterSet>> {
        self.check_empty(op)?;
        let set = Arc::new(detached(py, make)?);
        // Another thread may have attached a set while `make` ran. If so, take the new set off the layers, which
        // disabling does.
        if let Err(error) = self.check_empty(op) {
            set.set_enabled(false);
            return Err(error);
        }
        *self.lock() = Some(set.clone());
        Ok(AdapterSet::object(py, set, model.clone())?)
    }

    /// Return an error that names the operation `op` if the model has a set.
    fn check_empty(&self, op: &'static str) -> Result<()> {
        if self.lock().is_none() {
            return Ok(());
        }
        let cure = "call remove_adapter() first, or name all layers in one configuration";
        Err(tc::Error::Config(format!("{op}: the model has an adapter already; {cure}")).into())
    }

    /// Return the set. If there is none, return an error that names the operation `op`.
    pub fn get(&self, op: &'static str) -> Result<Arc<adapter::AdapterSet>> {
        let missing =
            || tc::Error::argument(op, "the model has no adapter; call add_adapter() or load_adapter() first");
        Ok(self.lock().clone().ok_or_else(missing)?)
    }

    /// Take the set, if there is one, off the model's layers.
    pub fn remove(&self) -> Result<()> {
        catch_panics(|| {
            if let Some(set) = self.lock().take() {
                // Disabling takes the adapters, or the merged weights, off the layers.
                set.set_enabled(false);
            }
            Ok(())
        })
    }
}
