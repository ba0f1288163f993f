//! Pipelines: which models belong together, where they are in files, and which names other tools use for them.
//!
//! [`PIPELINES`] is the only place in this crate that lists families. Loading, saving, the recognition of files and the
//! names in adapter files follow from it. The module of a model ([`crate::clip`], [`crate::vae`], ...) describes only
//! the model's architecture and the names of its parameters.

mod encoders;
mod readers;
mod recognise;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::{Error, Result};
use trainable_candle_io::PartNames;
use trainable_candle_io::adapter_file::{BaseModel, Outline, Reader};
use trainable_candle_nn::Module;

use crate::pretrained::{INDEX, Naming, class_of, read_json};
use crate::registry::{Model, ModelKind};
use crate::{Choice, Pretrained};

pub(crate) use recognise::{not_found, of_denoiser, of_file, of_models, recognised};
pub use table::PIPELINES;

/// Whether a `config.json` may belong to a certain model, or to a model of a certain size.
pub type Fits = fn(&Map<String, Value>) -> bool;

/// Models that work together, under one name.
#[derive(Debug)]
pub struct Pipeline {
    /// The pipeline's name on the command line.
    pub name: &'static str,
    /// The pipeline's name in messages.
    pub title: &'static str,
    /// The names of the pipeline's classes in diffusers' `model_index.json`.
    pub class_names: &'static [&'static str],
    /// The base model, as other tools name it in the metadata of adapter files; None if there is no such name.
    pub base: Option<BaseModel>,
    /// The base models of other sizes than `base`. Each is a pair: whether a denoiser's configuration has this size,
    /// and the name that then replaces `base.architecture`.
    pub sizes: &'static [(Fits, &'static str)],
    /// The number of pixels along one side of an image per unit of the denoiser's `sample_size`.
    pub pixels: usize,
    /// The pipeline's models. The model that every run fine-tunes comes first.
    pub parts: &'static [Part],
}

/// The function of a part in its pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The part predicts noise or velocity. Every run fine-tunes it.
    Denoiser,
    /// The part converts images to latents and back.
    Autoencoder,
    /// The part converts token ids to features. Runs can fine-tune it if its [`adapter`](Part::adapter) is not None.
    TextEncoder,
    /// The part predicts the next token. Every run fine-tunes it.
    LanguageModel,
}

impl Role {
    /// Whether every run fine-tunes the part with this role.
    pub const fn is_tuned(self) -> bool {
        matches!(self, Self::Denoiser | Self::LanguageModel)
    }
}

/// One model of a pipeline.
#[derive(Debug)]
pub struct Part {
    /// The function of the part.
    pub role: Role,
    /// The kind of model that the part is.
    pub model: &'static ModelKind,
    /// The name of the part's folder in a pipeline's folder. diffusers uses the same name for the part in adapter
    /// files. Empty for a model that stands alone.
    pub subfolder: &'static str,
    /// The sections that may contain the part in a checkpoint in one file. This library writes such checkpoints with
    /// the first section. It writes none if the list is empty or the first section is for GGUF files.
    pub sections: &'static [Section],
    /// Whether a `config.json` may belong to this part. This distinguishes parts of the same kind of model.
    pub fits: Fits,
    /// The `config.json` of the published model.
    pub published: fn() -> Map<String, Value>,
    /// The part's names in adapter files of other tools; None if adapters on the part are not supported.
    pub adapter: Option<AdapterNames>,
}

/// The keys under which a checkpoint in one file stores a part.
#[derive(Debug)]
pub struct Section {
    /// Possible prefixes of the keys. This library writes files with the first one.
    pub prefixes: &'static [&'static str],
    /// The names that follow the prefix.
    pub naming: Naming,
    /// A key, without the prefix, that every file with this section has. If the prefix may be empty, the key alone must
    /// tell which kind of model the file holds.
    pub probe: &'static str,
}

impl Section {
    /// Whether this library writes files with this section. It writes no GGUF files, whose names are llama.cpp's.
    pub fn is_written(&self) -> bool {
        self.naming != Naming::LlamaCpp
    }
}

