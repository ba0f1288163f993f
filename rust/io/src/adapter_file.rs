//! Adapter files: the same parameters under the names that other tools read.

use std::collections::BTreeMap;
use std::path::Path;

use trainable_candle_core::{Device, Error, Result, Tensor};
use trainable_candle_nn::Layer;
use trainable_candle_nn::adapter::{AdapterSet, KINDS, LayerValues};

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
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    for layer in set.layers()? {
        for (name, value) in layer.parameters {
            tensors.insert(format!("{prefix}{}.{name}", layer.name), value);
        }
        // Readers divide by the rank; with rsLoRA's scale that gives an alpha of scale * rank.
        let alpha = (layer.settings.scale * layer.settings.rank as f64) as f32;
        tensors.insert(format!("{prefix}{}.{ALPHA}", layer.name), Tensor::new(alpha, &Device::Cpu)?);
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

/// The adapters of a file by layer, under peft's names.
fn read_adapter(path: &Path) -> Result<BTreeMap<String, LayerValues>> {
    let mut file = TensorFile::open(path)?;
    let mut layers: BTreeMap<String, LayerValues> = BTreeMap::new();
    let mut alphas = BTreeMap::new();
    for name in file.names() {
        let tensor = file.read(&name, &Device::Cpu)?;
        let bare = name.strip_prefix(PEFT_PREFIX).unwrap_or(&name);
        if let Some(layer) = bare.strip_suffix(ALPHA).and_then(|n| n.strip_suffix('.')) {
            alphas.insert(layer.to_string(), tensor.item()?);
            continue;
        }
        let parameter = KINDS
            .iter()
            .flat_map(|kind| kind.parameters)
            .find_map(|(parameter, _)| Some((bare.strip_suffix(parameter)?.strip_suffix('.')?, *parameter)));
        let Some((layer, parameter)) = parameter else {
            return Err(Error::weights(path, format!("no adapter file: \"{name}\" is no parameter of an adapter")));
        };
        let values =
            layers.entry(layer.to_string()).or_insert_with(|| LayerValues { parameters: BTreeMap::new(), scale: 1.0 });
        values.parameters.insert(parameter.to_string(), tensor);
    }
    for (layer, values) in &mut layers {
        if let (Some(alpha), rank @ 1..) = (alphas.get(layer), values.rank()?) {
            values.scale = alpha / rank as f64;
        }
    }
    Ok(layers)
}

/// Read the parameters of an adapter file into `set`.
///
/// # Errors
/// [`Error::WeightsFormat`] if it is no adapter file; [`Error::Config`] or [`Error::Shape`] if it does not fit the adapters;
/// nothing is changed then.
pub fn load_adapter(path: &Path, set: &AdapterSet) -> Result<()> {
    set.load(&read_adapter(path)?)
}

/// Put the adapters of a file on the `layers` that it names, with their ranks, kinds and alphas (the rank where it has none), their
/// effect multiplied by `scale`.
///
/// # Errors
/// [`Error::WeightsFormat`] if it is no adapter file; as [`AdapterSet::attach_values`].
pub fn attach_adapter(path: &Path, scale: f64, layers: &[(String, Layer<'_>)]) -> Result<AdapterSet> {
    if !scale.is_finite() || scale == 0.0 {
        let cure = "give a finite number other than 0, or leave the adapter off the model";
        return Err(Error::argument("load_adapter", format!("scale is {scale}; {cure}")));
    }
    let mut values = read_adapter(path)?;
    for layer in values.values_mut() {
        layer.scale *= scale;
    }
    AdapterSet::attach_values(&values, layers)
}
