//! What `from_pretrained` and `load` are asked for.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_models::pretrained::Component;
use trainable_candle_models::{Choice, Pretrained};

use crate::arguments::FilePath;
use crate::call::detached;
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;

/// A model to load.
pub struct Request {
    pub path: PathBuf,
    pub choice: Choice,
    pub dtype: Option<tc::DType>,
    pub device: tc::Device,
}

/// Who asks, and for what kind of model.
#[derive(Clone, Copy)]
pub struct Call {
    pub op: &'static str,
    pub component: &'static Component,
}

impl Call {
    /// The `from_pretrained` of a kind of model.
    pub const fn from_pretrained(component: &'static Component) -> Self {
        Self { op: "from_pretrained", component }
    }
}

impl Request {
    /// The arguments of a call; the name of a model on the Hugging Face hub becomes the folder of its files.
    pub fn new(
        py: Python<'_>,
        call: Call,
        path: FilePath,
        dtype: Option<DTypeArg>,
        device: &str,
        subfolder: Option<String>,
        config: Option<FilePath>,
    ) -> Result<Self> {
        let path = path.get(call.op)?;
        let config = config.map(|config| config.get(call.op)).transpose()?;
        let dtype = dtype.map(|dtype| dtype.0);
        let (half, mut subfolder) = (dtype == Some(tc::DType::F16), subfolder);
        let path = match path.to_str() {
            Some(name) if is_hub_name(name) => {
                let likeliest = call.component.parts.iter().map(|part| part.subfolder).take(1).chain([""]);
                let places = match subfolder.take() {
                    Some(subfolder) => vec![subfolder],
                    None => likeliest.map(str::to_owned).collect(),
                };
                from_hub(py, name, places, half)?
            }
            _ => path,
        };
        Ok(Self { path, choice: Choice { subfolder, config, half }, dtype, device: device::parse(device)? })
    }

    /// Load a model of one kind.
    pub fn load<M: Send>(
        &self,
        py: Python<'_>,
        component: &Component,
        load: impl FnOnce(&Pretrained, Option<tc::DType>, &tc::Device) -> tc::Result<M> + Send,
    ) -> Result<M> {
        detached(py, || load(&Pretrained::find(&self.path, component, &self.choice)?, self.dtype, &self.device))
    }
}

/// `organisation/name`, unless there is such a path.
fn is_hub_name(text: &str) -> bool {
    let word = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    let named = text.split_once('/').is_some_and(|(organisation, name)| word(organisation) && word(name));
    // A file, or a folder whose parent is there, was meant as a path.
    let path = Path::new(text);
    let is_path = path.exists() || path.parent().is_some_and(Path::is_dir);
    named && !is_path && path.extension().is_none_or(|end| end != "safetensors")
}

fn from_hub(py: Python<'_>, name: &str, subfolders: Vec<String>, half: bool) -> Result<PathBuf> {
    let hub = py.import("trainable_candle.hub")?;
    Ok(hub.call_method1("download", (name, subfolders, half))?.extract()?)
}
