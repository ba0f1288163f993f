//! Reports how other tools would apply an adapter file.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use trainable_candle_io::adapter_file::{self, ModuleReport, Tool};
use trainable_candle_models::Pipeline;

use crate::arguments::FilePath;
use crate::call::detached;
use crate::error::Result;

/// The report on one module of an adapter file. A module consists of the tensors whose keys start with the same name,
/// such as the two factors of a LoRA. A module may adapt several layers that other tools hold as one matrix; then each
/// of these layers has its own report.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
/// module = report.modules[0]
/// assert (module.kind, module.rank, module.fault) == ("lora", 4, None)
/// ```
#[pyclass(frozen, get_all, module = "trainable_candle")]
pub struct AdapterModule {
    /// The module's name in the file: the part of its tensors' keys before the name of the parameter.
    module: String,
    /// The name of the adapted layer, after the part's name in diffusers (such as "unet."); None if the model has no
    /// such layer.
    layer: Option<String>,
    /// The kind of adapter; None if the parameters form no complete adapter.
    kind: Option<&'static str>,
    /// The adapter's rank; 0 if it has no low-rank factors.
    rank: usize,
    /// The value of the module's tensor `alpha`, the numerator of the scale; None if the module has no such tensor.
    alpha: Option<f64>,
    /// The scale by which the adapter is multiplied: `alpha / rank`. If `alpha` is None, the scale is taken from peft's
    /// configuration. The scale is 1 if that is missing too, or if `rank` is 0.
    scale: f64,
    /// Whether all elements of a factor are 0, so that the adapter has no effect.
    zero: bool,
    /// A message about wrong shapes, missing parameters or non-finite elements; None if there is no such fault.
    fault: Option<String>,
    /// The tools that ignore the module: a dict of names and reasons.
    ignored_by: BTreeMap<&'static str, &'static str>,
    /// The tools that apply the module, but not as it was trained: a dict of names and reasons.
    changed_by: BTreeMap<&'static str, &'static str>,
}

/// The report on an adapter file: how other tools would apply the file.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
/// assert report.good and "ComfyUI" in report.tools
/// ```
#[pyclass(frozen, get_all, module = "trainable_candle")]
pub struct AdapterReport {
    /// The names of the tools that the report covers. The first is ComfyUI for image models, and peft for language
    /// models; the demo's model has no tools.
    tools: Vec<&'static str>,
    /// The reports of all modules, in the order of the modules' names.
    modules: Vec<Py<AdapterModule>>,
    /// The keys of the file's tensors that are not parameters of an adapter.
    others: Vec<String>,
    /// Remarks about the file as a whole.
    remarks: Vec<String>,
    /// Whether the file has modules, `others` is empty, every module has a layer, an effect and no fault, and the tool
    /// `tools[0]`, if there is one, applies every module as it was trained. The rest of `tools` does not count.
    good: bool,
}

/// Report how ComfyUI, diffusers and other tools would apply an adapter file to a model. The tools do not run: the
/// report follows from the file.
///
/// ```python
/// report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
/// assert report.good  # ComfyUI applies every module as it was trained
/// ```
///
/// Args:
///     path: the path of the adapter file, or of a folder with peft's files.
///     model: the model family, such as "sdxl", "sd3" or "flux".
///     weights: the path of the model's files, if the model's sizes differ from those of the published model. Only the
///         headers of the files are read.
///
/// Raises:
///     MissingFileError: if the adapter file or the model's files do not exist.
///     WeightsFormatError: if the adapter file is not a safetensors file, has no tensors or has an adapter that this
///         library cannot read, or if the model's files are not in a known format.
///     ConfigError: if the model family is unknown, if peft's configuration beside the file is not JSON, or if the
///         configuration of the model's files is wrong.
#[pyfunction]
#[pyo3(signature = (path, model="sdxl", weights=None))]
pub fn verify_adapter(py: Python<'_>, path: FilePath, model: &str, weights: Option<FilePath>) -> Result<AdapterReport> {
    const OP: &str = "verify_adapter";
    let (path, weights) = (path.get(OP)?, weights.map(|weights| weights.get(OP)).transpose()?);
    let report =
        detached(py, || adapter_file::verify_adapter(&path, &Pipeline::find(model)?.outlines(weights.as_deref())?))?;
    let good = report.is_good();
    let tools = report.tools.iter().map(|tool| tool.name()).collect();
    let modules = report
        .modules
        .into_iter()
        .map(|module_report| {
            let reasons =
                |tools: Vec<(Tool, &'static str)>| tools.into_iter().map(|(tool, why)| (tool.name(), why)).collect();
            let ModuleReport { module, layer, kind, rank, alpha, scale, zero, fault, ignored_by, changed_by, .. } =
                module_report;
            let (ignored_by, changed_by) = (reasons(ignored_by), reasons(changed_by));
            Py::new(py, AdapterModule { module, layer, kind, rank, alpha, scale, zero, fault, ignored_by, changed_by })
        })
        .collect::<PyResult<_>>()?;
    Ok(AdapterReport { tools, modules, others: report.others, remarks: report.remarks, good })
}