/// The names of a part in adapter files of other tools.
#[derive(Clone, Copy, Debug)]
pub struct AdapterNames {
    /// kohya's name: `lora_unet`, `lora_te1`.
    pub kohya: &'static str,
    /// `ComfyUI`'s name: `diffusion_model`, `text_encoders.clip_l.transformer`. None if `ComfyUI` does not
    /// support the model.
    pub comfyui: Option<&'static str>,
    /// The tools that load the part's adapters.
    pub readers: &'static [Reader],
}

/// A part and the pipeline that it belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The pipeline.
    pub pipeline: &'static Pipeline,
    /// The part.
    pub part: &'static Part,
}

impl Pipeline {
    /// Finds the pipeline of this name.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no pipeline of this name. The message names all pipelines.
    pub fn find(name: &str) -> Result<&'static Self> {
        PIPELINES.iter().find(|pipeline| pipeline.name == name).copied().ok_or_else(|| {
            let known: Vec<&str> = PIPELINES.iter().map(|pipeline| pipeline.name).collect();
            Error::Config(format!("there is no model \"{name}\"; expected \"{}\"", known.join("\", \"")))
        })
    }

    /// Finds the pipeline that `model_index.json` in a folder names. None if there is no such file, or if it names no
    /// class or an unknown class.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Config`] if it does not parse.
    pub fn of_folder(folder: &Path) -> Result<Option<&'static Self>> {
        let index = folder.join(INDEX);
        if !index.is_file() {
            return Ok(None);
        }
        let Some(class) = class_of(&read_json(&index)?) else { return Ok(None) };
        Ok(PIPELINES.iter().find(|pipeline| pipeline.class_names.contains(&class.as_str())).copied())
    }

    /// The places of the pipeline's parts.
    pub fn places(&'static self) -> impl Iterator<Item = Place> {
        self.parts.iter().map(move |part| Place { pipeline: self, part })
    }

    /// Returns, for each part whose adapters are supported, the layers that can have adapters. Without `weights`, the
    /// layers have the sizes of the published model. With `weights`, they have the sizes of the part's files at this
    /// path. If a text encoder's files cannot be read there, its layers have the sizes of the published model.
    ///
    /// # Errors
    /// As [`Pretrained::find`] and [`ModelKind::config`], for the part that every run fine-tunes; as
    /// [`ModelKind::shapes`].
    pub fn outlines(&'static self, weights: Option<&Path>) -> Result<Vec<Outline>> {
        let outline = |place: Place| {
            let part = place.part;
            let found = weights.map(|path| Pretrained::find(path, part.model, &Choice::of(part.subfolder)));
            let config = match found.map(|files| (part.model.config)(&files?)) {
                Some(Err(error)) if part.role.is_tuned() => return Err(error),
                Some(Ok(config)) => config,
                Some(Err(_)) | None => (part.published)(),
            };
            let model = (part.model.shapes)(&config)?;
            Ok(Outline { names: place.names(model.as_ref()), layers: layer_shapes(model.as_ref()) })
        };
        self.places().filter(|place| place.part.adapter.is_some()).map(outline).collect()
    }
}

/// The names of a model's layers with the shapes of their weights in files: (out, in), or (out, in, height, width) for
/// a convolution.
pub(crate) fn layer_shapes(model: &dyn Module) -> BTreeMap<String, Vec<usize>> {
    // In memory, the weight of a convolution is (out, height, width, in).
    let shape = |dims: &[usize]| match *dims {
        [out, height, width, input] => vec![out, input, height, width],
        ref dims => dims.to_vec(),
    };
    model.named_layers().into_iter().map(|(name, layer)| (name, shape(layer.base().weight.dims()))).collect()
}

impl Part {
    /// Possible prefixes of the part's keys in adapter files.
    fn adapter_prefixes(&self) -> Vec<String> {
        let Some(names) = self.adapter else { return Vec::new() };
        // kohya's trainers number text encoders only if there are several.
        let unnumbered = names.kohya.strip_suffix('1').map(|name| format!("{name}_"));
        let diffusers = Some(self.subfolder).filter(|name| !name.is_empty()).map(|name| format!("{name}."));
        let comfyui = names.comfyui.map(|name| format!("{name}."));
        // OneTrainer names the denoiser after its folder.
        let is_in_onetrainer = self.role == Role::Denoiser && !self.subfolder.is_empty();
        let onetrainer = is_in_onetrainer.then(|| format!("lora_{}_", self.subfolder));
        let kohya = Some(format!("{}_", names.kohya));
        [kohya, unnumbered, diffusers, comfyui, onetrainer].into_iter().flatten().collect()
    }
}

