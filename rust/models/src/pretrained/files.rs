//! Finds the files of a model's weights in a folder, and rejects pickles.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use trainable_candle_core::{Error, Result};

/// The beginnings of the names of weight files: those of transformers, then those of diffusers.
const STEMS: [&str; 2] = ["model", "diffusion_pytorch_model"];
/// The name of the half-precision variant in file names.
const HALF: &str = "fp16";

/// Endings of checkpoints that Python's pickle wrote.
const PICKLES: [&str; 6] = ["ckpt", "pt", "pth", "bin", "pkl", "pickle"];

/// Finds the weight files in `folder`: one file, or the shards of a model. If both the plain and the half-precision
/// variant (`*.fp16.safetensors`) exist, `half` selects the half-precision variant.
///
/// # Errors
/// [`Error::WeightsFormat`] if there are no weight files, the index of the shards is damaged, or a shard that it lists
/// is missing; [`Error::Io`] if the folder or the index cannot be read.
pub(super) fn weights_in(folder: &Path, half: bool) -> Result<Vec<PathBuf>> {
    let variants = if half { [Some(HALF), None] } else { [None, Some(HALF)] };
    for variant in variants {
        for stem in STEMS {
            if let Some(files) = variant_in(folder, stem, variant)? {
                return Ok(files);
            }
        }
    }
    let names: Vec<String> = STEMS.iter().map(|stem| format!("{stem}.safetensors")).collect();
    refuse_pickles_in(folder)?;
    Err(Error::weights(
        folder,
        format!("there are no weights in this folder; expected {}, or shards of it", names.join(" or ")),
    ))
}

/// Return an error if the ending of `path` is that of a pickle.
///
/// # Errors
/// [`Error::WeightsFormat`] for a pickle. The message says why pickles are rejected and what to do.
pub(super) fn refuse_pickle(path: &Path) -> Result<()> {
    if !has_extension(path, &PICKLES) {
        return Ok(());
    }
    let extension = path.extension().unwrap_or_default().display();
    Err(Error::weights(
        path,
        format!(
            "a .{extension} file is a pickle checkpoint, which is not supported because opening it can run code; \
             download the safetensors file of the same model, or, if you trust the file, convert it with \
             safetensors.torch.save_file"
        ),
    ))
}

/// Return an error for the first pickle of a folder without safetensors files.
///
/// # Errors
/// As [`refuse_pickle`]; [`Error::Io`] if the folder cannot be read.
pub(super) fn refuse_pickles_in(folder: &Path) -> Result<()> {
    if !files_in(folder, |path| has_extension(path, &["safetensors"]))?.is_empty() {
        return Ok(());
    }
    files_in(folder, |path| has_extension(path, &PICKLES))?.first().map_or(Ok(()), |path| refuse_pickle(path))
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let given = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    extensions.iter().any(|extension| given.eq_ignore_ascii_case(extension))
}

/// The paths in a folder for which `is_wanted` is true, sorted.
fn files_in(folder: &Path, is_wanted: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let io = |source| Error::io(folder, source);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if is_wanted(&path) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Finds the weight files of one variant whose names begin with `stem`: the unsharded file, or else the shards that an
/// index lists, or else all shards in the folder. None if there are no such files.
fn variant_in(folder: &Path, stem: &str, variant: Option<&str>) -> Result<Option<Vec<PathBuf>>> {
    let dotted = variant.map(|v| format!(".{v}")).unwrap_or_default();
    let unsharded = folder.join(format!("{stem}{dotted}.safetensors"));
    if unsharded.is_file() {
        return Ok(Some(vec![unsharded]));
    }
    let index = folder.join(format!("{stem}.safetensors.index{dotted}.json"));
    if index.is_file() {
        return indexed(folder, &index).map(Some);
    }
    let shards = files_in(folder, |path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| is_shard(name, stem, variant))
    })?;
    Ok((!shards.is_empty()).then_some(shards))
}

/// The shards that the file `index` lists.
fn indexed(folder: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let text = std::fs::read_to_string(index).map_err(|e| Error::io(index, e))?;
    let parsed: Index =
        serde_json::from_str(&text).map_err(|e| Error::weights(index, format!("not an index of shards: {e}")))?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    // An index may list only files in its own folder.
    if let Some(name) = names.iter().find(|name| name.contains(['/', '\\'])) {
        return Err(Error::weights(
            index,
            format!("\"{name}\" is not a file name; a shard must be in the folder of its index"),
        ));
    }
    let files: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
    match files.iter().find(|path| !path.is_file()) {
        Some(missing) => {
            Err(Error::weights(index, format!("the shard {} is missing; download the folder again", missing.display())))
        }
        None if files.is_empty() => Err(Error::weights(index, "the index lists no shards; download the folder again")),
        None => Ok(files),
    }
}

/// Whether `name` is the file name of a shard of this variant. An example for the plain variant (None) is
/// `model-00001-of-00003.safetensors`. Examples for the variant `fp16` are `model.fp16-00001-of-00002.safetensors` and
/// `model-00001-of-00002.fp16.safetensors`.
fn is_shard(name: &str, stem: &str, variant: Option<&str>) -> bool {
    let Some(rest) = name.strip_prefix(stem).and_then(|rest| rest.strip_suffix(".safetensors")) else { return false };
    let rest = match variant.map(|v| format!(".{v}")) {
        None => Some(rest),
        Some(v) => rest.strip_prefix(&v).or_else(|| rest.strip_suffix(&v)),
    };
    rest.and_then(|rest| rest.strip_prefix('-')).and_then(|rest| rest.split_once("-of-")).is_some_and(
        |(index, count)| [index, count].iter().all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit())),
    )
}

#[cfg(test)]
mod tests {
    use super::is_shard;

    #[test]
    fn shards_of_a_variant_are_distinguished_from_other_files() {
        assert!(is_shard("model-00001-of-00003.safetensors", "model", None));
        assert!(is_shard("diffusion_pytorch_model-00002-of-00002.safetensors", "diffusion_pytorch_model", None));
        assert!(is_shard("model.fp16-00001-of-00002.safetensors", "model", Some("fp16")));
        assert!(is_shard("model-00001-of-00002.fp16.safetensors", "model", Some("fp16")));
        for other in [
            "model.safetensors",
            // The plain variant (None) does not include the shards of another variant.
            "model.fp16-00001-of-00002.safetensors",
            "model-00001-of-00002.fp16.safetensors",
            "lora.safetensors",
            "model-1-of-.safetensors",
        ] {
            assert!(!is_shard(other, "model", None), "{other}");
        }
    }
}
