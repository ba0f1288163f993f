//! Adapter files of the library peft: `adapter_model.safetensors`, and beside it `adapter_config.json`, the
//! configuration with the scales.
//!
//! peft multiplies the change of every layer's weight by alpha / r. It does so even for a LoKr without a rank, whose
//! two factors are full matrices. `LyCORIS`, and tools that read the files of `LyCORIS`, multiply a LoKr without a rank
//! by 1. Therefore, for a LoKr without a rank, peft's files store the factor [`FOLDED`] divided by peft's alpha / r, so
//! that peft's multiplication restores the factor.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use trainable_candle_core::ops::cayley::size_of;
use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_nn::adapter::{AdaptedLayer, AdapterSet, LayerValues, LoraConfig, oft_block_size};

use super::modules::Stored;
use super::{alpha, oft};

const MODEL: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// For a LoKr without a rank, peft's files store this factor divided by alpha / r.
pub(super) const FOLDED: &str = "lokr_w1";

/// The file to write for `path`: `path` itself if it ends in `.safetensors` and is no folder, otherwise
/// `adapter_model.safetensors` in the folder `path`. The folder need not exist. A path such as `x_v1.5` thus names a
/// folder.
pub(super) fn file_to_write(path: &Path) -> PathBuf {
    let is_file = path.extension().is_some_and(|extension| extension == "safetensors") && !path.is_dir();
    if is_file { path.to_path_buf() } else { path.join(MODEL) }
}

/// The file to read for `path`: `adapter_model.safetensors` in `path` if `path` is a folder, otherwise `path` itself.
pub(super) fn file_to_read(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(MODEL) } else { path.to_path_buf() }
}

/// The path of `adapter_config.json` beside the adapter file at `path`. `None` if the file's name is not
/// `adapter_model.safetensors`.
pub(super) fn config_beside(path: &Path) -> Option<PathBuf> {
    (path.file_name()? == MODEL).then(|| path.with_file_name(CONFIG))
}

/// The fields `r` and alpha of peft's configuration. They hold for every layer that `rank_pattern` and `alpha_pattern`
/// do not list.
#[derive(Clone, Copy)]
pub(super) struct Common {
    rank: usize,
    alpha: f64,
}

