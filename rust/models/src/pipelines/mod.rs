//! Pipelines: which models belong together, where they are in files, and which names other tools use for them.
//!
//! [`PIPELINES`] is the only place in this crate that describes families. Loading, saving, the recognition of files and
//! the names in adapter files follow from it. The module of a model ([`crate::clip`], [`crate::vae`], ...) only
//! describes its architecture.

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

/// Whether a `config.json` may belong to a model.
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
    /// For each base model of another size: whether a denoiser's configuration is that of this size, and the
    /// architecture that then replaces the one in `base`.
    pub sizes: &'static [(Fits, &'static str)],
    /// The number of pixels along one side of an image per unit of the denoiser's `sample_size`.
    pub pixels: usize,
    /// The pipeline's models. The model that is fine-tuned comes first.
    pub parts: &'static [Part],
}

/// The function of a part in its pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The part predicts noise or velocity. Runs fine-tune it.
    Denoiser,
    /// The part converts images to latents and back.
    Autoencoder,
    /// The part converts token ids to features.
    TextEncoder,
    /// The part predicts the next token. Runs fine-tune it.
    LanguageModel,
}

impl Role {
    /// Whether runs fine-tune the part with this role.
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
    /// The sections of checkpoints in one file that may contain the part. This library writes files with the first one,
    /// or none if the first one is for GGUF files.
    pub sections: &'static [Section],
    /// Whether a `config.json` may belong to this part, if several parts have the same architecture.
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
    /// Whether this library writes files with this section.
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
    /// The programs that load the part's adapters.
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
    /// The pipeline of this name.
    ///
    /// # Errors
    /// [`Error::Config`] that names all pipelines, if there is none of this name.
    pub fn find(name: &str) -> Result<&'static Self> {
        PIPELINES.iter().find(|pipeline| pipeline.name == name).copied().ok_or_else(|| {
            let known: Vec<&str> = PIPELINES.iter().map(|pipeline| pipeline.name).collect();
            Error::Config(format!("there is no model \"{name}\"; expected \"{}\"", known.join("\", \"")))
        })
    }

    /// The pipeline that `model_index.json` in a folder names; none if there is no such file, or if it names an unknown
    /// class.
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

    /// The layers that can have adapters, for each part whose adapters are supported. Without `weights`, the layers
    /// have the sizes of the published model. With `weights`, they have the sizes of the files there; a text encoder
    /// that cannot be read there has the sizes of the published model.
    ///
    /// # Errors
    /// As [`Pretrained::find`] and the reading of a configuration, for the part that is fine-tuned.
    pub fn outlines(&'static self, weights: Option<&Path>) -> Result<Vec<Outline>> {
        let outline = |place: Place| {
            let part = place.part;
            let there = weights.map(|path| Pretrained::find(path, part.model, &Choice::of(part.subfolder)));
            let config = match there.map(|files| (part.model.config)(&files?)) {
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

/// The layers of a model with the shapes of their weights in files: (out, in), or (out, in, height, width).
pub(crate) fn layer_shapes(model: &dyn Module) -> BTreeMap<String, Vec<usize>> {
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
        let alone = names.kohya.strip_suffix('1').map(|alone| format!("{alone}_"));
        let diffusers = Some(self.subfolder).filter(|name| !name.is_empty()).map(|name| format!("{name}."));
        let comfyui = names.comfyui.map(|name| format!("{name}."));
        let named = self.role == Role::Denoiser && !self.subfolder.is_empty();
        let onetrainer = named.then(|| format!("lora_{}_", self.subfolder));
        [Some(format!("{}_", names.kohya)), alone, diffusers, comfyui, onetrainer].into_iter().flatten().collect()
    }
}

impl Place {
    /// Whether `key`, from an adapter file, begins with a prefix of this part.
    pub(crate) fn begins(self, key: &str) -> bool {
        self.part.adapter_prefixes().iter().any(|prefix| key.starts_with(prefix))
    }

    /// The place of a model by its architecture and configuration, for files that do not state the place.
    pub fn by_configuration(model: &ModelKind, config: &Map<String, Value>) -> Option<Self> {
        let is_published =
            |place: &Self| (place.part.published)().iter().all(|(field, value)| config.get(field) == Some(value));
        let fits = |place: &Self| (place.part.fits)(config);
        // Without a file that says otherwise, a model that can stand alone is not taken as a part of a pipeline.
        let alone = places(model).find(|place| place.part.subfolder.is_empty() && fits(place));
        alone.or_else(|| places(model).find(is_published)).or_else(|| places(model).find(fits))
    }

    /// The names that other tools use for `model` in this place, and for its layers.
    pub fn names(self, model: &dyn Model) -> PartNames {
        let Some(adapter) = self.part.adapter else { return PartNames::default() };
        let config = model.configuration();
        let side = config.get("sample_size").and_then(Value::as_u64).filter(|_| self.part.role == Role::Denoiser);
        let other = self.pipeline.sizes.iter().find(|(fits, _)| fits(&config)).map(|&(_, name)| name);
        let base = self.pipeline.base.map(|base| BaseModel {
            architecture: other.unwrap_or(base.architecture),
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

/// The names of the folders in which pipelines have a kind of model.
pub fn subfolders(model: &ModelKind) -> Vec<&'static str> {
    unique(places(model).map(|place| place.part.subfolder).filter(|subfolder| !subfolder.is_empty()))
}

/// All kinds of models, each once: denoisers, then the other kinds, both in the order of the table. If a path holds
/// models of several kinds, the first kind of this list is loaded. For a pipeline, that is the model that is
/// fine-tuned.
pub fn kinds() -> Vec<&'static ModelKind> {
    let mut parts: Vec<&Part> = PIPELINES.iter().flat_map(|pipeline| pipeline.parts).collect();
    parts.sort_by_key(|part| part.role != Role::Denoiser);
    let mut kinds: Vec<&ModelKind> = Vec::new();
    for part in parts {
        if kinds.iter().all(|kind| kind.name != part.model.name) {
            kinds.push(part.model);
        }
    }
    kinds
}

/// The prefixes of keys in adapter files that identify a part, in the styles of kohya, diffusers, `ComfyUI` and
/// `OneTrainer`.
fn adapter_prefixes() -> Arc<[String]> {
    let mut prefixes = BTreeSet::new();
    for part in PIPELINES.iter().flat_map(|pipeline| pipeline.parts) {
        prefixes.extend(part.adapter_prefixes());
    }
    prefixes.into_iter().collect()
}

fn unique<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found = Vec::new();
    for name in names {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}
