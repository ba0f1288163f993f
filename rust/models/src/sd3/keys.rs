//! The names of the parameters of Stable Diffusion 3's transformer in files: diffusers' names, which are also the names
//! in this library, and the names in original checkpoints, the files that Stability AI published.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::SD3Config;
use crate::pretrained::{CheckpointNaming, Form, Key, Layout, Naming, OwnNames, PrefixedNames, Renaming, renamed};

/// The keys of the transformer's parameters in a diffusers folder (`checkpoint` is `None`), or in a single file whose
/// keys have the prefix and the naming of `checkpoint`.
pub(super) fn layout(checkpoint: Option<CheckpointNaming>, config: &SD3Config) -> Box<dyn Layout> {
    match checkpoint {
        Some(CheckpointNaming { prefix, naming: Naming::Original }) => {
            Box::new(OriginalTransformer { prefix, last: config.num_layers.saturating_sub(1) })
        }
        // llama.cpp's names are only for language models and text encoders.
        Some(CheckpointNaming { prefix, naming: Naming::Own | Naming::LlamaCpp }) => Box::new(PrefixedNames(prefix)),
        None => Box::new(OwnNames),
    }
}

struct OriginalTransformer {
    prefix: &'static str,
    /// The index of the last block, from 0.
    last: usize,
}

impl Layout for OriginalTransformer {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        original_key(name, self.last).into_iter().collect()
    }
}

/// The layers outside the blocks: diffusers' name, the original name, and the form of the tensor in original files.
const OUTSIDE: [Renaming; 8] = [
    ("pos_embed.proj", "x_embedder.proj", Form::Plain),
    ("time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0", Form::Plain),
    ("time_text_embed.timestep_embedder.linear_2", "t_embedder.mlp.2", Form::Plain),
    ("time_text_embed.text_embedder.linear_1", "y_embedder.mlp.0", Form::Plain),
    ("time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2", Form::Plain),
    ("context_embedder", "context_embedder", Form::Plain),
    // Original files have the shift first, diffusers has the scale first.
    ("norm_out.linear", "final_layer.adaLN_modulation.1", Form::Swapped),
    ("proj_out", "final_layer.linear", Form::Plain),
];

/// The layers of a block, in the same three columns. A tensor with the form `share(i, n)` holds n parameters with
/// equally many rows, one below the other; the parameter is number i of them, from 0.
const INSIDE: [Renaming; 24] = [
    ("norm1.linear", "x_block.adaLN_modulation.1", Form::Plain),
    ("attn.to_q", "x_block.attn.qkv", Form::share(0, 3)),
    ("attn.to_k", "x_block.attn.qkv", Form::share(1, 3)),
    ("attn.to_v", "x_block.attn.qkv", Form::share(2, 3)),
    ("attn.norm_q", "x_block.attn.ln_q", Form::Plain),
    ("attn.norm_k", "x_block.attn.ln_k", Form::Plain),
    ("attn.to_out.0", "x_block.attn.proj", Form::Plain),
    ("attn2.to_q", "x_block.attn2.qkv", Form::share(0, 3)),
    ("attn2.to_k", "x_block.attn2.qkv", Form::share(1, 3)),
    ("attn2.to_v", "x_block.attn2.qkv", Form::share(2, 3)),
    ("attn2.norm_q", "x_block.attn2.ln_q", Form::Plain),
    ("attn2.norm_k", "x_block.attn2.ln_k", Form::Plain),
    ("attn2.to_out.0", "x_block.attn2.proj", Form::Plain),
    ("ff.net.0.proj", "x_block.mlp.fc1", Form::Plain),
    ("ff.net.2", "x_block.mlp.fc2", Form::Plain),
    ("attn.add_q_proj", "context_block.attn.qkv", Form::share(0, 3)),
    ("attn.add_k_proj", "context_block.attn.qkv", Form::share(1, 3)),
    ("attn.add_v_proj", "context_block.attn.qkv", Form::share(2, 3)),
    ("attn.norm_added_q", "context_block.attn.ln_q", Form::Plain),
    ("attn.norm_added_k", "context_block.attn.ln_k", Form::Plain),
    ("attn.to_add_out", "context_block.attn.proj", Form::Plain),
    ("ff_context.net.0.proj", "context_block.mlp.fc1", Form::Plain),
    ("ff_context.net.2", "context_block.mlp.fc2", Form::Plain),
    ("norm1_context.linear", "context_block.adaLN_modulation.1", Form::Plain),
];

