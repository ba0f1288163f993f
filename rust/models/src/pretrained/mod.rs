//! The files of a pretrained model: a folder of diffusers or transformers, such a folder inside a pipeline's, or an original
//! checkpoint in one file, which holds several models under names of its own.

mod files;
mod layout;
mod save;
mod stored;

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::{TensorFile, WeightFiles};
use trainable_candle_nn::{Source, Weights};

use files::{refuse_pickle, refuse_pickles_in, weights_in};
pub use layout::{Form, Layout, OwnNames, Place};
pub use save::{save_checkpoint, save_pretrained};
use stored::StoredWeights;

pub(crate) const CONFIG: &str = "config.json";

/// Where the files of a kind of model are.
#[derive(Clone, Copy, Debug)]
pub struct Component {
    /// The names in `config.json`, `_class_name` of diffusers or `architectures` of transformers.
    pub class_names: &'static [&'static str],
    /// Its places in pipelines and original checkpoints; the first is meant if none is named.
    pub parts: &'static [Part],
    /// The name of its weight file in a folder.
    pub weights_name: &'static str,
}

/// One place of a kind of model in pipelines and original checkpoints.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The folder in a pipeline's.
    pub subfolder: &'static str,
    /// What its keys begin with in an original checkpoint.
    pub prefixes: &'static [&'static str],
    /// A key without the prefix that is in every such checkpoint and in no folder.
    pub probe: &'static str,
}

/// What to take of a path that could mean several things.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// The model's folder in a pipeline's; of an original checkpoint, the model that the folder would hold.
    pub subfolder: Option<String>,
    /// A `config.json`, or a pipeline's folder that has one, in place of the one that belongs to the weights.
    pub config: Option<PathBuf>,
    /// Prefer half-precision files (`*.fp16.safetensors`) where both are there.
    pub half: bool,
}

/// Where a model's files are.
#[derive(Clone, Debug)]
pub struct Pretrained {
    path: PathBuf,
    config: Option<PathBuf>,
    weights: Vec<PathBuf>,
    /// The part and the prefix of its keys in an original checkpoint.
    original: Option<(Part, &'static str)>,
}

impl Pretrained {
    /// The files of a `component` at `path`: its folder, a pipeline's folder, an original checkpoint, or a weight file beside its
    /// `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` does not exist or cannot be read, [`Error::WeightsFormat`] if it is no such folder or file.
    pub fn find(path: &Path, component: &Component, choice: &Choice) -> Result<Self> {
        let found = if std::fs::metadata(path).map_err(|e| Error::io(path, e))?.is_dir() {
            Self::in_folder(path, component, choice)
        } else {
            Self::in_file(path, component, choice)
        }?;
        let Some(config) = &choice.config else { return Ok(found) };
        let inside = |folder: &Path| {
            let subfolder = choice.subfolder.as_deref();
            let parts = component.parts.iter().map(|part| part.subfolder).filter(|s| subfolder.is_none_or(|c| c == *s));
            let found = parts.map(|s| folder.join(s).join(CONFIG)).find(|path| path.is_file());
            found.unwrap_or_else(|| folder.join(CONFIG))
        };
        let config = if config.is_dir() { inside(config) } else { config.clone() };
        Ok(Self { config: Some(config), ..found })
    }

    fn in_folder(path: &Path, component: &Component, choice: &Choice) -> Result<Self> {
        let has_config = |folder: &Path| folder.join(CONFIG).is_file();
        let folder = match &choice.subfolder {
            Some(subfolder) => Some(path.join(subfolder)).filter(|folder| has_config(folder)),
            None if has_config(path) => Some(path.to_path_buf()),
            None => component.parts.iter().map(|part| path.join(part.subfolder)).find(|folder| has_config(folder)),
        };
        let Some(folder) = folder else {
            let subfolders: Vec<&str> = match &choice.subfolder {
                Some(subfolder) => vec![subfolder],
                None => component.parts.iter().map(|part| part.subfolder).collect(),
            };
            refuse_pickles_in(path)?;
            let nor = if subfolders.is_empty() { String::new() } else { format!(" or in {}", subfolders.join(", ")) };
            return Err(Error::weights(
                path,
                format!("there is no {CONFIG} in this folder{nor}; it says which model the weights are of"),
            ));
        };
        let weights = weights_in(&folder, choice.half)?;
        Ok(Self { path: path.to_path_buf(), config: Some(folder.join(CONFIG)), weights, original: None })
    }

