//! Scales and alphas in adapter files. A layer's scale is alpha / rank.
//!
//! In three cases the scale in the file differs from the trained scale:
//! - The file names the layers of a UNet as kohya does. For the projections of attention layers, diffusers 0.42 looks
//!   for alphas under names that no layer has. It then uses the most common alpha of the part (text encoder or UNet)
//!   instead. Therefore all layers of a part get one alpha in the file.
//! - The file has names that both `ComfyUI` and diffusers read. The two programs expect the alphas under different
//!   keys. Therefore the file has no alphas: every scale is 1.
//! - Several layers are stored as one fused module. The module has one alpha, so the layers get one scale.
//!
//! In all three cases the up factor is multiplied by (trained scale / scale in the file), so that the adapter's effect
//! stays the same in every tool. The file's header keeps the trained alphas.

use std::collections::{BTreeMap, HashMap};

use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_nn::adapter::{AdaptedLayer, LayerValues};

/// The metadata entry that maps diffusers' name of a layer to the alpha of training. A file has this entry if the
/// alphas stored as its tensors differ from the alphas of training.
pub(super) const TRAINED: &str = "trainable_candle.alphas";

/// The parameter names of the up factors that [`rescale`] multiplies: of LoRA and DoRA, and of LoHa. An adapter has at
/// most one of these parameters.
const UPS: [&str; 2] = ["lora_B.weight", "hada_w1_a"];

/// The alpha of a layer: scale · rank.
pub(super) fn of(layer: &AdaptedLayer<'_>) -> f64 {
    layer.settings.scale * layer.settings.rank as f64
}

/// The most common of the given alphas, or the one that occurs first if several are equally common.
pub(super) fn most_common(alphas: impl Iterator<Item = f64>) -> Option<f64> {
    let mut counts: Vec<(f64, usize)> = Vec::new();
    for alpha in alphas {
        match counts.iter_mut().find(|(known, _)| same(*known, alpha)) {
            Some((_, count)) => *count += 1,
            None => counts.push((alpha, 1)),
        }
    }
    // `max_by_key` returns the last of several maxima, so the order is reversed.
    counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(alpha, _)| alpha)
}

/// Whether two alphas are equal after rounding to f32, the dtype of alphas in a file.
pub(super) fn same(a: f64, b: f64) -> bool {
    a as f32 == b as f32
}

/// The alpha that all layers of a part get in the file. `None` if some layer has an adapter other than LoRA, or if some
/// alpha is 0; then all layers keep their own alphas.
pub(super) fn common(layers: &[AdaptedLayer<'_>]) -> Option<f64> {
    let can_share = layers.iter().all(|layer| layer.kind.name == "lora" && of(layer) != 0.0);
    if can_share { most_common(layers.iter().map(of)) } else { None }
}

/// Set the layer's scale to `scale` and multiply its up factor so that the adapter's effect stays the same. A layer
/// without an up factor keeps its scale.
pub(super) fn rescale(layer: &mut AdaptedLayer<'_>, scale: f64) -> Result<()> {
    let quotient = layer.settings.scale / scale;
    let Some((_, value)) = layer.parameters.iter_mut().find(|(name, _)| UPS.contains(name)) else { return Ok(()) };
    *value = value.mul_scalar(quotient)?;
    layer.settings.scale = scale;
    Ok(())
}

/// The content of the entry [`TRAINED`]; empty if the metadata has no valid entry.
pub(super) fn trained(metadata: &HashMap<String, String>) -> BTreeMap<String, f64> {
    metadata.get(TRAINED).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// Undo [`rescale`]: set the scale of `values` to the scale of training, `alpha / rank`, and multiply the up factor by
/// (old scale / scale of training). Does nothing if this quotient is 0 or not finite, or if the adapter has no up
/// factor.
pub(super) fn to_trained(values: &mut LayerValues, rank: usize, alpha: f64) -> Result<()> {
    let scale = alpha / rank as f64;
    let quotient = values.scale / scale;
    if !quotient.is_finite() || quotient == 0.0 {
        return Ok(());
    }
    let Some(name) = UPS.iter().find(|name| values.parameters.contains_key(**name)) else { return Ok(()) };
    if let Some(up) = values.parameters.get_mut(*name) {
        *up = Tensor::to_dtype(up, DType::F32)?.mul_scalar(quotient)?;
        values.scale = scale;
    }
    Ok(())
}