impl Common {
    /// Rank and alpha of the first layer that has a rank; if there is none, those of the adapter's configuration.
    pub(super) fn of(set: &AdapterSet, layers: &[AdaptedLayer<'_>]) -> Self {
        let ranked = layers.iter().find(|layer| has_rank(layer));
        ranked.map_or(Self { rank: set.config().r, alpha: set.config().lora_alpha }, |layer| Self {
            rank: layer.settings.rank,
            alpha: alpha::of(layer),
        })
    }

    /// Rank and alpha of a layer in peft's configuration.
    fn rank_and_alpha(self, layer: &AdaptedLayer<'_>) -> (usize, f64) {
        if has_rank(layer) {
            return (layer.settings.rank, alpha::of(layer));
        }
        // peft must make full matrices, too: its LoKr does so if r is large. The rank in the settings is 0 if the
        // adapter was read from a file that does not store it. Then r is the largest dimension of the factors, which
        // certainly gives full matrices.
        let largest = || layer.parameters.iter().flat_map(|(_, value)| value.dims()).copied().max().unwrap_or(1);
        (if layer.settings.rank > 0 { layer.settings.rank } else { largest() }, self.alpha)
    }

    /// For a layer without a rank: the number by which the factor [`FOLDED`] is multiplied when peft's file is written.
    /// When peft multiplies by its alpha / r, the layer's own scale results.
    pub(super) fn fold(self, layer: &AdaptedLayer<'_>) -> f64 {
        let (rank, alpha) = self.rank_and_alpha(layer);
        layer.settings.scale * rank as f64 / alpha
    }
}

/// Whether one of a layer's parameters has a dimension of the size of the rank.
pub(super) fn has_rank(layer: &AdaptedLayer<'_>) -> bool {
    layer.parameters.iter().any(|(name, _)| layer.kind.ranked.contains(name))
}

/// peft's configuration of a part. The configuration gives every layer its rank r and its alpha; the layer's scale is
/// alpha / r.
pub(super) fn configuration(set: &AdapterSet, layers: &[AdaptedLayer<'_>]) -> Map<String, Value> {
    let Some(first) = layers.first() else { return Map::new() };
    if first.kind.name == "oft" {
        return oft_configuration(set, layers);
    }
    let common = Common::of(set, layers);
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for layer in layers {
        let (rank, alpha) = common.rank_and_alpha(layer);
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
    let kind_fields = match first.kind.name {
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
            // -1 lets peft choose the sizes of the factors.
            "decompose_factor": set.config().decompose_factor.map_or(json!(-1), |factor| json!(factor)),
        }),
        other => json!({"peft_type": other.to_uppercase(), "alpha": common.alpha}),
    };
    if let (Value::Object(fields), Value::Object(kind_fields)) = (&mut fields, kind_fields) {
        fields.extend(kind_fields);
    }
    if let Value::Object(fields) = fields { fields } else { Map::new() }
}

/// peft's configuration of OFT.
fn oft_configuration(set: &AdapterSet, layers: &[AdaptedLayer<'_>]) -> Map<String, Value> {
    let terms = layers.first().and_then(|layer| layer.settings.cayley_neumann_terms);
    let targets: Vec<&str> = layers.iter().map(|layer| module(layer.name)).collect();
    let fields = json!({
        "peft_type": "OFT",
        // Releases of peft before 0.18.0 used another series for the rotations.
        "peft_version": "0.18.0",
        "r": 0,
        "oft_block_size": block_size(layers).unwrap_or(set.config().oft_block_size),
        "target_modules": targets,
        "use_cayley_neumann": terms.is_some(),
        // Five terms are peft's default. peft ignores the number if it uses no series.
        "num_cayley_neumann_terms": terms.unwrap_or(5),
        "coft": false,
        "block_share": false,
    });
    if let Value::Object(fields) = fields { fields } else { Map::new() }
}

/// A value of `oft_block_size` from which peft computes the actual block size of every layer. `None` if no single value
/// gives the block sizes of all layers.
pub(super) fn block_size(layers: &[AdaptedLayer<'_>]) -> Option<usize> {
    let sizes: BTreeSet<(usize, usize)> = layers
        .iter()
        .filter_map(|layer| {
            let (_, triangles) = layer.parameters.iter().find(|(name, _)| *name == oft::TRIANGLES)?;
            // `size_of` returns the size of the block whose triangle has this number of elements.
            Some((layer.base.inputs(), size_of(*triangles.dims().get(1)?)?))
        })
        .collect();
    let largest = sizes.iter().map(|(_, size)| *size).max()?;
    let gives_sizes = |wanted: &usize| sizes.iter().all(|&(inputs, size)| oft_block_size(inputs, *wanted) == size);
    // peft takes the divisor of `inputs` nearest to the value. If a value above 2 · largest gives all sizes, 2 ·
    // largest does too: the value moves closer to the nearest divisor, which stays the nearest.
    // The search begins with 2, because a block of one feature cannot rotate.
    (2..=2 * largest).find(gives_sizes)
}

/// The triangles of all blocks of a layer with `inputs` input features, (blocks, elements of a triangle). If the file
/// has only one triangle (`block_share`), the triangle is repeated for each block.
pub(super) fn unshared(triangles: &Tensor, inputs: usize) -> Result<Tensor> {
    match *triangles.dims() {
        [1, elements] => {
            // If no triangle has this number of elements, the count is 1; the layer later rejects the tensor.
            let count = (inputs / size_of(elements).unwrap_or(inputs).max(1)).max(1);
            triangles.broadcast_as((count, elements))?.contiguous()
        }
        _ => Ok(triangles.clone()),
    }
}

/// If `config` has `coft: true`, limit the Frobenius norm of each block's skew-symmetric matrix Q, which the triangle
/// stores, to `eps` / √(number of blocks). peft does this before each forward pass
/// (<https://github.com/huggingface/peft/blob/5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40/src/peft/tuners/oft/layer.py#L158>).
pub(super) fn apply_coft(config: Option<&Value>, stored: &mut Stored) -> Result<()> {
    let Some(config) = config.filter(|config| config.get("coft").and_then(Value::as_bool) == Some(true)) else {
        return Ok(());
    };
    let Some(triangles) = stored.parameters.get_mut(oft::TRIANGLES).filter(|value| value.rank() == 2) else {
        return Ok(());
    };
    // 6e-5 is peft's default for `eps`.
    let limit = config.get("eps").and_then(Value::as_f64).unwrap_or(6e-5) / (triangles.dims()[0] as f64).sqrt();
    let value = triangles.to_dtype(DType::F32)?;
    // Each element of a triangle occurs twice in its block's skew-symmetric matrix Q.
    let norms = value.sqr()?.sum(&[1], true)?.mul_scalar(2.0)?.sqrt()?;
    let factors =
        norms.to_vec::<f32>()?.into_iter().map(|norm| if f64::from(norm) > limit { limit as f32 / norm } else { 1.0 });
    let factors = Tensor::from_vec(factors.collect::<Vec<_>>(), norms.dims(), value.device())?;
    *triangles = value.mul(&factors)?;
    Ok(())
}

/// The number of terms of the Neumann series with which OFT approximates the Cayley transform. `None` if the
/// configuration selects the exact Cayley transform, or is not one of OFT.
pub(super) fn cayley_neumann_terms(config: &Value) -> Option<usize> {
    // peft's default for missing entries: the Neumann series with five terms.
    let uses_series = config.get("use_cayley_neumann").and_then(Value::as_bool).unwrap_or(true);
    let is_oft = config.get("peft_type").and_then(Value::as_str) == Some("OFT");
    let terms = config.get("num_cayley_neumann_terms").and_then(Value::as_u64).unwrap_or(5);
    (is_oft && uses_series).then(|| usize::try_from(terms).ok()).flatten()
}

/// The name of a layer in peft's configuration, which is the layer's name without `text_model.`. transformers 5 removed
/// this prefix from the layer names of one of its two CLIP encoders and kept it in the other. peft compares only the
/// ends of layer names, so names without the prefix match in both encoders.
fn module(layer: &str) -> &str {
    layer.strip_prefix("text_model.").unwrap_or(layer)
}

/// The content of `adapter_config.json`.
pub(super) fn config_text(configuration: Map<String, Value>) -> String {
    let mut fields = json!({"base_model_name_or_path": null, "inference_mode": true, "task_type": null});
    if let Value::Object(fields) = &mut fields {
        fields.extend(configuration);
    }
    format!("{fields:#}\n")
}

/// The content of `adapter_config.json` beside the adapter file at `path`. `None` if the adapter file's name is not
/// `adapter_model.safetensors`, or if there is no configuration.
///
/// # Errors
/// [`Error::Io`] if the configuration cannot be read, [`Error::Config`] if it is not JSON.
pub(super) fn read_config_beside(path: &Path) -> Result<Option<Value>> {
    let Some(path) = config_beside(path).filter(|path| path.is_file()) else { return Ok(None) };
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
    let config = serde_json::from_str(&text);
    config.map(Some).map_err(|e| Error::Config(format!("{} is not valid JSON: {e}", path.display())))
}

/// The scale that a configuration gives to a layer of a part. `None` if the configuration has no valid rank and alpha.
pub(super) fn configured_scale(config: &Value, part: &str, layer: &str) -> Option<f64> {
    // In the headers of diffusers' files, the name of the part precedes that of the field, such as `unet.r`.
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
    // peft's patterns are names or regular expressions, which match convolutions and linear layers alike, so it does
    // not matter which of them the layer is.
    let is_conv = false;
    Some(config.settings(layer, is_conv).ok()?.scale)
}

/// Undo [`Common::fold`] for a layer without a rank: multiply the factor [`FOLDED`] by `scale`, the alpha / r of peft's
/// configuration, so that the layer has the scale 1.
pub(super) fn unfold(values: &mut LayerValues, scale: f64) -> Result<()> {
    if let Some(factor) = values.parameters.get_mut(FOLDED) {
        *factor = factor.to_dtype(DType::F32)?.mul_scalar(scale)?;
    }
    Ok(())
}
