//! Adapter files: the same parameters under the names that other tools read.

use std::collections::BTreeMap;
use std::path::Path;

use trainable_candle_core::{Device, Error, Result, Tensor};
use trainable_candle_nn::adapter::AdapterSet;

use crate::tensor_file::{TensorFile, save_tensors};

/// Whose names an adapter file carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterFormat {
    /// `base_model.model.LAYER.lora_A.weight` (peft).
    #[default]
    Peft,
    /// `LAYER.lora_A.weight` (diffusers, without a component's prefix).
    Diffusers,
}

impl std::str::FromStr for AdapterFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "peft" => Ok(Self::Peft),
            "diffusers" => Ok(Self::Diffusers),
            other => Err(Error::argument("save_adapter", format!("unknown format \"{other}\"; expected \"peft\" or \"diffusers\""))),
        }
    }
}

const PEFT_PREFIX: &str = "base_model.model.";
/// Beside each layer's matrices, so that the scale alpha / rank can be read without a configuration file.
const ALPHA: &str = "alpha";

/// Write the adapters to `path`, atomically, with `.alpha` beside each layer and the configuration in the metadata.
///
/// # Errors
/// [`Error::Io`] naming the path if it cannot be written.
pub fn save_adapter(path: &Path, set: &AdapterSet, format: AdapterFormat, metadata: &BTreeMap<String, String>) -> Result<()> {
    let prefix = match format {
        AdapterFormat::Peft => PEFT_PREFIX,
        AdapterFormat::Diffusers => "",
    };
    let mut tensors: BTreeMap<String, Tensor> =
        set.named_vars().into_iter().map(|(name, var)| (format!("{prefix}{name}"), var.detach())).collect();
    for (name, settings) in set.layers() {
        // Readers divide by the rank; with rsLoRA's scale that gives an alpha of scale * rank.
        let alpha = Tensor::new((settings.scale * settings.rank as f64) as f32, &Device::Cpu)?;
        tensors.insert(format!("{prefix}{name}.{ALPHA}"), alpha);
    }
    let mut metadata = metadata.clone();
    metadata.entry("format".into()).or_insert_with(|| "pt".into());
    metadata.extend(settings_text(set)?);
    save_tensors(path, tensors.iter().map(|(n, t)| (n.as_str(), t)), &metadata)
}

/// The configuration as peft's JSON, so that the file alone suffices to build the adapters again.
fn settings_text(set: &AdapterSet) -> Result<Vec<(String, String)>> {
    let config = set.config();
    let json = serde_json::json!({
        "peft_type": "LORA",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": config.target_modules,
        "exclude_modules": config.exclude_modules,
        "lora_dropout": config.lora_dropout,
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
    });
    Ok(vec![("lora_adapter_metadata".into(), json.to_string())])
}

/// Read the parameters of an adapter file into `set`.
///
/// # Errors
/// [`Error::WeightsFormat`] if it is no adapter file; [`Error::Config`] or [`Error::Shape`] if it does not fit the adapters;
/// nothing is changed then.
pub fn load_adapter(path: &Path, set: &AdapterSet) -> Result<()> {
    let mut file = TensorFile::open(path)?;
    let mut values = BTreeMap::new();
    let mut alphas = BTreeMap::new();
    for name in file.names() {
        let tensor = file.read(&name, &Device::Cpu)?;
        let bare = name.strip_prefix(PEFT_PREFIX).unwrap_or(&name);
        match bare.strip_suffix(ALPHA).and_then(|n| n.strip_suffix('.')) {
            Some(layer) => {
                alphas.insert(layer.to_string(), tensor.item()?);
            }
            None => {
                values.insert(bare.to_string(), tensor);
            }
        }
    }
    for (layer, settings) in set.layers() {
        let here = settings.scale * settings.rank as f64;
        if let Some(there) = alphas.get(layer).filter(|a| (*a - here).abs() > 1e-4 * here.abs()) {
            return Err(Error::Config(format!(
                "{}: {layer} was trained with alpha {there}, this adapter has {here}; give add_adapter the same lora_alpha and r",
                path.display()
            )));
        }
    }
    set.load(&values)
}
