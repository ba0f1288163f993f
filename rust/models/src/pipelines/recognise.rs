//! Recognises which models a checkpoint in one file has, by its keys, which are the names of its tensors.
//!
//! A place is a part of a pipeline, such as SDXL's UNet. A part has several sections if checkpoints store it under
//! different names. A section's keys begin with one of its prefixes, and its probe is a key (without the prefix) that
//! every file with this section has.

use super::table::UNSUPPORTED;
use super::{PIPELINES, Pipeline, Place, Role, Section, adapter_prefixes, kinds, places, unique};
use crate::pretrained::{CONFIG, Choice};
use crate::registry::{Model, ModelKind};

/// Returns the first place of `model` with a section whose probe the file has under one of the section's prefixes;
/// also returns this section and this prefix. None if there is no such place. `is_there` says whether the file has a
/// key. If `choice` names a subfolder or a pipeline, only places in these count.
pub fn of_file(
    model: &ModelKind,
    choice: &Choice,
    is_there: impl Fn(&str) -> bool,
) -> Option<(Place, &'static Section, &'static str)> {
    // If several pipelines have the model, pipelines whose denoiser is in the file too take precedence: the sort is
    // stable, and false is less than true.
    let mut candidates: Vec<Place> = places(model).collect();
    candidates.sort_by_key(|place| !has_denoiser(place.pipeline, &is_there));
    candidates
        .into_iter()
        .filter(|place| choice.subfolder.as_deref().is_none_or(|subfolder| subfolder == place.part.subfolder))
        .filter(|place| choice.pipeline.is_none_or(|pipeline| pipeline.name == place.pipeline.name))
        .flat_map(|place| place.part.sections.iter().map(move |section| (place, section)))
        .flat_map(|(place, section)| section.prefixes.iter().map(move |&prefix| (place, section, prefix)))
        .find(|(_, section, prefix)| is_there(&format!("{prefix}{}", section.probe)))
}

/// Whether a file has the denoiser of a pipeline. `is_there` says whether the file has a key.
fn has_denoiser(pipeline: &Pipeline, is_there: impl Fn(&str) -> bool) -> bool {
    let denoisers = pipeline.parts.iter().filter(|part| part.role == Role::Denoiser);
    denoisers
        .flat_map(|part| part.sections)
        .any(|section| section.prefixes.iter().any(|prefix| is_there(&format!("{prefix}{}", section.probe))))
}

/// Returns a pipeline that has all of `models`, pairs of subfolder and model, or None if there is no such pipeline. If
/// there are several, pipelines whose denoiser is in a certain file take precedence, and the first one is returned.
/// `is_there` says whether this file has a key.
pub fn of_models(models: &[(&str, &dyn Model)], is_there: impl Fn(&str) -> bool) -> Option<&'static Pipeline> {
    let has = |pipeline: &Pipeline, subfolder: &str, model: &dyn Model| {
        let mut parts = pipeline.parts.iter();
        parts.any(|part| part.subfolder == subfolder && part.model.name == model.kind().name)
    };
    let mut fitting: Vec<&Pipeline> = PIPELINES.to_vec();
    fitting.retain(|pipeline| models.iter().all(|&(subfolder, model)| has(pipeline, subfolder, model)));
    fitting.sort_by_key(|pipeline| !has_denoiser(pipeline, &is_there));
    fitting.first().copied()
}

/// Returns the first pipeline whose denoiser is in a file with the keys `names`, or None if there is no such pipeline.
pub fn of_denoiser(names: &[String]) -> Option<&'static Pipeline> {
    PIPELINES.iter().copied().find(|pipeline| has_denoiser(pipeline, |key| names.iter().any(|name| name == key)))
}

/// Returns the error message for a file with the keys `names`, which does not contain a model of the kind `wanted`.
pub fn not_found(names: &[String], wanted: &ModelKind) -> String {
    let sections = PIPELINES.iter().flat_map(|pipeline| pipeline.parts).flat_map(|part| part.sections);
    let mut prefixes = sections.flat_map(|section| section.prefixes).filter(|prefix| !prefix.is_empty());
    let has_prefix = prefixes.any(|prefix| names.iter().any(|name| name.starts_with(prefix)));
    let of_pipeline =
        || of_denoiser(names).map(|pipeline| format!("a checkpoint of {} without this model", pipeline.title));
    let what = recognised(names).or_else(of_pipeline).unwrap_or_else(|| {
        let unknown =
            if has_prefix { "a checkpoint without this model" } else { "not an original checkpoint with this model" };
        unknown.to_owned()
    });
    let wanted = wanted.class_names.join(" or ");
    format!("there is no {wanted} in this file and no {CONFIG} beside it: the file is {what}")
}

/// Says what a file with the keys `names` is, if the keys show that it is not a checkpoint of a supported pipeline, but
/// a checkpoint of another family, an adapter, or the weights of one model. None in all other cases.
pub fn recognised(names: &[String]) -> Option<String> {
    let has_prefix = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    let unsupported =
        UNSUPPORTED.iter().find(|(prefix, _)| has_prefix(prefix)).map(|(_, title)| unsupported_family(title));
    unsupported
        .or_else(|| {
            // Prefixes that end with a dot also begin the keys of checkpoints, so only the others show an adapter.
            let is_adapter = adapter_prefixes().iter().any(|prefix| prefix.ends_with('_') && has_prefix(prefix));
            is_adapter.then(|| "an adapter, not a model".to_owned())
        })
        .or_else(|| {
            // `mark` is a prefix of keys in the weight file of a model's folder.
            let kind = kinds().into_iter().find(|kind| has_prefix(kind.mark))?;
            Some(format!("the weights of {} from a pipeline's folder", kind.noun))
        })
}

/// Describes a checkpoint of a family that is not supported, and lists those that are.
fn unsupported_family(title: &str) -> String {
    // Language models and the demo's model for digits have no `base`, the name that other tools write into adapter
    // files for the base model. They are left out: the message is about image models.
    let known = PIPELINES.iter().filter(|pipeline| pipeline.base.is_some()).map(|pipeline| pipeline.title);
    format!("a checkpoint of {title}, which is not supported; supported are {}", unique(known).join(", "))
}
