//! The names of the parameters of Chroma's transformer in files. The model uses diffusers' names. Original checkpoints,
//! those of the model's authors, have other names.

use trainable_candle_core::Result;
use trainable_candle_io::WeightFiles;

use super::ChromaConfig;
use crate::flux::keys::{BlockNames, DOUBLE_ATTENTION, DOUBLE_BLOCKS, DOUBLE_MLP, SINGLE, SINGLE_BLOCKS};
use crate::pretrained::{CheckpointNaming, Form, Renaming, StoredSizes};

/// The names of layers in diffusers and in original checkpoints. The blocks have the names of Flux's blocks, but no
/// layers for the modulation; the approximator, which computes the modulation, is added. An entry of
/// `blocks` describes one kind of block. It has three fields: diffusers' prefix of the block's index, with a dot at its
/// end; the original prefix, without this dot; and the names of the block's layers.
pub(super) static NAMES: BlockNames = BlockNames {
    outside: &OUTSIDE,
    blocks: &[
        (DOUBLE_BLOCKS.0, DOUBLE_BLOCKS.1, &[&DOUBLE_ATTENTION, &DOUBLE_MLP]),
        (SINGLE_BLOCKS.0, SINGLE_BLOCKS.1, &[&SINGLE]),
        ("distilled_guidance_layer.layers.", "distilled_guidance_layer.layers", &[&APPROXIMATOR_LAYER]),
    ],
};

/// The names of the layers that are neither in a block nor in a residual layer of the approximator. `norms` stands for
/// all norms of the approximator.
const OUTSIDE: [Renaming; 6] = [
    ("x_embedder", "img_in", Form::Plain),
    ("context_embedder", "txt_in", Form::Plain),
    ("proj_out", "final_layer.linear", Form::Plain),
    ("distilled_guidance_layer.in_proj", "distilled_guidance_layer.in_proj", Form::Plain),
    ("distilled_guidance_layer.norms", "distilled_guidance_layer.norms", Form::Plain),
    ("distilled_guidance_layer.out_proj", "distilled_guidance_layer.out_proj", Form::Plain),
];

/// The names inside a residual layer of the approximator, in diffusers and in original checkpoints.
const APPROXIMATOR_LAYER: [Renaming; 2] =
    [("linear_1", "in_layer", Form::Plain), ("linear_2", "out_layer", Form::Plain)];

/// The configuration of the transformer in a checkpoint, from the shapes of the checkpoint's tensors. The shapes
/// determine all fields except `axes_dims_rope`. This field comes from the first of the `known` configurations (one
/// found with the file, then those of published models) whose other fields agree, or else from
/// [`ChromaConfig::default`].
///
/// # Errors
/// [`trainable_candle_core::Error::Config`] if a size cannot be determined, the sizes do not fit one another, or the
/// model is Chroma Radiance.
pub(super) fn deduce(
    files: &WeightFiles,
    original: CheckpointNaming,
    known: Vec<ChromaConfig>,
) -> Result<ChromaConfig> {
    let sizes = StoredSizes::new(files, NAMES.layout(Some(original)));
    let radiance_prefix = format!("{}nerf_blocks.", original.prefix);
    if files.names().any(|name| name.starts_with(&radiance_prefix)) {
        return Err(sizes.wrong(
            "the transformer is Chroma Radiance, which works on pixels instead of latents and is not supported",
        ));
    }
    let size = |name: &str, dim: usize| sizes.size(name, dim);
    let head_dim = size("transformer_blocks.0.attn.norm_q.weight", 0)?;
    let deduced = ChromaConfig {
        in_channels: size("x_embedder.weight", 1)?,
        out_channels: size("proj_out.weight", 0)?,
        num_layers: sizes.count("transformer_blocks", "attn.to_out.0"),
        num_single_layers: sizes.count("single_transformer_blocks", "proj_out"),
        num_attention_heads: size("x_embedder.weight", 0)? / head_dim.max(1),
        attention_head_dim: head_dim,
        joint_attention_dim: size("context_embedder.weight", 1)?,
        approximator_num_channels: size("distilled_guidance_layer.in_proj.weight", 1)?,
        approximator_hidden_dim: size("distilled_guidance_layer.in_proj.weight", 0)?,
        approximator_layers: sizes.count("distilled_guidance_layer.layers", "linear_1"),
        ..ChromaConfig::default()
    };
    let agrees = |known: &ChromaConfig| {
        ChromaConfig { axes_dims_rope: known.axes_dims_rope.clone(), ..deduced.clone() } == *known
    };
    let config = known.into_iter().find(agrees).unwrap_or(deduced);
    config.validate()?;
    Ok(config)
}
