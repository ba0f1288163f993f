//! The files of a pretrained model: a folder of diffusers or transformers, such a folder in a pipeline's folder, a
//! weight file beside the model's `config.json`, or an original checkpoint. An original checkpoint is one file. It may
//! hold several models, and its format has its own names for parameters.

mod architecture;
mod files;
mod layout;
mod save;
mod sizes;
mod stored;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use trainable_candle_core::quantized::Format;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::{PartNames, WeightFile, WeightFiles};
use trainable_candle_nn::{Module, Quantization, Source, StreamOptions, Streaming, Weights};

pub use architecture::{Architecture, Configuration};
use files::{refuse_pickle, refuse_pickles_in, weights_in};
pub use layout::{CheckpointNaming, Form, Key, Layout, Naming, OwnNames, PrefixedNames, Renaming, renamed};
pub use save::{WriteOptions, save_checkpoint, save_pretrained};
pub use sizes::StoredSizes;
use stored::StoredWeights;

use crate::pipelines::{self, Pipeline, Place};
use crate::registry::{Model, ModelKind};

/// The file that holds a model's configuration in the model's folder.
pub(crate) const CONFIG: &str = "config.json";
/// The file in a pipeline's folder that names the pipeline's class.
pub(crate) const INDEX: &str = "model_index.json";

/// Selects the model to load from a path, and how to load it.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// The kind of model. None selects the kind that the files name. If the files name no kind, None selects the kind
    /// that is fine-tuned: the denoiser or the language model.
    pub kind: Option<&'static ModelKind>,
    /// The name of the model's folder in the pipeline's folder. For an original checkpoint, the name selects the model
    /// that this folder would hold. None accepts every folder in which pipelines have the kind of model.
    pub subfolder: Option<String>,
    /// The pipeline whose part the model is, if several pipelines have such a part.
    pub pipeline: Option<&'static Pipeline>,
    /// The path of a `config.json`, or of a pipeline's folder that has one, to use instead of the configuration beside
    /// the weights.
    pub config: Option<PathBuf>,
    /// Whether half-precision files (`*.fp16.safetensors`) take precedence over plain files.
    pub half: bool,
    /// Whether the model is f32 even if half precision is requested or stored. None lets the configuration decide.
    pub force_upcast: Option<bool>,
    /// The number of layers to load, from the first on, of a language model. None loads all.
    pub layers: Option<usize>,
    /// The format to which the linear layers of the model's blocks are quantized while they are read. None requests no
    /// format.
    pub quantize: Option<Format>,
    /// Which weights stay in host memory and are copied to the device before each use.
    pub stream: StreamOptions,
}

impl Choice {
    /// Selects the model that a pipeline has in `subfolder`. If `subfolder` is empty, the model is at the path itself.
    pub fn of(subfolder: &str) -> Self {
        Self { subfolder: Some(subfolder.to_owned()).filter(|name| !name.is_empty()), ..Self::default() }
    }
}

/// The files of a model, and how the model is loaded from them.
#[derive(Clone, Debug)]
pub struct Pretrained {
    /// The path that was given to [`find`](Self::find).
    path: PathBuf,
    /// The path of the model's `config.json`, if there is one.
    config: Option<PathBuf>,
    /// The weight files.
    weights: Vec<PathBuf>,
    /// The kind of model.
    model: &'static ModelKind,
    /// For an original checkpoint, the model's place (a pipeline and the part of it that the model is) and its keys.
    original: Option<(Place, CheckpointNaming)>,
    force_upcast: Option<bool>,
    layers: Option<usize>,
    quantize: Option<Format>,
    stream: StreamOptions,
}

impl Pretrained {
    /// Find the files of a `model` at `path`: the model's folder, a pipeline's folder, an original checkpoint, or a
    /// weight file beside the model's `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` does not exist or cannot be read, [`Error::WeightsFormat`] if it is none of these, is
    /// damaged, or is a pickle.
    pub fn find(path: &Path, model: &'static ModelKind, choice: &Choice) -> Result<Self> {
        let found = if std::fs::metadata(path).map_err(|e| Error::io(path, e))?.is_dir() {
            Self::in_folder(path, model, choice)
        } else {
            Self::in_file(path, model, choice)
        }?;
        let Some(config) = &choice.config else { return Ok(found) };
        let config_in = |folder: &Path| {
            let mut paths = Self::subfolders(model, choice).into_iter().map(|name| folder.join(name).join(CONFIG));
            paths.find(|path| path.is_file()).unwrap_or_else(|| folder.join(CONFIG))
        };
        let config = if config.is_dir() { config_in(config) } else { config.clone() };
        Ok(Self { config: Some(config), ..found })
    }