/// The key of a layer in an original checkpoint; `last` is the index of the model's last block.
pub(super) fn original_layer(layer: &str, last: usize) -> Option<Key> {
    original_key(&format!("{layer}.weight"), last)?.of_layer()
}

/// The key of the parameter `name` in an original checkpoint, without the checkpoint's prefix; `last` is the index of
/// the model's last block.
fn original_key(name: &str, last: usize) -> Option<Key> {
    if name == "pos_embed.pos_embed" {
        return Some(Key::plain("pos_embed"));
    }
    let Some(rest) = name.strip_prefix("transformer_blocks.") else { return renamed(name, &OUTSIDE) };
    let (index, inside) = rest.split_once('.')?;
    let Key { key, mut form } = renamed(inside, &INSIDE)?;
    // The linear layer of the last block's text norm computes only a shift and a scale. As in `norm_out.linear`,
    // original files have the shift first, diffusers has the scale first.
    if inside.starts_with("norm1_context.") && index.parse() == Ok(last) {
        form = Form::Swapped;
    }
    Some(Key { key: format!("joint_blocks.{index}.{key}"), form })
}

/// The configuration of the transformer in a checkpoint, from the shapes of its tensors. Fields that shapes do not
/// determine come from the first of the `known` configurations (one found with the file, then the published ones) that
/// have the deduced sizes, or else from [`SD3Config::default`].
///
/// # Errors
/// [`Error::Config`] if a size cannot be determined.
pub(super) fn deduce(files: &WeightFiles, checkpoint: CheckpointNaming, known: Vec<SD3Config>) -> Result<SD3Config> {
    let key = |name: &str| match checkpoint.naming {
        Naming::Own | Naming::LlamaCpp => Some(name.to_owned()),
        // The index of the last block affects the form of the text norm's tensor, but no key.
        Naming::Original => original_key(name, usize::MAX).map(|key| key.key),
    };
    let shape = |name: &str| files.shape(&format!("{}{}", checkpoint.prefix, key(name)?));
    let size = |name: &str, axis: usize| {
        shape(name).and_then(|dims| dims.get(axis).copied()).ok_or_else(|| {
            Error::Config(format!(
                "{}: the shapes of the checkpoint do not determine the size of {name}; give config=, the path of the \
                 transformer's config.json",
                files.path().display()
            ))
        })
    };
    let defaults = SD3Config::default();
    let has_layer = |i: usize, layer: &str| shape(&format!("transformer_blocks.{i}.{layer}.weight")).is_some();
    let num_layers = (0..).take_while(|&i| has_layer(i, "attn.to_out.0")).count();
    let (width, patch_size) = (size("pos_embed.proj.weight", 0)?, size("pos_embed.proj.weight", 2)?);
    // Only the norms of queries and keys, which SD3.5 has and SD3 lacks, show the width of a head.
    let head_dim = shape("transformer_blocks.0.attn.norm_q.weight").map(|dims| dims[0]);
    let deduced = SD3Config {
        patch_size,
        in_channels: size("pos_embed.proj.weight", 1)?,
        out_channels: size("proj_out.weight", 0)? / (patch_size * patch_size).max(1),
        num_layers,
        num_attention_heads: width / head_dim.unwrap_or(defaults.attention_head_dim).max(1),
        attention_head_dim: head_dim.unwrap_or(defaults.attention_head_dim),
        joint_attention_dim: size("context_embedder.weight", 1)?,
        pooled_projection_dim: size("time_text_embed.text_embedder.linear_1.weight", 1)?,
        // The table of positions is (1, size · size, width).
        pos_embed_max_size: size("pos_embed.pos_embed", 1)?.isqrt(),
        dual_attention_layers: (0..num_layers).filter(|&i| has_layer(i, "attn2.to_out.0")).collect(),
        qk_norm: head_dim.is_some(),
        ..defaults
    };
    // Whether a known configuration equals the deduced one in all fields that shapes determine.
    let agrees = |candidate: &SD3Config| {
        SD3Config {
            sample_size: candidate.sample_size,
            num_attention_heads: if head_dim.is_some() {
                deduced.num_attention_heads
            } else {
                candidate.num_attention_heads
            },
            attention_head_dim: head_dim.unwrap_or(candidate.attention_head_dim),
            ..deduced.clone()
        } == *candidate
            && candidate.inner_dim() == width
    };
    Ok(known.into_iter().find(agrees).unwrap_or(deduced))
}
