//! How other tools read an adapter file.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use trainable_candle_io::adapter_file::{self as io, Tool};
use trainable_candle_models::Pipeline;

use crate::arguments::FilePath;
use crate::call::detached;
use crate::error::Result;

/// The report on one module of an adapter file: the tensors whose keys start with the same name, such as the two factors of
/// a LoRA. If a module adapts several layers, which are one matrix in some tools, each of these layers has a report.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
/// module = report.modules[0]
/// assert (module.kind, module.rank, module.fault) == ("lora", 4, None)
/// ```
#[pyclass(frozen, get_all, module = "trainable_candle")]
pub struct AdapterModule {
    /// The module's name in the file: the keys of its tensors without the parameters' names.
    module: String,
    /// The name of the layer that the adapter is for; None if the model has no such layer.
    layer: Option<String>,
    /// The kind of adapter; None if the parameters form no complete adapter.
    kind: Option<&'static str>,
    /// The adapter's rank; 0 if it has no low-rank factors.
    rank: usize,
    /// The value of the module's tensor `alpha`, the numerator of the scale; None if the module has no such tensor.
    alpha: Option<f64>,
    /// The scale by which the adapter is multiplied: the module's `alpha` / rank, or without this tensor the scale in peft's
    /// configuration. It is 1 if there is neither, and for an adapter without a rank.
    scale: f64,
    /// Whether all elements of one of the factors are 0, so that the adapter has no effect.
    zero: bool,
    /// A message about wrong shapes, missing parameters or non-finite elements; None if there is no such fault.
    fault: Option<String>,
    /// The tools that ignore the module, with the reason.
    ignored_by: BTreeMap<&'static str, &'static str>,
    /// The tools that apply the module, but not as it was trained, with the reason.
    changed_by: BTreeMap<&'static str, &'static str>,
}

/// The report of an adapter file: how other tools would apply the file.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
/// assert report.good and "ComfyUI" in report.tools
/// ```
#[pyclass(frozen, get_all, module = "trainable_candle")]
pub struct AdapterReport {
    /// The tools that the report covers: none for the demo's model, otherwise first ComfyUI (image models) or peft (language
    /// models).
    tools: Vec<&'static str>,
    /// The reports of all modules, in the order of the modules' names.
    modules: Vec<Py<AdapterModule>>,
    /// The file's keys that are not parameters of an adapter.
    others: Vec<String>,
    /// Remarks about the file as a whole.
    remarks: Vec<String>,
    /// Whether the file has modules and no other keys, every module fits a layer and has an effect, and the tool
    /// `tools[0]`, if there is one, applies every module as it was trained. The other tools do not count.
    good: bool,
}

/// Match an adapter file with a model's layers as ComfyUI, diffusers and other tools do.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
/// assert report.good  # ComfyUI applies all of it
/// ```
///
/// Args:
///     path: the adapter file.
///     model: the model family, such as "sdxl", "sd3" or "flux".
///     weights: the path of the model's files, if the model's sizes differ from those of the published model. Only the
///         headers of the files are read.
///
/// Raises:
///     MissingFileError, WeightsFormatError: if there is no such file, or it is not a safetensors file of adapters that this
///         library can read.
///     ConfigError: if the model family is not known, or peft's configuration beside the file is not JSON.
#[pyfunction]
#[pyo3(signature = (path, model="sdxl", weights=None))]
pub fn verify_adapter(py: Python<'_>, path: FilePath, model: &str, weights: Option<FilePath>) -> Result<AdapterReport> {
    const OP: &str = "verify_adapter";
    let (path, weights) = (path.get(OP)?, weights.map(|weights| weights.get(OP)).transpose()?);
    let report = detached(py, || io::verify_adapter(&path, &Pipeline::find(model)?.outlines(weights.as_deref())?))?;
    let good = report.is_good();
    let tools = report.tools.iter().map(|tool| tool.name()).collect();
    let modules = report
        .modules
        .into_iter()
        .map(|m| {
            let named = |by: Vec<(Tool, &'static str)>| by.into_iter().map(|(tool, why)| (tool.name(), why)).collect();
            let (ignored_by, changed_by) = (named(m.ignored_by), named(m.changed_by));
            let io::ModuleReport { module, layer, kind, rank, alpha, scale, zero, fault, .. } = m;
            Py::new(py, AdapterModule { module, layer, kind, rank, alpha, scale, zero, fault, ignored_by, changed_by })
        })
        .collect::<PyResult<_>>()?;
    Ok(AdapterReport { tools, modules, others: report.others, remarks: report.remarks, good })
}
