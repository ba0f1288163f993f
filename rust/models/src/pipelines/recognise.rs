//! What a file of one piece is, by the names of its tensors.

use super::table::UNSUPPORTED;
use super::{PIPELINES, Place, Section, adapter_prefixes, kinds, places, unique};
use crate::pretrained::CONFIG;
use crate::registry::ModelKind;

/// The first place of `model` that a file has, with its section and the prefix of its keys. `is_there` tells of a name whether it is
/// in the file; with `subfolder`, that part alone is looked for.
pub fn of_file(
    model: &ModelKind,
    subfolder: Option<&str>,
    is_there: impl Fn(&str) -> bool,
) -> Option<(Place, &'static Section, &'static str)> {
    places(model)
        .filter(|place| subfolder.is_none_or(|subfolder| subfolder == place.part.subfolder))
        .flat_map(|place| place.part.sections.iter().map(move |section| (place, section)))
        .flat_map(|(place, section)| section.prefixes.iter().map(move |&prefix| (place, section, prefix)))
        .find(|(_, section, prefix)| is_there(&format!("{prefix}{}", section.probe)))
}

/// What a file with these names is, in which a model was looked for in vain.
pub fn not_found(names: &[String], wanted: &ModelKind) -> String {
    let there = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    let unsupported = || UNSUPPORTED.iter().find(|(prefix, _)| there(prefix)).map(|(_, title)| foreign(title));
    let adapter = || {
        let flat = |prefix: &String| prefix.ends_with('_') && there(prefix);
        adapter_prefixes().iter().any(flat).then(|| "an adapter, not a model".to_owned())
    };
    let other_part = || {
        let sections = PIPELINES.iter().flat_map(|pipeline| pipeline.parts).flat_map(|part| part.sections);
        let mut prefixes = sections.flat_map(|section| section.prefixes).filter(|prefix| !prefix.is_empty());
        prefixes.any(|prefix| there(prefix)).then(|| "a checkpoint without this model".to_owned())
    };
    let alone = || {
        let kind = kinds().into_iter().find(|kind| there(kind.mark))?;
        Some(format!("the weights of {} from a pipeline's folder", kind.noun))
    };
    let what = unsupported()
        .or_else(adapter)
        .or_else(other_part)
        .or_else(alone)
        .unwrap_or_else(|| "no original checkpoint with this model".to_owned());
    let wanted = wanted.class_names.join(" or ");
    format!("there is no {wanted} in this file and no {CONFIG} beside it: the file is {what}")
}

/// What is said of a checkpoint of a family that is not supported.
fn foreign(title: &str) -> String {
    let known = PIPELINES.iter().filter(|pipeline| pipeline.base.is_some()).map(|pipeline| pipeline.title);
    format!("a checkpoint of {title}, which is not supported; {}'s are", unique(known).join("'s, "))
}
