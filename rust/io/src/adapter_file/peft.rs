//! peft's files: `adapter_model.safetensors` beside `adapter_config.json`, and the configuration that gives the scales.
//!
//! peft multiplies every layer by alpha / r, even a LoKr without a rank, both of whose factors are full matrices.
//! `LyCORIS` and tools that read its files multiply such a LoKr by 1. In peft's files, its factor is therefore divided
//! by peft's alpha / r.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use trainable_candle_core::{DType, Error, Result};
use trainable_candle_nn::adapter::{AdaptedLayer, AdapterSet, LayerValues, LoraConfig};

use super::alpha;

const MODEL: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// The full factor of a LoKr that is rescaled in peft's files.
pub(super) const FOLDED: &str = "lokr_w1";

/// The file to write for `path`: `path` itself, or peft's file in it if `path` is a folder (existing or not).
pub(super) fn file_to_write(path: &Path) -> PathBuf {
    if path.is_dir() || path.extension().is_none() { path.join(MODEL) } else { path.to_path_buf() }
}

/// The file to read for `path`: `path` itself, or peft's file in it if `path` is a folder.
pub(super) fn file_to_read(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(MODEL) } else { path.to_path_buf() }
}

/// The path of an adapter file's configuration, if the file has peft's name.
pub(super) fn config_beside(path: &Path) -> Option<PathBuf> {
    (path.file_name()? == MODEL).then(|| path.with_file_name(CONFIG))
}

/// The rank and alpha of peft's configuration, for layers without entries of their own.
#[derive(Clone, Copy)]
pub(super) struct Common {
    rank: usize,
    alpha: f64,
}

impl Common {
    /// Rank and alpha of the first layer that has a rank, or of the configuration.
    pub(super) fn of(set: &AdapterSet, layers: &[AdaptedLayer<'_>]) -> Self {
        let ranked = layers.iter().find(|layer| has_rank(layer));
        ranked.map_or(Self { rank: set.config().r, alpha: set.config().lora_alpha }, |layer| Self {
            rank: layer.settings.rank,
            alpha: alpha::of(layer),
        })
    }

    /// Rank and alpha of a layer in peft's configuration.
    fn sizes(self, layer: &AdaptedLayer<'_>) -> (usize, f64) {
        if has_rank(layer) {
            return (layer.settings.rank, alpha::of(layer));
        }
        // The rank at which the factors were full matrices is not in a file. With a rank as large as their largest
        // dimension, they are certainly full.
        let largest = || layer.parameters.iter().flat_map(|(_, value)| value.dims()).copied().max().unwrap_or(1);
        (if layer.settings.rank > 0 { layer.settings.rank } else { largest() }, self.alpha)
    }

    /// The number by which a layer's factor is multiplied in peft's files.
    pub(super) fn fold(self, layer: &AdaptedLayer<'_>) -> f64 {
        let (rank, alpha) = self.sizes(layer);
        layer.settings.scale * rank as f64 / alpha
    }
}

/// Whether one of a layer's parameters has a rank.
pub(super) fn has_rank(layer: &AdaptedLayer<'_>) -> bool {
    layer.parameters.iter().any(|(name, _)| layer.kind.ranked.contains(name))
}

/// peft's configuration of a part, with each layer's own rank and alpha; the scale is alpha / r.
pub(super) fn configuration(set: &AdapterSet, layers: &[AdaptedLayer<'_>]) -> Map<String, Value> {
    let Some(first) = layers.first() else { return Map::new() };
    let common = Common::of(set, layers);
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for layer in layers {
        let (rank, alpha) = common.sizes(layer);
        if rank != common.rank {
            ranks.insert(module(layer.name).to_owned(), json!(rank));
        }
        if (alpha - common.alpha).abs() > 1e-9 {
            alphas.insert(module(layer.name).to_owned(), json!(alpha));
        }
    }
    let targets: Vec<&str> = layers.iter().map(|layer| module(layer.name)).collect();
    let mut fields = json!({
        "r": common.rank,
        "target_modules": targets,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    });
    let own = match first.kind.name {
        kind @ ("lora" | "dora") => json!({
            "peft_type": "LORA",
            "lora_alpha": common.alpha,
            "lora_dropout": first.settings.dropout,
            "use_dora": kind == "dora",
            "use_rslora": false,
        }),
        "lokr" => json!({
            "peft_type": "LOKR",
            "alpha": common.alpha,
            "decompose_both": set.config().decompose_both,
            "decompose_factor": set.config().decompose_factor.map_or(json!(-1), |factor| json!(factor)),
        }),
        other => json!({"peft_type": other.to_uppercase(), "alpha": common.alpha}),
    };
    if let (Value::Object(fields), Value::Object(own)) = (&mut fields, own) {
        fields.extend(own);
    }
    if let Value::Object(fields) = fields { fields } else { Map::new() }
}

/// The name of a module in a configuration. transformers 5 has removed `text_model.` from the layer names of one of its
/// CLIP encoders and kept it in the other. peft matches modules by the end of their names, so names without this prefix
/// match in both.
fn module(layer: &str) -> &str {
    layer.strip_prefix("text_model.").unwrap_or(layer)
}

/// The text of `adapter_config.json`.
pub(super) fn config_text(configuration: Map<String, Value>) -> String {
    let mut fields = json!({"base_model_name_or_path": null, "inference_mode": true, "task_type": null});
    if let Value::Object(fields) = &mut fields {
        fields.extend(configuration);
    }
    format!("{fields:#}\n")
}

/// The configuration in `adapter_config.json` beside a file with peft's name.
///
/// # Errors
/// [`Error::Io`] if it cannot be read, [`Error::Config`] if it is not JSON.
pub(super) fn read_config_beside(path: &Path) -> Result<Option<Value>> {
    let Some(path) = config_beside(path).filter(|path| path.is_file()) else { return Ok(None) };
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
    let config = serde_json::from_str(&text);
    config.map(Some).map_err(|e| Error::Config(format!("{}: {e}", path.display())))
}

/// The scale that a configuration gives a layer of a part.
pub(super) fn configured_scale(config: &Value, part: &str, layer: &str) -> Option<f64> {
    let get = |name: &str| config.get(format!("{part}.{name}")).or_else(|| config.get(name));
    let mut config = LoraConfig {
        r: usize::try_from(get("r")?.as_u64()?).ok()?,
        lora_alpha: get("lora_alpha").or_else(|| get("alpha"))?.as_f64()?,
        use_rslora: get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
        ..LoraConfig::default()
    };
    for (name, rank) in get("rank_pattern").and_then(Value::as_object).into_iter().flatten() {
        config.rank_pattern.insert(name.clone(), usize::try_from(rank.as_u64()?).ok()?);
    }
    for (name, alpha) in get("alpha_pattern").and_then(Value::as_object).into_iter().flatten() {
        config.alpha_pattern.insert(name.clone(), alpha.as_f64()?);
    }
    Some(config.settings(layer).ok()?.scale)
}

/// Give a layer without a rank the scale 1, by multiplying its factor by `scale`, the scale of peft's configuration.
pub(super) fn unfold(values: &mut LayerValues, scale: f64) -> Result<()> {
    if let Some(factor) = values.parameters.get_mut(FOLDED) {
        *factor = factor.to_dtype(DType::F32)?.mul_scalar(scale)?;
    }
    Ok(())
}