    fn new(path: &Path, model: &'static ModelKind, choice: &Choice, weights: Vec<PathBuf>) -> Self {
        let &Choice { force_upcast, layers, quantize, stream, .. } = choice;
        let path = path.to_path_buf();
        Self { path, config: None, weights, model, original: None, force_upcast, layers, quantize, stream }
    }

    /// The names of the folders that may hold the model in a pipeline's folder.
    fn subfolders<'a>(model: &ModelKind, choice: &'a Choice) -> Vec<&'a str> {
        choice.subfolder.as_deref().map_or_else(|| pipelines::subfolders(model), |subfolder| vec![subfolder])
    }

    fn in_folder(path: &Path, model: &'static ModelKind, choice: &Choice) -> Result<Self> {
        let has_config = |folder: &PathBuf| folder.join(CONFIG).is_file();
        let subfolders = Self::subfolders(model, choice);
        // The path is the model's folder, or a pipeline's folder that has the model's folder.
        let model_folder = Some(path.to_path_buf()).filter(|folder| choice.subfolder.is_none() && has_config(folder));
        let folder = model_folder.or_else(|| subfolders.iter().map(|subfolder| path.join(subfolder)).find(has_config));
        let Some(folder) = folder else {
            refuse_pickles_in(path)?;
            let names = subfolders.join(", ");
            let searched = match &choice.subfolder {
                Some(subfolder) => format!("the subfolder {subfolder}"),
                None if names.is_empty() => "this folder".to_owned(),
                None => format!("this folder or in {names}"),
            };
            return Err(Error::weights(
                path,
                format!("there is no {CONFIG} in {searched}; {CONFIG} says what model the weights belong to"),
            ));
        };
        let weights = weights_in(&folder, choice.half)?;
        Ok(Self { config: Some(folder.join(CONFIG)), ..Self::new(path, model, choice, weights) })
    }

    fn in_file(path: &Path, model: &'static ModelKind, choice: &Choice) -> Result<Self> {
        refuse_pickle(path)?;
        let beside = Some(path.with_file_name(CONFIG)).filter(|config| config.is_file());
        let file = WeightFile::open(path)?;
        // The place of the model whose keys the file has, the names of these keys (`section`) and their prefix.
        let original = pipelines::of_file(model, choice, |name| file.shape(name).is_some())
            // If the prefix is empty, such names may also occur in the weight file of a model's folder. A file beside a
            // configuration belongs to such a folder, unless it is GGUF.
            .filter(|(_, _, prefix)| !prefix.is_empty() || beside.is_none() || file.gguf().is_some())
            .map(|(place, section, prefix)| (place, CheckpointNaming { prefix, naming: section.naming }));
        if original.is_none() && beside.is_none() && choice.config.is_none() {
            return Err(Error::weights(path, pipelines::not_found(&file.names(), model)));
        }
        let config = beside.filter(|_| original.is_none());
        Ok(Self { config, original, ..Self::new(path, model, choice, vec![path.to_path_buf()]) })
    }

    /// Determines the model's place in a pipeline from the keys of the original checkpoint, from the pipeline's
    /// `model_index.json`, or from the model's configuration. None if these do not determine a place.
    pub fn place(&self) -> Option<Place> {
        if let Some((place, _)) = self.original {
            return Some(place);
        }
        let folder = self.config.as_deref()?.parent()?;
        let subfolder = folder.file_name().and_then(|name| name.to_str());
        let pipeline = folder.parent().and_then(|parent| Pipeline::of_folder(parent).ok().flatten());
        let is_indexed = |place: &Place| {
            subfolder == Some(place.part.subfolder)
                && pipeline.is_some_and(|pipeline| pipeline.name == place.pipeline.name)
        };
        pipelines::places(self.model)
            .find(is_indexed)
            .or_else(|| Place::by_configuration(self.model, &read_json(&folder.join(CONFIG)).ok()?))
    }

    /// The names that other tools use in adapter files for `model`, which was loaded from these files, and for its
    /// layers.
    pub fn adapter_names(&self, model: &dyn Model) -> PartNames {
        self.place().map_or_else(PartNames::default, |place| place.names(model))
    }

    /// The path of the folder or file that was given to [`find`](Self::find).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of layers to load, from the first on; None for all.
    pub const fn layers(&self) -> Option<usize> {
        self.layers
    }

    /// Which weights are streamed from host memory.
    pub const fn stream(&self) -> StreamOptions {
        self.stream
    }

    /// The format to which linear layers are quantized, if one was requested.
    pub const fn quantize(&self) -> Option<Format> {
        self.quantize
    }

    /// The path of `config.json`, if there is one.
    pub fn config_path(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// How an original checkpoint names the model's parameters. None if the files are not an original checkpoint.
    pub fn original(&self) -> Option<CheckpointNaming> {
        self.original.map(|(_, original)| original)
    }

    /// The weight files.
    pub fn weights(&self) -> &[PathBuf] {
        &self.weights
    }

    /// The class that `config.json` names. None if there is no `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`] if `config.json` cannot be read, [`Error::Config`] if it does not parse or names no class.
    pub fn class_name(&self) -> Result<Option<String>> {
        let Some(path) = &self.config else { return Ok(None) };
        class_of(&read_json::<Map<String, Value>>(path)?)
            .map(Some)
            .ok_or_else(|| Error::Config(format!("{}: _class_name and architectures are both missing", path.display())))
    }

    /// The JSON object in the file `name` in the folder of `config.json`. None if there is no such file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Config`] if it is not a JSON object.
    pub fn beside_config(&self, name: &str) -> Result<Option<Map<String, Value>>> {
        let path = self.config.as_ref().map(|config| config.with_file_name(name));
        path.filter(|path| path.is_file()).map(|path| read_json(&path)).transpose()
    }

    /// Returns the configuration in `config.json`. If an original checkpoint has no `config.json`, `deduce` determines
    /// the configuration from the shapes of tensors and from known configurations. The first known configuration is the
    /// one in the checkpoint's header. If the header has none, the first one is the `config.json` in a folder beside
    /// the checkpoint that has the name of the part's folder in a pipeline, such as `unet`. The configurations of
    /// published models follow.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read; [`Error::Config`] if the configuration is wrong or not supported, with a
    /// message that says why; [`Error::WeightsFormat`] if there is neither a `config.json` nor an original checkpoint,
    /// or the checkpoint is damaged; the errors of `deduce`.
    pub fn config<C: Configuration>(
        &self,
        deduce: impl FnOnce(&WeightFiles, CheckpointNaming, Vec<C>) -> Result<C>,
    ) -> Result<C> {
        match (&self.config, self.original) {
            (Some(path), _) => {
                let mut map: Map<String, Value> = read_json(path)?;
                take_quantization(&mut map).map_err(|text| Error::Config(format!("{}: {text}", path.display())))?;
                let expected = self.model.class_names;
                if let Some(class) = class_of(&map).filter(|class| !expected.contains(&class.as_str())) {
                    return Err(Error::Config(format!(
                        "{}: the model is a \"{class}\", expected \"{}\"",
                        path.display(),
                        expected.join("\" or \"")
                    )));
                }
                C::from_json(&map).map_err(|error| match error {
                    Error::Config(text) => Error::Config(format!("{}: {text}", path.display())),
                    other => other,
                })
            }
            (None, Some((place, original))) => {
                let files = WeightFiles::open(&self.weights)?;
                let subfolder = place.part.subfolder;
                let in_header = files.metadata().get(&config_entry(subfolder)).map(|text| serde_json::from_str(text));
                let beside = self.path.with_file_name(subfolder).join(CONFIG);
                // The folder beside the file may belong to another model, so errors in its configuration are ignored.
                // A header entry that does not parse is ignored too. `first` is the first of the known configurations.
                let first = in_header.and_then(|map| map.ok()).or_else(|| read_json(&beside).ok());
                let places = std::iter::once(place).chain(pipelines::places(self.model));
                let published = places.map(|place| (place.part.published)());
                let known = first.into_iter().chain(published).filter_map(|map| C::from_json(&map).ok()).collect();
                deduce(&files, original, known)
            }
            (None, None) => Err(Error::weights(&self.path, format!("there is no {CONFIG}"))),
        }
    }

    /// Whether weights are converted to f32 although the requested `dtype` is half precision or None. `default` is what
    /// the configuration says; [`Choice::force_upcast`] takes precedence.
    pub(crate) fn upcasts(&self, dtype: Option<DType>, default: bool) -> bool {
        matches!(dtype, None | Some(DType::F16 | DType::BF16)) && self.force_upcast.unwrap_or(default)
    }

    /// Build a frozen model with the function `model`, which must use all weights of the files. `layout` returns the
    /// layout of the files. Weights are read one at a time and converted to `dtype`, or to the dtype of most stored
    /// weights if `dtype` is None. Therefore memory holds at most one parameter in addition to the model.
    ///
    /// # Errors
    /// [`Error::DType`] if `dtype` is not floating-point; as [`WeightFiles::open`], [`WeightFiles::read`],
    /// [`Source::finish`], [`Streaming::start`] and `model`.
    pub fn build<M: Module>(
        &self,
        layout: impl FnOnce(&WeightFiles) -> Box<dyn Layout>,
        dtype: Option<DType>,
        (device, quantization, streaming): (&Device, Quantization, Option<Arc<Streaming>>),
        model: impl FnOnce(&mut Weights<'_>) -> Result<M>,
    ) -> Result<M> {
        if let Some(dtype) = dtype.filter(|&d| !is_float(d)) {
            return Err(Error::dtype(
                "from_pretrained",
                format!("dtype is {}, expected a floating-point dtype", dtype.as_str()),
            ));
        }
        let files = WeightFiles::open(&self.weights)?;
        let layout = layout(&files);
        // A model computes in one dtype, even if its file mixes several.
        let dtype = dtype.or_else(|| files.common_dtype(layout.prefix()));
        let stored = StoredWeights { files, layout, dtype, device: device.clone() };
        let mut source = Source::stored(stored).quantized(Some(quantization)).streamed(streaming.clone());
        let in_file = |error| match error {
            Error::Config(text) => Error::Config(format!("{}: {text}", self.path.display())),
            other => other,
        };
        let model = model(&mut source.root()).map_err(in_file)?;
        source.finish().map_err(in_file)?;
        if let Some(streaming) = streaming {
            streaming.start(&model)?;
        }
        Ok(model)
    }
}

/// The contents of a JSON file.
pub(crate) fn read_json<C: DeserializeOwned>(path: &Path) -> Result<C> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    serde_json::from_str(&text).map_err(|e| Error::Config(format!("{}: {e}", path.display())))
}

