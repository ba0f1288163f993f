//! The names of the parameters of Flux.1's transformer in files: diffusers' names, which are also the names in this
//! library, and the names in original checkpoints, those of Black Forest Labs.

use trainable_candle_core::Result;
use trainable_candle_io::WeightFiles;

use super::FluxConfig;
use crate::pretrained::{
    CheckpointNaming, Form, Key, Layout, Naming, OwnNames, PrefixedNames, Renaming, StoredSizes, renamed,
};

/// The names of the layers of a transformer by Black Forest Labs, or of a model derived from such a transformer: this
/// library's names, and the names in original checkpoints.
pub(crate) struct BlockNames {
    /// The names of the layers outside of the blocks.
    pub outside: &'static [Renaming],
    /// For each kind of block: this library's prefix, with the dot before the block's index (`transformer_blocks.`);
    /// the prefix in original checkpoints, without this dot (`double_blocks`); and lists of the names of the layers in
    /// a block.
    pub blocks: &'static [(&'static str, &'static str, &'static [&'static [Renaming]])],
}

/// The layout of an original checkpoint.
pub(crate) struct OriginalTransformer {
    /// The prefix of the keys.
    pub prefix: &'static str,
    /// The names after the prefix.
    pub names: &'static BlockNames,
}

impl Layout for OriginalTransformer {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        let Some(found) = self.names.find(name) else { return Vec::new() };
        // The parameter of an RMS norm is called `scale` in original files, and `weight` in files of some other tools.
        // Flux's blocks have `.norm.` in these names, Chroma's approximator has `.norms.`.
        let is_norm = [".norm.", ".norms."].iter().any(|norm| found.key.contains(norm));
        let layer = is_norm.then(|| found.key.strip_suffix("weight")).flatten();
        let scale = layer.map(|layer| Key { key: format!("{layer}scale"), form: found.form });
        // `scale` is first, because writers use the first key.
        scale.into_iter().chain([found]).collect()
    }
}

impl BlockNames {
    /// The layout of the model's folder if `checkpoint` is None; otherwise, of a checkpoint in one file, whose keys
    /// `checkpoint` describes.
    pub fn layout(&'static self, checkpoint: Option<CheckpointNaming>) -> Box<dyn Layout> {
        match checkpoint {
            Some(CheckpointNaming { prefix, naming: Naming::Original }) => {
                Box::new(OriginalTransformer { prefix, names: self })
            }
            // `LlamaCpp` only completes the match: just language models and text encoders have llama.cpp's names.
            Some(CheckpointNaming { prefix, naming: Naming::Own | Naming::LlamaCpp }) => {
                Box::new(PrefixedNames(prefix))
            }
            None => Box::new(OwnNames),
        }
    }

    /// The key of a layer in an original checkpoint, without the checkpoint's prefix. None if these checkpoints
    /// have no such layer.
    pub fn layer(&self, layer: &str) -> Option<Key> {
        self.find(&format!("{layer}.weight"))?.of_layer()
    }

    /// The key of a parameter in an original checkpoint, without the checkpoint's prefix. None if these checkpoints
    /// have no such parameter.
    fn find(&self, name: &str) -> Option<Key> {
        let in_block =
            self.blocks.iter().find_map(|(ours, theirs, lists)| Some((name.strip_prefix(ours)?, theirs, lists)));
        let Some((rest, theirs, lists)) = in_block else { return renamed(name, self.outside) };
        let (index, inner_name) = rest.split_once('.')?;
        let Key { key, form } = lists.iter().find_map(|renamings| renamed(inner_name, renamings))?;
        Some(Key { key: format!("{theirs}.{index}.{key}"), form })
    }
}

/// The names of Flux.1's layers.
pub(super) static NAMES: BlockNames = BlockNames {
    outside: &OUTSIDE,
    blocks: &[
        (DOUBLE_BLOCKS.0, DOUBLE_BLOCKS.1, &[&DOUBLE_ATTENTION, &DOUBLE_MLP, &DOUBLE_MODULATION]),
        (SINGLE_BLOCKS.0, SINGLE_BLOCKS.1, &[&SINGLE, &SINGLE_MODULATION]),
    ],
};

/// The prefixes of the double-stream blocks: this library's, and the one in original checkpoints.
pub(crate) const DOUBLE_BLOCKS: (&str, &str) = ("transformer_blocks.", "double_blocks");
/// The prefixes of the single-stream blocks: this library's, and the one in original checkpoints.
pub(crate) const SINGLE_BLOCKS: (&str, &str) = ("single_transformer_blocks.", "single_blocks");

/// The layers outside of the blocks. An entry has a layer's name in this library, the name in original checkpoints, and
/// the form in which these store the layer's parameters.
const OUTSIDE: [Renaming; 10] = [
    ("x_embedder", "img_in", Form::Plain),
    ("context_embedder", "txt_in", Form::Plain),
    ("time_text_embed.timestep_embedder.linear_1", "time_in.in_layer", Form::Plain),
    ("time_text_embed.timestep_embedder.linear_2", "time_in.out_layer", Form::Plain),
    ("time_text_embed.guidance_embedder.linear_1", "guidance_in.in_layer", Form::Plain),
    ("time_text_embed.guidance_embedder.linear_2", "guidance_in.out_layer", Form::Plain),
    ("time_text_embed.text_embedder.linear_1", "vector_in.in_layer", Form::Plain),
    ("time_text_embed.text_embedder.linear_2", "vector_in.out_layer", Form::Plain),
    // Original files have the shift first, diffusers has the scale first.
    ("norm_out.linear", "final_layer.adaLN_modulation.1", Form::Swapped),
    ("proj_out", "final_layer.linear", Form::Plain),
];

