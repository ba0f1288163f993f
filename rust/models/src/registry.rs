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
    pub load: Load,
}

/// Loads a model.
pub type Load = fn(files: &Pretrained, dtype: Option<DType>, device: &Device) -> Result<Arc<dyn Model>>;

/// Every kind of model.
pub static KINDS: &[ModelKind] = &[ModelKind {
    class_name: DigitsTransformer::CLASS_NAME,
    load: |files, dtype, device| Ok(Arc::new(DigitsTransformer::load(files, dtype, device)?)),
}];

/// The kind of the model whose files these are.
///
/// # Errors
/// [`Error::Config`] if its configuration is of no known model; as [`Pretrained::class_name`].
pub fn kind_of(files: &Pretrained) -> Result<&'static ModelKind> {
    let class_name = files.class_name()?;
    KINDS.iter().find(|kind| kind.class_name == class_name).ok_or_else(|| {
        let known: Vec<&str> = KINDS.iter().map(|kind| kind.class_name).collect();
        Error::Config(format!(
            "{}: the model is a \"{class_name}\", which is not supported; supported are {}",
            files.config_path().display(),
            known.join(", ")
        ))
    })
}

/// Load the model at `path` (a folder with `config.json` and safetensors weights, or one weight file beside its
/// `config.json`), frozen, whatever kind its configuration says it is.
///
/// # Errors
/// As [`Pretrained::find`], [`kind_of`] and the kind's loader.
pub fn load(path: &Path, dtype: Option<DType>, device: &Device) -> Result<Arc<dyn Model>> {
    let files = Pretrained::find(path)?;
    (kind_of(&files)?.load)(&files, dtype, device)
}