    fn in_file(path: &Path, component: &Component, choice: &Choice) -> Result<Self> {
        refuse_pickle(path)?;
        let beside = path.with_file_name(CONFIG);
        let beside = beside.is_file().then_some(beside);
        let file = TensorFile::open(path)?;
        let parts =
            component.parts.iter().filter(|part| choice.subfolder.as_deref().is_none_or(|s| s == part.subfolder));
        let original = parts
            .flat_map(|&part| part.prefixes.iter().map(move |&prefix| (part, prefix)))
            .find(|(part, prefix)| file.shape(&format!("{prefix}{}", part.probe)).is_some());
        // Some original names are the folder's too: with its configuration, the file is one from a folder.
        let original = original.filter(|(_, prefix)| !prefix.is_empty() || beside.is_none());
        let weights = vec![path.to_path_buf()];
        match (original, beside) {
            (Some(_), _) => Ok(Self { path: path.to_path_buf(), config: None, weights, original }),
            (None, Some(beside)) => {
                Ok(Self { path: path.to_path_buf(), config: Some(beside), weights, original: None })
            }
            (None, None) if choice.config.is_some() => {
                Ok(Self { path: path.to_path_buf(), config: None, weights, original: None })
            }
            (None, None) => Err(Error::weights(path, not_found(&file, component))),
        }
    }

    /// The path of `config.json`, if there is one.
    pub fn config_path(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// What the model's keys begin with in an original checkpoint; none in a folder.
    pub fn prefix(&self) -> Option<&'static str> {
        self.original.map(|(_, prefix)| prefix)
    }

    /// The class that `config.json` names; none for an original checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::Config`] if it does not parse or names no class.
    pub fn class_name(&self) -> Result<Option<String>> {
        let Some(path) = &self.config else { return Ok(None) };
        class_of(&read_json::<Map<String, Value>>(path)?)
            .map(Some)
            .ok_or_else(|| Error::Config(format!("{}: neither _class_name nor architectures is there", path.display())))
    }

    /// The configuration of a `component`: `read` from `config.json`, or of an original checkpoint, `deduce`d from the shapes and,
    /// if there is one, the configuration in its header, or that lies where a pipeline would have it, beside the file.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read, [`Error::Config`] naming what is wrong with the configuration.
    pub fn config<C>(
        &self,
        component: &Component,
        read: fn(&Map<String, Value>) -> Result<C>,
        deduce: impl FnOnce(&WeightFiles, &str, Option<C>) -> Result<C>,
    ) -> Result<C> {
        match (&self.config, self.original) {
            (Some(path), _) => {
                let map: Map<String, Value> = read_json(path)?;
                if let Some(class) = class_of(&map).filter(|class| !component.class_names.contains(&class.as_str())) {
                    return Err(Error::Config(format!(
                        "{}: the model is a \"{class}\", expected \"{}\"",
                        path.display(),
                        component.class_names.join("\" or \"")
                    )));
                }
                read(&map).map_err(|error| match error {
                    Error::Config(text) => Error::Config(format!("{}: {text}", path.display())),
                    other => other,
                })
            }
            (None, Some((part, prefix))) => {
                let files = WeightFiles::open(&self.weights)?;
                let written =
                    files.metadata().get(&config_entry(part.subfolder)).map(|text| serde_json::from_str(text));
                let beside = self.path.with_file_name(part.subfolder).join(CONFIG);
                // Either may be another model's: what does not fit is as if it were not there.
                let known = written
                    .and_then(|map| map.ok())
                    .or_else(|| read_json(&beside).ok())
                    .and_then(|map| read(&map).ok());
                deduce(&files, prefix, known)
            }
            (None, None) => Err(Error::weights(&self.path, format!("there is no {CONFIG}"))),
        }
    }

