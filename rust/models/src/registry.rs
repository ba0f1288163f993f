//! [`Model`], the interface of all models, and functions that load a model of any kind.

use std::any::Any;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::quantized::Format;
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_io::{PartNames, WeightFiles};
use trainable_candle_nn::{Module, Quantizable, Source, StreamOptions};

use crate::pipelines::{self, Place};
use crate::pretrained::{Architecture, CheckpointNaming, Choice, Configuration, Layout, Pretrained};
use crate::saved::{SampleSize, Saved};

/// A model that can be loaded, saved and fine-tuned.
pub trait Model: Module + Any + Send + Sync {
    /// The model's entry in the registry of models.
    fn kind(&self) -> &'static ModelKind;

    /// The model's `config.json`.
    fn configuration(&self) -> Map<String, Value>;

    /// The dtype of the model's weights, in which the model computes.
    fn dtype(&self) -> DType;

    /// The layout of the model's parameters in files: if `original` is None, in the model's folder; otherwise in an
    /// original checkpoint, one file with the names of the model's authors or of llama.cpp. `files` is this checkpoint,
    /// if it exists already.
    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout>;

    /// Adds to `saved` what the tape keeps of a forward pass of one sample. The default, for models that are not
    /// fine-tuned, adds nothing.
    fn saved(&self, _size: SampleSize, _saved: &mut Saved) {}

    /// The class that the model's `config.json` names; by default, the kind's first class.
    fn class_name(&self) -> &'static str {
        self.kind().class_names[0]
    }

    /// Check that all layers were loaded, so that the model can be saved.
    ///
    /// # Errors
    /// [`Error::Argument`] if only some layers were loaded.
    fn require_whole(&self) -> Result<()> {
        Ok(())
    }

    /// The names of the model's layers in original checkpoints; by default, no layer has one. Adapter files of some
    /// tools use these names too.
    fn original_names(&self) -> OriginalNames {
        Arc::new(|_| None)
    }
}

/// A model, or the error for which it could not be made.
pub type ModelResult = Result<Arc<dyn Model>>;

/// Makes a model of random weights, in a dtype and on a device. Its sizes come from the `config.json` at the path, or
/// from the published model if there is no path. The last argument is a pair: the format to which linear layers are
/// quantized, if any, and the options that say which blocks are streamed from host memory.
pub type RandomModel = fn(Option<&Path>, DType, &Device, (Option<Format>, StreamOptions)) -> ModelResult;

/// A kind of model: its names in files, and how it is made from files.
#[derive(Debug)]
pub struct ModelKind {
    /// The name of the model's class in this library.
    pub name: &'static str,
    /// The model's name in messages, such as `a UNet`.
    pub noun: &'static str,
    /// A prefix of some keys in the weight file of a model's folder. Messages about unexpected files recognise the kind
    /// by this prefix.
    pub mark: &'static str,
    /// The class names that a `config.json` of this kind may have, in diffusers' `_class_name` or transformers'
    /// `architectures`. See also [`Model::class_name`].
    pub class_names: &'static [&'static str],
    /// The name of the weight file in the model's folder.
    pub weights_name: &'static str,
    /// Loads a frozen model, with its weights converted to a dtype if one is given.
    pub load: fn(&Pretrained, Option<DType>, &Device) -> ModelResult,
    /// Makes a frozen model of random weights.
    pub random: RandomModel,
    /// The linear layers that may be quantized.
    pub quantizable: Quantizable,
    /// Returns the `config.json` of files without reading weights.
    pub config: fn(&Pretrained) -> Result<Map<String, Value>>,
    /// Makes a model from a configuration. The model has layers and shapes, but no weights.
    pub shapes: fn(&Map<String, Value>) -> ModelResult,
}

