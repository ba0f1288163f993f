//! What all models have in common, and the list of them.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::{PartNames, WeightFiles};
use trainable_candle_nn::Module;

use crate::clip::CLIPTextModel;
use crate::digits::DigitsTransformer;
use crate::pretrained::{Choice, Component, Layout, Pretrained};
use crate::sdxl::SDXLUNet;
use crate::vae::AutoencoderKL;

/// A model that can be loaded, saved and fine-tuned.
pub trait Model: Module + Send + Sync {
    /// The class that its `config.json` names.
    fn class_name(&self) -> &'static str;

    /// The text of its `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] if a value cannot be written as JSON.
    fn config_json(&self) -> Result<String>;

    /// The dtype of its weights, in which it computes.
    fn dtype(&self) -> DType;

    /// Where its files are in pipelines and checkpoints.
    fn component(&self) -> Component;

    /// What other tools call it and its layers in adapter files.
    fn adapter_names(&self) -> PartNames {
        PartNames::default()
    }

    /// The names of its parameters in a folder, or in an original checkpoint where they begin with `prefix`: in `files`, if such a
    /// checkpoint is there already.
    fn layout(&self, prefix: Option<&'static str>, files: Option<&WeightFiles>) -> Box<dyn Layout>;
}

/// How a kind of model is loaded.
pub struct ModelKind {
    /// The name of its class in the library.
    pub name: &'static str,
    /// Where its files are.
    pub component: Component,
    /// Load it, frozen, its weights converted to `dtype` if one is given.
    pub load: Load,
}

/// Loads a model.
pub type Load = fn(files: &Pretrained, dtype: Option<DType>, device: &Device) -> Result<Arc<dyn Model>>;

/// Every kind of model. Where several are at one place, the first is meant: the one that is fine-tuned.
pub static KINDS: &[ModelKind] = &[
    ModelKind {
        name: "SDXLUNet",
        component: SDXLUNet::COMPONENT,
        load: |files, dtype, device| Ok(Arc::new(SDXLUNet::load(files, dtype, device)?)),
    },
    ModelKind {
        name: "AutoencoderKL",
        component: AutoencoderKL::COMPONENT,
        load: |files, dtype, device| Ok(Arc::new(AutoencoderKL::load(files, dtype, device, None)?)),
    },
    ModelKind {
        name: "CLIPTextModel",
        component: CLIPTextModel::COMPONENT,
        load: |files, dtype, device| Ok(Arc::new(CLIPTextModel::load(files, dtype, device)?)),
    },
    ModelKind {
        name: "DigitsTransformer",
        component: DigitsTransformer::COMPONENT,
        load: |files, dtype, device| Ok(Arc::new(DigitsTransformer::load(files, dtype, device)?)),
    },
];

/// The model at `path`: its files and its kind.
///
/// # Errors
/// [`Error::Config`] if its configuration is of no known model; as [`Pretrained::find`].
pub fn find(path: &Path, choice: &Choice) -> Result<(&'static ModelKind, Pretrained)> {
    let mut failure = None;
    let mut unknown = None;
    for kind in KINDS {
        match Pretrained::find(path, &kind.component, choice) {
            Ok(files) => match files.class_name()? {
                Some(class) if !kind.component.class_names.contains(&class.as_str()) => {
                    unknown = Some((files, class));
                }
                _ => return Ok((kind, files)),
            },
            Err(error) => {
                failure.get_or_insert(error);
            }
        }
    }
    match (unknown, failure) {
        (Some((files, class)), _) => {
            let known: Vec<&str> = KINDS.iter().flat_map(|kind| kind.component.class_names).copied().collect();
            Err(Error::Config(format!(
                "{}: the model is a \"{class}\", which is not supported; supported are {}",
                files.config_path().unwrap_or(path).display(),
                known.join(", ")
            )))
        }
        (None, Some(failure)) => Err(failure),
        (None, None) => Err(Error::Config("load: there are no kinds of models".into())),
    }
}

/// Load the model at `path`, frozen, whatever kind its files say it is: a model's folder, a weight file beside its `config.json`, or a
/// pipeline's folder or an original checkpoint, of which the model that is fine-tuned is meant unless `choice` names another.
///
/// # Errors
/// As [`find`] and the kind's loader.
pub fn load(path: &Path, choice: &Choice, dtype: Option<DType>, device: &Device) -> Result<Arc<dyn Model>> {
    let (kind, files) = find(path, choice)?;
    (kind.load)(&files, dtype, device)
}

/// The text of a `config.json`.
pub(crate) fn json_text(map: &Map<String, Value>) -> Result<String> {
    serde_json::to_string_pretty(map)
        .map(|text| text + "\n")
        .map_err(|e| Error::Config(format!("save_pretrained: {e}")))
}
