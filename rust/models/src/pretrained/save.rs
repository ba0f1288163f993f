//! Writes models to folders, or to one file in the form of an original checkpoint.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

use trainable_candle_core::quantized::Format;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Tensor, Weight, WeightRef};
use trainable_candle_io::{EightBits, TensorEntry, WeightFiles, comfy_format, save_entries, write_atomically};

use super::layout::{Form, Layout, Original};
use super::{CONFIG, config_entry};
use crate::Model;
use crate::pipelines::{self, Pipeline, Place, Section, places};

/// Write `config.json` and the weights of `model` to `folder`, which is created if missing, under the names that
/// diffusers and transformers read. Adapters are not written, but a merged adapter is part of its layer's weight.
///
/// # Errors
/// [`Error::Io`] that names the path that cannot be written, [`Error::Argument`] if only a part of the model was
/// loaded.
pub fn save_pretrained(model: &dyn Model, folder: &Path) -> Result<()> {
    let entries = entries(model, model.layout(None, None).as_ref(), None, None)?;
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    save_entries(&folder.join(model.kind().weights_name), entries, &metadata)?;
    let config = json_text(model)?;
    write_atomically(&folder.join(CONFIG), |file| file.write_all(config.as_bytes()))
}

/// Options for writing weights.
#[derive(Clone, Debug, Default)]
pub struct Written {
    /// The floating-point dtype to which all weights are converted; with None, each keeps its own dtype.
    pub dtype: Option<DType>,
    /// For each model, by the name of its folder, the format (`Fp8` or `Int8`) in which to write the linear layers that
    /// may be quantized. Their weights are stored as in `ComfyUI`: an `Fp8` weight has one scale, an `Int8` weight has
    /// one scale for each row.
    pub formats: BTreeMap<String, Format>,
}

/// Write `models` to one file under the names of the original checkpoints, with the options `written`. Each model is
/// given with the name of its folder in a pipeline. All other tensors of the checkpoint `base`, if it is given, are
/// copied unchanged. The header stores the models' configurations, because names and shapes do not determine every
/// field.
///
/// # Errors
/// [`Error::Argument`] if a model has no place in such a file, if a model with a format has no layers that may be
/// quantized, or if a format is not `Fp8` or `Int8`; [`Error::DType`] if the dtype is not a floating-point one;
/// [`Error::WeightsFormat`] if `base` is damaged or has tensors of an unsupported dtype; [`Error::Io`] that names the path
/// that cannot be read or written.
pub fn save_checkpoint(
    path: &Path,
    models: &[(&str, &dyn Model)],
    base: Option<&Path>,
    written: &Written,
) -> Result<()> {
    if let Some(other) = written.formats.keys().find(|name| !models.iter().any(|(known, _)| known == name)) {
        return Err(Error::argument(
            "save_checkpoint",
            format!("quantize names \"{other}\", which is not among the models"),
        ));
    }
    if let Some(dtype) = written.dtype.filter(|&dtype| !is_float(dtype)) {
        let text = format!("dtype is {}, expected one of f32, f16, bf16, f64", dtype.as_str());
        return Err(Error::dtype("save_checkpoint", text));
    }
    let base = base.map(|path| WeightFiles::open(&[path.to_path_buf()])).transpose()?.map(RefCell::new);
    let pipeline =
        pipelines::of_models(models, |key| base.as_ref().is_some_and(|base| base.borrow().shape(key).is_some()));
    let mut all = Vec::new();
    for &(subfolder, model) in models {
        let sections = sections(subfolder, model, pipeline)?;
        let original = |section: &Section, prefix| Original { prefix, naming: section.naming };
        let first = original(&sections[0], sections[0].prefixes[0]);
        let layout = match &base {
            Some(base) => {
                let file = base.borrow();
                let found = sections.iter().find_map(|section| {
                    let is_there = |prefix: &&&str| file.shape(&format!("{prefix}{}", section.probe)).is_some();
                    Some(original(section, section.prefixes.iter().find(is_there)?))
                });
                model.layout(Some(found.unwrap_or(first)), Some(&file))
            }
            None => model.layout(Some(first), None),
        };
        all.extend(entries(model, layout.as_ref(), written.dtype, written.formats.get(subfolder).copied())?);
    }
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    if let Some(base) = &base {
        let file = base.borrow();
        metadata.extend(file.metadata());
        let written: BTreeSet<String> = all.iter().map(|entry| entry.name.clone()).collect();
        for name in file.names().filter(|name| !written.contains(*name)) {
            let (Some(shape), Some(dtype)) = (file.shape(name), file.dtype(name)) else {
                return Err(Error::weights(
                    file.path(),
                    format!("tensor \"{name}\" has a dtype that is not supported"),
                ));
            };
            let (name, read) = (name.to_owned(), name.to_owned());
            let values = Box::new(move || base.borrow_mut().read(&read, None, &Device::Cpu));
            all.push(TensorEntry { name, shape: shape.to_vec(), dtype, codes: None, values });
        }
    }
    for &(subfolder, model) in models {
        metadata.insert(config_entry(subfolder), json_text(model)?);
    }
    save_entries(path, all, &metadata)
}

/// The sections of original checkpoints that hold the model in a pipeline's `subfolder`. The pipeline is
/// `preferred` if `preferred` has a model of this kind in `subfolder`, or else the first pipeline that has one there.
fn sections(subfolder: &str, model: &dyn Model, preferred: Option<&Pipeline>) -> Result<&'static [Section]> {
    let places = || places(model.kind()).filter(|place| place.part.sections.first().is_some_and(Section::is_written));
    let is_preferred = |place: &Place| preferred.is_none_or(|pipeline| pipeline.name == place.pipeline.name);
    let found = places().filter(is_preferred).chain(places()).find(|place| place.part.subfolder == subfolder);
    found.map(|place| place.part.sections).ok_or_else(|| {
        let known: Vec<&str> = places().map(|place| place.part.subfolder).collect();
        Error::argument(
            "save_checkpoint",
            format!(
                "a {} has no place \"{subfolder}\" in an original checkpoint; expected one of {known:?}",
                model.class_name()
            ),
        )
    })
}

