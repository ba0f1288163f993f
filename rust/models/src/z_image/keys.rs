//! The names of the parameters of Z-Image's transformer in files: diffusers' names (also the model's own names) and, as
//! `Naming::Original`, the names in `ComfyUI`'s files.

use trainable_candle_core::Result;
use trainable_candle_io::WeightFiles;

use super::ZImageConfig;
use super::config::PATCH;
use crate::pretrained::{
    CheckpointNaming, Form, Key, Layout, Naming, OwnNames, PrefixedNames, Renaming, StoredSizes, renamed,
};

/// The keys of the transformer's parameters in a diffusers folder (`checkpoint` is `None`), or in a checkpoint whose
/// keys have the prefix and the naming of `checkpoint`.
pub(super) fn layout(checkpoint: Option<CheckpointNaming>) -> Box<dyn Layout> {
    match checkpoint {
        Some(CheckpointNaming { prefix, naming: Naming::Original }) => Box::new(OriginalTransformer(prefix)),
        // No file of this transformer has llama.cpp's names.
        Some(CheckpointNaming { prefix, naming: Naming::Own | Naming::LlamaCpp }) => Box::new(PrefixedNames(prefix)),
        None => Box::new(OwnNames),
    }
}

/// The layout of `ComfyUI`'s files, whose keys begin with this prefix.
struct OriginalTransformer(&'static str);

impl Layout for OriginalTransformer {
    fn prefix(&self) -> &str {
        self.0
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        vec![comfyui_key(name)]
    }

    fn ignores(&self, key: &str) -> bool {
        // This unused tensor is a leftover of the model that Z-Image's code was derived from.
        key == "norm_final.weight"
    }
}

/// The layers outside attention whose names differ: diffusers' name, `ComfyUI`'s name, and the form of the tensor in
/// `ComfyUI`'s files. In the names, `2-1` is the size of a patch: 2 x 2 latent pixels of 1 frame.
const OUTSIDE: [Renaming; 3] = [
    ("all_x_embedder.2-1", "x_embedder", Form::Plain),
    ("all_final_layer.2-1.linear", "final_layer.linear", Form::Plain),
    ("all_final_layer.2-1.adaLN_modulation.1", "final_layer.adaLN_modulation.1", Form::Plain),
];

/// The layers of an attention, in the same three columns. Query, key and value are the three equal shares of `qkv`.
const ATTENTION: [Renaming; 6] = [
    ("to_q", "qkv", Form::share(0, 3)),
    ("to_k", "qkv", Form::share(1, 3)),
    ("to_v", "qkv", Form::share(2, 3)),
    ("to_out.0", "out", Form::Plain),
    ("norm_q", "q_norm", Form::Plain),
    ("norm_k", "k_norm", Form::Plain),
];

/// The key of a parameter in a file of `ComfyUI`, without the file's prefix.
fn comfyui_key(name: &str) -> Key {
    let in_attention = |(block, rest): (&str, &str)| {
        let Key { key, form } = renamed(rest, &ATTENTION)?;
        Some(Key { key: format!("{block}.attention.{key}"), form })
    };
    let key = name.split_once(".attention.").map_or_else(|| renamed(name, &OUTSIDE), in_attention);
    key.unwrap_or_else(|| Key::plain(name))
}

/// The key of a layer in a file of `ComfyUI`, without the file's prefix.
pub(super) fn original_layer(layer: &str) -> Option<Key> {
    comfyui_key(&format!("{layer}.weight")).of_layer()
}

/// The configuration of the transformer in `files`, from the shapes of its tensors. Fields that shapes do not determine
/// come from the first of the `known` configurations that have the deduced sizes, or else from the published model.
///
/// # Errors
/// [`trainable_candle_core::Error::Config`] if a size cannot be determined, the sizes do not fit together, or the model
/// is a variant or a relative of Z-Image that is not supported.
pub(super) fn deduce(
    files: &WeightFiles,
    checkpoint: CheckpointNaming,
    known: Vec<ZImageConfig>,
) -> Result<ZImageConfig> {
    let sizes = StoredSizes::new(files, layout(Some(checkpoint)));
    let size = |name: &str, dim: usize| sizes.size(name, dim);
    // Whether the file is of a model that is not supported, and the name of this model.
    let relatives = [
        (sizes.has("siglip_embedder.0.weight"), "Z-Image-Omni, which also reads images"),
        (sizes.has("dec_net.cond_embed.weight"), "a variant of Z-Image for pixels instead of latents"),
        (!sizes.has("cap_pad_token"), "Lumina 2 or another relative of Z-Image without cap_pad_token"),
    ];
    if let Some((_, what)) = relatives.iter().find(|(is_found, _)| *is_found) {
        return Err(sizes.wrong(&format!("the transformer is not supported: it is {what}")));
    }
    let count = |blocks: &str| sizes.count(blocks, "attention.to_out.0");
    let (dim, head_dim) = (size("all_x_embedder.2-1.weight", 0)?, size("noise_refiner.0.attention.norm_k.weight", 0)?);
    let deduced = ZImageConfig {
        in_channels: size("all_x_embedder.2-1.weight", 1)? / (PATCH * PATCH),
        dim,
        n_layers: count("layers"),
        n_refiner_layers: count("noise_refiner"),
        n_heads: dim / head_dim.max(1),
        cap_feat_dim: size("cap_embedder.1.weight", 1)?,
        ..ZImageConfig::default()
    };
    // Whether a known configuration has the deduced sizes: only the fields that shapes do not determine may differ.
    let agrees = |candidate: &ZImageConfig| {
        ZImageConfig {
            norm_eps: candidate.norm_eps,
            rope_theta: candidate.rope_theta,
            axes_dims: candidate.axes_dims.clone(),
            axes_lens: candidate.axes_lens.clone(),
            ..deduced.clone()
        } == *candidate
    };
    let config = known.into_iter().find(agrees).unwrap_or(deduced);
    config.validate()?;
    Ok(config)
}
