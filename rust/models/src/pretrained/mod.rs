//! The files of a pretrained model: `config.json` and safetensors weights, as diffusers and transformers lay them out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Result, Tensor};
use trainable_candle_io::{load_tensors, save_tensors, write_atomically};
use trainable_candle_nn::{Source, Weights};

use crate::Model;

const CONFIG: &str = "config.json";
/// The names of a weight file in one piece: transformers', then diffusers'.
const WEIGHTS: [&str; 2] = ["model.safetensors", "diffusion_pytorch_model.safetensors"];

/// Where a model's files are.
#[derive(Clone, Debug)]
pub struct Pretrained {
    config: PathBuf,
    weights: Vec<PathBuf>,
}

impl Pretrained {
    /// The files of the model at `path`: a folder that holds `config.json` and `model.safetensors`,
    /// `diffusion_pytorch_model.safetensors` or the shards of one of them, or a weight file with `config.json` beside it.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` does not exist or cannot be read, [`Error::WeightsFormat`] if it is no such folder or file.
    pub fn find(path: &Path) -> Result<Self> {
        let is_folder = std::fs::metadata(path).map_err(|e| Error::io(path, e))?.is_dir();
        let folder = if is_folder { path } else { path.parent().unwrap_or(Path::new("")) };
        let config = folder.join(CONFIG);
        if !config.is_file() {
            let place = if is_folder { "in this folder" } else { "beside this file" };
            return Err(Error::weights(
                path,
                format!("there is no {CONFIG} {place}; it says which model the weights are of"),
            ));
        }
        let weights = if is_folder { weights_in(folder)? } else { vec![path.to_path_buf()] };
        Ok(Self { config, weights })
    }

    /// The path of `config.json`.
    pub fn config_path(&self) -> &Path {
        &self.config
    }

    /// The `_class_name` of the configuration.
    ///
    /// # Errors
    /// As [`config`](Self::config).
    pub fn class_name(&self) -> Result<String> {
        #[derive(Deserialize)]
        struct ClassName {
            _class_name: String,
        }
        Ok(self.config::<ClassName>()?._class_name)
    }

    /// The configuration, parsed.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::Config`] naming the file, the line and the field that does not parse.
    pub fn config<C: DeserializeOwned>(&self) -> Result<C> {
        let text = std::fs::read_to_string(&self.config).map_err(|e| Error::io(&self.config, e))?;
        serde_json::from_str(&text).map_err(|e| Error::Config(format!("{}: {e}", self.config.display())))
    }

    /// Every weight by name.
    ///
    /// # Errors
    /// As [`load_tensors`]; [`Error::WeightsFormat`] if two shards hold the same name.
    pub fn tensors(&self, device: &Device) -> Result<BTreeMap<String, Tensor>> {
        let mut all = BTreeMap::new();
        for path in &self.weights {
            for (name, tensor) in load_tensors(path, device)? {
                if all.contains_key(&name) {
                    return Err(Error::weights(path, format!("tensor \"{name}\" is in another shard too")));
                }
                all.insert(name, tensor);
            }
        }
        Ok(all)
    }

    /// Build a frozen model of these weights, each of which must be asked for.
    ///
    /// # Errors
    /// As [`tensors`](Self::tensors) and [`Source::finish`]; whatever `model` raises.
    pub fn build<M>(
        &self,
        dtype: Option<DType>,
        device: &Device,
        model: impl FnOnce(&mut Weights<'_>) -> Result<M>,
    ) -> Result<M> {
        if let Some(dtype) = dtype.filter(|&d| !is_float(d)) {
            return Err(Error::dtype(
                "from_pretrained",
                format!("a model computes in floating point, found {}", dtype.as_str()),
            ));
        }
        let mut source = Source::loaded(self.tensors(device)?, dtype);
        let model = model(&mut source.root())?;
        source.finish()?;
        Ok(model)
    }
}

fn weights_in(folder: &Path) -> Result<Vec<PathBuf>> {
    if let Some(whole) = WEIGHTS.iter().map(|name| folder.join(name)).find(|path| path.is_file()) {
        return Ok(vec![whole]);
    }
    let io = |source| Error::io(folder, source);
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.file_name().and_then(|name| name.to_str()).is_some_and(is_shard) {
            shards.push(path);
        }
    }
    if shards.is_empty() {
        return Err(Error::weights(
            folder,
            format!("there are no weights in this folder; expected {}, or shards of it", WEIGHTS.join(" or ")),
        ));
    }
    shards.sort();
    Ok(shards)
}

/// `model-00001-of-00003.safetensors` and its like.
fn is_shard(name: &str) -> bool {
    WEIGHTS.iter().filter_map(|whole| whole.strip_suffix(".safetensors")).any(|stem| {
        name.strip_prefix(stem)
            .and_then(|rest| rest.strip_suffix(".safetensors"))
            .and_then(|rest| rest.strip_prefix('-'))
            .and_then(|rest| rest.split_once("-of-"))
            .is_some_and(|(index, count)| {
                [index, count].iter().all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
            })
    })
}

/// Write `config.json` and `model.safetensors` of `model` to `folder`, which is made if need be. Adapters are left out.
///
/// # Errors
/// [`Error::Io`] naming what cannot be written.
pub fn save_pretrained(model: &dyn Model, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let tensors = model.named_tensors();
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    save_tensors(&folder.join(WEIGHTS[0]), tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)), &metadata)?;
    let config = model.config_json()?;
    write_atomically(&folder.join(CONFIG), |file| file.write_all(config.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::is_shard;

    #[test]
    fn shards_are_told_from_other_files() {
        assert!(is_shard("model-00001-of-00003.safetensors"));
        assert!(is_shard("diffusion_pytorch_model-00002-of-00002.safetensors"));
        for other in [
            "model.safetensors",
            "model.fp16-00001-of-00002.safetensors",
            "lora.safetensors",
            "model-1-of-.safetensors",
        ] {
            assert!(!is_shard(other), "{other}");
        }
    }
}
