//! The contents of an adapter file, module by module, whichever tool's names the file has.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use trainable_candle_core::{DType, Device, Error, Result, Tensor};
use trainable_candle_nn::adapter::{KINDS, LayerValues};

use super::{metadata, oft, peft};
use crate::tensor_file::TensorFile;

/// The adapter of one module.
#[derive(Default)]
pub(super) struct Stored {
    /// Parameters under this crate's names, which are peft's, laid out as in files.
    pub parameters: BTreeMap<&'static str, Tensor>,
    /// The module's alpha. The scale of most kinds is alpha / rank; for OFT that rotates outputs, alpha limits the
    /// rotation (`oft::apply_limit`).
    pub alpha: Option<f64>,
}

impl Stored {
    /// The module's parameters as a layer's values, from which a caller determines the kind, the rank and the shapes of
    /// the adapter. The scale and the number of Cayley terms do not affect these, so both have neutral values.
    pub(super) fn layer_values(&self) -> LayerValues {
        let parameters = self.parameters.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        LayerValues { parameters, scale: 1.0, cayley_neumann_terms: None }
    }
}

/// The contents of an adapter file.
pub(super) struct Contents {
    /// The modules by name. A module's name is the part of its keys before the parameter's name.
    pub modules: BTreeMap<String, Stored>,
    /// The keys that belong to no module, except the keys of [`QAT_PREFIX`].
    pub others: Vec<String>,
    pub metadata: HashMap<String, String>,
    /// peft's configuration, from the header or from `adapter_config.json` beside the file.
    config: Option<serde_json::Value>,
}

/// The entry of [`ALIASES`] for a module's alpha, which is not a parameter.
const ALPHA: &str = "alpha";

/// Pairs (ending of a key in a file of another tool, the parameter's name in this crate).
const ALIASES: [(&str, &str); 12] = [
    (".lora_down.weight", "lora_A.weight"),
    (".lora_up.weight", "lora_B.weight"),
    (".lora_A.default.weight", "lora_A.weight"),
    (".lora_B.default.weight", "lora_B.weight"),
    (".lora.down.weight", "lora_A.weight"),
    (".lora.up.weight", "lora_B.weight"),
    ("_lora.down.weight", "lora_A.weight"),
    ("_lora.up.weight", "lora_B.weight"),
    (".lora_linear_layer.down.weight", "lora_A.weight"),
    (".lora_linear_layer.up.weight", "lora_B.weight"),
    (".lora_magnitude_vector", "lora_magnitude_vector.weight"),
    (".alpha", ALPHA),
];

/// Split a key into the module's name and the parameter's name. `None` if the key ends neither in one of [`ALIASES`]
/// nor in a parameter's name of this crate.
fn split(key: &str) -> Option<(&str, &'static str)> {
    let alias = ALIASES.iter().find_map(|(ending, parameter)| Some((key.strip_suffix(ending)?, *parameter)));
    let mut parameters = KINDS.iter().flat_map(|kind| kind.parameters);
    alias.or_else(|| parameters.find_map(|(name, _)| Some((key.strip_suffix(name)?.strip_suffix('.')?, *name))))
}

/// The prefix of the keys `qat_scales.LAYER` of the scales that quantization-aware training learns. The scales are no
/// part of the adapter: they are needed to quantize the sum of base weight and adapter.
pub(super) const QAT_PREFIX: &str = "qat_scales.";

/// Pairs (ending of the key of an unsupported parameter, the variant of adapter that has such parameters).
const UNSUPPORTED: [(&str, &str); 6] = [
    (".lora_mid.weight", TUCKER),
    (".hada_t1", TUCKER),
    (".hada_t2", TUCKER),
    (".lokr_t2", TUCKER),
    (".rescale", "OFT with a factor for each output"),
    (".oft_r", "OFT of peft before 0.16"),
];

const TUCKER: &str = "the Tucker form of convolutions";

