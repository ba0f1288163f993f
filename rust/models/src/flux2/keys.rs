//! The names of the parameters of FLUX.2's transformer in files: diffusers' names, which are also the names in this
//! library, and the names in original checkpoints.

use trainable_candle_core::Result;
use trainable_candle_io::WeightFiles;

use super::Flux2Config;
use crate::flux::keys::{BlockNames, DOUBLE_ATTENTION, DOUBLE_BLOCKS, SINGLE_BLOCKS};
use crate::pretrained::{CheckpointNaming, Form, Renaming, StoredSizes};

/// The names of FLUX.2's layers. An entry of the lists has the layer's name in this library, its name in original
/// checkpoints, and the form of its parameters there ([`Form::Plain`]: the same). The entry of a kind of block has the
/// same two names of the blocks, without the block's index, and the lists of the layers in each block.
pub(super) static NAMES: BlockNames = BlockNames {
    outside: &OUTSIDE,
    blocks: &[
        (DOUBLE_BLOCKS.0, DOUBLE_BLOCKS.1, &[&DOUBLE_ATTENTION, &DOUBLE_FEED_FORWARD]),
        (SINGLE_BLOCKS.0, SINGLE_BLOCKS.1, &[&SINGLE]),
    ],
};

/// The layers outside of the blocks.
const OUTSIDE: [Renaming; 11] = [
    ("x_embedder", "img_in", Form::Plain),
    ("context_embedder", "txt_in", Form::Plain),
    ("time_guidance_embed.timestep_embedder.linear_1", "time_in.in_layer", Form::Plain),
    ("time_guidance_embed.timestep_embedder.linear_2", "time_in.out_layer", Form::Plain),
    ("time_guidance_embed.guidance_embedder.linear_1", "guidance_in.in_layer", Form::Plain),
    ("time_guidance_embed.guidance_embedder.linear_2", "guidance_in.out_layer", Form::Plain),
    ("double_stream_modulation_img.linear", "double_stream_modulation_img.lin", Form::Plain),
    ("double_stream_modulation_txt.linear", "double_stream_modulation_txt.lin", Form::Plain),
    ("single_stream_modulation.linear", "single_stream_modulation.lin", Form::Plain),
    // The layer computes a shift and a scale. Original files have the rows of the shift first, diffusers those of the
    // scale, so loading swaps the halves.
    ("norm_out.linear", "final_layer.adaLN_modulation.1", Form::Swapped),
    ("proj_out", "final_layer.linear", Form::Plain),
];

/// The feed-forward layers of the double-stream blocks.
const DOUBLE_FEED_FORWARD: [Renaming; 4] = [
    ("ff.linear_in", "img_mlp.0", Form::Plain),
    ("ff.linear_out", "img_mlp.2", Form::Plain),
    ("ff_context.linear_in", "txt_mlp.0", Form::Plain),
    ("ff_context.linear_out", "txt_mlp.2", Form::Plain),
];

/// The layers of the single-stream blocks.
const SINGLE: [Renaming; 4] = [
    ("attn.to_qkv_mlp_proj", "linear1", Form::Plain),
    ("attn.to_out", "linear2", Form::Plain),
    ("attn.norm_q", "norm.query_norm", Form::Plain),
    ("attn.norm_k", "norm.key_norm", Form::Plain),
];

/// The configuration of the transformer in a checkpoint with the naming `original`, from the shapes of the checkpoint's
/// tensors. Shapes do not determine `axes_dims_rope` and `rope_theta`: these fields come from the first of the `known`
/// configurations whose other fields agree, or else from [`Flux2Config::default`], whose two values all published
/// models share.
///
/// # Errors
/// [`trainable_candle_core::Error::Config`] if a size cannot be determined, or if `axes_dims_rope` does not fit the
/// width of a head.
pub(super) fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<Flux2Config>) -> Result<Flux2Config> {
    let sizes = StoredSizes::new(files, NAMES.layout(Some(original)));
    let size = |name: &str, dim: usize| sizes.size(name, dim);
    let head_dim = size("transformer_blocks.0.attn.norm_q.weight", 0)?;
    let deduced = Flux2Config {
        in_channels: size("x_embedder.weight", 1)?,
        out_channels: size("proj_out.weight", 0)?,
        num_layers: sizes.count("transformer_blocks", "attn.to_out.0"),
        num_single_layers: sizes.count("single_transformer_blocks", "attn.to_out"),
        // `max(1)`: in a damaged file, a size may be 0.
        num_attention_heads: size("x_embedder.weight", 0)? / head_dim.max(1),
        attention_head_dim: head_dim,
        joint_attention_dim: size("context_embedder.weight", 1)?,
        guidance_embeds: sizes.has("time_guidance_embed.guidance_embedder.linear_1.weight"),
        ..Flux2Config::default()
    };
    let agrees = |known: &Flux2Config| {
        Flux2Config { axes_dims_rope: known.axes_dims_rope.clone(), rope_theta: known.rope_theta, ..deduced.clone() }
            == *known
    };
    let config = known.into_iter().find(agrees).unwrap_or(deduced);
    config.validate()?;
    Ok(config)
}