/// The attention layers of the double-stream blocks. In original files, one layer `qkv` computes queries, keys and
/// values: each is a third of the layer's rows. `Form::share(i, 3)` is the third with index i.
pub(crate) const DOUBLE_ATTENTION: [Renaming; 12] = [
    ("attn.to_q", "img_attn.qkv", Form::share(0, 3)),
    ("attn.to_k", "img_attn.qkv", Form::share(1, 3)),
    ("attn.to_v", "img_attn.qkv", Form::share(2, 3)),
    ("attn.norm_q", "img_attn.norm.query_norm", Form::Plain),
    ("attn.norm_k", "img_attn.norm.key_norm", Form::Plain),
    ("attn.to_out.0", "img_attn.proj", Form::Plain),
    ("attn.add_q_proj", "txt_attn.qkv", Form::share(0, 3)),
    ("attn.add_k_proj", "txt_attn.qkv", Form::share(1, 3)),
    ("attn.add_v_proj", "txt_attn.qkv", Form::share(2, 3)),
    ("attn.norm_added_q", "txt_attn.norm.query_norm", Form::Plain),
    ("attn.norm_added_k", "txt_attn.norm.key_norm", Form::Plain),
    ("attn.to_add_out", "txt_attn.proj", Form::Plain),
];

/// The layers that compute the modulation in the double-stream blocks.
const DOUBLE_MODULATION: [Renaming; 2] =
    [("norm1.linear", "img_mod.lin", Form::Plain), ("norm1_context.linear", "txt_mod.lin", Form::Plain)];

/// The feed-forward layers of the double-stream blocks.
pub(crate) const DOUBLE_MLP: [Renaming; 4] = [
    ("ff.net.0.proj", "img_mlp.0", Form::Plain),
    ("ff.net.2", "img_mlp.2", Form::Plain),
    ("ff_context.net.0.proj", "txt_mlp.0", Form::Plain),
    ("ff_context.net.2", "txt_mlp.2", Form::Plain),
];

/// The layer that computes the modulation in the single-stream blocks.
const SINGLE_MODULATION: [Renaming; 1] = [("norm.linear", "modulation.lin", Form::Plain)];

/// The other layers of the single-stream blocks. In original files, `linear1` computes the queries, the keys, the
/// values and the hidden layer of the feed-forward network. The hidden layer is four times as wide as the queries, so
/// the rows of `linear1` are seven shares as wide as the queries.
pub(crate) const SINGLE: [Renaming; 7] = [
    ("attn.to_q", "linear1", Form::share(0, 7)),
    ("attn.to_k", "linear1", Form::share(1, 7)),
    ("attn.to_v", "linear1", Form::share(2, 7)),
    ("proj_mlp", "linear1", Form::Rows { first: 3, count: 4, of: 7 }),
    ("attn.norm_q", "norm.query_norm", Form::Plain),
    ("attn.norm_k", "norm.key_norm", Form::Plain),
    ("proj_out", "linear2", Form::Plain),
];

/// The configuration of the transformer in a checkpoint, from the shapes of the checkpoint's tensors. Shapes do not
/// determine `axes_dims_rope`. `known` has the configurations of published models: this field comes from the first of
/// them whose other fields agree, or else from [`FluxConfig::default`].
///
/// # Errors
/// [`trainable_candle_core::Error::Config`] if a size cannot be determined, if the model is one of Flux's tools (Fill,
/// Canny, Depth), or if `axes_dims_rope` does not fit the width of a head.
pub(super) fn deduce(files: &WeightFiles, checkpoint: CheckpointNaming, known: Vec<FluxConfig>) -> Result<FluxConfig> {
    let sizes = StoredSizes::new(files, NAMES.layout(Some(checkpoint)));
    let size = |name: &str, dim: usize| sizes.size(name, dim);
    let head_dim = size("transformer_blocks.0.attn.norm_q.weight", 0)?;
    let deduced = FluxConfig {
        in_channels: size("x_embedder.weight", 1)?,
        out_channels: size("proj_out.weight", 0)?,
        num_layers: sizes.count("transformer_blocks", "attn.to_out.0"),
        num_single_layers: sizes.count("single_transformer_blocks", "proj_out"),
        num_attention_heads: size("x_embedder.weight", 0)? / head_dim.max(1),
        attention_head_dim: head_dim,
        joint_attention_dim: size("context_embedder.weight", 1)?,
        pooled_projection_dim: size("time_text_embed.text_embedder.linear_1.weight", 1)?,
        guidance_embeds: sizes.has("time_text_embed.guidance_embedder.linear_1.weight"),
        ..FluxConfig::default()
    };
    if let Some(message) = deduced.tool_message() {
        return Err(sizes.wrong(&message));
    }
    let agrees =
        |known: &FluxConfig| FluxConfig { axes_dims_rope: known.axes_dims_rope.clone(), ..deduced.clone() } == *known;
    let config = known.into_iter().find(agrees).unwrap_or(deduced);
    config.validate()?;
    Ok(config)
}
