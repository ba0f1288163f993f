//! Writes models to a folder, or into an original checkpoint.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use trainable_candle_core::{DType, Device, Error, Result, Weight, WeightRef};
use trainable_candle_io::{TensorEntry, WeightFiles, save_entries, write_atomically};

use super::layout::{Form, Layout, Original};
use super::{CONFIG, config_entry};
use crate::Model;
use crate::pipelines::{self, Pipeline, Place, Section, places};

/// Write `config.json` and the weights of `model` to `folder`, which is created if missing, under the names that diffusers and
/// transformers read. Adapters are left out; a merged one is part of its layer's weight.
///
/// # Errors
/// [`Error::Io`] naming what cannot be written, [`Error::Argument`] if only a part of the model was loaded.
pub fn save_pretrained(model: &dyn Model, folder: &Path) -> Result<()> {
    let entries = entries(model, model.layout(None, None).as_ref(), None)?;
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    save_entries(&folder.join(model.kind().weights_name), entries, &metadata)?;
    let config = json_text(model)?;
    write_atomically(&folder.join(CONFIG), |file| file.write_all(config.as_bytes()))
}

/// Write `models`, each with the folder that it would have in a pipeline, to one file under the names of the original checkpoints,
/// converted to `dtype` if one is given. All else is taken from the checkpoint `base`, if there is one, as it is. The header holds
/// their configurations, which names and shapes do not fully determine.
///
/// # Errors
/// [`Error::Argument`] if a model has no place in such a file, [`Error::Io`] naming what cannot be read or written.
pub fn save_checkpoint(
    path: &Path,
    models: &[(&str, &dyn Model)],
    base: Option<&Path>,
    dtype: Option<DType>,
) -> Result<()> {
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
        all.extend(entries(model, layout.as_ref(), dtype)?);
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
            all.push(TensorEntry { name, shape: shape.to_vec(), dtype, values });
        }
    }
    for &(subfolder, model) in models {
        metadata.insert(config_entry(subfolder), json_text(model)?);
    }
    save_entries(path, all, &metadata)
}

/// Where files of one piece have a model that its pipeline, `preferred` if it has one, has in `subfolder`.
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

/// The tensors of `model` as `layout` writes them.
fn entries(model: &dyn Model, layout: &dyn Layout, dtype: Option<DType>) -> Result<Vec<TensorEntry<'static>>> {
    model.require_whole()?;
    let mut grouped: BTreeMap<String, Vec<(Form, Weight)>> = BTreeMap::new();
    for (name, weight) in model.named_weights() {
        let Some(place) = layout.places(&name).into_iter().next() else {
            return Err(Error::argument("save", format!("{name} has no name in this kind of file")));
        };
        grouped.entry(place.key).or_default().push((place.form, weight));
    }
    let entry = |(key, parts): (String, Vec<(Form, Weight)>)| {
        let shape = match parts.first() {
            Some((form, weight)) => form.stored_shape(weight.dims()),
            None => Vec::new(),
        };
        let dtype = dtype.unwrap_or_else(|| parts.first().map_or(DType::F32, |(_, weight)| weight.dtype()));
        let values = Box::new(move || {
            let values = |(form, weight): &(Form, Weight)| Ok((*form, WeightRef::from(weight).values(weight.dtype())?));
            Form::write(&parts.iter().map(values).collect::<Result<Vec<_>>>()?)?.to_dtype(dtype)
        });
        TensorEntry { name: format!("{}{key}", layout.prefix()), shape, dtype, values }
    };
    Ok(grouped.into_iter().map(entry).collect())
}
