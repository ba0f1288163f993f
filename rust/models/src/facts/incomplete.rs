//! The errors for a checkpoint that lacks parts of a pipeline, with hints at what it is or which flags help.

use std::path::Path;

use serde_json::{Map, Value};
use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFile;

use crate::pipelines::{self, Pipeline, Role};
use crate::pretrained::{CONFIG, read_json};

/// The error for a folder that lacks the parts `missing` (names of subfolders) of a pipeline. The folder of a single
/// part has its configuration at the top; the message then names the part's class. The message ends with the flags that
/// give the missing parts, or, if the denoiser is missing, with what a model may be.
pub(super) fn incomplete_folder(path: &Path, pipeline: &Pipeline, missing: &[&str]) -> Error {
    let class = read_json::<Map<String, Value>>(&path.join(CONFIG)).ok();
    let class = class.as_ref().and_then(|map| map.get("_class_name")?.as_str());
    let content = class.map_or_else(String::new, |class| format!(" (it holds a {class} alone)"));
    let expected = "; expected the folder of a diffusers pipeline, or a single .safetensors file";
    let hint = flag_hint(pipeline, missing).unwrap_or_else(|| expected.to_owned());
    let text =
        format!("it is not a model of {}{content}: it has no folder {}{hint}", pipeline.title, missing.join(", "));
    Error::weights(path, text)
}

/// The error for a file that lacks the parts `missing` of a pipeline. The message says that the file belongs to another
/// pipeline; or else which flags give the missing parts; or else what the file looks like.
pub(super) fn incomplete_file(path: &Path, pipeline: &Pipeline, missing: &[&str]) -> Result<Error> {
    let names = WeightFile::open(path)?.names();
    let other = pipelines::of_denoiser(&names).filter(|other| other.name != pipeline.name);
    let hint = other.map(pipeline_hint).or_else(|| flag_hint(pipeline, missing));
    let hint = hint.unwrap_or_else(|| content_hint(&names));
    let text = format!("it is not a checkpoint of {}: it has no {}{hint}", pipeline.title, missing.join(" and no "));
    Ok(Error::weights(path, text))
}

/// Says that a checkpoint belongs to the pipeline `found`, for the end of an error message.
pub(super) fn pipeline_hint(found: &Pipeline) -> String {
    format!("; it is one of {}: give --model {}", found.title, found.name)
}

/// Says what a file with the keys `names` is, for the end of an error message. Empty if the keys do not show it.
pub(super) fn content_hint(names: &[String]) -> String {
    pipelines::recognised(names).map_or_else(String::new, |what| format!("; it looks like {what}"))
}

/// Says how to give the parts `missing` of a pipeline in files of their own, for the end of an error message. `None` if
/// the denoiser is missing, because the checkpoint itself must have it.
fn flag_hint(pipeline: &Pipeline, missing: &[&str]) -> Option<String> {
    let lacks = |role: Role| pipeline.parts.iter().any(|part| part.role == role && missing.contains(&part.subfolder));
    if lacks(Role::Denoiser) {
        return None;
    }
    let flags = [(Role::Autoencoder, "--vae"), (Role::TextEncoder, "--text-encoder")];
    let flags: Vec<&str> = flags.into_iter().filter(|&(role, _)| lacks(role)).map(|(_, flag)| flag).collect();
    Some(format!("; give the files of these parts with {}", flags.join(" and ")))
}