impl Place {
    /// Whether `key`, from an adapter file, begins with a prefix of this part.
    pub(crate) fn has_prefix_of(self, key: &str) -> bool {
        self.part.adapter_prefixes().iter().any(|prefix| key.starts_with(prefix))
    }

    /// Finds the place of a model by its kind and configuration, for files that do not state the place. None if the
    /// configuration fits no place.
    pub fn by_configuration(model: &ModelKind, config: &Map<String, Value>) -> Option<Self> {
        // Whether the configuration has all values of the published model.
        let is_published =
            |place: &Self| (place.part.published)().iter().all(|(field, value)| config.get(field) == Some(value));
        let fits = |place: &Self| (place.part.fits)(config);
        // If a model can stand alone, only files that state the place can make it a part of a larger pipeline.
        let alone = places(model).find(|place| place.part.subfolder.is_empty() && fits(place));
        alone.or_else(|| places(model).find(is_published)).or_else(|| places(model).find(fits))
    }

    /// The names that other tools use for `model` in this place, and for its layers. There are no names if adapters on
    /// the part are not supported.
    pub fn names(self, model: &dyn Model) -> PartNames {
        let Some(adapter) = self.part.adapter else { return PartNames::default() };
        let config = model.configuration();
        // The `sample_size` of other parts does not tell the denoiser's resolution.
        let side = config.get("sample_size").and_then(Value::as_u64).filter(|_| self.part.role == Role::Denoiser);
        let of_size = self.pipeline.sizes.iter().find(|(fits, _)| fits(&config)).map(|&(_, architecture)| architecture);
        let base = self.pipeline.base.map(|base| BaseModel {
            architecture: of_size.unwrap_or(base.architecture),
            resolution: side.map_or(base.resolution, |side| self.pipeline.pixels * side as usize),
            ..base
        });
        PartNames {
            diffusers: self.part.subfolder,
            kohya: adapter.kohya,
            comfyui: adapter.comfyui,
            readers: adapter.readers,
            is_denoiser: self.part.role == Role::Denoiser,
            base,
            original: model.original_names(),
            prefixes: adapter_prefixes(),
        }
    }
}

/// The places of a kind of model, in the order of the table.
pub fn places(model: &ModelKind) -> impl Iterator<Item = Place> {
    PIPELINES.iter().flat_map(|pipeline| pipeline.places()).filter(move |place| place.part.model.name == model.name)
}

/// The names of the folders in which pipelines have a kind of model, each once.
pub fn subfolders(model: &ModelKind) -> Vec<&'static str> {
    unique(places(model).map(|place| place.part.subfolder).filter(|subfolder| !subfolder.is_empty()))
}

/// All kinds of models, each once: denoisers, then the other kinds, both in the order of the table. If a path holds
/// models of several kinds, the first of these kinds is loaded. In a pipeline of several models, that is the denoiser.
pub fn kinds() -> Vec<&'static ModelKind> {
    let mut parts: Vec<&Part> = PIPELINES.iter().flat_map(|pipeline| pipeline.parts).collect();
    // `false` comes before `true`, and equal keys stay in their order.
    parts.sort_by_key(|part| part.role != Role::Denoiser);
    let mut kinds: Vec<&ModelKind> = Vec::new();
    for part in parts {
        if kinds.iter().all(|kind| kind.name != part.model.name) {
            kinds.push(part.model);
        }
    }
    kinds
}

/// The prefixes that identify a part in the keys of adapter files, for all parts, in the styles of kohya, diffusers,
/// `ComfyUI` and `OneTrainer`.
fn adapter_prefixes() -> Arc<[String]> {
    let mut prefixes = BTreeSet::new();
    for part in PIPELINES.iter().flat_map(|pipeline| pipeline.parts) {
        prefixes.extend(part.adapter_prefixes());
    }
    prefixes.into_iter().collect()
}

/// The names, each once, in the order in which they first occur.
fn unique<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}
