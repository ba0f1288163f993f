//! Writes a model to a folder, or several models to one file in the form of an original checkpoint: with the tensor
//! names of the code that the models were published with.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

use serde_json::{Map, Value, json};
use trainable_candle_core::quantized::Format;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Tensor, Weight, WeightRef};
use trainable_candle_io::{
    EightBits, TensorEntry, WeightFiles, comfy_format, nf4_entries, save_entries, write_atomically,
};

use super::layout::{CheckpointNaming, Form, Key, Layout};
use super::{CONFIG, config_entry};
use crate::Model;
use crate::pipelines::{self, Pipeline, Place, Section, places};

/// Write `config.json` and the weights of `model` to `folder`, which is created if missing, under the names that
/// diffusers and transformers read. Adapters are not written, but a merged adapter is part of its layer's weight.
/// `format` is None or `Nf4`.
///
/// With `Nf4`, the linear layers that may be quantized are in bitsandbytes' format with scales in f32. `config.json`
/// names the other linear layers, so that diffusers does not read them as quantized. diffusers compares each of these
/// names also with the last part of a layer's name. So a name that is the last part of a quantized layer's name cannot
/// be among them, and the layer of this name is quantized too. An example is Flux's last layer `proj_out`, because of
/// `single_transformer_blocks.0.proj_out`.
///
/// # Errors
/// [`Error::Io`], which names the path, if a file cannot be written; [`Error::Argument`] if only a part of the model
/// was loaded, if `format` is another format, or if the model has no layers that may be quantized; [`Error::DType`] if
/// a layer to quantize is f64.
pub fn save_pretrained(model: &dyn Model, folder: &Path, format: Option<Format>) -> Result<()> {
    let codes = match format {
        None => None,
        Some(Format::Nf4) => Some(Codes::Nf4),
        Some(other) => {
            let text = format!(
                "the format is {}, expected nf4 in a folder; save_checkpoint writes fp8 and int8",
                other.name()
            );
            return Err(Error::argument("save_pretrained", text));
        }
    };
    let (original, files) = (None, None); // the layout of a folder
    let mut stored = StoredModel::of(model, model.layout(original, files).as_ref(), "save_pretrained", codes)?;
    let mut config = model.configuration();
    if codes.is_some() {
        stored.quantize_what_cannot_be_skipped();
        config.insert("quantization_config".to_owned(), bitsandbytes_config(model.dtype(), &stored.plain_layers()));
    }
    let dtype = None; // each weight keeps its own dtype
    let entries = stored.entries(dtype)?;
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    // transformers requires this entry.
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    save_entries(&folder.join(model.kind().weights_name), entries, &metadata)?;
    let config = json_text(&config)?;
    write_atomically(&folder.join(CONFIG), |file| file.write_all(config.as_bytes()))
}

/// The field `quantization_config` of a `config.json` for weights in NF4: the fields of diffusers'
/// `BitsAndBytesConfig`. Layers compute in `dtype`. The layers named in `skipped` are not quantized.
fn bitsandbytes_config(dtype: DType, skipped: &[String]) -> Value {
    let dtype = match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    json!({
        "quant_method": "bitsandbytes",
        "load_in_4bit": true,
        "load_in_8bit": false,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": false,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skipped,
    })
}

/// Options for writing weights.
#[derive(Clone, Debug, Default)]
pub struct WriteOptions {
    /// The floating-point dtype to which the weights that are not quantized are converted. With None, each keeps its
    /// own dtype.
    pub dtype: Option<DType>,
    /// For each model, by the name of its folder, the format (`Fp8` or `Int8`) in which to write the linear layers that
    /// may be quantized. Their weights are stored as in `ComfyUI`: an `Fp8` weight has one scale, an `Int8` weight has
    /// one scale for each row.
    pub formats: BTreeMap<String, Format>,
}

