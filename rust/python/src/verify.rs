//! How other tools read an adapter file.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use trainable_candle_io::adapter_file::{self as io, Tool};
use trainable_candle_models::Pipeline;

use crate::arguments::FilePath;
use crate::call::detached;
use crate::error::Result;

/// One layer's adapter in a file. A module with the adapters of several layers is listed once for each layer.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", "sdxl")
/// module = report.modules[0]
/// assert (module.kind, module.rank, module.fault) == ("lora", 4, None)
/// ```
#[pyclass(frozen, get_all, module = "trainable_candle")]
pub struct AdapterModule {
    /// Its name in the file.
    module: String,
    /// The layer that it is for; None if the model has no such layer.
    layer: Option<String>,
    /// The kind of adapter; None if it is not an adapter.
    kind: Option<&'static str>,
    /// Its rank; 0 if it has no low-rank factors.
    rank: usize,
    /// The numerator of the scale; None if the file does not have it beside the parameters.
    alpha: Option<f64>,
    /// The factor that tools apply.
    scale: f64,
    /// Whether a factor is zero everywhere, so that the adapter has no effect.
    zero: bool,
    /// A message about wrong shapes or values, if there are any.
    fault: Option<String>,
    /// Tools that ignore it, with the reason.
    ignored_by: BTreeMap<&'static str, &'static str>,
    /// Tools that apply it, but not as it was trained, with the reason.
    changed_by: BTreeMap<&'static str, &'static str>,
}

/// How other tools read an adapter file.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", "sdxl")
/// assert report.good and "ComfyUI" in report.tools
/// ```
#[pyclass(frozen, get_all, module = "trainable_candle")]
pub struct AdapterReport {
    /// The tools that the report covers.
    tools: Vec<&'static str>,
    /// Every module, by name.
    modules: Vec<Py<AdapterModule>>,
    /// Keys that are not parameters of an adapter.
    others: Vec<String>,
    /// Remarks about the header.
    remarks: Vec<String>,
    /// Whether the first of `tools` applies every module as it was trained, and every module has an effect.
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
///     path: the file.
///     model: the family, such as "sdxl", "sd3" or "flux".
///     weights: the model's files, if its sizes differ from the published ones; only their headers are read.
///
/// Raises:
///     MissingFileError, WeightsFormatError: if there is no such file, or it is not a safetensors file.
///     ConfigError: if the model is not known.
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
