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

impl Request {
    /// The arguments of a call of `op`; the name of a model on the Hugging Face hub becomes the folder of its files.
    pub fn new(
        py: Python<'_>,
        op: &'static str,
        path: FilePath,
        dtype: Option<DTypeArg>,
        device: &str,
        subfolder: Option<String>,
        config: Option<FilePath>,
    ) -> Result<Self> {
        let path = path.get(op)?;
        let config = config.map(|config| config.get(op)).transpose()?;
        let dtype = dtype.map(|dtype| dtype.0);
        let half = dtype == Some(tc::DType::F16);
        let path = match path.to_str() {
            Some(name) if is_hub_name(name) => from_hub(py, name, subfolder.as_deref(), half)?,
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
    named && !path.exists() && path.extension().is_none_or(|end| end != "safetensors") && !parent_exists(path)
}

fn parent_exists(path: &Path) -> bool {
    path.parent().is_some_and(Path::is_dir)
}

fn from_hub(py: Python<'_>, name: &str, subfolder: Option<&str>, half: bool) -> Result<PathBuf> {
    let hub = py.import("trainable_candle.hub")?;
    Ok(hub.call_method1("download", (name, subfolder, half))?.extract()?)
}