/// Write `models` to one file under the names of the original checkpoints, with these `options`. Each model is
/// given with the name of its folder in a pipeline. If `base` is given, all tensors of this checkpoint that do not
/// belong to `models` are copied unchanged. The header stores the models' configurations, because names and shapes do
/// not determine every field.
///
/// # Errors
/// [`Error::Argument`] if a model has no place in such a file, if only a part of a model was loaded, if a format is
/// given for a name that is not in `models` or for a model without layers that may be quantized, or if a format is not
/// `Fp8` or `Int8`; [`Error::DType`] if `options.dtype` is not floating-point; [`Error::WeightsFormat`] if `base` is
/// damaged or has tensors of an unsupported dtype; [`Error::Io`], which names the path, if a file cannot be read or
/// written.
pub fn save_checkpoint(
    path: &Path,
    models: &[(&str, &dyn Model)],
    base: Option<&Path>,
    options: &WriteOptions,
) -> Result<()> {
    const OP: &str = "save_checkpoint";
    if let Some(other) = options.formats.keys().find(|name| !models.iter().any(|(known, _)| known == name)) {
        return Err(Error::argument(OP, format!("quantize names \"{other}\", which is not among the models to save")));
    }
    if let Some(dtype) = options.dtype.filter(|&dtype| !is_float(dtype)) {
        let text = format!("dtype is {}, expected one of f32, f16, bf16, f64", dtype.as_str());
        return Err(Error::dtype(OP, text));
    }
    let base = base.map(|path| WeightFiles::open(&[path.to_path_buf()])).transpose()?.map(RefCell::new);
    // A pipeline that has all `models`, if possible one whose denoiser is in `base`.
    let pipeline =
        pipelines::of_models(models, |key| base.as_ref().is_some_and(|base| base.borrow().shape(key).is_some()));
    let mut all = Vec::new();
    for &(subfolder, model) in models {
        let sections = sections(subfolder, model, pipeline)?;
        // A section has the possible prefixes of a model's keys in a checkpoint. Under the right prefix the file has
        // the key `probe`. The model gets the section and the prefix that `base` has, or else the first ones.
        let original = |section: &Section, prefix| CheckpointNaming { prefix, naming: section.naming };
        let default = original(&sections[0], sections[0].prefixes[0]);
        let layout = match &base {
            Some(base) => {
                let file = base.borrow();
                let found = sections.iter().find_map(|section| {
                    let is_there = |prefix: &&&str| file.shape(&format!("{prefix}{}", section.probe)).is_some();
                    Some(original(section, section.prefixes.iter().find(is_there)?))
                });
                model.layout(Some(found.unwrap_or(default)), Some(&file))
            }
            None => model.layout(Some(default), None),
        };
        let codes = options.formats.get(subfolder).map(|&format| eight_bits(format)).transpose()?;
        all.extend(StoredModel::of(model, layout.as_ref(), OP, codes)?.entries(options.dtype)?);
    }
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    if let Some(base) = &base {
        let file = base.borrow();
        metadata.extend(file.metadata());
        let replaced: BTreeSet<String> = all.iter().map(|entry| entry.name.clone()).collect();
        for name in file.names().filter(|name| !replaced.contains(*name)) {
            let (Some(shape), Some(dtype)) = (file.shape(name), file.dtype(name)) else {
                return Err(Error::weights(
                    file.path(),
                    format!("tensor \"{name}\" has a dtype that is not supported"),
                ));
            };
            // The entry has the name; the closure that reads the values has a copy of it, `key`.
            let (name, key) = (name.to_owned(), name.to_owned());
            let values = Box::new(move || base.borrow_mut().read(&key, None, &Device::Cpu));
            all.push(TensorEntry { name, shape: shape.to_vec(), dtype, codes: None, values });
        }
    }
    for &(subfolder, model) in models {
        metadata.insert(config_entry(subfolder), json_text(&model.configuration())?);
    }
    save_entries(path, all, &metadata)
}

/// Returns how a checkpoint stores matrices in `format`.
///
/// # Errors
/// [`Error::Argument`] if `format` is neither `Fp8` nor `Int8`.
fn eight_bits(format: Format) -> Result<Codes> {
    match format {
        Format::Fp8 => Ok(Codes::Eight(EightBits::Fp8)),
        Format::Int8 => Ok(Codes::Eight(EightBits::Int8)),
        other => {
            let text = format!("the format is {}, expected fp8 or int8 in a checkpoint", other.name());
            Err(Error::argument("save_checkpoint", text))
        }
    }
}

/// Returns the sections of original checkpoints that hold the model in a pipeline's `subfolder`. There are several
/// if checkpoints store the model under different prefixes and names. The pipeline is `preferred` if `preferred` has a
/// model of this kind in `subfolder`, or else the first pipeline that has one there.
///
/// # Errors
/// [`Error::Argument`] if no pipeline writes a model of this kind in `subfolder` to checkpoints.
fn sections(subfolder: &str, model: &dyn Model, preferred: Option<&Pipeline>) -> Result<&'static [Section]> {
    let writable = || places(model.kind()).filter(|place| place.part.sections.first().is_some_and(Section::is_written));
    let is_preferred = |place: &Place| preferred.is_none_or(|pipeline| pipeline.name == place.pipeline.name);
    let found = writable().filter(is_preferred).chain(writable()).find(|place| place.part.subfolder == subfolder);
    found.map(|place| place.part.sections).ok_or_else(|| {
        let known: Vec<&str> = writable().map(|place| place.part.subfolder).collect();
        let class = model.class_name();
        let text = if known.is_empty() {
            format!("a {class} has no place in an original checkpoint; save_pretrained writes it to a folder")
        } else {
            format!("a {class} has no place \"{subfolder}\" in an original checkpoint; expected one of {known:?}")
        };
        Error::argument("save_checkpoint", text)
    })
}

