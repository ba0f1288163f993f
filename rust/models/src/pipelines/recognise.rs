//! Recognises a checkpoint in one file by the names of its tensors.

use super::table::UNSUPPORTED;
use super::{PIPELINES, Pipeline, Place, Role, Section, adapter_prefixes, kinds, places, unique};
use crate::pretrained::{CONFIG, Choice};
use crate::registry::{Model, ModelKind};

/// The first place of `model` for which the file has a probe key, the section with this key, and the key's prefix.
/// `is_there` says whether the file has a key; `choice` may name the part or the pipeline.
pub fn of_file(
    model: &ModelKind,
    choice: &Choice,
    is_there: impl Fn(&str) -> bool,
) -> Option<(Place, &'static Section, &'static str)> {
    // If several pipelines have the model, pipelines whose denoiser is in the file too take precedence.
    let mut places: Vec<Place> = places(model).collect();
    places.sort_by_key(|place| !has_denoiser(place.pipeline, &is_there));
    places
        .into_iter()
        .filter(|place| choice.subfolder.as_deref().is_none_or(|subfolder| subfolder == place.part.subfolder))
        .filter(|place| choice.pipeline.is_none_or(|pipeline| pipeline.name == place.pipeline.name))
        .flat_map(|place| place.part.sections.iter().map(move |section| (place, section)))
        .flat_map(|(place, section)| section.prefixes.iter().map(move |&prefix| (place, section, prefix)))
        .find(|(_, section, prefix)| is_there(&format!("{prefix}{}", section.probe)))
}

/// Whether a file has the denoiser of a pipeline.
fn has_denoiser(pipeline: &Pipeline, is_there: impl Fn(&str) -> bool) -> bool {
    let denoisers = pipeline.parts.iter().filter(|part| part.role == Role::Denoiser);
    denoisers
        .flat_map(|part| part.sections)
        .any(|section| section.prefixes.iter().any(|prefix| is_there(&format!("{prefix}{}", section.probe))))
}

/// The pipeline that has all of `models`, given as pairs of subfolder and model. If several pipelines have them, a
/// pipeline whose denoiser is in a file takes precedence. `is_there` says whether this file has a key.
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

/// The pipeline whose denoiser a file with the keys `names` has.
pub fn of_denoiser(names: &[String]) -> Option<&'static Pipeline> {
    PIPELINES.iter().copied().find(|pipeline| has_denoiser(pipeline, |key| names.iter().any(|name| name == key)))
}

/// The error message for a file with the keys `names` that does not contain the model `wanted`.
pub fn not_found(names: &[String], wanted: &ModelKind) -> String {
    let sections = PIPELINES.iter().flat_map(|pipeline| pipeline.parts).flat_map(|part| part.sections);
    let mut prefixes = sections.flat_map(|section| section.prefixes).filter(|prefix| !prefix.is_empty());
    let other = prefixes.any(|prefix| names.iter().any(|name| name.starts_with(prefix)));
    let of_pipeline =
        || of_denoiser(names).map(|pipeline| format!("a checkpoint of {} without this model", pipeline.title));
    let what = recognised(names).or_else(of_pipeline).unwrap_or_else(|| {
        let what = if other { "a checkpoint without this model" } else { "not an original checkpoint with this model" };
        what.to_owned()
    });
    let wanted = wanted.class_names.join(" or ");
    format!("there is no {wanted} in this file and no {CONFIG} beside it: the file is {what}")
}

/// Says what a file with these keys is, if the keys show that it is not a checkpoint of a supported pipeline.
pub fn recognised(names: &[String]) -> Option<String> {
    let there = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    let unsupported = UNSUPPORTED.iter().find(|(prefix, _)| there(prefix)).map(|(_, title)| foreign(title));
    unsupported
        .or_else(|| {
            let is_adapter = adapter_prefixes().iter().any(|prefix| prefix.ends_with('_') && there(prefix));
            is_adapter.then(|| "an adapter, not a model".to_owned())
        })
        .or_else(|| {
            let kind = kinds().into_iter().find(|kind| there(kind.mark))?;
            Some(format!("the weights of {} from a pipeline's folder", kind.noun))
        })
}

/// Describes a checkpoint of a family that is not supported.
fn foreign(title: &str) -> String {
    let known = PIPELINES.iter().filter(|pipeline| pipeline.base.is_some()).map(|pipeline| pipeline.title);
    format!("a checkpoint of {title}, which is not supported; supported are {}", unique(known).join(", "))
}