/// Remove the description of quantized weights from the configuration `map` if their format is supported. Readers do
/// not need it, because the weight files state how weights are stored. The error is a message without the path.
fn take_quantization(map: &mut Map<String, Value>) -> std::result::Result<(), String> {
    const FIELD: &str = "quantization_config";
    let Some(given) = map.get(FIELD).filter(|given| !given.is_null()) else { return Ok(()) };
    let is_true = |name: &str| given.get(name).and_then(Value::as_bool).unwrap_or(false);
    let text = |name: &str| given.get(name).and_then(Value::as_str);
    let is_supported = match text("quant_method") {
        Some("bitsandbytes") if is_true("load_in_4bit") || is_true("_load_in_4bit") => {
            text("bnb_4bit_quant_type") == Some("nf4")
        }
        Some("bitsandbytes") => is_true("load_in_8bit") || is_true("_load_in_8bit"),
        Some("compressed-tensors") => {
            matches!(text("format"), Some("float-quantized" | "int-quantized" | "naive-quantized"))
        }
        _ => false,
    };
    if is_supported {
        map.remove(FIELD);
        return Ok(());
    }
    let method = match text("quant_method") {
        // bitsandbytes' default for four bits is fp4.
        Some("bitsandbytes") => format!("of \"bitsandbytes\" ({})", text("bnb_4bit_quant_type").unwrap_or("fp4")),
        Some("compressed-tensors") => format!("of \"compressed-tensors\" ({})", text("format").unwrap_or("no format")),
        Some(method) => format!("of \"{method}\""),
        None => "without a quant_method".to_owned(),
    };
    Err(format!(
        "weights with this {FIELD} {method} are not supported; supported are nf4 and int8 of bitsandbytes, and \
         eight-bit weights of compressed-tensors; load the unquantized weights, with quantize= (--base-precision)"
    ))
}

/// The name of the header entry in which an original checkpoint stores the configuration of the model that a pipeline
/// has in `subfolder`.
fn config_entry(subfolder: &str) -> String {
    format!("trainable_candle.config.{subfolder}")
}

/// The class that a configuration names, if it names one: `_class_name`, or else the first of the `architectures`.
pub(crate) fn class_of(map: &Map<String, Value>) -> Option<String> {
    let name = map.get("_class_name").or_else(|| map.get("architectures")?.as_array()?.first())?;
    name.as_str().map(str::to_owned)
}