impl Contents {
    /// Read the adapter file at `path`, or peft's adapter file in the folder `path`.
    ///
    /// # Errors
    /// As [`TensorFile::open`] and [`TensorFile::read`]; [`Error::WeightsFormat`] if the file has no tensors, has an
    /// alpha that is not one finite number, or has a parameter of an unsupported variant of adapter; as
    /// [`peft::read_config_beside`].
    pub(super) fn read(path: &Path) -> Result<Self> {
        let path = &peft::file_to_read(path);
        let mut file = TensorFile::open(path)?;
        let header = file.metadata();
        let config = match header.get(metadata::CONFIGURATION).and_then(|text| serde_json::from_str(text).ok()) {
            Some(config) => Some(config),
            None => peft::read_config_beside(path)?,
        };
        let mut contents = Self { modules: BTreeMap::new(), others: Vec::new(), metadata: header, config };
        let names = file.names();
        if names.is_empty() {
            return Err(Error::weights(path, "not an adapter file: it has no tensors"));
        }
        for key in names.into_iter().filter(|key| !key.starts_with(QAT_PREFIX)) {
            if let Some((ending, variant)) = UNSUPPORTED.iter().find(|(ending, _)| key.ends_with(ending)) {
                return Err(Error::weights(
                    path,
                    format!(
                        "\"{key}\": {variant} (parameter \"{ending}\") is not supported; use an adapter without this \
                         parameter"
                    ),
                ));
            }
            let Some((module, parameter)) = split(&key) else {
                contents.others.push(key);
                continue;
            };
            let tensor = file.read(&key, &Device::Cpu)?;
            let stored = contents.modules.entry(module.to_owned()).or_default();
            if parameter == ALPHA {
                let alpha = tensor.item().ok().filter(|alpha| alpha.is_finite());
                stored.alpha = Some(alpha.ok_or_else(|| {
                    let shape = tensor.dims();
                    Error::weights(path, format!("\"{key}\" (shape {shape:?}) must hold one finite number"))
                })?);
            } else {
                stored.parameters.insert(parameter, tensor);
            }
        }
        // An alpha without further parameters is no adapter.
        contents.modules.retain(|module, stored| {
            let orphan = stored.parameters.is_empty();
            if orphan {
                contents.others.push(format!("{module}.{ALPHA}"));
            }
            !orphan
        });
        for (module, stored) in &mut contents.modules {
            let wrong = |e: Error| Error::weights(path, format!("\"{module}\": {e}"));
            // Other tools limit the rotation by OFT in each forward pass; here the parameters are scaled once. peft calls
            // its own limit COFT (constrained OFT).
            oft::apply_limit(stored).map_err(wrong)?;
            peft::apply_coft(contents.config.as_ref(), stored).map_err(wrong)?;
        }
        Ok(contents)
    }

    /// The scale of a layer according to peft's configuration, for modules without an alpha. `None` without a
    /// configuration.
    pub(super) fn configured_scale(&self, part: &str, layer: &str) -> Option<f64> {
        peft::configured_scale(self.config.as_ref()?, part, layer)
    }

    /// The number of terms of the Neumann series with which OFT approximates the Cayley transform, from peft's
    /// configuration. `None` for other adapters, and if OFT uses the exact Cayley transform.
    pub(super) fn cayley_neumann_terms(&self) -> Option<usize> {
        peft::cayley_neumann_terms(self.config.as_ref()?)
    }
}

/// The name of the first parameter with an infinite or NaN element.
///
/// # Errors
/// Errors of the conversion to f32.
pub(super) fn non_finite(values: &LayerValues) -> Result<Option<&str>> {
    for (name, value) in &values.parameters {
        let elements = value.to_dtype(DType::F32)?.contiguous()?.to_vec::<f32>()?;
        if elements.iter().any(|x| !x.is_finite()) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// The scales of quantization-aware training in the file at `path`, by layer. Empty if the file has none.
///
/// # Errors
/// As [`TensorFile::open`] and [`TensorFile::read`].
pub(super) fn qat_scales(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let mut file = TensorFile::open(peft::file_to_read(path))?;
    let keys: Vec<String> = file.names().into_iter().filter(|key| key.starts_with(QAT_PREFIX)).collect();
    keys.into_iter().map(|key| Ok((key[QAT_PREFIX.len()..].to_owned(), file.read(&key, &Device::Cpu)?))).collect()
}

/// The keys of the adapter file at `path`, or of peft's adapter file in the folder `path`. Reads no values.
///
/// # Errors
/// As [`TensorFile::open`].
pub fn adapter_keys(path: &Path) -> Result<Vec<String>> {
    Ok(TensorFile::open(peft::file_to_read(path))?.names())
}