/// The text of a `config.json`.
fn json_text(config: &Map<String, Value>) -> Result<String> {
    serde_json::to_string_pretty(config).map(|text| text + "\n").map_err(|e| Error::Config(format!("{CONFIG}: {e}")))
}

/// How a file stores quantized matrices.
#[derive(Clone, Copy)]
enum Codes {
    /// As `ComfyUI` stores int8 and fp8 matrices.
    Eight(EightBits),
    /// As bitsandbytes stores NF4 matrices, with scales in f32.
    Nf4,
}

/// A model's parameters as a file stores them.
struct StoredModel {
    /// The parameters under each key, without the layout's prefix.
    groups: BTreeMap<String, Group>,
    /// The prefix of the keys.
    prefix: String,
    /// How matrices are quantized; None if no matrix is quantized.
    codes: Option<Codes>,
}

impl StoredModel {
    /// The parameters of `model` with the keys and forms of `layout`. With `codes`, matrices of layers that may be
    /// quantized are quantized. `op` is the operation's name in errors.
    ///
    /// # Errors
    /// [`Error::Argument`] if only a part of the model was loaded, if `codes` is given for a model without layers that
    /// may be quantized, or if `layout` has no key for a parameter.
    fn of(model: &dyn Model, layout: &dyn Layout, op: &'static str, codes: Option<Codes>) -> Result<Self> {
        model.require_whole()?;
        if codes.is_some() {
            model.kind().check_quantizable(op)?;
        }
        let layers = pipelines::layer_shapes(model);
        let is_chosen = |layer: &str| layers.contains_key(layer) && model.kind().quantizable.has(layer);
        let mut groups: BTreeMap<String, Group> = BTreeMap::new();
        for (name, weight) in model.named_weights() {
            // A file may have a parameter under one of several keys. The first is the one to write.
            let Some(Key { key, form }) = layout.keys(&name).into_iter().next() else {
                return Err(Error::argument("save", format!("parameter \"{name}\" has no key in this kind of file")));
            };
            let is_chosen_weight = name.strip_suffix(".weight").is_some_and(is_chosen);
            let group = groups.entry(key).or_insert_with(|| Group { parts: Vec::new(), is_quantized: codes.is_some() });
            group.is_quantized &= is_chosen_weight;
            group.parts.push((form, weight));
        }
        // A file may store a layer's weight with more dimensions, as a convolution. It is then not quantized.
        for group in groups.values_mut() {
            group.is_quantized &= group.shape().len() == 2;
        }
        Ok(Self { groups, prefix: layout.prefix().to_owned(), codes })
    }

    /// The names, in the file, of the layers whose weight is a matrix that is not quantized.
    fn plain_layers(&self) -> Vec<String> {
        let is_plain = |group: &Group| !group.is_quantized && group.shape().len() == 2;
        let layers = self.groups.iter().filter(|(_, group)| is_plain(group));
        layers.filter_map(|(key, _)| Some(key.strip_suffix(".weight")?.to_owned())).collect()
    }

    /// Quantize each layer whose whole name is the last part of a quantized layer's name. If `config.json` told
    /// diffusers to skip such a layer, diffusers would skip the quantized layer too.
    fn quantize_what_cannot_be_skipped(&mut self) {
        let last_part = |key: &str| Some(key.strip_suffix(".weight")?.rsplit('.').next()?.to_owned());
        let quantized = self.groups.iter().filter(|(_, group)| group.is_quantized);
        let last_parts: BTreeSet<String> = quantized.filter_map(|(key, _)| last_part(key)).collect();
        for layer in self.plain_layers().into_iter().filter(|layer| last_parts.contains(layer)) {
            if let Some(group) = self.groups.get_mut(&format!("{layer}.weight")) {
                group.is_quantized = true;
            }
        }
    }

