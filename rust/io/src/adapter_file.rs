//! Adapter files: the same parameters under the names that other tools read.

use std::collections::BTreeMap;
use std::path::Path;

use trainable_candle_core::{Device, Error, Result, Tensor};
use trainable_candle_nn::Layer;
use trainable_candle_nn::adapter::{AdapterSet, LoraConfig};

use crate::tensor_file::TensorFile;
use crate::tensor_writer::save_tensors;

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
            other => Err(Error::argument(
                "save_adapter",
                format!("unknown format \"{other}\"; expected \"peft\" or \"diffusers\""),
            )),
        }
    }
}

const PEFT_PREFIX: &str = "base_model.model.";
/// Beside each layer's matrices, so that the scale alpha / rank can be read without a configuration file.
const ALPHA: &str = "alpha";
/// The down matrix, whose first size is the rank.
const DOWN: &str = ".lora_A.weight";
/// What only DoRA has.
const MAGNITUDE: &str = ".lora_magnitude_vector.weight";

/// Write the adapters to `path`, atomically, with `.alpha` beside each layer and the configuration in the metadata.
///
/// # Errors
/// [`Error::Io`] naming the path if it cannot be written.
pub fn save_adapter(
    path: &Path,
    set: &AdapterSet,
    format: AdapterFormat,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
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

/// What an adapter file holds: parameters under peft's names without a prefix, and alphas by layer.
struct AdapterTensors {
    values: BTreeMap<String, Tensor>,
    alphas: BTreeMap<String, f64>,
}

fn read_adapter(path: &Path) -> Result<AdapterTensors> {
    let mut file = TensorFile::open(path)?;
    let mut read = AdapterTensors { values: BTreeMap::new(), alphas: BTreeMap::new() };
    for name in file.names() {
        let tensor = file.read(&name, &Device::Cpu)?;
        let bare = name.strip_prefix(PEFT_PREFIX).unwrap_or(&name);
        match bare.strip_suffix(ALPHA).and_then(|n| n.strip_suffix('.')) {
            Some(layer) => {
                read.alphas.insert(layer.to_string(), tensor.item()?);
            }
            None => {
                read.values.insert(bare.to_string(), tensor);
            }
        }
    }
    Ok(read)
}

/// Read the parameters of an adapter file into `set`.
///
/// # Errors
/// [`Error::WeightsFormat`] if it is no adapter file; [`Error::Config`] or [`Error::Shape`] if it does not fit the adapters;
/// nothing is changed then.
pub fn load_adapter(path: &Path, set: &AdapterSet) -> Result<()> {
    let AdapterTensors { values, alphas } = read_adapter(path)?;
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

/// Put the adapters of a file on the `layers` that it names, with their ranks, kinds and alphas (the rank where it has none), their
/// effect multiplied by `scale`.
///
/// # Errors
/// [`Error::WeightsFormat`] if it is no adapter file or names layers that are not there; as [`AdapterSet::attach`] and
/// [`AdapterSet::load`].
pub fn attach_adapter(path: &Path, scale: f64, layers: &[(String, Layer<'_>)]) -> Result<AdapterSet> {
    if !scale.is_finite() || scale == 0.0 {
        let cure = "give a finite number other than 0, or leave the adapter off the model";
        return Err(Error::argument("load_adapter", format!("scale is {scale}; {cure}")));
    }
    let AdapterTensors { values, alphas } = read_adapter(path)?;
    let mut config = LoraConfig { target_modules: Vec::new(), ..LoraConfig::default() };
    for (name, tensor) in &values {
        config.use_dora |= name.ends_with(MAGNITUDE);
        let Some(layer) = name.strip_suffix(DOWN) else { continue };
        if !layers.iter().any(|(known, _)| known == layer) {
            return Err(Error::weights(
                path,
                format!("the model has no layer {layer}; the adapter is for another model"),
            ));
        }
        let rank = tensor.dims().first().copied().unwrap_or(0);
        config.rank_pattern.insert(layer.to_string(), rank);
        config.alpha_pattern.insert(layer.to_string(), scale * alphas.get(layer).copied().unwrap_or(rank as f64));
        config.target_modules.push(layer.to_string());
    }
    if config.target_modules.is_empty() {
        return Err(Error::weights(path, "no adapter file: none of its tensors is named LAYER.lora_A.weight"));
    }
    let set = AdapterSet::attach(config, layers)?;
    if let Err(error) = set.load(&values) {
        set.set_enabled(false);
        return Err(error);
    }
    Ok(set)
}