    /// Build a frozen model of these weights, each of which must be asked for. They are read one at a time and converted on the
    /// way to `dtype`, or to the one that most of them are stored in: beside the model, memory holds its largest parameter at most.
    ///
    /// # Errors
    /// [`Error::DType`] if `dtype` is not floating-point; as [`WeightFiles::open`], [`WeightFiles::read`] and
    /// [`Source::finish`]; whatever `model` raises.
    pub fn build<M>(
        &self,
        layout: impl FnOnce(&WeightFiles) -> Box<dyn Layout>,
        dtype: Option<DType>,
        device: &Device,
        model: impl FnOnce(&mut Weights<'_>) -> Result<M>,
    ) -> Result<M> {
        if let Some(dtype) = dtype.filter(|&d| !is_float(d)) {
            return Err(Error::dtype(
                "from_pretrained",
                format!("a model computes in floating point, found {}", dtype.as_str()),
            ));
        }
        let files = WeightFiles::open(&self.weights)?;
        let layout = layout(&files);
        // A model computes in one dtype, also if its file mixes some.
        let dtype = dtype.or_else(|| files.common_dtype(layout.prefix()));
        let mut source = Source::stored(StoredWeights { files, layout, dtype, device: device.clone() });
        let in_file = |error| match error {
            Error::Config(text) => Error::Config(format!("{}: {text}", self.path.display())),
            other => other,
        };
        let model = model(&mut source.root()).map_err(in_file)?;
        source.finish().map_err(in_file)?;
        Ok(model)
    }
}

/// What a JSON file holds.
pub(crate) fn read_json<C: DeserializeOwned>(path: &Path) -> Result<C> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    serde_json::from_str(&text).map_err(|e| Error::Config(format!("{}: {e}", path.display())))
}

/// The configuration in a `config.json`, or the default without one, of a model of random weights of `dtype`.
pub(crate) fn configured<C: Default>(
    path: Option<&Path>,
    dtype: DType,
    from_json: impl FnOnce(&Map<String, Value>) -> Result<C>,
) -> Result<C> {
    if !is_float(dtype) {
        let message = format!("a model computes in floating point, found {}", dtype.as_str());
        return Err(Error::dtype("from_config", message));
    }
    path.map_or_else(|| Ok(C::default()), |path| from_json(&read_json(path)?))
}

/// Keys of checkpoints that are not supported or hold another part, and what they are.
const RECOGNISED: [(&str, &str); 9] = [
    ("cond_stage_model.transformer.", "a checkpoint of Stable Diffusion 1, which is not supported; SDXL's are"),
    ("cond_stage_model.model.", "a checkpoint of Stable Diffusion 2, which is not supported; SDXL's are"),
    ("model.diffusion_model.joint_blocks.", "a checkpoint of Stable Diffusion 3, which is not supported; SDXL's are"),
    ("model.diffusion_model.double_blocks.", "a checkpoint of Flux, which is not supported; SDXL's are"),
    ("double_blocks.", "a checkpoint of Flux, which is not supported; SDXL's are"),
    ("lora_unet_", "an adapter, not a model"),
    ("model.diffusion_model.", "a checkpoint without this model"),
    ("down_blocks.", "the weights of a UNet from a pipeline's folder"),
    ("decoder.up_blocks.", "the weights of an autoencoder from a pipeline's folder"),
];

/// What a file is in which a `component` was not found.
fn not_found(file: &TensorFile, component: &Component) -> String {
    let names = file.names();
    let there = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    let what =
        RECOGNISED.iter().find(|(prefix, _)| there(prefix)).map_or("no original checkpoint with this model", |k| k.1);
    let wanted = component.class_names.join(" or ");
    format!("there is no {wanted} in this file and no {CONFIG} beside it: the file is {what}")
}

/// The entry of an original checkpoint's header with the configuration of the model that a pipeline has in `subfolder`.
fn config_entry(subfolder: &str) -> String {
    format!("trainable_candle.config.{subfolder}")
}

/// The class that a configuration names.
fn class_of(map: &Map<String, Value>) -> Option<String> {
    let name = map.get("_class_name").or_else(|| map.get("architectures")?.as_array()?.first())?;
    name.as_str().map(str::to_owned)
}
