//! What an adapter file holds, module by module, whatever its names.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use trainable_candle_core::{Device, Error, Result, Tensor};
use trainable_candle_nn::adapter::LoraConfig;

use crate::tensor_file::TensorFile;

/// The adapter of one module.
#[derive(Default)]
pub(super) struct Stored {
    /// Parameters under peft's names, laid out as in files.
    pub parameters: BTreeMap<&'static str, Tensor>,
    /// The numerator of the scale.
    pub alpha: Option<f64>,
}

/// A file's modules by the name before the parameter's, and the keys that are of none.
pub(super) struct Contents {
    pub modules: BTreeMap<String, Stored>,
    pub others: Vec<String>,
    pub metadata: HashMap<String, String>,
}

const ALPHA: &str = "alpha";

/// Endings of keys and the parameters that they mean.
const ENDINGS: [(&str, &str); 26] = [
    (".lora_down.weight", "lora_A.weight"),
    (".lora_up.weight", "lora_B.weight"),
    (".lora_A.weight", "lora_A.weight"),
    (".lora_B.weight", "lora_B.weight"),
    (".lora_A.default.weight", "lora_A.weight"),
    (".lora_B.default.weight", "lora_B.weight"),
    (".lora.down.weight", "lora_A.weight"),
    (".lora.up.weight", "lora_B.weight"),
    ("_lora.down.weight", "lora_A.weight"),
    ("_lora.up.weight", "lora_B.weight"),
    (".lora_linear_layer.down.weight", "lora_A.weight"),
    (".lora_linear_layer.up.weight", "lora_B.weight"),
    (".lora_magnitude_vector", "lora_magnitude_vector.weight"),
    (".lora_magnitude_vector.weight", "lora_magnitude_vector.weight"),
    (".dora_scale", "dora_scale"),
    (".hada_w1_a", "hada_w1_a"),
    (".hada_w1_b", "hada_w1_b"),
    (".hada_w2_a", "hada_w2_a"),
    (".hada_w2_b", "hada_w2_b"),
    (".lokr_w1", "lokr_w1"),
    (".lokr_w1_a", "lokr_w1_a"),
    (".lokr_w1_b", "lokr_w1_b"),
    (".lokr_w2", "lokr_w2"),
    (".lokr_w2_a", "lokr_w2_a"),
    (".lokr_w2_b", "lokr_w2_b"),
    (".alpha", ALPHA),
];

/// Endings of the Tucker form of convolutions, which is not supported.
const TUCKER: [&str; 4] = [".lora_mid.weight", ".hada_t1", ".hada_t2", ".lokr_t2"];

impl Contents {
    /// Read the file at `path`.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if it is no safetensors file, an alpha is no number, or a module has the Tucker form.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut file = TensorFile::open(path)?;
        let mut contents = Self { modules: BTreeMap::new(), others: Vec::new(), metadata: file.metadata() };
        for key in file.names() {
            if let Some(ending) = TUCKER.iter().find(|ending| key.ends_with(*ending)) {
                return Err(Error::weights(
                    path,
                    format!(
                        "\"{key}\": the Tucker form of convolutions (\"{ending}\") is not supported; train without it"
                    ),
                ));
            }
            let Some((module, parameter)) =
                ENDINGS.iter().find_map(|(ending, parameter)| Some((key.strip_suffix(ending)?, *parameter)))
            else {
                contents.others.push(key);
                continue;
            };
            let tensor = file.read(&key, &Device::Cpu)?;
            let stored = contents.modules.entry(module.to_owned()).or_default();
            if parameter == ALPHA {
                let alpha = tensor.item().ok().filter(|alpha| alpha.is_finite());
                stored.alpha = Some(alpha.ok_or_else(|| {
                    Error::weights(path, format!("\"{key}\" has shape {:?}, expected one number", tensor.dims()))
                })?);
            } else {
                stored.parameters.insert(parameter, tensor);
            }
        }
        contents.modules.retain(|module, stored| {
            let orphan = stored.parameters.is_empty();
            if orphan {
                contents.others.push(format!("{module}.{ALPHA}"));
            }
            !orphan
        });
        Ok(contents)
    }

    /// The scale of a layer by the configuration in the metadata, for files without alphas.
    pub(super) fn configured_scale(&self, part: &str, layer: &str) -> Option<f64> {
        let json: serde_json::Value = serde_json::from_str(self.metadata.get("lora_adapter_metadata")?).ok()?;
        let get = |name: &str| json.get(format!("{part}.{name}")).or_else(|| json.get(name));
        let mut config = LoraConfig {
            r: usize::try_from(get("r")?.as_u64()?).ok()?,
            lora_alpha: get("lora_alpha")?.as_f64()?,
            use_rslora: get("use_rslora").and_then(serde_json::Value::as_bool).unwrap_or(false),
            ..LoraConfig::default()
        };
        for (name, rank) in get("rank_pattern").and_then(|v| v.as_object()).into_iter().flatten() {
            config.rank_pattern.insert(name.clone(), usize::try_from(rank.as_u64()?).ok()?);
        }
        for (name, alpha) in get("alpha_pattern").and_then(|v| v.as_object()).into_iter().flatten() {
            config.alpha_pattern.insert(name.clone(), alpha.as_f64()?);
        }
        Some(config.settings(layer).ok()?.scale)
    }
}
