//! What all models have in common, and the list of them.

use std::path::Path;
use std::sync::Arc;

use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_nn::Module;

use crate::Pretrained;
use crate::digits::DigitsTransformer;

/// A model that can be loaded, saved and fine-tuned.
pub trait Model: Module + Send + Sync {
    /// The `_class_name` in its `config.json`.
    fn class_name(&self) -> &'static str;

    /// The text of its `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] if a value cannot be written as JSON.
    fn config_json(&self) -> Result<String>;

    /// The dtype of its weights, in which it computes.
    fn dtype(&self) -> DType;

    /// What its blocks keep between forward and backward.
    fn set_checkpointing(&self, policy: Policy);
}

/// How a kind of model is loaded.
pub struct ModelKind {
    /// The `_class_name` in its `config.json`.
    pub class_name: &'static str,
    /// Load it, frozen, its weights converted to `dtype` if one is given.
    pub load: fn(files: &Pretrained, dtype: Option<DType>, device: &Device) -> Result<Arc<dyn Model>>,
}

/// Every kind of model.
pub static KINDS: &[ModelKind] = &[ModelKind {
    class_name: DigitsTransformer::CLASS_NAME,
    load: |files, dtype, device| Ok(Arc::new(DigitsTransformer::load(files, dtype, device)?)),
}];

/// Load the model at `path` (a folder with `config.json` and safetensors weights, or one weight file beside its
/// `config.json`), frozen, whatever kind its configuration says it is.
///
/// # Errors
/// [`Error::Io`] or [`Error::WeightsFormat`] if the files are missing or damaged; [`Error::Config`] if the configuration is of
/// no known model or does not fit the weights.
pub fn load(path: &Path, dtype: Option<DType>, device: &Device) -> Result<Arc<dyn Model>> {
    let files = Pretrained::find(path)?;
    let class_name = files.class_name()?;
    let Some(kind) = KINDS.iter().find(|kind| kind.class_name == class_name) else {
        let known: Vec<&str> = KINDS.iter().map(|kind| kind.class_name).collect();
        return Err(Error::Config(format!(
            "{}: the model is a \"{class_name}\", which is not supported; supported are {}",
            files.config_path().display(),
            known.join(", ")
        )));
    };
    (kind.load)(&files, dtype, device)
}