impl ModelKind {
    /// The kind of the architecture `M`. `name` is the class in Python. `noun` and `mark` are for messages about a wrong
    /// file: the noun of such a model, and a prefix of keys by which its files are recognized. `class_names` are the
    /// classes in `config.json`, and `weights_name` is the name of the weight file in a model's folder.
    pub const fn of<M: Architecture>(
        name: &'static str,
        (noun, mark): (&'static str, &'static str),
        class_names: &'static [&'static str],
        weights_name: &'static str,
    ) -> Self {
        Self {
            name,
            noun,
            mark,
            class_names,
            weights_name,
            load: |files, dtype, device| Ok(Arc::new(M::load(files, dtype, device)?)),
            random: |config, dtype, device, options| Ok(Arc::new(M::from_config(config, dtype, device, options)?)),
            quantizable: M::QUANTIZABLE,
            config: |files| Ok(M::read_config(files)?.to_json()),
            shapes: |config| {
                let config = M::Config::from_json(config)?;
                // Without weights, any dtype will do.
                Ok(Arc::new(M::build(config, &mut Source::shapes(DType::F16).root())?))
            },
        }
    }
}

impl ModelKind {
    /// Check that some layers of this kind of model may be quantized.
    ///
    /// # Errors
    /// [`Error::Argument`] if no layer may be quantized.
    pub fn check_quantizable(&self, op: &'static str) -> Result<()> {
        if self.quantizable == Quantizable::NOTHING {
            return Err(Error::argument(op, format!("{} has no layers that may be quantized", self.noun)));
        }
        Ok(())
    }
}

/// A model and, if it belongs to a pipeline, its place: the pipeline and which of its parts the model is. The place
/// determines the names that other tools use for the model.
#[derive(Clone)]
pub struct Loaded {
    model: Arc<dyn Model>,
    place: Option<Place>,
}

impl Loaded {
    /// A model that was not loaded from files; its configuration determines its place in a pipeline.
    pub fn new(model: Arc<dyn Model>) -> Self {
        let place = Place::by_configuration(model.kind(), &model.configuration());
        Self { model, place }
    }

    /// The model itself.
    pub const fn model(&self) -> &Arc<dyn Model> {
        &self.model
    }

    /// The names of the model and its layers in adapter files of other tools; [`PartNames::default`] without a place.
    pub fn adapter_names(&self) -> PartNames {
        self.place.map_or_else(PartNames::default, |place| place.names(self.model.as_ref()))
    }
}

impl Deref for Loaded {
    type Target = dyn Model;

    fn deref(&self) -> &Self::Target {
        self.model.as_ref()
    }
}

/// The kind and the files of the model at `path`. If `choice` names no kind, the kind is the first of
/// [`pipelines::kinds`] that the files fit.
///
/// # Errors
/// As [`Pretrained::find`]. If `choice` names no kind, also [`Error::Config`] if the `config.json` at `path` names no
/// supported class, and as [`Pretrained::class_name`].
pub fn find(path: &Path, choice: &Choice) -> Result<(&'static ModelKind, Pretrained)> {
    if let Some(kind) = choice.kind {
        return Ok((kind, Pretrained::find(path, kind, choice)?));
    }
    let mut first_error = None;
    // Files that were found, and the class that their `config.json` names, which none of the kinds so far has.
    let mut unsupported = None;
    for kind in pipelines::kinds() {
        match Pretrained::find(path, kind, choice) {
            Ok(files) => match files.class_name()? {
                Some(class) if !kind.class_names.contains(&class.as_str()) => {
                    unsupported = Some((files, class));
                }
                _ => return Ok((kind, files)),
            },
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    match (unsupported, first_error) {
        (Some((files, class)), _) => {
            let known: Vec<&str> = pipelines::kinds().iter().flat_map(|kind| kind.class_names).copied().collect();
            Err(Error::Config(format!(
                "{}: the model is a \"{class}\", which is not supported; supported are {}",
                files.config_path().unwrap_or(path).display(),
                known.join(", ")
            )))
        }
        (None, Some(error)) => Err(error),
        (None, None) => Err(Error::Config("load: there are no kinds of models".into())),
    }
}

/// Load the frozen model at `path`: a model's folder, a weight file beside a `config.json`, a pipeline's folder, or an
/// original checkpoint. `choice` or the files name the kind of model. From a pipeline's folder or an original
/// checkpoint, this function loads the model that is fine-tuned, unless `choice` names another model.
///
/// # Errors
/// As [`find`] and the kind's loader.
pub fn load(path: &Path, choice: &Choice, dtype: Option<DType>, device: &Device) -> Result<Loaded> {
    let (kind, files) = find(path, choice)?;
    Ok(Loaded { model: (kind.load)(&files, dtype, device)?, place: files.place() })
}
