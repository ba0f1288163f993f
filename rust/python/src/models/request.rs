//! The arguments of the Python functions that load a model: `from_pretrained` of a class, and `load`.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use trainable_candle_core as tc;
use trainable_candle_core::quantized::Format;
use trainable_candle_models::pipelines::{self, PIPELINES};
use trainable_candle_models::registry::ModelKind;
use trainable_candle_models::{self as models, Choice, Loaded};
use trainable_candle_nn::StreamOptions;

use crate::arguments::FilePath;
use crate::autograd::Function;
use crate::call::detached;
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;

/// A model to load: where it is, which model of several it is, and how to load it.
pub struct Request {
    pub path: PathBuf,
    pub choice: Choice,
    pub dtype: Option<tc::DType>,
    pub device: tc::Device,
}

/// The keyword-only arguments of `from_pretrained`. [`Choice`] has fields of the same names and describes them.
#[derive(Default)]
pub struct Options {
    pub subfolder: Option<String>,
    pub config: Option<FilePath>,
    pub force_upcast: Option<bool>,
    pub layers: Option<usize>,
    pub quantize: Option<Format>,
    pub stream: StreamOptions,
}

impl Request {
    /// Convert the arguments of the Python function `op`. `kind` is the kind of the class on which `op` was called, and
    /// `None` for the base class. If the path does not exist, it may be the name of a model: the function that
    /// [`set_resolver`] has set then finds the model's folder.
    pub fn new(
        py: Python<'_>,
        op: &'static str,
        kind: Option<&'static ModelKind>,
        (path, options): (FilePath, Options),
        dtype: Option<DTypeArg>,
        device: &str,
    ) -> Result<Self> {
        let Options { mut subfolder, config, force_upcast, layers, quantize, stream } = options;
        let config = config.map(|config| config.named(op, "config")).transpose()?;
        let mut path = path.get(op)?;
        let dtype = dtype.map(|dtype| dtype.0);
        // Half-precision files, which are preferred for this dtype, have values in f16.
        let half = dtype == Some(tc::DType::F16);
        if !path.exists()
            && let (Some(name), Some(resolve)) = (path.to_str(), RESOLVER.get(py))
        {
            let subfolders = subfolder.as_deref().map_or_else(|| likely_subfolders(kind), |subfolder| vec![subfolder]);
            if let Some(folder) = resolve.call1(py, (name, subfolders, half))?.extract::<Option<PathBuf>>(py)? {
                // This is the model's own folder, so there is no subfolder to choose in it.
                (path, subfolder) = (folder, None);
            }
        }
        // Only a caller that loads the parts of a known pipeline names the pipeline.
        let pipeline = None;
        let choice = Choice { kind, subfolder, pipeline, config, half, force_upcast, layers, quantize, stream };
        Ok(Self { path, choice, dtype, device: device::parse(device)? })
    }

    /// Load the model.
    pub fn load(self, py: Python<'_>) -> Result<Loaded> {
        detached(py, || models::load(&self.path, &self.choice, self.dtype, &self.device))
    }
}

/// The subfolders of a repository in which a model of `kind` may be, the most likely first: the model's subfolder in a
/// pipeline, then the repository itself (""). Without a kind: the subfolder of the first model of every pipeline, then
/// "".
fn likely_subfolders(kind: Option<&'static ModelKind>) -> Vec<&'static str> {
    let mut subfolders = match kind {
        Some(kind) => pipelines::subfolders(kind).into_iter().take(1).collect(),
        None => PIPELINES.iter().map(|pipeline| pipeline.parts[0].subfolder).collect::<Vec<_>>(),
    };
    subfolders.retain(|subfolder| !subfolder.is_empty());
    subfolders.push("");
    subfolders
}

/// The function that finds a model by a name that is not a path.
static RESOLVER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Set the function that finds models by names that are not paths. Only the first call has an effect.
///
/// Args:
///     resolve: a function with three arguments: the name, the subfolders of a repository in which the model may be
///         (the most likely first; "" is the repository itself), and whether half-precision files are preferred. The
///         function returns the model's folder, or None if it finds no model of this name.
#[pyfunction]
pub fn set_resolver(py: Python<'_>, resolve: Function) {
    // `set` returns an error if a function is set already. This error is ignored.
    drop(RESOLVER.set(py, resolve.0));
}