/// The text of a model's `config.json`.
fn json_text(model: &dyn Model) -> Result<String> {
    serde_json::to_string_pretty(&model.configuration())
        .map(|text| text + "\n")
        .map_err(|e| Error::Config(format!("save_pretrained: {e}")))
}

/// The tensors of `model` with the names and forms of `layout`.
fn entries(
    model: &dyn Model,
    layout: &dyn Layout,
    dtype: Option<DType>,
    format: Option<Format>,
) -> Result<Vec<TensorEntry<'static>>> {
    model.require_whole()?;
    let bits = match format {
        None => None,
        Some(Format::Fp8) => Some(EightBits::Fp8),
        Some(Format::Int8) => Some(EightBits::Int8),
        Some(other) => {
            let text = format!("the format is {}, expected fp8 or int8 in a checkpoint", other.name());
            return Err(Error::argument("save_checkpoint", text));
        }
    };
    if bits.is_some() {
        model.kind().check_quantizable("save_checkpoint")?;
    }
    let mut grouped: BTreeMap<String, Group> = BTreeMap::new();
    for (name, weight) in model.named_weights() {
        let Some(place) = layout.places(&name).into_iter().next() else {
            return Err(Error::argument("save", format!("{name} has no name in this kind of file")));
        };
        let is_layer = name.strip_suffix(".weight").is_some_and(|layer| model.kind().quantizable.has(layer));
        let group =
            grouped.entry(place.key).or_insert_with(|| Group { parts: Vec::new(), is_quantized: bits.is_some() });
        group.is_quantized &= is_layer;
        group.parts.push((place.form, weight));
    }
    let mut all = Vec::new();
    for (key, group) in grouped {
        let name = format!("{}{key}", layout.prefix());
        let group = Rc::new(group);
        match bits.filter(|_| group.is_quantized && group.shape().len() == 2) {
            Some(bits) => all.extend(of_eight_bits(&name, &group, bits)?),
            None => all.push(group.entry(name, dtype)),
        }
    }
    Ok(all)
}

/// The parameters that are stored under one key.
struct Group {
    parts: Vec<(Form, Weight)>,
    /// Whether to quantize the parameters: a format is given, and each parameter is the weight of a layer that may be
    /// quantized.
    is_quantized: bool,
}

impl Group {
    fn shape(&self) -> Vec<usize> {
        self.parts.first().map_or_else(Vec::new, |(form, weight)| form.stored_shape(weight.dims()))
    }

    fn values(&self) -> Result<Tensor> {
        let values = |(form, weight): &(Form, Weight)| Ok((*form, WeightRef::from(weight).values(weight.dtype())?));
        Form::write(&self.parts.iter().map(values).collect::<Result<Vec<_>>>()?)
    }

    fn entry(self: Rc<Self>, name: String, dtype: Option<DType>) -> TensorEntry<'static> {
        let shape = self.shape();
        let dtype = dtype.unwrap_or_else(|| self.parts.first().map_or(DType::F32, |(_, weight)| weight.dtype()));
        TensorEntry { name, shape, dtype, codes: None, values: Box::new(move || self.values()?.to_dtype(dtype)) }
    }

    /// Quantizes the whole matrix to codes and scales.
    fn quantized(&self, bits: EightBits) -> Result<(Tensor, Tensor)> {
        let values = self.values()?;
        let quantized = match bits {
            EightBits::Int8 => Quantized::new(&values, Format::Int8)?,
            // Quantization gives each row a scale, so the matrix is reshaped to one row to get one scale.
            EightBits::Fp8 => Quantized::new(&values.reshape((1, values.elem_count()))?, Format::Fp8)?,
        };
        let parts = quantized.tensors()?;
        let found = |name| parts.iter().flatten().find(|(known, _)| *known == name).map(|(_, tensor)| tensor.clone());
        found("codes").zip(found("scales")).ok_or_else(|| Error::argument("save", "the matrix has no codes"))
    }
}

/// The tensors in which `ComfyUI` stores a quantized matrix.
fn of_eight_bits(name: &str, group: &Rc<Group>, bits: EightBits) -> Result<[TensorEntry<'static>; 3]> {
    let layer = name.strip_suffix("weight").unwrap_or(name);
    let format = serde_json::json!({ "format": comfy_format(bits) }).to_string().into_bytes();
    let (of_codes, of_scales) = (Rc::clone(group), Rc::clone(group));
    let shape = group.shape();
    let scales = match bits {
        EightBits::Fp8 => Vec::new(),
        EightBits::Int8 => vec![shape[0], 1],
    };
    let (to, of) = (shape.clone(), scales.clone());
    Ok([
        TensorEntry {
            name: name.to_owned(),
            shape,
            dtype: DType::U8,
            codes: Some(bits),
            values: Box::new(move || of_codes.quantized(bits)?.0.reshape(to)),
        },
        TensorEntry {
            name: format!("{layer}weight_scale"),
            shape: scales,
            dtype: DType::F32,
            codes: None,
            values: Box::new(move || of_scales.quantized(bits)?.1.reshape(of)),
        },
        TensorEntry {
            name: format!("{layer}comfy_quant"),
            shape: vec![format.len()],
            dtype: DType::U8,
            codes: None,
            values: Box::new(move || Tensor::new(format.as_slice(), &Device::Cpu)),
        },
    ])
}