    /// The tensors of the file. Parameters that are not quantized are converted to `dtype`, if it is given.
    fn entries(self, dtype: Option<DType>) -> Result<Vec<TensorEntry<'static>>> {
        let mut all = Vec::new();
        for (key, group) in self.groups {
            let name = format!("{}{key}", self.prefix);
            let group = Rc::new(group);
            match self.codes.filter(|_| group.is_quantized) {
                Some(Codes::Eight(bits)) => all.extend(eight_bit_entries(&name, &group, bits)?),
                Some(Codes::Nf4) => {
                    let (dims, dtype) = (group.shape(), group.dtype());
                    all.extend(nf4_entries(&name, [dims[0], dims[1]], dtype, Rc::new(move || group.values()))?);
                }
                None => all.push(group.entry(name, dtype)),
            }
        }
        Ok(all)
    }
}

/// The parameters that are stored under one key.
struct Group {
    /// Each parameter with its form.
    parts: Vec<(Form, Weight)>,
    /// Whether the file stores codes and scales of the parameters.
    is_quantized: bool,
}

impl Group {
    /// The shape of the tensor that holds the parameters. Each parameter's form and shape give the same result: the
    /// form of a parameter that is stored as some rows of the tensor says what share of the rows it has.
    fn shape(&self) -> Vec<usize> {
        self.parts.first().map_or_else(Vec::new, |(form, weight)| form.stored_shape(weight.dims()))
    }

    /// The dtype of the parameters before they are quantized or converted.
    fn dtype(&self) -> DType {
        self.parts.first().map_or(DType::F32, |(_, weight)| weight.dtype())
    }

    /// The values of the tensor that holds the parameters.
    fn values(&self) -> Result<Tensor> {
        let values = |(form, weight): &(Form, Weight)| Ok((*form, WeightRef::from(weight).values(weight.dtype())?));
        Form::write(&self.parts.iter().map(values).collect::<Result<Vec<_>>>()?)
    }

    /// The tensor for the file, if the parameters are not quantized. None as `dtype` keeps the parameters' dtype.
    fn entry(self: Rc<Self>, name: String, dtype: Option<DType>) -> TensorEntry<'static> {
        let shape = self.shape();
        let dtype = dtype.unwrap_or_else(|| self.dtype());
        TensorEntry { name, shape, dtype, codes: None, values: Box::new(move || self.values()?.to_dtype(dtype)) }
    }

    /// Quantizes the matrix that holds the parameters, and returns its codes and its scales.
    fn quantized(&self, bits: EightBits) -> Result<(Tensor, Tensor)> {
        let values = self.values()?;
        let quantized = match bits {
            EightBits::Int8 => Quantized::new(&values, Format::Int8)?,
            // Quantization gives each row a scale. The matrix is reshaped to one row, so that it gets one scale.
            EightBits::Fp8 => Quantized::new(&values.reshape((1, values.elem_count()))?, Format::Fp8)?,
        };
        let tensors = quantized.tensors()?;
        let named = |name| tensors.iter().flatten().find(|(known, _)| *known == name).map(|(_, tensor)| tensor.clone());
        named("codes")
            .zip(named("scales"))
            .ok_or_else(|| Error::argument("save", "the matrix has no codes or no scales"))
    }
}

/// The tensors in which `ComfyUI` stores the quantized matrix `name`: codes, scales and a description of the format.
/// The entries of codes and scales each quantize the matrix while the file is written, so that no quantized matrix is
/// in memory before that.
fn eight_bit_entries(name: &str, group: &Rc<Group>, bits: EightBits) -> Result<[TensorEntry<'static>; 3]> {
    let prefix = name.strip_suffix("weight").unwrap_or(name);
    let format = json!({ "format": comfy_format(bits) }).to_string().into_bytes();
    let (for_codes, for_scales) = (Rc::clone(group), Rc::clone(group));
    let codes_shape = group.shape();
    let scales_shape = match bits {
        EightBits::Fp8 => Vec::new(),
        EightBits::Int8 => vec![codes_shape[0], 1],
    };
    Ok([
        TensorEntry {
            name: name.to_owned(),
            shape: codes_shape.clone(),
            dtype: DType::U8,
            codes: Some(bits),
            values: Box::new(move || for_codes.quantized(bits)?.0.reshape(codes_shape)),
        },
        TensorEntry {
            name: format!("{prefix}weight_scale"),
            shape: scales_shape.clone(),
            dtype: DType::F32,
            codes: None,
            values: Box::new(move || for_scales.quantized(bits)?.1.reshape(scales_shape)),
        },
        TensorEntry {
            name: format!("{prefix}comfy_quant"),
            shape: vec![format.len()],
            dtype: DType::U8,
            codes: None,
            values: Box::new(move || Tensor::new(format.as_slice(), &Device::Cpu)),
        },
    ])
}
