//! The names of the transformer's parameters in files. The files of `ComfyUI` and the adapter files of all tools have
//! diffusers' names, which are the model's own.

use trainable_candle_core::Result;
use trainable_candle_io::WeightFiles;

use super::QwenImageConfig;
use super::config::PATCH;
use crate::pretrained::{CheckpointNaming, Layout, OwnNames, PrefixedNames, StoredSizes};

/// The layout of the transformer's parameters. `original` tells how a checkpoint in one file names them; it is None for
/// a folder in diffusers' layout.
pub(super) fn layout(original: Option<CheckpointNaming>) -> Box<dyn Layout> {
    match original {
        Some(CheckpointNaming { prefix, .. }) => Box::new(PrefixedNames(prefix)),
        None => Box::new(OwnNames),
    }
}

/// Parameters that only related models have, with descriptions of these models.
const RELATIVES: [(&str, &str); 4] = [
    ("__index_timestep_zero__", "Qwen-Image-Edit-2511, which reads images besides the text"),
    ("time_text_embed.addition_t_embedding.weight", "Qwen-Image-Layered, which draws several layers"),
    ("transformer_blocks.0.img_mlp.gate_layer.weight", "Qwen-Image 2.1, whose feed-forward layers have gates"),
    ("transformer_blocks.0.img_mlp.gate_up.weight", "Qwen-Image 2.1, whose feed-forward layers have gates"),
];

/// Determines the configuration of the transformer in a file from the shapes of its tensors. Shapes do not determine
/// `axes_dims_rope`: it comes from the first of the `known` configurations (those found with the file, then those of
/// published models) with the same sizes. If there is none, it has its default.
///
/// # Errors
/// [`trainable_candle_core::Error::Config`] if a size cannot be determined, if the model is a related model that is not
/// supported, or if `axes_dims_rope` does not fit the width of a head.
pub(super) fn deduce(
    files: &WeightFiles,
    original: CheckpointNaming,
    known: Vec<QwenImageConfig>,
) -> Result<QwenImageConfig> {
    let sizes = StoredSizes::new(files, layout(Some(original)));
    let size = |name: &str, dim: usize| sizes.size(name, dim);
    if let Some((_, relative)) = RELATIVES.iter().find(|(name, _)| sizes.has(name)) {
        return Err(sizes.wrong(&format!("the transformer is {relative}; it is not supported, expected Qwen-Image")));
    }
    let head_dim = size("transformer_blocks.0.attn.norm_q.weight", 0)?;
    let deduced = QwenImageConfig {
        in_channels: size("img_in.weight", 1)?,
        out_channels: size("proj_out.weight", 0)? / (PATCH * PATCH),
        // The number of blocks that have this layer.
        num_layers: sizes.count("transformer_blocks", "attn.to_out.0"),
        num_attention_heads: size("img_in.weight", 0)? / head_dim.max(1),
        attention_head_dim: head_dim,
        joint_attention_dim: size("txt_in.weight", 1)?,
        ..QwenImageConfig::default()
    };
    let agrees = |known: &QwenImageConfig| {
        QwenImageConfig { axes_dims_rope: known.axes_dims_rope.clone(), ..deduced.clone() } == *known
    };
    let config = known.into_iter().find(agrees).unwrap_or(deduced);
    config.validate()?;
    Ok(config)
}
